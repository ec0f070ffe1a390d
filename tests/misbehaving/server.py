"""An image server for tests, in a thread of this process, that misbehaves on request.

    with ImageServer(images=20) as server:
        fetch(server.image_url(7, "429", after=2, times=1))

`/images/<i>.<ext>` and `/image/<i>.<ext>`, below any folder, are image i; the extension is ignored. The table in
`tests.misbehaving.behaviours` lists what `?do=…` can do.

Virtual hosts: all of 127.0.0.0/8 is this machine, so `hosts=("127.0.0.1", "127.0.0.2")` listens at both, on one
port. Traffic is counted by Host header, so any other name works as well.
"""

import asyncio
import contextlib
import dataclasses
import re
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlencode

from sdp.errors import SdpError, UserError
from tests.misbehaving import behaviours
from tests.misbehaving.gallery import Gallery, Image, shapes_source
from tests.misbehaving.traffic import Stats, Traffic, Visit
from tests.misbehaving.wire import BadRequest, Connection, Request, response

if TYPE_CHECKING:
    from tests.certificate import Certificate

IMAGE_PATH = re.compile(r"(?:/[^?]*)?/images?/(\d{1,12})(?:\.\w+)?")
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 30.0
HANDSHAKE_S = 10.0
"""The longest TLS handshake."""


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageServer:
    """The server in a thread of this process. Its methods may be called from any thread."""

    images: int = 200
    """Indices below this exist."""
    distinct: int = 0
    """Number of distinct images: image i equals image i + distinct. 0 makes all distinct."""
    seed: int = 0
    hosts: Sequence[str] = ("127.0.0.1",)
    port: int = 0
    """0: any free one; after `start`, the one that it is."""
    tls: bool = False

    def __post_init__(self) -> None:
        self._service: _Service | None = None
        self._thread: threading.Thread | None = None
        self._finished: Future[None] = Future()
        self._dead_ends: list[socket.socket] = []
        self._deaf_port = self._refused_port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serve; returns when connections are accepted."""
        service = _Service(self)
        started: Future[None] = Future()
        self._finished = Future()

        def run() -> None:
            try:
                asyncio.run(service.run(lambda: started.set_result(None)))
                self._finished.set_result(None)
            except Exception as error:  # noqa: BLE001 (carried to the thread that waits for it)
                (self._finished if started.done() else started).set_exception(error)

        self._service = service
        self._thread = threading.Thread(target=run, name="image-server", daemon=True)
        self._thread.start()
        try:
            started.result(START_DEADLINE_S)
        except BaseException:
            self._thread = None
            raise

    def stop(self) -> None:
        """Stop the server if it is running; its statistics remain available."""
        for plug in self._dead_ends:
            plug.close()
        self._dead_ends.clear()
        self._deaf_port = self._refused_port = 0
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._running.stop()
        thread.join(STOP_DEADLINE_S)
        if thread.is_alive():
            raise SdpError(f"the image server at {self.url} did not stop within {STOP_DEADLINE_S:g} s")
        self._finished.result(0)

    @property
    def url(self) -> str:
        """The base URL, at the first host; what `shapes.metadata_table` takes."""
        return self.url_of(self.hosts[0])

    def url_of(self, host: str) -> str:
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def image_url(self, index: int, do: str = "", host: str = "", **parameters: Any) -> str:
        """The URL of an image and of what is to happen, e.g. `image_url(7, "429", after=2, times=3)`.

        Without `do` it is the URL of `shapes.metadata_table`. A list gives a parameter several times; `as_` is `as`.
        """
        from scripts.demo import shapes

        url = f"{self.url_of(host or self.hosts[0])}/{shapes.sample(index, self.seed).path}"
        named = {key.rstrip("_"): value for key, value in parameters.items()}
        query = urlencode({"do": do, **named} if do else named, doseq=True)
        return f"{url}?{query}" if query else url

    @property
    def certificate(self) -> Path:
        """With TLS: the file by which a client may trust this server."""
        if self._running.certificate is None:
            raise UserError("the image server has no certificate; start it with tls=True")
        return self._running.certificate.path

    @property
    def deaf_url(self) -> str:
        """A base URL whose port never completes a connection: what a host behind a silent firewall is like."""
        if not self._deaf_port:
            self._deaf_port = _deaf_port(self.hosts[0], self._dead_ends)
        return f"http://{self.hosts[0]}:{self._deaf_port}"

    @property
    def refused_url(self) -> str:
        """A base URL whose port refuses connections."""
        if not self._refused_port:
            plug = socket.socket()
            self._dead_ends.append(plug)
            plug.bind((self.hosts[0], 0))
            self._refused_port = plug.getsockname()[1]
        return f"http://{self.hosts[0]}:{self._refused_port}"

    @property
    def stats(self) -> Stats:
        """Return the statistics since the server started or was reset."""
        return self._running.traffic.stats()

    def visits(self) -> list[Visit]:
        """The requests, oldest first."""
        return self._running.traffic.visits()

    def reset(self) -> None:
        """Forget what was seen, and the counts behind `times=N`."""
        self._running.reset()

    def wait_for(self, condition: Callable[[Stats], bool], deadline_s: float = 10.0) -> None:
        """Wait until what was seen satisfies a condition."""
        self._running.traffic.wait_for(condition, deadline_s)

    def warm(self, deadline_s: float = 300.0) -> None:
        """Make all images now rather than on request (about 30 ms each)."""
        service = self._running
        asyncio.run_coroutine_threadsafe(service.gallery.warm(), service.loop).result(deadline_s)

    @property
    def _running(self) -> "_Service":
        if self._service is None:
            raise SdpError("the image server was never started; use it in a with statement")
        return self._service


class _Service:
    """The part of the server that runs in its event loop."""

    def __init__(self, server: ImageServer):
        self.traffic = Traffic()
        self._distinct = server.distinct or max(1, server.images)
        self.gallery = Gallery(shapes_source(server.seed), min(server.images, self._distinct))
        self.certificate: Certificate | None = None
        self._server = server
        self._scheme = "https" if server.tls else "http"
        self._connections: set[Connection] = set()
        self._adopting: dict[asyncio.Task[None], socket.socket] = {}
        self._admitted: defaultdict[str, deque[float]] = defaultdict(deque)

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until stopped."""
        self.loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        with contextlib.ExitStack() as stack:
            stack.callback(self.gallery.close)
            listeners = _listen(self._server.hosts, self._server.port)
            for listener in listeners:
                stack.enter_context(listener)
            self._server.port = listeners[0].getsockname()[1]
            if self._server.tls:
                from tests.certificate import Certificate

                self.certificate = Certificate(sorted({*self._server.hosts, "127.0.0.1", "localhost"}))
                stack.callback(self.certificate.close)
            work = [self._stopping.wait(), *map(self._accept, listeners)]
            tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
            ready()
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await self._end_connections()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

    def stop(self) -> None:
        """Stop serving; any thread may call this."""
        # If the loop is closed already, the service has failed: its thread says why.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._stopping.set)

    def reset(self) -> None:
        self.traffic.reset()
        self._admitted.clear()

    def respond(self, connection: Connection, request: Request) -> bytes | Coroutine[None, None, None]:
        index = image_index(request.target)
        if index is None:
            return _page(request, 404, "there are only images here\n")
        visit = connection.visited(request)
        if request.method not in ("GET", "HEAD"):
            return _page(request, 405, "GET or HEAD\n")
        if index >= self._server.images:
            return _page(request, 404, f"there are images 0 to {self._server.images - 1}\n")
        if "do=" in request.query:
            try:
                plan = behaviours.plan(request.query)
            except BadRequest as error:
                return _page(request, 400, f"{error}\n")
            if plan is not None and (plan.times is None or visit.attempt <= plan.times):
                return self._misbehave(connection, request, visit, index, plan)
        image = self.gallery.ready(index % self._distinct)
        return self._made(connection, request, index) if image is None else _plain(request, image)

    def admit(self, host: str, rps: int, at_once: int) -> bool:
        """Return true if a host with this capacity accepts one more request, which is already in flight."""
        if at_once and self.traffic.in_flight(host) > at_once:
            return False
        now, recent = time.monotonic(), self._admitted[host]
        while recent and recent[0] <= now - 1:
            recent.popleft()
        if len(recent) >= rps:
            return False
        recent.append(now)
        return True

    async def _made(self, connection: Connection, request: Request, index: int) -> None:
        await connection.send(_plain(request, await self.gallery.image(index % self._distinct)))

    async def _misbehave(
        self, connection: Connection, request: Request, visit: Visit, index: int, plan: behaviours.Plan
    ) -> None:
        await plan.kind.run(
            behaviours.Exchange(
                wire=connection,
                limiter=self,
                request=request,
                host=visit.host,
                origin=f"{self._scheme}://{visit.host}:{self._server.port}",
                index=index,
                image=await self.gallery.image(index % self._distinct),
                name=plan.name,
                options=plan.options,
            )
        )

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                plug, _ = await self.loop.sock_accept(listener)
            except OSError:
                # Out of file descriptors, or the client is gone already: others may yet be served.
                await asyncio.sleep(0.1)
                continue
            task = self.loop.create_task(self._adopt(plug))
            self._adopting[task] = plug
            task.add_done_callback(self._adopting.pop)

    async def _adopt(self, plug: socket.socket) -> None:
        limits = {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": 1.0} if self.certificate else {}
        with contextlib.suppress(OSError):  # the handshake failed
            await self.loop.connect_accepted_socket(
                lambda: Connection(self, self.traffic, self._connections),
                plug,
                ssl=self.certificate.context if self.certificate else None,
                **limits,
            )

    async def _end_connections(self) -> None:
        adopting = dict(self._adopting)
        for task in adopting:
            task.cancel()
        await asyncio.gather(*adopting, return_exceptions=True)
        for task, plug in adopting.items():
            if task.cancelled():
                plug.close()
        for connection in tuple(self._connections):
            connection.abort()
        deadline = time.monotonic() + STOP_DEADLINE_S / 2
        while self._connections and time.monotonic() < deadline:
            await asyncio.sleep(0.001)


def image_index(target: str) -> int | None:
    """Which image a path, or a path and query, is about."""
    match = IMAGE_PATH.fullmatch(target.partition("?")[0])
    return int(match[1]) if match else None


def _page(request: Request, status: int, text: str) -> bytes:
    complete = response(status, "text/plain; charset=utf-8", text.encode(), keep_alive=request.keep_alive)
    return complete[: complete.index(b"\r\n\r\n") + 4] if request.method == "HEAD" else complete


def _plain(request: Request, image: Image) -> bytes:
    answer = image.answer if request.method == "GET" else image.answer[: image.head_length]
    if request.keep_alive:
        return answer
    return answer.replace(b"Connection: keep-alive", b"Connection: close", 1)


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Return sockets that listen at all hosts on one port; `port` 0 looks for one that is free at all of them."""
    for _ in range(20):
        with contextlib.ExitStack() as stack:
            listeners: list[socket.socket] = []
            try:
                for host in hosts:
                    listener = stack.enter_context(socket.socket())
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listener.bind((host, listeners[0].getsockname()[1] if listeners else port))
                    listener.listen(4096)
                    listener.setblocking(False)
                    listeners.append(listener)
            except OSError as error:
                if port or not listeners:
                    raise UserError(f"the image server cannot listen at {host}:{port}: {error.strerror}") from error
                continue
            stack.pop_all()
            return listeners
    raise UserError(f"the image server found no port that is free at each of {', '.join(hosts)}; give one")


def _deaf_port(host: str, keep: list[socket.socket]) -> int:
    """Return a port with a full queue: Linux drops every further connection attempt."""
    listener = socket.socket()
    keep.append(listener)
    listener.bind((host, 0))
    listener.listen(0)
    for _ in range(16):
        client = socket.socket()
        keep.append(client)
        client.settimeout(0.05)
        try:
            client.connect(listener.getsockname())
        except TimeoutError:
            return int(listener.getsockname()[1])
    raise SdpError(f"{host}: this kernel keeps accepting connections into a full queue; there is no deaf port here")
