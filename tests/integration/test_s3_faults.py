"""A job and a storage over a real S3 server behind a proxy that does what object stores do on a bad day."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from sdp.process import job
from sdp.storage import open_storage
from tests.integration.s3 import Gateway, gateway_fixture  # noqa: F401 (fixture)
from tests.kit import accounted
from tests.local_ray import one_node
from tests.process_kit import config_of, every_tenth, make_images, write_model
from tests.s3_faults import BadDay, Faults, bad_day
from tests.waiting import as_soon_as

pytestmark = pytest.mark.needs("versitygw")

ROWS = 80
GONE_S = 9.0  # five retries take less


@pytest.fixture(scope="module")
def day(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BadDay]:
    """A proxy, which is also where this process and Ray's workers find credentials."""
    folder = tmp_path_factory.mktemp("home")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        proxy = stack.enter_context(bad_day(gateway, folder))
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in {**proxy.env, "XDG_CACHE_HOME": str(folder / "cache")}.items():
            patch.setenv(name, value)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, str(folder / "none"))  # not another HOME: Ray, once started, looks there for its token
        stack.enter_context(one_node(cpus=3))
        yield proxy


@pytest.mark.parametrize(
    ("faults", "happened"),
    [
        (Faults(busy=0.4), "SlowDown"),
        (Faults(reset=0.2), "reset after"),
        (Faults(stale_s=1.0), "stale"),
        (Faults(lasting_s=1.0, delay_s=0.05), "credentials"),
    ],
    ids=["busy", "resets", "stale listings", "credentials that expire"],
)
def test_objects_are_written_and_read_whole(
    day: BadDay, gateway: Gateway, faults: Faults, happened: str, request: pytest.FixtureRequest
) -> None:
    folder = open_storage(f"{gateway.uri}/{request.node.callspec.id.replace(' ', '-')}")
    day.faults = faults
    day.counts.clear()

    def write_and_read(number: int) -> bytes:
        folder.create(f"parts/{number}", bytes([number]) * 3000)
        folder.names()
        return folder.read(f"parts/{number}")

    with ThreadPoolExecutor(8) as executor:
        contents = list(executor.map(write_and_read, range(40)))
    day.faults = Faults()
    assert contents == [bytes([number]) * 3000 for number in range(40)]
    assert len(folder.names("parts")) == 40
    assert day.counts[happened] > 5, day.counts


def test_a_job_over_a_server_with_every_fault_writes_the_bytes_of_an_undisturbed_one(
    day: BadDay, gateway: Gateway, tmp_path: Path
) -> None:
    make_images(tmp_path, rows=ROWS, unit_rows=10)
    model = str(write_model(tmp_path / "model"))
    local = job.run(
        config_of(str(tmp_path / "images"), str(tmp_path / "out"), model, "output.rows_per_file=10")
    ).dataset
    day.faults = Faults(delay_s=0.02, busy=0.15, reset=0.05, stale_s=1.0, lasting_s=3.0)
    day.counts.clear()

    def go_and_return(_: bool) -> None:
        day.faults.gone = True
        threading.Timer(GONE_S, lambda: setattr(day.faults, "gone", False)).start()

    def written() -> bool:
        return any(name.startswith("out/parts/") for name in gateway.objects())

    leaver = as_soon_as(written, go_and_return)
    config = config_of(str(tmp_path / "images"), f"{gateway.uri}/out", model, "output.rows_per_file=10")
    remote = job.run(config).dataset
    leaver.join()
    day.faults = Faults()
    assert min(day.counts[what] for what in ("SlowDown", "gone", "credentials")) > 3, day.counts
    assert local is not None
    assert remote is not None
    assert accounted(remote) == [row for row in range(ROWS) if not every_tenth(row)]
    names = remote.parts["path"].to_pylist()
    assert len(names) == ROWS // 10
    for name in names:
        assert remote.storage.read(name) == local.storage.read(name)
    assert gateway.pending_uploads() == []
