"""The interface of every storage, local or remote."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from sdp.errors import NotFound
from sdp.storage import uri as uris

if TYPE_CHECKING:
    import pyarrow as pa

Data: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"
"""A whole object, already serialised: nothing that could fail half-way through a write."""

OpenFile: TypeAlias = "pa.NativeFile"
"""A file that is open for random access."""

HIDDEN = ".sdp-"
"""The prefix of the storage's own names (drafts, locks), which no listing shows and no caller may use."""

_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """The address of a store, and the limits of each operation."""

    endpoint: str | None = None
    """S3-compatible server; None asks AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the AWS config file, then Amazon."""
    timeout_s: float = 480.0
    """Deadline of one operation with all its attempts; in a long listing, of each page. A store may be away for five
    minutes; training's watchdog, which waits longer, does not end a trainer meanwhile."""
    retries: int | None = None
    """Attempts after the first, made only where another one can help; None: until the deadline, but few while this
    store has not answered this process yet."""

    def client(self, address: str, retries: int = 0) -> dict[str, Any]:
        """Return obstore's settings for the server at an address; its own retries are off."""
        limit, connect_s = timedelta(seconds=self.timeout_s), min(_CONNECT_S, self.timeout_s)
        options = {"timeout": limit, "connect_timeout": timedelta(seconds=connect_s)}
        return {
            "client_options": {**options, "allow_http": address.startswith("http:")},
            "retry_config": {"max_retries": retries, "retry_timeout": limit},
        }


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One object. Right after a write, `modified` is by the writer's clock."""

    path: str
    """Relative to the storage's folder."""
    size: int
    etag: str | None
    """A tag that changes with every write; `replace` and `swap` compare it."""
    modified: datetime


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source, which may be on the web."""

    uri: str
    size: int
    etag: str | None
    """A tag that changes with the content; None where the server sends none."""


FileList: TypeAlias = list[FileInfo]
Names: TypeAlias = list[str]  # inside the class, `list` is the method


class Storage(ABC):
    """A folder: local, or a prefix of an s3:// or gs:// bucket.

    Cheap to create (nothing is contacted before the first operation) and safe to share between threads. A pickle holds
    the location and options only, so that each process finds its own credentials. An object is written whole or not
    at all.
    """

    def __init__(self, location: uris.Location, options: StorageOptions) -> None:
        self.location, self.options = location, options
        self.uri = location.uri

    @abstractmethod
    def list(self, prefix: str = "") -> FileList:
        """Return all objects below the folder `prefix` ("" is everything), sorted by path; [] if there are none."""

    def names(self, prefix: str = "") -> Names:
        """Return the paths of `list`, at less cost where there is a way."""
        return [info.path for info in self.list(prefix)]

    @abstractmethod
    def find(self, path: str) -> FileInfo | None:
        """Describe an object; None if there is none."""

    def stat(self, path: str) -> FileInfo:
        """Describe an object; raise NotFound if there is none."""
        if (info := self.find(path)) is None:
            raise NotFound(f"{self.uri_of(path)}: no such file; check the path")
        return info

    def exists(self, path: str) -> bool:
        return self.find(path) is not None

    def read(self, path: str) -> bytes:
        return self.read_range(path, 0, None)

    @abstractmethod
    def read_range(self, path: str, start: int, length: int | None) -> bytes:
        """Return at most `length` bytes from `start`, fewer where the object ends before; None: the whole object."""

    @abstractmethod
    def open(self, path: str) -> OpenFile:
        """Open for random access; read Parquet from it with pre_buffer=True."""

    @abstractmethod
    def publish(self, path: str, data: Data) -> FileInfo:
        """Write an object, over any earlier version."""

    @abstractmethod
    def create(self, path: str, data: Data) -> FileInfo:
        """Write a new object. Exactly one of several writers succeeds; the others get AlreadyExists."""

    @abstractmethod
    def replace(self, path: str, data: Data, etag: str) -> FileInfo:
        """Write over the version with this etag; raise Conflict where another one, or none, is stored."""

    def etag(self, path: str) -> str | None:
        """Return the etag of the present version; None if there is no such object."""
        info = self.find(path)
        return info.etag if info else None

    def swap(self, path: str, data: Data, etag: str | None) -> FileInfo:
        """Write over the version that `etag` returned; raise Conflict if another writer has changed it since."""
        return self.create(path, data) if etag is None else self.replace(path, data, etag)

    def publish_held(self, path: str, data: Data, check: Callable[[], None]) -> FileInfo:
        """Write an object as the holder of a lease, whose `check` raises if another job may be writing by now.

        A job that is suspended changes nothing later: if another one has written before the etag is read, `check`
        raises; if after, there is a Conflict.
        """
        etag = self.etag(path)
        check()
        return self.swap(path, data, etag)

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete an object, if it exists."""

    @abstractmethod
    def child(self, path: str) -> "Storage":
        """Return a folder below this one."""

    def uri_of(self, path: str) -> str:
        return uris.join(self.uri, path)

    def with_options(self, **changes: Any) -> "Storage":
        """Return the same folder with some options changed, such as a shorter `timeout_s`."""
        return type(self)(self.location, replace(self.options, **changes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def __repr__(self) -> str:
        return f"Storage({self.uri!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.location, self.options)


def checked(path: str) -> str:
    """Return a path below a storage's folder; ValueError if it is not one (the caller's mistake, not the user's)."""
    segments = path.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or uris.CONTROL.search(path):
        raise ValueError(f"{path!r}: not a relative path without empty, '.' or '..' segments")
    if any(segment.startswith(HIDDEN) for segment in segments):
        raise ValueError(f"{path!r}: names beginning with {HIDDEN!r} belong to the storage itself")
    return path


def folder(prefix: str) -> str:
    """Return a listing's prefix: "" or a checked path."""
    prefix = prefix.rstrip("/")
    return checked(prefix) if prefix else ""


def view(data: Data) -> memoryview:
    """Return serialised data as contiguous bytes; TypeError for anything else."""
    return memoryview(data).cast("B")
