"""The API server, through the official client: plain JSON, timeouts on every request, errors of one line."""

import contextlib
import copy
import json
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import kubernetes
import urllib3
import websocket
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import ws_client
from urllib3.exceptions import HTTPError

from sdp.errors import SdpError, UserError, one_line
from sdp.kube import Object

RAY = "/apis/ray.io/v1"
OPERATOR_HINT = "install the KubeRay operator, 1.7 or later, and its CRDs"
CONNECT_S, ANSWER_S = 10.0, 30.0
ATTEMPTS = 3
"""Attempts of requests that only read."""
_TEMPORARY = (429, 500, 502, 503, 504)
"""Statuses after which a retry may succeed."""


class Unreachable(SdpError):
    """No response in time, or a temporary error: a retry may help."""


class Forbidden(UserError):
    """The credentials lack a right."""


class Missing(UserError):
    """The object, or its kind, does not exist."""


class AlreadyThere(UserError):
    """An object of that name exists."""


class Api:
    """One cluster's API server, and a namespace in it. Safe to share between threads."""

    def __init__(self, settings: Any, namespace: str, context: str = "") -> None:
        """Use the official client's settings: certificates, tokens and their renewal.

        `context` is the name of the context that they come from; empty for a pod's service account.
        """
        self.namespace, self.context, self._settings = namespace, context, settings
        settings.retries = urllib3.Retry(
            ATTEMPTS - 1,
            allowed_methods=["GET"],
            status_forcelist=_TEMPORARY,
            backoff_factor=0.5,
            raise_on_status=False,
        )
        client = kubernetes.client.ApiClient(settings)
        self._tls = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        # Many clusters' authorities fail Python 3.13's stricter default checks, which kubectl does not make.
        self._tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not settings.verify_ssl:
            self._tls.check_hostname = False
            self._tls.verify_mode = ssl.CERT_NONE
        if settings.cert_file:
            self._tls.load_cert_chain(settings.cert_file, settings.key_file)
        client.rest_client.pool_manager.connection_pool_kw["ssl_context"] = self._tls
        # Discovery would cost each command two more requests, and the paths are known.
        self._client = kubernetes.dynamic.DynamicClient(client, discoverer=lambda *_: None)

    def within(self, namespace: str) -> "Api":
        """Return the same API server with another namespace."""
        other = copy.copy(self)
        other.namespace = namespace
        return other

    def get(self, path: str, **query: str) -> Any:
        return self._json("GET", path, query)

    def list(self, path: str, **query: str) -> "list[Object]":
        return self.get(path, **query).get("items") or []

    def post(self, path: str, body: Object) -> Any:
        return self._json("POST", path, body=body)

    def delete(self, path: str) -> None:
        """Delete an object, and its dependents in the background."""
        self._json("DELETE", path, {"propagationPolicy": "Background"})

    def path(self, kind: str, name: str = "", group: str = RAY) -> str:
        """Return the path of a kind of objects, or of one object, in this namespace."""
        path = f"{group}/namespaces/{quote(self.namespace, safe='')}/{kind}"
        return f"{path}/{quote(name, safe=':')}" if name else path

    def _json(self, method: str, path: str, query: Mapping[str, str] | None = None, body: Object | None = None) -> Any:
        pairs, timeout = list((query or {}).items()), (CONNECT_S, ANSWER_S)
        with self._explained(path):
            response = self._client.request(
                method, path, body=body, serialize=False, query_params=pairs, header_params={}, _request_timeout=timeout
            )
            return json.loads(response.data)

    def forward(self, pod: str, port: int) -> Any:
        """Return a socket to a pod's port. Needs the right to create pods/portforward."""
        path = f"{self.path('pods', pod, '/api/v1')}/portforward"
        url = ws_client.get_websocket_url(f"{self._settings.host}{path}?ports={port}")
        headers = [f"{setting['key']}: {setting['value']}" for setting in self._settings.auth_settings().values()]
        headers.append("Sec-WebSocket-Protocol: v4.channel.k8s.io")
        proxy = ws_client.websocket_proxycare({}, self._settings, url, {})
        # The client's own create_websocket has no timeout.
        tls = {"context": self._tls, "server_hostname": self._settings.tls_server_name}
        connection: Any = websocket.WebSocket(sslopt=tls)
        with self._explained(path):
            connection.connect(url, header=headers, timeout=ANSWER_S, **proxy)
        tunnel: Any = _Tunnel(connection, [port])  # type: ignore[no-untyped-call]
        return tunnel.socket(port)

    @contextlib.contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        """Turn errors of the client libraries into SdpErrors of one line."""
        host = urlsplit(self._settings.host).netloc
        try:
            yield
        except websocket.WebSocketBadStatusException as error:
            raise explain(path, error.status_code, error.resp_body) from error
        except ApiException as error:
            raise explain(path, error.status or 0, error.body or error.reason) from error
        except (HTTPError, websocket.WebSocketException, OSError) as error:
            words = one_line(getattr(error, "reason", None) or error).rpartition("): ")[2] or type(error).__name__
            raise Unreachable(
                f"kubernetes: {host} does not answer ({words}); check the network and KUBECONFIG"
            ) from error
        except ValueError as error:
            raise UserError(
                f"kubernetes: {host}: expected an API server, got a response that is not JSON; check KUBECONFIG"
            ) from error


class _Tunnel(ws_client.PortForward):
    """The official client's port forwarding, but a broken connection ends the reader's wait without a traceback."""

    def _proxy(self) -> None:
        try:
            super()._proxy()  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 (any error ends the connection, and the reader sees its end)
            for port in self.local_ports.values():
                port.python.close()


def explain(path: str, status: int, body: bytes | str | None) -> SdpError:
    """Return the error for a response of status 400 or more."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body or ""
    try:
        data = dict(json.loads(text))
    except (ValueError, TypeError):
        data = {}
    words = one_line(data.get("message") or text, 400) or f"status {status}"
    if status == 401 or (status == 403 and "system:anonymous" in words):
        return UserError(
            f"kubernetes: the API server refuses these credentials ({status}); log in again, or use another --context"
        )
    if status == 403:
        return Forbidden(f"kubernetes: {words}; ask for that right, or use another --context or --namespace")
    if status == 404 and (data.get("details") or {}).get("name"):
        return Missing(f"kubernetes: {words}")
    if status == 404:
        hint = f"; {OPERATOR_HINT}" if path.startswith(RAY) else ""
        return Missing(f"kubernetes: this cluster does not serve {path}{hint}")
    if status == 409:
        return AlreadyThere(f"kubernetes: {words}")
    if status in _TEMPORARY:
        return Unreachable(f"kubernetes: {words} ({status}); try again")
    return UserError(f"kubernetes: {words} ({status})")
