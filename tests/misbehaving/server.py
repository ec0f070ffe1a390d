"""An image server for tests, in threads of this process, that misbehaves on request.

    with ImageServer(images=20) as server:
        fetch(server.image_url(7, "429", after=2, times=1))

`/images/<i>.<ext>`, below any folder, is image i; the extension is ignored. `tests.misbehaving.behaviours` has what
`?do=…` can do.

Virtual hosts: all of 127.0.0.0/8 is this machine, so `hosts=("127.0.0.1", "127.0.0.2")` listens at both, on one
port. Traffic is counted by Host header, so any other name works as well.
"""

import contextlib
import dataclasses
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlencode

from scripts.demo import shapes
from sdp.errors import UserError
from tests.misbehaving import behaviours
from tests.misbehaving.behaviours import Exchange
from tests.misbehaving.traffic import Traffic, Visit

_IMAGE_PATH = re.compile(r"/(?:[^?]*/)?images?/(\d{1,12})(?:\.\w+)?")


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageServer:
    """The server in threads of this process. Its methods may be called from any thread."""

    images: int = 200
    """Indices below this exist."""
    distinct: int = 0
    """Number of distinct images: image i equals image i + distinct. 0 makes all distinct."""
    hosts: Sequence[str] = ("127.0.0.1",)
    port: int = 0
    """0: any free one; once the server runs, the one that it is."""
    tls: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        """The lock for what was seen, which also notifies those in `wait_for` of changes."""
        self._visits: list[Visit] = []
        self._connections = 0
        self._open: set[socket.socket] = set()
        self._context: Any = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if self.tls:
                from tests.certificate import Certificate

                certificate = Certificate(sorted({*self.hosts, "localhost"}))
                stack.callback(certificate.close)
                self.certificate: Path = certificate.path
                """The file by which a client may trust this server."""
                self._context = certificate.context
            for host in self.hosts:
                try:
                    listener = stack.enter_context(_Listener(self, (host, self.port)))
                except OSError as error:
                    raise UserError(
                        f"the image server cannot listen at {host}:{self.port}: {error.strerror}"
                    ) from error
                self.port = listener.server_address[1]
                threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
                stack.callback(listener.shutdown)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        with self._changed:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        """The base URL, at the first host; what `shapes.metadata_table` takes."""
        return self.url_of(self.hosts[0])

    def url_of(self, host: str) -> str:
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def image_url(self, index: int, do: str = "", host: str = "", **parameters: Any) -> str:
        """The URL of an image and of what is to happen, e.g. `image_url(7, "429", after=2, times=3)`.

        Without `do` it is the URL of `shapes.metadata_table`. A list gives a parameter several times.
        """
        url = f"{self.url_of(host or self.hosts[0])}/{shapes.sample(index).path}"
        query = urlencode({"do": do, **parameters} if do else parameters, doseq=True)
        return f"{url}?{query}" if query else url

    @property
    def stats(self) -> Traffic:
        """Return what was seen since the server started or was reset."""
        with self._changed:
            return Traffic([dataclasses.replace(visit) for visit in self._visits], self._connections)

    def reset(self) -> None:
        """Forget what was seen, and the counts behind `times=N`."""
        with self._changed:
            self._visits, self._connections = [], 0

    def wait_for(self, condition: Callable[[Traffic], bool], deadline_s: float = 10.0) -> None:
        """Wait until what was seen satisfies a condition."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(Traffic(self._visits)), deadline_s):
                raise TimeoutError(f"the image server waited {deadline_s:g} s in vain; it saw {self._visits[-20:]}")

    def warm(self) -> None:
        """Make all images now rather than on request (about 30 ms each)."""
        for index in range(self.distinct or self.images):
            _image(index)

    # --- called by the threads that serve ---

    def serve(self, x: Exchange) -> None:
        """Answer a request."""
        path, _, query = x.path.partition("?")
        match = _IMAGE_PATH.fullmatch(path)
        host, colon, port = x.headers.get("Host", "").lower().rpartition(":")
        name = host if colon and port.isdigit() else f"{host}{colon}{port}"
        x.visit = Visit(name, x.path, x.headers.get("User-Agent", ""), time.monotonic())
        if match is None or int(match[1]) >= self.images:
            x.send_text(404, f"there are images 0 to {self.images - 1}")
            return
        x.origin, x.query = self.url_of(name), parse_qs(query, keep_blank_values=True)
        x.index = int(match[1])
        with self._changed:
            self._visits.append(x.visit)
            earlier = self._visits if "times" in x.query else []
            attempt = sum((each.target, each.host) == (x.path, name) for each in earlier)
            self._changed.notify_all()
        try:
            x.image, x.content_type = _image(x.index % (self.distinct or self.images))
            if "do" in x.query and attempt <= int(x.query.get("times", ["0"])[-1]):
                behaviours.run(x)
            else:
                behaviours.plain(x)
        finally:
            with self._changed:
                x.visit.ended = time.monotonic()
                self._changed.notify_all()

    def admit(self, visit: Visit, rps: int, at_once: int) -> bool:
        """Return true if a host with this capacity accepts this request, which is already in flight."""
        with self._changed:
            same = Traffic(self._visits).at(visit.host)
            recent = sum(each.status == 200 and each.began > visit.began - 1 for each in same.visits)
            admitted = same.in_flight <= at_once and recent < rps
            visit.status = 200 if admitted else 429
            return admitted

    @contextlib.contextmanager
    def connected(self, connection: socket.socket) -> Any:
        """Count a connection, and know it while it is open."""
        with self._changed:
            self._connections += 1
            self._open.add(connection)
        try:
            yield
        finally:
            with self._changed:
                self._open.remove(connection)


class _Listener(socketserver.ThreadingTCPServer):
    """A host of the server."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 4096

    def __init__(self, site: ImageServer, address: tuple[str, int]) -> None:
        self.site = site
        super().__init__(address, Exchange)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with contextlib.ExitStack() as stack:
            if self.site._context is not None:
                request = stack.enter_context(self.site._context.wrap_socket(request, server_side=True))
            stack.enter_context(self.site.connected(request))
            super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the client has left
            super().handle_error(request, client_address)


@cache
def _image(index: int) -> tuple[bytes, str]:
    """Return an image's bytes and content type."""
    data, content_type, _ = shapes.encode(shapes.sample(index))
    return data, content_type
