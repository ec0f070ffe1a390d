"""A proxy before an S3 server that behaves as object stores do on a bad day: slow, busy, resetting, stale, and strict.

It understands HTTP, where the proxy of `tests.integration.s3` only forwards bytes. Credentials come from it as well, as
from a container's endpoint: each lasts for a few seconds, after which the proxy refuses it as expired.
"""

import contextlib
import http.client
import itertools
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.integration.s3 import Gateway

CREDENTIALS = "/credentials"
_REPLACED = ("authorization", "host", "connection", "x-amz-date", "x-amz-security-token", "x-amz-content-sha256")
_DROPPED = ("connection", "keep-alive", "transfer-encoding")


@dataclass
class Faults:
    """The server's present faults; every field may be changed at any time."""

    delay_s: float = 0.0
    busy: float = 0.0
    """Share of requests that are refused with 503 SlowDown."""
    reset: float = 0.0
    """Share of requests whose connection is reset, half of them after the server has done what they ask."""
    stale_s: float = 0.0
    """A listing may be this old."""
    gone: bool = False
    """Every connection is reset."""
    lasting_s: float = 3600.0
    """Time for which credentials are good."""
    draw: random.Random = field(default_factory=lambda: random.Random(1))


class BadDay:
    """The proxy. `faults` decides what goes wrong, `counts` says what went wrong."""

    def __init__(self, gateway: Gateway, folder: Path) -> None:
        self._folder = folder
        self.faults, self.counts = Faults(), Counter[str]()
        self._gateway = gateway
        self._tokens: dict[str, float] = {}
        self._numbers = itertools.count()
        self._listings: dict[str, tuple[float, int, list[tuple[str, str]], bytes]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer._answer(self, body)

            do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = answer  # noqa: N815 (as http.server calls them)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def env(self) -> dict[str, str]:
        """Return the environment variables of a client whose credentials come from here."""
        token = self._folder / "container-token"
        token.write_text("t")
        return {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self.endpoint}{CREDENTIALS}",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        faults, draw = self.faults, self.faults.draw
        if handler.path.startswith(CREDENTIALS):
            self._send(handler, 200, [("Content-Type", "application/json")], self._credentials())
            return
        if faults.gone:
            self._reset(handler, "gone")
            return
        time.sleep(faults.delay_s)
        if draw.random() < faults.busy:
            self._refuse(handler, 503, "SlowDown", "Please reduce your request rate.")
            return
        token = handler.headers.get("x-amz-security-token", "")
        if time.monotonic() > self._tokens.get(token, float("inf")):
            self._refuse(handler, 400, "ExpiredToken", "The provided token has expired.")
            return
        reset = draw.random() if draw.random() < faults.reset else 1.0
        if reset < 0.5:
            self._reset(handler, "reset before")
            return
        status, headers, data = self._listed(handler) or self._forward(handler, body)
        if reset < 1.0:
            self._reset(handler, "reset after")
            return
        self._send(handler, status, headers, data)

    def _credentials(self) -> bytes:
        token = f"token-{next(self._numbers)}"
        self._tokens[token] = time.monotonic() + self.faults.lasting_s
        expires = datetime.now(UTC) + timedelta(seconds=self.faults.lasting_s)
        self.counts["credentials"] += 1
        return json.dumps(
            {
                "AccessKeyId": self._gateway.access_key,
                "SecretAccessKey": self._gateway.secret_key,
                "Token": token,
                "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        ).encode()

    def _listed(self, handler: BaseHTTPRequestHandler) -> tuple[int, list[tuple[str, str]], bytes] | None:
        """Answer a listing from an older one, if that is not too old."""
        if handler.command != "GET" or "list-type=2" not in handler.path or not self.faults.stale_s:
            return None
        now = time.monotonic()
        taken, *answer = self._listings.get(handler.path, (0.0, 0, [], b""))
        if now - taken > self.faults.stale_s:
            status, headers, data = self._forward(handler, b"")
            self._listings[handler.path] = (now, status, headers, data)
            return status, headers, data
        self.counts["stale"] += 1
        status, headers, data = answer
        return status, headers, data

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Have the server do what a request asks, signed anew: this server knows no tokens."""
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in _REPLACED}
        request = AWSRequest(handler.command, f"{self._gateway.endpoint}{handler.path}", headers, body)
        keys = Credentials(self._gateway.access_key, self._gateway.secret_key)
        S3SigV4Auth(keys, "s3", "us-east-1").add_auth(request)
        connection = http.client.HTTPConnection("127.0.0.1", self._gateway.port, timeout=30)
        try:
            connection.request(handler.command, handler.path, body or None, dict(request.headers.items()))
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _send(self, handler: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        handler.send_response_only(status)
        for name, value in headers:
            if name.lower() not in (*_DROPPED, "content-length"):
                handler.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length", str(len(data)))
        handler.send_header("Content-Length", length if handler.command == "HEAD" else str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int, code: str, message: str) -> None:
        self.counts[code] += 1
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        self._send(handler, status, [("Content-Type", "application/xml")], text.encode())

    def _reset(self, handler: BaseHTTPRequestHandler, what: str) -> None:
        self.counts[what] += 1
        handler.close_connection = True
        with contextlib.suppress(OSError):
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def bad_day(gateway: Gateway, folder: Path) -> Iterator[BadDay]:
    """Run a proxy before a server; its clients find a token in the folder."""
    proxy = BadDay(gateway, folder)
    try:
        yield proxy
    finally:
        proxy.close()
