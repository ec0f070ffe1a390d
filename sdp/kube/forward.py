"""HTTP to a port of a pod, through the API server's port forwarding."""

from typing import Any

from kubernetes.stream.ws_client import PortForward
from urllib3 import HTTPConnectionPool


class ForwardedPort(HTTPConnectionPool):
    """A connection pool of urllib3 that holds one forwarded port."""

    def __init__(self, websocket: Any, port: int) -> None:
        super().__init__("localhost", port, retries=False)
        tunnel: Any = _Tunnel  # the client is untyped
        self._tunnel = tunnel(websocket, [port])

    def _new_conn(self) -> Any:
        connection: Any = super()._new_conn()
        connection.sock = self._tunnel.socket(self.port)
        return connection

    def error(self) -> str:
        """Return the error that the API server or the pod's node reported; empty if there is none."""
        return str(self._tunnel.error(self.port) or "").strip()


class _Tunnel(PortForward):
    """The official client's port forwarding, but a broken connection ends the reader's wait without a traceback."""

    def _proxy(self) -> None:
        try:
            PortForward._proxy(self)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 (any error ends the connection, and the reader sees it)
            for port in self.local_ports.values():
                port.error = port.error or str(error)
                port.python.close()
