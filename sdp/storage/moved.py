"""Source files that may have moved: names that stay the same, and whether the contents have stayed the same."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace

from sdp.storage.base import SourceFile, StorageOptions
from sdp.storage.opening import open_source, split_pattern
from sdp.storage.uri import parse

_SAMPLES, _SAMPLE = 16, 65_536


def root_of(uri: str, files: Sequence[SourceFile]) -> str:
    """Return the folder that the names of a source's files are relative to; empty if they are listed elsewhere."""
    root = parse(split_pattern(uri)[0]).uri
    if any(file.uri == root for file in files):
        root = root.rpartition("/")[0]
    return root if all(file.uri.startswith(f"{root}/") for file in files) else ""


def with_sample(file: SourceFile, options: StorageOptions | None) -> SourceFile:
    """Return the file; a local one with a digest of its content added to its etag, a time and a size otherwise."""
    if file.etag is None or parse(file.uri).scheme != "file":
        return file
    return replace(file, etag=f"{file.etag}-{_sample(file, options)}")


def unchanged(file: SourceFile, size: int, etag: str | None, options: StorageOptions | None = None) -> bool:
    """Return whether a file still has its content, by size and etag; copies are compared by content."""
    if file.size != size:
        return False
    if None in (etag, file.etag) or etag == file.etag or str(etag).startswith(f"{file.etag}-"):
        return True
    if len(parts := str(etag).split("-")) == 3:  # as `with_sample` makes it
        return _sample(file, options) == parts[2]
    if re.fullmatch("[0-9a-f]{32}", str(etag).strip('"')):  # in most buckets, the etag of a small object is its MD5
        return hashlib.md5(open_source(file.uri, options).read(), usedforsecurity=False).hexdigest() in str(etag)
    return False


def _sample(file: SourceFile, options: StorageOptions | None) -> str:
    """Return the digest of a file of up to 1 MiB, or of 16 pieces of a larger one, with its first and its last."""
    with open_source(file.uri, options) as opened:
        if file.size <= _SAMPLES * _SAMPLE:
            return hashlib.sha256(opened.read()).hexdigest()[:32]
        digest = hashlib.sha256()
        for number in range(_SAMPLES):
            opened.seek(number * (file.size - _SAMPLE) // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()[:32]
