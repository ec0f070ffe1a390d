"""Where everything is kept: folders and buckets behind one interface, and the reading of sources from the web.

A storage is a folder at a URI. Objects appear in it whole or not at all; every operation ends by its deadline, with a
result or with one line saying what was wrong, where, and what to do.
"""

from sdp.storage.base import Data, FileInfo, Storage, StorageOptions
from sdp.storage.opening import open_storage
from sdp.storage.sources import SourceFile, list_source, open_source
from sdp.storage.uri import is_read_only, join

__all__ = [
    "Data",
    "FileInfo",
    "SourceFile",
    "Storage",
    "StorageOptions",
    "is_read_only",
    "join",
    "list_source",
    "open_source",
    "open_storage",
]
