"""Folders and buckets behind one interface, and sources that are read from the web.

A storage is a folder at a URI. An object appears in it whole or not at all. Every operation ends by its deadline, with
a result or with one line that says what was wrong, where, and what to do.
"""

from sdp.storage.base import Data, FileInfo, SourceFile, Storage, StorageOptions
from sdp.storage.opening import list_source, open_source, open_storage
from sdp.storage.uri import is_read_only

__all__ = [
    "Data",
    "FileInfo",
    "SourceFile",
    "Storage",
    "StorageOptions",
    "is_read_only",
    "list_source",
    "open_source",
    "open_storage",
]
