"""Bodies, captions, URLs and robots.txt."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sdp import urls
from sdp.config.download import FetchConfig
from sdp.download.fetch import Request
from sdp.download.slot import Buffer, Networks, Slot
from sdp.sandbox.child import send
from tests.growth import Case


def _url(pieces: int, _: Path) -> Callable[[], object]:
    url = "http://example.org/" + "%61/../" * pieces

    def read() -> None:
        with contextlib.suppress(urls.BadUrl):
            urls.parse(url)

    return read


def _body(pieces: int, _: Path) -> Callable[[], object]:
    request = Request(None, urls.parse("http://example.org/a.jpg"))
    slot = Slot(FetchConfig(), Networks(), Buffer(1 << 30), deque(), None, request, 0.0, status=200)

    def read() -> None:
        for _ in range(pieces):
            assert slot.write(b"ab") is None
        _pass_on(slot.pieces)

    return read


def _message(pieces: int, _: Path) -> Callable[[], object]:
    return lambda: _pass_on([b"ab"] * pieces)


def _pass_on(pieces: list[bytes] | list[bytearray]) -> None:
    """Send a message to a thread that reads it."""
    source, sink = os.pipe()

    def read() -> None:
        while os.read(source, 1 << 16):
            pass

    reader = threading.Thread(target=read)
    reader.start()
    send(sink, pieces)
    os.close(sink)
    reader.join()


CASES: tuple[Case, ...] = (
    Case("URL of escapes and dots", 20_000, _url),
    Case("body in pieces", 150_000, _body),
    Case("message to a decoder in pieces", 50_000, _message),
)
