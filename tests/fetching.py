"""Fetch URLs in a process of its own, whose memory and resolver a test can tell from others'."""

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from sdp.config.download import FetchConfig, HostsConfig
from sdp.download.fetch import Fetcher, Request
from sdp.download.slot import Buffer
from sdp.urls import parse
from tests.programs import ended, peak_bytes


def fetch_apart(
    urls: Sequence[str], *, buffer_bytes: int = 1 << 28, env: Mapping[str, str] | None = None, **options: Any
) -> dict[str, Any]:
    """Return the reason of each URL's failure (None for an image), the bytes still held, and the memory taken."""
    arguments = json.dumps([urls, buffer_bytes, options])
    done = ended(
        [sys.executable, "-m", "tests.fetching", arguments], env={**os.environ, **(env or {})}, timeout=400, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    assert result.pop("error") == "None"
    return result


def _main(urls: Sequence[str], buffer_bytes: int, options: dict[str, Any]) -> None:
    buffer, ended, done = Buffer(buffer_bytes), dict[int, str | None](), threading.Event()

    def take(fetched: Request[int]) -> None:
        ended[fetched.token] = fetched.failure and fetched.failure.reason
        buffer.release(fetched.size)
        if len(ended) == len(urls):
            done.set()

    config, before = FetchConfig(allow_networks=("127.0.0.0/8",), **options), peak_bytes()
    fetcher = Fetcher(config, HostsConfig(at_once=100, per_second=None), buffer, take)
    fetcher.submit((number, parse(url)) for number, url in enumerate(urls))
    done.wait(300)
    reasons = [ended.get(number, "none came") for number in range(len(urls))]
    result = {"reasons": reasons, "held": buffer.used, "grown": peak_bytes() - before, "error": repr(fetcher.error)}
    print(json.dumps(result), flush=True)
    os._exit(0)  # threads that look names up are not waited for


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
