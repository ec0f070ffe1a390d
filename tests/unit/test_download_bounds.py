"""Numbers that no job can mean are refused in one line, before a cluster has to bear them."""

import time
from unittest import mock

import pytest

from sdp.config import load
from sdp.config.download import FetchConfig, HostsConfig
from sdp.download.fetch import Fetcher, Request
from sdp.download.slot import Buffer
from sdp.errors import ConfigError
from sdp.urls import parse

ENDS = ["source.uri=in", "output.uri=out"]
MOST = {
    "concurrency": 10_000,
    "workers.cpus": 1024,
    "fetch.connections": 10_000,
    "fetch.max_bytes": 1_000_000_000,
    "fetch.retries": 100,
    "hosts.at_once": 10_000,
    "hosts.per_second": 1_000_000,
    "image.size": 16_383,
    "output.rows_per_file": 1_000_000,
}


@pytest.mark.parametrize(("key", "most"), MOST.items())
def test_a_number_has_a_highest_value(key: str, most: int) -> None:
    load("download", None, [*ENDS, f"{key}={most}"])
    with pytest.raises(ConfigError) as refused:
        load("download", None, [*ENDS, f"{key}={most + 1}"])
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{key}: expected ")
    assert str(most) in line.replace(",", "")


def test_a_host_is_asked_at_least_once_in_a_thousand_seconds() -> None:
    load("download", None, [*ENDS, "hosts.per_second=0.001"])
    with pytest.raises(ConfigError, match=r"hosts\.per_second: expected .*0\.001"):
        load("download", None, [*ENDS, "hosts.per_second=0.0001"])


def test_queueing_requests_stops_for_transfers_in_between() -> None:
    fetcher: Fetcher[int] = Fetcher(FetchConfig(), HostsConfig(), Buffer(1), lambda _: None)
    fetcher.close()
    fetcher._incoming.extend(Request(number, parse("http://a.org/")) for number in range(100))
    with mock.patch.object(fetcher, "_queue", side_effect=lambda *_, **__: time.sleep(0.01)):
        fetcher._queue_new(time.monotonic())
    assert len(fetcher._incoming) > 50
