"""HTTP to a port of a pod, through the API server's port forwarding."""

from typing import Any

from kubernetes.stream.ws_client import PortForward
from urllib3 import HTTPConnectionPool


class ForwardedPort(HTTPConnectionPool):
    """A pool of the one connection that a port forwarding is."""

    def __init__(self, websocket: Any, port: int) -> None:
        super().__init__("localhost", port, retries=False)
        tunnel: Any = _Tunnel  # the client comes without types
        self._tunnel = tunnel(websocket, [port])

    def _new_conn(self) -> Any:
        connection: Any = super()._new_conn()
        connection.sock = self._tunnel.socket(self.port)
        return connection

    def error(self) -> str:
        """Return what the API server or the pod's node reported; empty where nothing is wrong."""
        return str(self._tunnel.error(self.port) or "").strip()


class _Tunnel(PortForward):
    """The official client's forwarding, whose thread would print a traceback when the connection breaks, and leave
    the reader waiting."""

    def _proxy(self) -> None:
        try:
            PortForward._proxy(self)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the connection, and the reader is told
            for port in self.local_ports.values():
                port.error = port.error or str(error)
                port.python.close()
