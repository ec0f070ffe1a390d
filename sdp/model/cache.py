"""The cache of models on this machine: a download of each bucket's model, and the digests of large folders.

~/.cache/sdp/models/                 ($XDG_CACHE_HOME/sdp/models)
    <key>/                           a complete model; the key is the digest of its listing in the bucket
    .partial-<key>/, .lock-<key>     a download under way
    known/<key>                      the digest of a large folder's files
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from sdp.errors import ModelError, StorageError, Unavailable
from sdp.model import layout
from sdp.model.layout import ModelSource
from sdp.storage import FileInfo, Storage, StorageOptions, open_storage

LOCK_TIMEOUT_S = 3600.0
"""Timeout for another worker on this machine to finish the same download."""
CHUNK = 32 * 2**20
"""Bytes in one read. A storage operation has a deadline, which a 3 GB file would exceed."""
REMEMBER_FROM = 64 * 2**20
"""Size in bytes from which a folder's digest is kept. Smaller folders are quick to hash."""


def folder() -> Path:
    """Return the folder where models are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sdp" / "models"


def download(source: ModelSource, options: StorageOptions | None, patterns: Sequence[str]) -> Path:
    """Download the files of a bucket's folder that match a pattern, unless they are here; return the local folder."""
    from filelock import FileLock

    storage = open_storage(source.uri, options)
    listing = _matching(storage, patterns)
    if not listing:
        raise ModelError(f"model source {source}: no model there; check the URI")
    key = _key(storage.uri, listing)
    target, partial = folder() / key, folder() / f".partial-{key}"
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with FileLock(folder() / f".lock-{key}", timeout=LOCK_TIMEOUT_S):
            if not target.is_dir():
                shutil.rmtree(partial, ignore_errors=True)  # the rest of a download that was abandoned
                for file in listing:
                    _fetch(storage, file, partial / file.path)
                if _key(storage.uri, _matching(storage, patterns)) != key:
                    raise Unavailable(f"model source {source}: it changed while it was downloaded; try again")
                partial.rename(target)
    except OSError as error:  # the lock's timeout, too
        raise StorageError(
            f"model source {source}: cannot download it to {folder()} ({error.strerror or error}); free some space, "
            "set XDG_CACHE_HOME to another disk, or end the process that holds the lock"
        ) from error
    return target


def digest(path: Path, names: Sequence[str]) -> str:
    """Return the model's digest. That of a large folder is kept until a file's size, time or inode changes."""
    stats = [(path / name).stat() for name in names]
    if sum(stat.st_size for stat in stats) < REMEMBER_FROM:
        return layout.digest(path, names)
    identity = [[name, s.st_size, s.st_mtime_ns, s.st_ino] for name, s in zip(names, stats, strict=True)]
    record = folder() / "known" / _hash([str(path.resolve()), identity])
    if record.is_file() and (known := record.read_text()):  # empty after a loss of power
        return known
    result = layout.digest(path, names)
    with suppress(OSError):  # a read-only home only costs time at the next start
        record.parent.mkdir(parents=True, exist_ok=True)
        draft = record.with_name(f".{record.name}.{os.getpid()}")
        draft.write_text(result)
        draft.replace(record)
    return result


def _matching(storage: Storage, patterns: Sequence[str]) -> list[FileInfo]:
    """Return the files that match a pattern, segment by segment."""

    def matches(path: str) -> bool:
        return any(fnmatchcase(path, each) and path.count("/") == each.count("/") for each in patterns)

    return [file for file in storage.list() if matches(file.path)]


def _fetch(storage: Storage, file: FileInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out:
        for start in range(0, file.size, CHUNK):
            length = min(CHUNK, file.size - start)
            data = storage.read_range(file.path, start, length)
            if len(data) != length:
                where, end = storage.uri_of(file.path), start + len(data)
                raise Unavailable(f"{where}: ended early, at {end} of {file.size} bytes; try again")
            out.write(data)


def _key(uri: str, listing: list[FileInfo]) -> str:
    return _hash([uri, sorted([file.path, file.size, file.etag] for file in listing)])


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
