"""The API server: what is asked of it, as plain JSON, within deadlines, and its refusals as one line."""

import email.utils
import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from sdp.errors import UserError
from sdp.kube import wire
from sdp.kube.access import Access
from sdp.kube.answers import Forbidden, Unreachable, explain
from sdp.kube.wire import Endpoint, Failures, ForwardedPort, HandshakeRefused, Timing

Object = dict[str, Any]
T = TypeVar("T")

RAY = "/apis/ray.io/v1"
_PAGE = 500


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer below 400."""

    data: Any
    ahead_s: float | None
    """How far our clock is ahead of the server's, to about a second; None where it did not say."""


class Stream:
    """An answer that is still being written."""

    def __init__(self, connection: http.client.HTTPConnection, sock: Any, answer: http.client.HTTPResponse) -> None:
        self._connection, self._sock, self._answer = connection, sock, answer

    def read(self) -> bytes:
        """The next bytes, as soon as there are any; b"" at the end."""
        return self._answer.read1(65_536)

    def line(self) -> bytes:
        return self._answer.readline()

    def hang_up(self) -> None:
        """End it, from any thread: whoever reads is told at once."""
        wire.hang_up(self._sock)

    def close(self) -> None:
        self._answer.close()
        self._connection.close()
        self._sock.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Api:
    """One cluster's API server, and a namespace in it. Safe to share between threads."""

    def __init__(self, access: Access, namespace: str | None = None, timing: Timing | None = None) -> None:
        self.context = access.context
        self.namespace = namespace or access.namespace
        self.timing = timing or Timing()
        self._endpoint: Endpoint = access.endpoint
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    # --- objects ---

    def get(self, path: str, **query: str) -> Any:
        return self.ask("GET", path, query).data

    def list(self, path: str, **query: str) -> "list[Object]":
        """All items of a collection, page by page."""
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
        return self.ask("POST", path, {}, body).data

    def delete(self, path: str) -> None:
        """In the background: what depends on the object goes after it."""
        self.ask("DELETE", path, {"propagationPolicy": "Background"})

    def mine(self, kind: str, name: str = "", group: str = RAY) -> str:
        """The path of a kind of object, or of one, in our namespace."""
        path = f"{group}/namespaces/{quote(self.namespace, safe='')}/{kind}"
        return f"{path}/{quote(name, safe=':')}" if name else path

    def changed(self, path: str, item: Object, seconds: float) -> None:
        """Wait until an object of a collection is another than the one given, at the longest for so many seconds."""
        about = item["metadata"]
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={about['name']}",
            "resourceVersion": about.get("resourceVersion", ""),
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        try:
            with self.stream(path, query, quiet_s=seconds + self.timing.answer_s) as stream:
                event = json.loads(stream.line() or b"{}")
        except Forbidden:  # to watch; looking now and then is allowed
            wire.pause(min(seconds, 5.0))
            return
        except (Unreachable, *Failures, ValueError):
            event = {"type": "ERROR"}
        if event.get("type") == "ERROR":  # such as a version that is too old to be watched from
            wire.pause(min(seconds, 1.0))

    # --- HTTP ---

    def ask(self, method: str, path: str, query: Mapping[str, str] | None = None, body: Object | None = None) -> Reply:
        """One request and its answer. What only reads is tried again when the connection breaks."""
        target = self._target(path, query)
        payload = None if body is None else json.dumps(body).encode()
        if method == "GET":
            return self._persist(lambda: self._once(method, target, payload))
        return self._guarded(lambda: self._once(method, target, payload))

    def stream(self, path: str, query: Mapping[str, str], quiet_s: float) -> Stream:
        """An answer to be read as it is written; a silence of `quiet_s` is an error."""

        def begin() -> Stream:
            connection, sock = self.send("GET", f"{path}?{urlencode(query)}", {}, quiet_s)
            answer = connection.getresponse()
            if answer.status >= 400:
                error = explain("GET", path, answer.status, answer.read())
                connection.close()
                raise error
            return Stream(connection, sock, answer)

        return self._guarded(begin)

    def forward(self, pod: str, port: int) -> ForwardedPort:
        """A connection to a port of a pod of our namespace. The right to it: create pods/portforward."""
        path = self._target(f"{self.mine('pods', pod, '/api/v1')}/portforward", {"ports": str(port)})
        return self._guarded(lambda: self._forward(path))

    def _forward(self, path: str) -> ForwardedPort:
        sock = wire.dial(self._endpoint, self.timing)
        try:
            return ForwardedPort.open(sock, path, {**self._endpoint.credentials(), **self._host()})
        except HandshakeRefused as refusal:
            sock.close()
            raise explain("GET", path, refusal.status, refusal.body) from refusal
        except BaseException:
            sock.close()
            raise

    def _target(self, path: str, query: Mapping[str, str] | None) -> str:
        return self._endpoint.base + path + (f"?{urlencode(query)}" if query else "")

    def _host(self) -> dict[str, str]:
        return {"Host": wire.host_header(self._endpoint)}

    def send(
        self, method: str, path: str, headers: Mapping[str, str], quiet_s: float
    ) -> tuple[http.client.HTTPConnection, Any]:
        """Send a request on a connection of its own, whose answer is to be read as it comes."""
        connection = self._dial()
        sock = connection.sock
        try:
            ours = {**self._endpoint.credentials(), **self._host(), **headers}
            connection.request(method, self._endpoint.base + path, headers=ours)
            sock.settimeout(quiet_s)
        except BaseException:
            connection.close()
            raise
        return connection, sock

    def _once(self, method: str, target: str, payload: bytes | None) -> Reply:
        headers = {"Accept": "application/json", **self._endpoint.credentials(), **self._host()}
        if payload is not None:
            headers["Content-Type"] = "application/json"
        connection = self._reused() if method == "GET" else None
        if connection is not None:
            try:
                return self._exchange(connection, method, target, payload, headers)
            except Failures:
                connection.close()  # the server may have had enough of it meanwhile, which says nothing
        return self._exchange(self._dial(), method, target, payload, headers)

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, target: str, payload: bytes | None, headers: Any
    ) -> Reply:
        try:
            before = time.time()
            connection.request(method, target, payload, headers)
            answer = connection.getresponse()
            between = (before + time.time()) / 2
            content = answer.read()
        except BaseException:
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        if answer.status >= 400:
            raise explain(method, target, answer.status, content)
        try:
            data = json.loads(content) if content else None
        except ValueError:
            raise UserError(
                f"kubernetes: {self._endpoint.host}: expected an API server, its answer is no JSON; check KUBECONFIG"
            ) from None
        return Reply(data, _ahead(between, answer.headers.get("Date")))

    def _reused(self) -> http.client.HTTPConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _dial(self) -> http.client.HTTPConnection:
        return wire.http_on(wire.dial(self._endpoint, self.timing), self._endpoint.host)

    def _persist(self, call: Callable[[], T]) -> T:
        """Try again what failed in passing, a few times."""
        for attempt in range(self.timing.attempts - 1):
            try:
                return self._guarded(call)
            except Unreachable:
                wire.pause(self.timing.pause(attempt))
        return self._guarded(call)

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Failures as error:
            where = wire.host_header(self._endpoint)
            why = str(error) or type(error).__name__
            raise Unreachable(
                f"kubernetes: {where} does not answer ({why}); check the network and KUBECONFIG"
            ) from error


def _ahead(ours: float, date: str | None) -> float | None:
    try:
        theirs = email.utils.parsedate_to_datetime(date or "")
    except ValueError:
        return None
    return ours - (theirs.timestamp() + 0.5)  # a Date has whole seconds: half of one is what it left out
