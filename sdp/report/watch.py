"""`sdp report RUN --watch`: a run's newest pictures and figures on a page that reloads itself, served on this machine.

A page of another origin cannot read it: there is no CORS, and the host of a request must be this machine, not a name
that an attacker points at 127.0.0.1. A request reads a few files; of many, the oldest is ended, so that slow clients
hold nobody up.
"""

import re
import socket
import time
from collections import deque
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Lock
from typing import Any

from sdp.config.train import PHASES
from sdp.errors import SdpError, UserError
from sdp.model.checkpoints import run_of
from sdp.report.page import PageSection, page_of
from sdp.report.run import run_section
from sdp.report.sections import identify, phases_of
from sdp.storage import open_storage

_RELOAD_S, _SILENCE_S, _REQUESTS, _SHOWN = 10, 30.0, 64, 96
"""Seconds until the page reloads; a client's longest silence; requests at once; pictures on the page."""
_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.ASCII)
_PICTURE = re.compile(rf"/((?:(?:{'|'.join(PHASES)})/)?samples/step-\d{{9,18}}/\d{{3,9}}\.png)", re.ASCII)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class WatchServer(ThreadingTCPServer):
    """Serves the page of one run on 127.0.0.1, whose port `kubectl port-forward` reaches too."""

    allow_reuse_address, daemon_threads, block_on_close = True, True, False
    request_queue_size = 128  # a client that finds it full tries again after seconds

    def __init__(self, uri: str, port: int) -> None:
        kind, self.run = identify(open_storage(run_of(uri)))
        if kind != "run":
            raise UserError(f"report: --watch: expected a training run, got the {kind} {uri}; leave --watch out")
        try:
            super().__init__(("127.0.0.1", port), _Request)
        except (OSError, OverflowError) as error:
            raise UserError(f"report: --port: {port} cannot be used ({error}); choose another, or 0 for any") from error
        self.link = f"http://127.0.0.1:{self.server_address[1]}/"
        self._open, self._lock = deque[socket.socket](maxlen=_REQUESTS), Lock()
        self._page, self._until = b"", 0.0

    def page(self) -> bytes:
        """Return the page, which all requests of some seconds share."""
        with self._lock:
            if time.monotonic() > self._until:
                self._page = page_of(f"{self.run.uri.rpartition('/')[2]}, live", self._sections())
                self._until = time.monotonic() + _RELOAD_S / 2
            return self._page

    def _sections(self) -> list[PageSection]:
        try:
            phases = [(phase, f"{phase.uri.rpartition('/')[2]}/") for phase in phases_of(self.run)]
            return [run_section(phase, _SHOWN, live_at=at) for phase, at in phases[::-1] or [(self.run, "")]]
        except SdpError as error:
            return [PageSection("Training", self.run.uri, f"Cannot be read: {error}", False)]

    def get_request(self) -> tuple[socket.socket, Any]:
        """Return the next connection, and end the oldest if there are many."""
        request, address = super().get_request()
        if len(self._open) == _REQUESTS:
            with suppress(OSError):  # it has ended
                self._open[0].shutdown(socket.SHUT_RDWR)
        self._open.append(request)
        return request, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave a client that has gone without a word."""


class _Request(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = _SILENCE_S

    def do_GET(self) -> None:
        if not _HOST.fullmatch(self.headers.get("Host", "")):
            return self._answer(403, "text/plain", f"open {self.server.link} on this machine\n".encode())
        if self.path == "/":
            page = self.server.page()
            return self._answer(200, "text/html; charset=utf-8", page, Refresh=f"{_RELOAD_S}")
        with suppress(SdpError):
            if picture := _PICTURE.fullmatch(self.path):
                return self._answer(200, "image/png", self.server.run.read(picture[1]), cache="private, max-age=600")
        return self._answer(404, "text/plain", b"there is only / and its pictures\n")

    def _answer(self, status: int, kind: str, content: bytes, cache: str = "no-store", **more: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Cache-Control": cache, **_HEADERS, **more}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", f"{len(content)}")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Leave requests out of the terminal."""
