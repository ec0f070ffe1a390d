"""What every storage can do, whatever is behind it."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from sdp.storage import uri as uris

if TYPE_CHECKING:
    import pyarrow as pa

Data: TypeAlias = "bytes | bytearray | memoryview | pa.Buffer"
"""The whole of an object, serialised: storages take nothing that can fail half-way through being produced."""

HIDDEN = ".sdp-"
"""Names of this beginning are the storage's own (drafts, locks): no listing shows them, nobody may use them."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """How to reach a store, and for how long to try."""

    endpoint: str | None = None
    """Of an S3-compatible server; else AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, the AWS config file, Amazon."""
    region: str | None = None
    """Of the bucket; else AWS_REGION, AWS_DEFAULT_REGION, the AWS config file, us-east-1."""
    timeout_s: float = 60.0
    """Deadline of one operation, all of its attempts included; of one page where a listing has many."""
    connect_timeout_s: float = 5.0
    retries: int = 5
    """Attempts after the first one, made only where trying again can help."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One object. What was just written has the writer's clock as its `modified`."""

    path: str
    """Relative to the storage's folder."""
    size: int
    etag: str | None
    """Changes whenever the content is written anew; what `replace` compares."""
    modified: datetime


Files: TypeAlias = list[FileInfo]
Names: TypeAlias = list[str]  # inside the class `list` is the method


class Storage(ABC):
    """A folder: local, or a prefix of an s3:// or gs:// bucket.

    Cheap to make (nothing is contacted before the first operation), safe to share between threads, and pickled as
    what it was made from, so that each process finds its own credentials. An object is written whole or not at all.
    """

    uri: str
    options: StorageOptions

    def __init__(self, location: uris.Location, options: StorageOptions) -> None:
        self.uri = location.uri
        self.options = options

    @abstractmethod
    def list(self, prefix: str = "") -> Files:
        """All objects below the folder `prefix` ("" is everything), sorted by path; [] if there are none."""

    @abstractmethod
    def names(self, prefix: str = "", limit: int | None = None) -> Names:
        """The paths that `list` gives, for less: the way to look at 200,000 objects; any `limit` of them, sorted."""

    @abstractmethod
    def folders(self) -> Names:
        """The names of the folders directly below, sorted; nothing else is listed."""

    @abstractmethod
    def stat(self, path: str) -> FileInfo:
        """Raises NotFound where there is no object."""

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    @abstractmethod
    def read(self, path: str) -> bytes: ...

    @abstractmethod
    def read_range(self, path: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on: fewer where the object ends before."""

    @abstractmethod
    def open(self, path: str) -> "pa.NativeFile":
        """For random access, as pyarrow.parquet likes it; use pre_buffer=True there."""

    @abstractmethod
    def publish(self, path: str, data: Data) -> FileInfo:
        """Write whole or not at all, over whatever is there."""

    @abstractmethod
    def create(self, path: str, data: Data) -> FileInfo:
        """Write where nothing is: of several that try at once exactly one succeeds, the rest get AlreadyExists."""

    @abstractmethod
    def replace(self, path: str, data: Data, etag: str) -> FileInfo:
        """Write over the version that has this etag; Conflict where there is another one, or none."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Absent is fine."""

    @abstractmethod
    def child(self, path: str) -> "Storage":
        """A folder below this one."""

    def uri_of(self, path: str) -> str:
        return uris.join(self.uri, path)

    def with_options(self, **changes: Any) -> "Storage":
        """The same folder with some options changed, e.g. a shorter `timeout_s`."""
        from sdp.storage.opening import open_storage

        return open_storage(self.uri, replace(self.options, **changes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and self.uri == other.uri

    def __hash__(self) -> int:
        return hash(self.uri)

    def __repr__(self) -> str:
        return f"Storage({self.uri!r})"

    def __reduce__(self) -> "tuple[Callable[..., Any], tuple[Any, ...]]":
        from sdp.storage.opening import open_storage

        return open_storage, (self.uri, self.options)


def checked(path: str) -> str:
    """A path below a storage's folder; ValueError for what cannot be one (the caller's mistake, not the user's)."""
    segments = path.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or _CONTROL.search(path):
        raise ValueError(f"{path!r}: not a relative path without empty, '.' or '..' segments")
    if any(segment.startswith(HIDDEN) for segment in segments):
        raise ValueError(f"{path!r}: names beginning with {HIDDEN!r} belong to the storage itself")
    return path


def folder(prefix: str) -> str:
    """A listing's prefix: "" or a checked path."""
    prefix = prefix.rstrip("/")
    return checked(prefix) if prefix else ""


def view(data: Data) -> memoryview:
    """Serialised data as bytes in a row; TypeError for anything that is yet to be produced."""
    return memoryview(data).cast("B")


def checked_range(start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise ValueError(f"range from {start} of {length} bytes: neither may be negative")
