"""A real S3 server for tests, and a wire between it and its client that can be disturbed.

    from tests.integration.s3 import gateway_fixture, proxy_fixture, s3_env_fixture  # noqa: F401 (fixtures)

`gateway` is a versitygw (posix backend) of this test module on 127.0.0.1, with credentials made up at run time and one
bucket; `proxy` stands before it; `s3_env` puts its address and credentials into the environment. A test that wants to
kill its server starts one of its own with `running_gateway`.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from botocore.session import Session

from sdp.storage import open_storage
from tests.programs import free_port
from tests.storage_server import reset

START_S = 20.0


@dataclass
class Gateway:
    """A versitygw process; `kill` and `start` again keep address, credentials and data."""

    binary: Path
    root: Path
    """Its buckets are folders here, its objects files in them."""
    port: int
    bucket: str = "sdp-test"
    access_key: str = field(default_factory=lambda: f"AK{token_hex(8)}")
    secret_key: str = field(default_factory=lambda: token_hex(20), repr=False)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def env(self) -> dict[str, str]:
        """Return the environment variables that a client needs."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    def objects(self) -> list[str]:
        """Return the bucket's objects, read from the server's disk."""
        top = self.root / self.bucket
        return sorted(str(p.relative_to(top)) for p in top.rglob("*") if p.is_file() and ".sgwtmp" not in p.parts)

    def pending_uploads(self) -> list[str]:
        """Multipart uploads that were neither completed nor aborted, as the server lists them.

        Its staging folder does not tell: a part that arrives after the abort makes a folder there again.
        """
        keys = {"aws_access_key_id": self.access_key, "aws_secret_access_key": self.secret_key}
        client: Any = Session().create_client("s3", "us-east-1", endpoint_url=self.endpoint, **keys)
        listed = client.list_multipart_uploads(Bucket=self.bucket)
        return sorted(upload["UploadId"] for upload in listed.get("Uploads", ()))

    def start(self) -> None:
        (self.root / self.bucket).mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [self.binary, "--port", f"127.0.0.1:{self.port}", "--quiet", "--keep-alive", "posix", self.root],
            env={"ROOT_ACCESS_KEY_ID": self.access_key, "ROOT_SECRET_ACCESS_KEY": self.secret_key},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S
        while self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self.kill()
        raise RuntimeError(f"versitygw does not listen on port {self.port}")

    def kill(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def running_gateway(binary: Path, root: Path) -> Iterator[Gateway]:
    gateway = None
    for attempt in range(3):  # another process may take the port between our look and its start
        gateway = Gateway(binary, root, free_port())
        try:
            gateway.start()
            break
        except RuntimeError:
            if attempt == 2:
                raise
    assert gateway
    try:
        yield gateway
    finally:
        gateway.kill()


class Proxy:
    """A forwarded TCP connection. Changes of the behaviour apply to live connections too."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._up: int | None = None
        self._down: int | None = None
        self._times = 0
        self._stalled = threading.Event()
        self._stall_at: int | None = None
        self._closed = False
        self._listener: socket.socket | None = None
        self._live: set[socket.socket] = set()
        self.connections = 0
        """Accepted so far."""
        self.bytes_up = 0
        """Passed on to the server so far."""
        self.bytes_down = 0
        """Passed on to the client so far."""
        self._port = 0
        self.accept()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def accept(self) -> None:
        """Let connections in, as at the beginning."""
        if self._listener:
            return
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def refuse(self) -> None:
        """Refuse new connections and close existing ones."""
        if self._listener:
            # Closing alone would not wake up the thread in accept().
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            for connection in self._live:
                reset(connection)

    def stall(self, *, after: int = 0) -> None:
        """Connections stay, but nothing passes in either direction, once so many more bytes have gone to the server."""
        if after:
            self._stall_at = self.bytes_up + after
        else:
            self._stalled.set()

    def wait_until_stalled(self) -> None:
        assert self._stalled.wait(10), "nothing has been sent that could stall"

    def cut(self, *, up: int | None = None, down: int | None = None, times: int = 1_000_000) -> None:
        """Reset each connection after so many more bytes to the server (`up`) or from it (`down`), this often.

        `cut(down=0)` lets requests through and loses their answers.
        """
        with self._lock:
            self._up, self._down, self._times = up, down, times

    def pass_on(self) -> None:
        """Undo everything."""
        self._stall_at = None
        self._stalled.clear()
        self.cut()
        self.accept()

    def close(self) -> None:
        self._closed = True
        self.refuse()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._connection, args=(client,), daemon=True).start()

    def _connection(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            reset(client)
            return
        with self._lock:
            self._live |= {client, server}
        orderly = False
        try:
            orderly = self._pump(client, server)
        except OSError:
            pass  # either end is gone, and so is the other one now
        finally:
            with self._lock:
                self._live -= {client, server}
            server.close()  # in order: it has what was passed on, and then the end
            client.close() if orderly else reset(client)

    def _pump(self, client: socket.socket, server: socket.socket) -> bool:
        """Forward until either end closes (True) or the connection must be cut (False)."""
        passed = {client: 0, server: 0}
        while not self._closed:
            if self._stalled.is_set():
                time.sleep(0.02)
                continue
            ready, _, _ = select.select([client, server], [], [], 0.05)
            for source in ready:
                if self._stalled.is_set():
                    break
                data = source.recv(64 * 1024)
                if not data:
                    return True
                with self._lock:
                    limit = (self._up if source is client else self._down) if self._times else None
                cut = limit is not None and passed[source] + len(data) > limit
                if cut and limit is not None:
                    data = data[: limit - passed[source]]
                    with self._lock:
                        self._times -= 1
                passed[source] += len(data)
                if source is client:
                    self.bytes_up += len(data)
                    if self._stall_at is not None and self.bytes_up >= self._stall_at:
                        self._stalled.set()
                else:
                    self.bytes_down += len(data)
                (server if source is client else client).sendall(data)
                if cut:
                    return False
        return False


@pytest.fixture(scope="module", name="gateway")
def gateway_fixture(tool: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_gateway(tool("versitygw"), tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(name="proxy")
def proxy_fixture(gateway: Gateway) -> Iterator[Proxy]:
    between = Proxy(("127.0.0.1", gateway.port))
    yield between
    between.close()


@pytest.fixture(name="s3_env")
def s3_env_fixture(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gateway:
    """The environment of a client of the gateway, and of nothing else."""
    be_client(gateway.env, tmp_path, monkeypatch)
    return gateway


def be_client(env: Mapping[str, str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Put a client's variables, and no others of AWS, into the environment, with files of an empty folder."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    files = {name: str(folder / "none") for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")}
    # Not another HOME: Ray, once started, looks there for its token.
    for name, value in {**env, **files, "XDG_CACHE_HOME": str(folder / "cache")}.items():
        patch.setenv(name, value)


def upload(folder: Path, uri: str) -> str:
    """Copy a folder's files below a URI; return it."""
    storage = open_storage(uri)
    for path in folder.rglob("*"):
        if path.is_file():
            storage.publish(path.relative_to(folder).as_posix(), path.read_bytes())
    return storage.uri
