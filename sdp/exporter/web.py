"""The HTTP server: /metrics, /healthz, with TLS and users where a web configuration says so.

A thread for each connection, no more than a few at once, each with a deadline. Who connects and says nothing, or never
ends a handshake, keeps nobody else out: where there is no room, the one that has been silent for longest goes. Not all
of the room is for /metrics, so /healthz is answered whatever scrapers do.
"""

import base64
import binascii
import gzip
import http.server
import io
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from sdp.errors import UserError
from sdp.exporter import webconfig
from sdp.exporter.webconfig import Security, WebConfigError

LOG = logging.getLogger(__name__)
CONNECTION_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 32
MAX_SCRAPES = 24
"""Of them, /metrics at once."""
ROOM_S = 1.0
"""How long a new connection waits for one that had to go."""
GRACE_S = 5.0
"""How long a stop waits for answers that are being given."""
PAGE = b"""<!doctype html><title>sdp exporter</title><h1>sdp exporter</h1><p><a href="/metrics">Metrics</a></p>\n"""


class CannotListen(UserError):
    """The address or the port cannot be had."""


class Guard:
    """The security in force. Files that change, as certificates do when they are renewed, are read again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._security = webconfig.load(path) if path else Security()
        self._stamp = _stamp(self._security.files)
        self._lock = threading.Lock()

    def current(self) -> Security:
        if self._path is None:
            return self._security
        with self._lock:
            stamp = _stamp(self._security.files)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._security = webconfig.load(self._path)
                    self._stamp = _stamp(self._security.files)
                    LOG.info("%s: read again", self._path)
                except WebConfigError as error:
                    LOG.error("%s; keeping what was there before", error)
            return self._security


def _stamp(files: tuple[Path, ...]) -> tuple[object, ...]:
    stamps: list[object] = []
    for path in files:
        try:
            status = path.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(stamps)


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves a registry. Bound when made; serves when started."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str, port: int, registry: CollectorRegistry, web_config: Path | None = None) -> None:
        self.registry = registry
        self.guard = Guard(web_config)
        self.scrapes = threading.BoundedSemaphore(MAX_SCRAPES)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._silent: dict[socket.socket, None] = {}
        """Connections whose request is not there yet, the oldest first."""
        self._busy = 0
        self._quiet = threading.Condition()
        self._thread: threading.Thread | None = None
        if not 0 <= port <= 65535:  # the resolver would take the rest of a division for it
            raise CannotListen(f"cannot listen on {address} port {port}: there are ports up to 65535")
        try:
            family, _, _, _, where = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self.address_family = family
            super().__init__(cast("tuple[str, int]", where), Handler)
        except OSError as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise CannotListen(
                f"cannot listen on {address} port {port}: {reason}; choose another --port or --address"
            ) from error

    @property
    def url(self) -> str:
        host, port = self.server_address[0], self.server_address[1]
        scheme = "https" if self.guard.current().context else "http"
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"{scheme}://{name}:{port}/metrics"

    def start(self) -> None:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="sdp-web", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more connections, and let the answers under way be given."""
        if self._thread is not None:
            self.shutdown()
        self.server_close()
        with self._quiet:
            self._quiet.wait_for(lambda: self._busy == 0, GRACE_S)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            LOG.warning("%d connections at once: the one that has been silent for longest is closed", MAX_CONNECTIONS)
            self._drop_silent()
            if not self._free.acquire(timeout=ROOM_S):
                self.shutdown_request(request)
                return
        with self._quiet:
            self._busy += 1
            self._silent[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._release(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(CONNECTION_TIMEOUT_S)
            context = self.guard.current().context
            if context is not None:
                try:
                    request = self._wrapped(context, request)
                    request.do_handshake()
                except OSError as error:
                    LOG.debug("%s: no TLS connection: %s", client_address, error)
                    self.shutdown_request(request)
                    return
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def _wrapped(self, context: ssl.SSLContext, request: socket.socket) -> ssl.SSLSocket:
        wrapped = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        with self._quiet:
            self._silent = dict.fromkeys(wrapped if one is request else one for one in self._silent)
        return wrapped

    def heard(self, request: socket.socket) -> None:
        """Its request is there: it is answered, and not silent any more."""
        with self._quiet:
            self._silent.pop(request, None)

    def _drop_silent(self) -> None:
        """The oldest; its own thread notices, and ends."""
        with self._quiet:
            request = next(iter(self._silent), None)
            if request is not None:
                del self._silent[request]
                with suppress(OSError):  # it has gone by itself
                    socket.socket.shutdown(request, socket.SHUT_RDWR)  # of TLS as well: no farewell

    def _release(self, request: socket.socket) -> None:
        self.heard(request)
        self._free.release()
        with self._quiet:
            self._busy -= 1
            self._quiet.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # socketserver's
        """A client that goes away is no error of ours."""
        LOG.debug("%s: connection ended", client_address, exc_info=True)


class _Deadline(io.RawIOBase):
    """Reads from a connection until a moment, however slowly the bytes drip."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until = connection, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class Handler(http.server.BaseHTTPRequestHandler):
    """One request, then the connection is closed: scrapes are seconds apart."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = CONNECTION_TIMEOUT_S
    server_version = "sdp-exporter"
    sys_version = ""
    open_paths: ClassVar[frozenset[str]] = frozenset({"/healthz"})
    """For the kubelet's probes, which have no password."""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Deadline(self.connection, time.monotonic() + CONNECTION_TIMEOUT_S))

    def do_GET(self) -> None:
        self.server.heard(self.connection)
        try:
            path = urlsplit(self.path).path
        except ValueError:
            self._reply(b"not an address\n", "text/plain", HTTPStatus.BAD_REQUEST)
            return
        pages: Mapping[str, Callable[[], None]] = {
            "/": lambda: self._reply(PAGE, "text/html; charset=utf-8"),
            "/healthz": lambda: self._reply(b"ok\n", "text/plain; charset=utf-8"),
            "/metrics": self._metrics,
        }
        if path not in self.open_paths and not self._allowed():
            self._reply(
                b"unauthorized\n", "text/plain", HTTPStatus.UNAUTHORIZED, {"WWW-Authenticate": 'Basic realm="sdp"'}
            )
        elif path in pages:
            pages[path]()
        else:
            self._reply(b"not found; there are /metrics and /healthz\n", "text/plain", HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET  # noqa: N815  # http.server's name

    def _allowed(self) -> bool:
        passwords = self.server.guard.current().passwords
        if passwords is None:
            return True
        scheme, _, encoded = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            user, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return False
        return bool(colon) and passwords.check(user, password)

    def _metrics(self) -> None:
        if not self.server.scrapes.acquire(blocking=False):
            self._reply(b"too many scrapes at once\n", "text/plain", HTTPStatus.SERVICE_UNAVAILABLE)
            return
        try:
            self._scrape()
        finally:
            self.server.scrapes.release()

    def _scrape(self) -> None:
        began = time.monotonic()
        try:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            body = encode(self.server.registry)
        except Exception:
            # Tell the scraper, too: half an answer would look like metrics that are gone.
            LOG.exception("a scrape failed")
            self._reply(
                b"the scrape failed; the exporter's log says why\n", "text/plain", HTTPStatus.INTERNAL_SERVER_ERROR
            )
            return
        headers = {}
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers = gzip.compress(body, compresslevel=1), {"Content-Encoding": "gzip"}
        self._reply(body, content_type, headers=headers)
        LOG.debug("a scrape took %.3f s", time.monotonic() - began)

    def _reply(
        self,
        body: bytes,
        content_type: str,
        status: HTTPStatus = HTTPStatus.OK,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        every = {"Content-Type": content_type, "Content-Length": str(len(body)), "Connection": "close"}
        for name, value in {**every, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        LOG.debug("%s: %s", self.address_string(), format % args)
