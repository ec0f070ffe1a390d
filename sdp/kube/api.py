"""The API server, through the official client: plain JSON, timeouts on every request, errors of one line."""

import contextlib
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import kubernetes
import urllib3
import websocket
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import ws_client
from urllib3.exceptions import HTTPError

from sdp.backoff import backoff
from sdp.errors import SdpError, UserError, one_line
from sdp.kube import Object
from sdp.kube.access import Access

RAY = "/apis/ray.io/v1"
OPERATOR_HINT = "install the KubeRay operator, 1.7 or later, and its CRDs"
_PAGE = 500
_TEMPORARY = (429, 500, 502, 503, 504)
"""Statuses after which a retry may succeed."""


class Unreachable(SdpError):
    """No response in time, or a temporary error: a retry may help."""


class Forbidden(UserError):
    """The credentials lack a right."""


class Missing(UserError):
    """The object does not exist."""


class NoSuchKind(UserError):
    """The cluster does not serve this kind of object: a CRD is missing."""


class AlreadyThere(UserError):
    """An object of that name exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Timeouts and pauses, in seconds."""

    connect_s: float = 10.0
    answer_s: float = 30.0
    attempts: int = 3
    """Attempts of requests that only read."""
    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    poll_s: float = 2.0
    """Pause before a job's state is read again."""
    quiet_s: float = 60.0
    """Time without a byte after which a log's connection is replaced."""
    lost_s: float = 900.0
    """Time without a response from the API server after which following a job ends."""

    def pause(self, attempt: int) -> float:
        return backoff(attempt, self.first_pause_s, self.longest_pause_s)


def pause(seconds: float) -> None:
    """Wait before a request is repeated."""
    time.sleep(seconds)


class Api:
    """One cluster's API server, and a namespace in it. Safe to share between threads."""

    def __init__(self, access: Access, namespace: str | None = None, timing: Timing | None = None) -> None:
        self.context = access.context
        self.namespace = namespace or access.namespace
        self.timing = timing or Timing()
        self._settings = access.configuration
        self._settings.retries = urllib3.Retry(
            self.timing.attempts - 1,
            allowed_methods=["GET"],
            status_forcelist=_TEMPORARY,
            backoff_factor=self.timing.first_pause_s,
            backoff_max=self.timing.longest_pause_s,
            raise_on_status=False,
        )
        client = kubernetes.client.ApiClient(self._settings)
        self._tls = _tls(self._settings)
        client.rest_client.pool_manager.connection_pool_kw["ssl_context"] = self._tls
        # Discovery would cost each command two more requests, and the paths are known.
        self._client = kubernetes.dynamic.DynamicClient(client, discoverer=lambda *_: None)

    # --- objects ---

    def get(self, path: str, **query: str) -> Any:
        return self._json("GET", path, query)

    def list(self, path: str, **query: str) -> "list[Object]":
        """Return all items of a collection, read page by page."""
        items: list[Object] = []
        more: dict[str, str] = {}
        while True:
            page = self.get(path, limit=str(_PAGE), **query, **more)
            items += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return items
            more = {"continue": token}

    def post(self, path: str, body: Object) -> Any:
        return self._json("POST", path, body=body)

    def delete(self, path: str) -> None:
        """Delete an object, and its dependents in the background."""
        self._json("DELETE", path, {"propagationPolicy": "Background"})

    def path(self, kind: str, name: str = "", group: str = RAY) -> str:
        """Return the path of a kind of objects, or of one object, in this namespace."""
        path = f"{group}/namespaces/{quote(self.namespace, safe='')}/{kind}"
        return f"{path}/{quote(name, safe=':')}" if name else path

    # --- requests ---

    def _json(self, method: str, path: str, query: Mapping[str, str] | None = None, body: Object | None = None) -> Any:
        with self.explained(method, path):
            response = self.response(method, path, query, body)
            try:
                return json.loads(response.data)
            except ValueError:
                host = urlsplit(self._settings.host).netloc
                raise UserError(
                    f"kubernetes: {host}: expected an API server, got a response that is not JSON; check KUBECONFIG"
                ) from None

    def response(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        quiet_s: float | None = None,
    ) -> Any:
        """Send a request and return urllib3's response as a stream; wrap the call in `explained`.

        A silence of `quiet_s` is an error.
        """
        return self._client.request(
            method,
            path,
            body=body,
            serialize=False,
            query_params=list((query or {}).items()),
            header_params=dict(headers or {}),
            _request_timeout=(self.timing.connect_s, quiet_s or self.timing.answer_s),
        )

    def forward(self, pod: str, port: int) -> "ForwardedPort":
        """Return a connection pool of urllib3 over a pod's port. Needs the right to create pods/portforward."""
        path = f"{self.path('pods', pod, '/api/v1')}/portforward"
        url = f"{self._settings.host}{path}?ports={port}".replace("http", "ws", 1)
        headers = [f"{setting['key']}: {setting['value']}" for setting in self._settings.auth_settings().values()]
        proxy = ws_client.websocket_proxycare({}, self._settings, url, {})
        # The client's own create_websocket has no timeout.
        socket: Any = websocket.WebSocket(
            sslopt={"context": self._tls, "server_hostname": self._settings.tls_server_name}
        )
        with self.explained("GET", path):
            protocol = "Sec-WebSocket-Protocol: v4.channel.k8s.io"
            socket.connect(url, header=[protocol, *headers], timeout=self.timing.answer_s, **proxy)
        return ForwardedPort(socket, port)

    @contextlib.contextmanager
    def explained(self, method: str, path: str) -> Iterator[None]:
        """Turn errors of the client libraries into SdpErrors of one line."""
        try:
            yield
        except websocket.WebSocketBadStatusException as error:
            raise explain(method, path, error.status_code, error.resp_body) from error
        except ApiException as error:
            if error.status:
                raise explain(method, path, error.status, error.body) from error
            raise self._unreachable(error.reason) from error
        except (HTTPError, websocket.WebSocketException, OSError) as error:
            raise self._unreachable(getattr(error, "reason", None) or error) from error

    def _unreachable(self, reason: object) -> Unreachable:
        words = one_line(reason).rpartition("): ")[2] or type(reason).__name__
        host = urlsplit(self._settings.host).netloc
        return Unreachable(f"kubernetes: {host} does not answer ({words}); check the network and KUBECONFIG")


class ForwardedPort(urllib3.HTTPConnectionPool):
    """A connection pool of urllib3 that holds one forwarded port of a pod."""

    def __init__(self, websocket: Any, port: int) -> None:
        super().__init__("localhost", port, retries=False)
        self._tunnel: Any = _Tunnel(websocket, [port])  # type: ignore[no-untyped-call]

    def _new_conn(self) -> Any:
        connection: Any = super()._new_conn()
        connection.sock = self.socket()
        return connection

    def socket(self) -> Any:
        """Return the connection itself."""
        return self._tunnel.socket(self.port)

    def error(self) -> str:
        """Return the error that the API server or the pod's node reported; empty if there is none."""
        return str(self._tunnel.error(self.port) or "").strip()


class _Tunnel(ws_client.PortForward):
    """The official client's port forwarding, but a broken connection ends the reader's wait without a traceback."""

    def _proxy(self) -> None:
        try:
            super()._proxy()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 (any error ends the connection, and the reader sees it)
            for port in self.local_ports.values():
                port.error = port.error or str(error)
                port.python.close()


def explain(method: str, path: str, status: int, body: bytes | str | None) -> SdpError:
    """Return the error for a response of status 400 or more."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body or ""
    data = status_object(text)
    words = one_line(data.get("message") or text) or f"status {status}"
    words = words if len(words) <= 400 else f"{words[:399]}…"
    if status == 401:
        return UserError(
            "kubernetes: the API server refuses these credentials (401); log in again, or use another --context"
        )
    if status == 403 and "system:anonymous" in words:
        return UserError(
            "kubernetes: no credentials were sent; the login of this context failed (kubectl shows the reason)"
        )
    if status == 403:
        return Forbidden(f"kubernetes: {words}; ask for that right, or use another --context or --namespace")
    if status == 404 and data.get("reason") == "NotFound" and (data.get("details") or {}).get("name"):
        return Missing(f"kubernetes: {words}")
    if status == 404:
        hint = f"; {OPERATOR_HINT}" if path.startswith("/apis/ray.io/") else ""
        return NoSuchKind(f"kubernetes: this cluster does not serve {path.partition('?')[0]}{hint}")
    if status == 409 and data.get("reason") == "AlreadyExists":
        return AlreadyThere(f"kubernetes: {words}")
    if status == 409 or status in _TEMPORARY or status > 500:
        return Unreachable(f"kubernetes: {method} {path.partition('?')[0]}: {words} ({status}); try again")
    return UserError(f"kubernetes: {words} ({status})")


def status_object(text: str) -> Object:
    """Return the `Status` object in which the API server describes an error; {} if the text is not one."""
    try:
        data = json.loads(text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) and data.get("kind") == "Status" else {}


def _tls(settings: Any) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ssl_ca_cert, cadata=settings.ca_cert_data)
        # Many clusters' authorities fail Python 3.13's stricter default checks, which kubectl does not make.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not settings.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"KUBECONFIG: its certificates cannot be used ({error}); check that kubectl works with it"
        ) from error
    return context
