"""Files that are read from https:// and http:// addresses, for GET with or without ranges; redirects are followed."""

from collections.abc import Callable, Mapping

from obstore.store import HTTPStore

from sdp.errors import AccessDenied, Conflict, NotFound, SdpError, StorageError, Unavailable
from sdp.storage.base import StorageOptions
from sdp.storage.explain import StorageFailure
from sdp.storage.reader import RemoteObject
from sdp.storage.uri import shown

_NOT_FOUND = (NotFound, "not found ({cause}); check the URI")
_ERRORS: Mapping[str, tuple[type[SdpError], str]] = {
    "missing": _NOT_FOUND,
    "bucket": _NOT_FOUND,
    "denied": (AccessDenied, "access denied ({cause}); check the URI and the token"),
    "changed": (Conflict, "changed while it was read; run the same command again"),
    "transient": (
        Unavailable,
        "{cause} ({tried}); check that the server is up and reachable, then run the same command again",
    ),
}
_OTHER = (StorageError, "{cause}; check the URI, or download the file and name the copy")


def web_file(
    url: str, options: StorageOptions, *, headers: Mapping[str, str] | None = None, name: str | None = None
) -> RemoteObject:
    """Return the file at a URL. `headers` go to this host only, not to one it redirects to; messages call it `name`."""
    client = options.client(url)
    client["client_options"]["default_headers"] = dict(headers or {})
    store = HTTPStore(url.partition("#")[0], **client)
    # The store is the file itself: a path below it would lose the query, which signs many addresses.
    return RemoteObject(store, "", options, explaining(name or shown(url)))


def explaining(name: str) -> Callable[[StorageFailure, str], SdpError]:
    """Return a function that makes the errors about `name`."""

    def error(failure: StorageFailure, tried: str) -> SdpError:
        kind, text = _ERRORS.get(failure.kind, _OTHER)
        return kind(f"{name}: {text.format(cause=failure.cause, tried=tried)}")

    return error
