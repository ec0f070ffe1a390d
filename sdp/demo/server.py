"""The demo's image server: draws each picture on request, and fails for some as old links do."""

import contextlib
import itertools
import re
import socketserver
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from sdp.demo import shapes

_PATH = re.compile(r"/images/(\d+)\.\w+(?:\?.*)?")
_DRAWING_AT_ONCE = 2
"""Limit on pictures drawn at once: each takes tens of megabytes."""


@dataclass(frozen=True, slots=True)
class ServerFailure:
    """A response in place of a picture."""

    percent: float
    """Share of the pictures that fail like this."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Callable[[bytes], bytes] = lambda picture: b""  # noqa: ARG005
    """Makes the response's body from the picture."""
    whole_length: bool = False
    """Send the whole picture's length in the header, and close the connection early."""
    times: int | None = None
    """Number of failing requests for a picture, after which one succeeds; None means all."""


def _half(picture: bytes) -> bytes:
    return picture[: len(picture) // 2]


def _page(_: bytes) -> bytes:
    return b"<!doctype html><title>Gone</title><p>This image has moved on.</p>\n"


FAILURES = (
    ServerFailure(4, 404),
    ServerFailure(1, 410),
    ServerFailure(1, 403),
    ServerFailure(2, 500, times=1),
    ServerFailure(1, 503, times=2),
    ServerFailure(1, 429, {"Retry-After": "1"}, times=1),
    ServerFailure(2, 302, {"Location": "?moved"}, times=1),
    ServerFailure(1, body=_page),
    ServerFailure(1),
    ServerFailure(1, body=_half),
    ServerFailure(1, body=_half, whole_length=True),
    ServerFailure(0.5, headers={"X-Robots-Tag": "noai"}, body=bytes),
)


def failure_of(index: int) -> ServerFailure | None:
    """Return the failure of a picture, which depends only on its index."""
    position = shapes.Draws(0, index, "failure").between(0, 100)
    ends = itertools.accumulate(failure.percent for failure in FAILURES)
    return next((failure for failure, end in zip(FAILURES, ends, strict=True) if position < end), None)


@contextlib.contextmanager
def serve(images: int, hosts: Sequence[str] = ("127.0.0.1",), port: int = 0) -> Iterator[int]:
    """Serve the pictures from threads, at all hosts on one port (0: any free one); yield the port."""
    with contextlib.ExitStack() as stack:
        for host in hosts:
            server = stack.enter_context(_Server((host, port), _Handler))
            server.images, port = images, server.server_address[1]
            threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
            stack.callback(server.shutdown)
        yield port


class _Server(socketserver.ThreadingTCPServer):
    """The server of one host. http.server's own would look up the host's name first."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024
    images = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self.drawing = threading.BoundedSemaphore(_DRAWING_AT_ONCE)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless the client disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # send a response in one piece

    def do_GET(self) -> None:
        """Send the picture or its failure."""
        match = _PATH.fullmatch(self.path)
        index = int(match[1]) if match else self.server.images
        if index >= self.server.images:
            self._answer(404, {}, b"")
            return
        with self.server.drawing:
            picture, content_type, _ = shapes.encode(shapes.sample(index))
        request, failure = next(self.server.requests[index]), failure_of(index)
        if failure is None or (failure.times is not None and request > failure.times):
            self._answer(200, {"Content-Type": content_type}, picture)
            return
        body = failure.body(picture)
        headers = {"Content-Type": content_type, **failure.headers}
        self._answer(failure.status, headers, body, len(picture) if failure.whole_length else len(body))

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.close_connection or length not in (None, len(body))

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the download reports every row."""
