"""Serves /metrics and /healthz with prometheus_client's server, protected from slow or silent clients.

Each connection has a thread and a deadline. Beyond MAX_CONNECTIONS, the connection that has been silent for longest is
closed, and /metrics gets only a part of the connections, so a scrape and the kubelet's probe are always answered.
"""

import io
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from sdp.errors import UserError

LOG = logging.getLogger(__name__)
REQUEST_S = 10.0
"""Time for the TLS handshake and the whole request."""
REPLY_S = 70.0
"""Time for the reply: the longest --timeout-s, and ten seconds for a slow reader."""
MAX_CONNECTIONS = 32
MAX_SCRAPES = 24
"""Concurrent requests for /metrics; further ones get 503."""
GRACE_S = 5.0
"""Time for open connections to finish at a stop."""
PAGES = {
    "/": ("text/html; charset=utf-8", b'<!doctype html><title>sdp exporter</title><a href="/metrics">Metrics</a>\n'),
    "/healthz": ("text/plain; charset=utf-8", b"ok\n"),
}


class Tls:
    """The server's certificate; with a client authority, only clients with its certificates may connect."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._files = {"--tls-cert": cert, "--tls-key": key, **({"--tls-client-ca": client_ca} if client_ca else {})}
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. Files may be renewed at any time; invalid ones are not used."""
        try:
            self._context = self._load()
        except UserError as error:
            LOG.error("%s; the previous certificates stay in use", error)
        return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        cert, key, *authorities = self._files.values()
        for option, path in self._files.items():
            try:
                path.read_bytes()
            except OSError as error:
                raise UserError(f"{option}: {path}: {error.strerror}") from error
        try:
            context.load_cert_chain(cert, key, password=lambda: b"")  # otherwise OpenSSL prompts at the terminal
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or "expected a PEM certificate and its unencrypted key"
            raise UserError(f"--tls-cert, --tls-key: {cert}, {key}: {reason}") from error
        for authority in authorities:
            try:
                context.load_verify_locations(authority)
            except ssl.SSLError as error:
                raise UserError(f"--tls-client-ca: {authority}: {error.reason or 'no PEM certificate'}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class Server(ThreadingWSGIServer):
    """Serves a registry. The constructor binds the port."""

    request_queue_size = 64

    def __init__(self, address: str, port: int, registry: CollectorRegistry, tls: Tls | None = None) -> None:
        self._tls = tls
        self._deadlines: dict[socket.socket, float] = {}
        """Deadlines of open connections; those that have not sent a request yet have the nearest ones."""
        self._changed = threading.Condition()
        try:
            if not 0 <= port <= 65535:
                raise OverflowError("expected a port of 0 to 65535")
            info = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family, bound = info[0], (str(info[4][0]), port)
            super().__init__(bound, ScrapeHandler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"cannot listen on {address} port {port}: {reason}; choose another --port or --address"
            ) from error
        self.set_app(make_app(registry))

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"{'https' if self._tls else 'http'}://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}/metrics"

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, name="sdp-server", daemon=True).start()

    def stop(self) -> None:
        """Accept no more connections, and let open ones finish."""
        self.shutdown()
        self.server_close()
        with self._changed:
            self._changed.wait_for(lambda: not self._deadlines, GRACE_S)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own looks up the host's name in DNS
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, client = super().get_request()
        if self._tls is not None:  # the handshake happens at the first read, in the connection's own thread
            context = self._tls.context()
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, client

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            if len(self._deadlines) >= MAX_CONNECTIONS:
                LOG.warning("more than %d connections: closing the one that was silent for longest", MAX_CONNECTIONS)
                self._close(min(self._deadlines, key=self._deadlines.__getitem__))
            self._deadlines[request] = time.monotonic() + REQUEST_S
        super().process_request(request, client_address)

    def request_received(self, request: socket.socket) -> None:
        with self._changed:
            if request in self._deadlines:
                self._deadlines[request] = time.monotonic() + REPLY_S

    def service_actions(self) -> None:
        """Close connections past their deadline; called twice a second by the serving thread."""
        with self._changed:
            now = time.monotonic()
            for request in [request for request, deadline in self._deadlines.items() if deadline < now]:
                self._close(request)

    def _close(self, request: socket.socket) -> None:
        """Shut the connection down, which ends its thread."""
        self._forget(request)
        with suppress(OSError):  # the client has closed it
            socket.socket.shutdown(request, socket.SHUT_RDWR)  # an SSLSocket's own would first send a closing message

    def _forget(self, request: socket.socket) -> None:
        with self._changed:
            self._deadlines.pop(request, None)
            self._changed.notify_all()

    def shutdown_request(self, request: Any) -> None:
        self._forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # socketserver's
        LOG.debug("%s: the connection broke", client_address, exc_info=True)


class ScrapeHandler(WSGIRequestHandler):
    """One request of one connection."""

    server: Server

    def get_environ(self) -> WSGIEnvironment:
        self.server.request_received(self.connection)
        return super().get_environ()

    def get_stderr(self) -> io.StringIO:
        """Discard wsgiref's messages on disconnected clients; make_app logs errors of this server."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:
        LOG.debug("%s: %s", self.address_string(), format % args)


def make_app(registry: CollectorRegistry) -> WSGIApplication:
    """Return the WSGI application: prometheus_client's at /metrics, and PAGES."""
    metrics = make_wsgi_app(registry)
    scrapes = threading.BoundedSemaphore(MAX_SCRAPES)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status, (kind, page) = "200 OK", PAGES.get(environ["PATH_INFO"], ("text/plain", b""))
        if environ["PATH_INFO"] == "/metrics":
            if scrapes.acquire(blocking=False):
                try:
                    return list(metrics(environ, start_response))
                except Exception:
                    LOG.exception("a scrape failed")
                    status, page = "500 Internal Server Error", b"the scrape failed; see the exporter's log\n"
                finally:
                    scrapes.release()
            else:
                status, page = "503 Service Unavailable", b"too many scrapes at once\n"
        elif not page:
            status, page = "404 Not Found", b"not found; there are /metrics and /healthz\n"
        start_response(status, [("Content-Type", kind)])
        return [page]

    return app
