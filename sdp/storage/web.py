"""Files that are read from https:// and http:// addresses."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from obstore.store import HTTPStore

from sdp.errors import AccessDenied, Conflict, NotFound, SdpError, StorageError, Unavailable
from sdp.storage.base import StorageOptions
from sdp.storage.explain import Failure
from sdp.storage.reader import RemoteObject
from sdp.storage.uri import shown

if TYPE_CHECKING:
    import pyarrow as pa


class WebFile:
    """A file that a server sends for GET, with or without ranges; redirects are followed."""

    def __init__(
        self, url: str, options: StorageOptions, *, headers: Mapping[str, str] | None = None, name: str | None = None
    ) -> None:
        """Open a URL. `headers` go to this host only, not to one it redirects to; messages call the file `name`."""
        client = options.client(url)
        client["client_options"]["default_headers"] = dict(headers or {})
        store = HTTPStore(url.partition("#")[0], **client)
        # The store is the file itself: a path below it would lose the query, which signs many addresses.
        self._remote = RemoteObject(store, "", options, explaining(name or shown(url)))

    @property
    def size(self) -> int:
        return self._remote.size

    @property
    def etag(self) -> str | None:
        return self._remote.etag

    def open(self) -> "pa.NativeFile":
        return self._remote.open()


def explaining(name: str) -> Callable[[Failure, str], SdpError]:
    """Return a function that makes the errors about `name`."""

    def error(failure: Failure, tried: str) -> SdpError:
        match failure.kind:
            case "missing" | "bucket":
                return NotFound(f"{name}: not found ({failure.cause}); check the URI")
            case "denied":
                return AccessDenied(f"{name}: access denied ({failure.cause}); check the URI and the token")
            case "changed":
                return Conflict(f"{name}: changed while it was read; run the same command again")
            case "transient":
                return Unavailable(
                    f"{name}: {failure.cause} ({tried}); check that the server is up and reachable (or raise "
                    "storage.timeout_s), then run the same command again"
                )
            case _:
                return StorageError(f"{name}: {failure.cause}; check the URI, or download the file and name the copy")

    return error
