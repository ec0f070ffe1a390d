"""A small HTTP server in the test's process, with programmed answers and a record of its requests."""

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """With the query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


RESET = Answer(0)
"""No answer: the connection is reset, as by a host that is gone."""


def reset(connection: socket.socket) -> None:
    """Close so that the other end sees a reset."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Server:
    """Gives the queued answers first, one a request; then what `otherwise` makes."""

    def __init__(self, otherwise: Callable[[Request], Answer]) -> None:
        self.queue: deque[Answer] = deque()
        self.requests: list[Request] = []
        self._otherwise = otherwise
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, self.rfile.read(length))
                outer.requests.append(request)
                answer = outer.queue.popleft() if outer.queue else outer._otherwise(request)
                if answer is RESET:
                    self.close_connection = True
                    reset(self.connection)
                    return
                with contextlib.suppress(ConnectionError):  # the client has left
                    self.send_response(answer.status)
                    if "Content-Length" not in answer.headers:
                        self.send_header("Content-Length", str(len(answer.body)))
                    for name, value in answer.headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(answer.body)

            do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = answer  # noqa: N815 (as http.server calls them)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(otherwise: Callable[[Request], Answer]) -> Iterator[Server]:
    server = Server(otherwise)
    try:
        yield server
    finally:
        server.close()


def ranged(content: bytes, request: Request, etag: str | None = '"v1"') -> Answer:
    """Return the content, or the requested range of it."""
    headers = {"ETag": etag} if etag else {}
    wanted = request.headers.get("range")
    if not wanted:
        return Answer(200, content, headers)
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    size = len(content)
    if first:
        start, end = int(first), min(int(last or size - 1), size - 1)
    else:
        start, end = max(0, size - int(last)), size - 1
    if start > end:
        return Answer(416, b"", {"Content-Range": f"bytes */{size}"})
    return Answer(206, content[start : end + 1], {**headers, "Content-Range": f"bytes {start}-{end}/{size}"})
