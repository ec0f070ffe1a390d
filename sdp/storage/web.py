"""Files that are read from https:// and http:// addresses, for GET with or without ranges; redirects are followed."""

from collections.abc import Mapping

from obstore.store import HTTPStore

from sdp.storage.base import StorageOptions
from sdp.storage.explain import FailureKind, explaining
from sdp.storage.reader import RemoteObject
from sdp.storage.uri import shown

KINDS: Mapping[str, FailureKind] = {"bucket": "missing", "credentials": "other", "region": "other", "exists": "other"}
"""The meaning of failures that are a bucket's elsewhere."""


def web_file(
    url: str, options: StorageOptions, *, headers: Mapping[str, str] | None = None, name: str | None = None
) -> RemoteObject:
    """Return the file at a URL. `headers` go to this host only, not to one it redirects to; messages call it `name`."""
    client = options.client(url)
    client["client_options"]["default_headers"] = dict(headers or {})
    store = HTTPStore(url.partition("#")[0], **client)
    # The store is the file itself: a path below it would lose the query, which signs many addresses.
    return RemoteObject(store, "", options, explaining(name or shown(url), KINDS))
