"""Models on this machine: downloads from buckets, each made once, and the digests of large folders.

~/.cache/sdp/models/                 ($XDG_CACHE_HOME/sdp/models)
    <digest>/                        a model, whole or not there
    known/<key>                      the digest of what a bucket's listing or a folder's files stood for
    .partial-<key>/, .lock-<key>     a download under way
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sdp.errors import ModelError, StorageError, Unavailable
from sdp.model import layout

if TYPE_CHECKING:
    from sdp.model.sources import ModelSource
    from sdp.storage import FileInfo, Storage, StorageOptions

LOCK_TIMEOUT_S = 3600.0
"""How long a worker waits for another one of its machine to finish the same download."""
CHUNK = 32 * 2**20
"""Read in pieces, so that the deadline of one storage operation is not the deadline of a 3 GB file."""
REMEMBER_FROM = 64 * 2**20
"""Bytes of a folder from which on its digest is remembered: hashing less takes no time."""


def folder() -> Path:
    """Where models are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sdp" / "models"


Listing = Callable[["Storage"], "list[FileInfo]"]
"""Of a folder in a bucket the files that are wanted."""


def model_files(storage: "Storage") -> "list[FileInfo]":
    """Those of a model in diffusers layout."""
    found = [file for part in layout.PARTS for file in storage.list(part)]
    if storage.exists(layout.INDEX):
        found.append(storage.stat(layout.INDEX))
    belonging = set(layout.belonging(file.path for file in found))
    return [file for file in found if file.path in belonging]


def download(source: "ModelSource", options: "StorageOptions | None", wanted: Listing = model_files) -> Path:
    """The folder that holds what the bucket's folder holds now."""
    from sdp.storage import open_storage

    storage = open_storage(source.uri, options)
    listing = wanted(storage)
    if not listing:
        needed = f"needed are {', '.join(layout.PARTS)} in diffusers layout" if wanted is model_files else "check it"
        raise ModelError(f"model source {source}: there is no model in it; {needed}")
    key = _key(storage.uri, listing)
    try:
        return _known(key) or _download_once(storage, listing, key, wanted)
    except OSError as error:
        raise StorageError(
            f"model source {source}: cannot be kept in {folder()} ({error.strerror or error}); make room there, or set "
            "XDG_CACHE_HOME to another disk"
        ) from error


def digest(path: Path, names: Sequence[str]) -> str:
    """The model's digest; of a large folder it is remembered until a file's size, time or inode changes."""
    stats = [(path / name).stat() for name in names]
    if sum(stat.st_size for stat in stats) < REMEMBER_FROM:
        return layout.digest(path, names)
    seen = [[name, s.st_size, s.st_mtime_ns, s.st_ino] for name, s in zip(names, stats, strict=True)]
    note = folder() / "known" / _hash([str(path.resolve()), seen])
    if note.is_file():
        return note.read_text()
    found = layout.digest(path, names)
    # A home that cannot be written costs time at the next start, and nothing else.
    with suppress(OSError):
        _write(note, found)
    return found


def _download_once(storage: "Storage", listing: "list[FileInfo]", key: str, wanted: Listing) -> Path:
    from filelock import FileLock, Timeout

    folder().mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder() / f".lock-{key}", timeout=LOCK_TIMEOUT_S):
            return _known(key) or _download(storage, listing, key, wanted)
    except Timeout as error:
        raise Unavailable(
            f"{storage.uri}: another process of this machine has been downloading it for {LOCK_TIMEOUT_S:.0f} s; "
            f"see what holds {folder()}/.lock-{key}"
        ) from error


def _download(storage: "Storage", listing: "list[FileInfo]", key: str, wanted: Listing) -> Path:
    """Only ever run by the holder of the lock: what an earlier holder left half done is ours to clear away."""
    partial = folder() / f".partial-{key}"
    shutil.rmtree(partial, ignore_errors=True)
    for file in listing:
        _fetch(storage, file, partial / file.path)
    if _key(storage.uri, wanted(storage)) != key:
        shutil.rmtree(partial)
        raise Unavailable(f"{storage.uri}: the model changed while it was downloaded; try again when it is complete")
    found = layout.digest(partial, [file.path for file in listing])
    target = folder() / found
    if target.is_dir():  # the same content from another URI
        shutil.rmtree(partial)
    else:
        partial.rename(target)
    _write(folder() / "known" / key, found)
    return target


def _fetch(storage: "Storage", file: "FileInfo", to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("wb") as out:
        for start in range(0, file.size, CHUNK):
            length = min(CHUNK, file.size - start)
            data = storage.read_range(file.path, start, length)
            if len(data) != length:
                raise Unavailable(
                    f"{storage.uri_of(file.path)}: ended early, at {start + len(data)} of {file.size} bytes"
                )
            out.write(data)


def _known(key: str) -> Path | None:
    note = folder() / "known" / key
    target = folder() / note.read_text() if note.is_file() else None
    return target if target is not None and target.is_dir() else None


def _key(uri: str, listing: "list[FileInfo]") -> str:
    return _hash([uri, sorted([file.path, file.size, file.etag] for file in listing)])


def _hash(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    """Whole or not at all, also when two do it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
