"""From a URI to the storage behind it."""

from sdp.errors import UserError
from sdp.storage.base import Storage, StorageOptions
from sdp.storage.uri import WRITABLE, parse, shown


def open_storage(uri: str, options: StorageOptions | None = None) -> Storage:
    """The storage at a local path, file://, s3:// or gs:// URI; nothing is contacted yet."""
    location = parse(uri)
    options = options or StorageOptions()
    if location.scheme == "file":
        from sdp.storage.local import LocalStorage

        return LocalStorage(location, options)
    if location.scheme in WRITABLE:
        from sdp.storage.remote import ObjectStorage

        return ObjectStorage(location, options)
    raise UserError(
        f"{shown(uri)}: {location.scheme}:// can only be read from, as a source; use a local path, s3:// or gs:// here"
    )
