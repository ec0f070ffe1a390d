"""A local or mounted folder.

A file is written without a name, synced, and then linked or renamed into place, so it appears whole or not at all. A
killed writer leaves nothing behind; on file systems without O_TMPFILE, such as NFS, it leaves a hidden draft. The
deadline covers the wait for other writers, not a disk that hangs.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from stat import S_ISREG

from sdp.errors import AccessDenied, AlreadyExists, Conflict, NotFound, StorageError, Unavailable
from sdp.storage.base import HIDDEN, Data, FileInfo, FileList, Names, OpenFile, Storage, checked, folder, view
from sdp.storage.uri import Location

_CAUSES: dict[int, tuple[type[StorageError], str]] = {
    errno.ENOENT: (NotFound, "no such file; check the path"),
    errno.EEXIST: (NotFound, "a part of the path is a file, not a folder; check the path"),
    errno.EISDIR: (NotFound, "is a folder, not a file; name a file in it"),
    errno.ENOTDIR: (NotFound, "a part of the path is a file, not a folder; check the path"),
    errno.EACCES: (AccessDenied, "permission denied; check the owner and mode of the file and its folders"),
    errno.EPERM: (AccessDenied, "the file system does not permit it; check its mode, and whether it has hard links"),
    errno.EROFS: (AccessDenied, "the file system is mounted read-only; choose another place"),
    errno.ENOSPC: (StorageError, "no space left on the device; free some, then run the same command again"),
    errno.EDQUOT: (StorageError, "the disk quota is used up; free some space, then run the same command again"),
    errno.EFBIG: (StorageError, "larger than this process may write (ulimit -f); raise the limit"),
    errno.ENAMETOOLONG: (NotFound, "the name is too long for the file system; choose a shorter one"),
    errno.ELOOP: (NotFound, "too many symbolic links; remove the loop"),
}


_LOCK_S = 120.0
"""The longest wait for other writers, which hold a lock for milliseconds."""


class LocalStorage(Storage):
    def list(self, prefix: str = "") -> FileList:
        files = []
        with _explained(self.uri):
            for path, entry in self._walk(prefix):
                with suppress(FileNotFoundError):  # deleted since
                    files.append(_info(path, entry.stat()))
        return sorted(files, key=lambda info: info.path)

    def names(self, prefix: str = "") -> Names:
        with _explained(self.uri):  # without asking about each file, which takes seven times as long
            return sorted(path for path, _ in self._walk(prefix))

    def _walk(self, prefix: str) -> "Iterator[tuple[str, os.DirEntry[str]]]":
        pending = [folder(prefix)]
        linked: set[tuple[int, int]] = set()  # folders that were entered through a link, which may form a circle
        while pending:
            inside = pending.pop()
            try:
                entries = os.scandir(f"{self.uri}/{inside}")
            except (FileNotFoundError, NotADirectoryError):
                continue
            with entries:
                for entry in entries:
                    if entry.name.startswith(HIDDEN):
                        continue
                    path = f"{inside}/{entry.name}" if inside else entry.name
                    if entry.is_dir():
                        if not entry.is_symlink() or _first_visit(entry, linked):
                            pending.append(path)
                    elif entry.is_file():
                        yield path, entry

    def find(self, path: str) -> FileInfo | None:
        with _explained(self.uri_of(path)), suppress(FileNotFoundError, NotADirectoryError):
            status = self._file(path).stat()
            return _info(path, status) if S_ISREG(status.st_mode) else None  # a pipe would keep its reader waiting
        return None

    def read_range(self, path: str, start: int, length: int | None) -> bytes:
        with _explained(self.uri_of(path)), self._file(path).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def open(self, path: str) -> OpenFile:
        import pyarrow as pa

        # With a memory map, a failing disk or a truncated file would be a SIGBUS instead of an error.
        with _explained(self.uri_of(path)), self._file(path).open("rb"):  # which says what is wrong with a folder
            return pa.OSFile(str(self._file(path)), mode="r")

    def publish(self, path: str, data: Data) -> FileInfo:
        with self._draft_file(path, data) as (draft, target), self._lock_folder(target):
            draft.replace(target)
            return _info(path, target.stat())

    def create(self, path: str, data: Data) -> FileInfo:
        with self._draft_file(path, data) as (draft, target):
            try:
                os.link(draft, target)
            except FileExistsError:
                cause = "exists already; another writer was first, run the same command again"
                raise AlreadyExists(f"{self.uri_of(path)}: {cause}") from None
            return _info(path, draft.stat())

    def replace(self, path: str, data: Data, etag: str) -> FileInfo:
        with self._draft_file(path, data) as (draft, target), self._lock_folder(target):
            if self.etag(path) != etag:
                raise Conflict(f"{self.uri_of(path)}: changed or deleted meanwhile; run the same command again")
            draft.replace(target)
            return _info(path, target.stat())

    def delete(self, path: str) -> None:
        target = self._file(path)
        with _explained(self.uri_of(path)), suppress(FileNotFoundError), self._lock_folder(target):
            target.unlink()

    def child(self, path: str) -> "LocalStorage":
        return LocalStorage(Location("file", "", str(self._file(path))), self.options)

    def _file(self, path: str) -> Path:
        return Path(self.uri, checked(path))

    @contextmanager
    def _draft_file(self, path: str, data: Data) -> Iterator[tuple[Path, Path]]:
        """Yield a complete, synced file under a hidden name, and its target beside it; the draft is removed at last."""
        content, target = view(data), self._file(path)
        inside = target.parent
        draft = inside / f"{HIDDEN}draft-{token_hex(8)}"
        with _explained(self.uri_of(path)):
            inside.mkdir(parents=True, exist_ok=True)
            try:
                _write(draft, content)
                yield draft, target
            finally:
                draft.unlink(missing_ok=True)
            _sync_folder(inside)

    @contextmanager
    def _lock_folder(self, target: Path) -> Iterator[None]:
        """Lock the target's folder against other writers, so that `replace` compares and swaps atomically."""
        inside = target.parent
        descriptor = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                self._lock(descriptor, inside)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                # NFS locks only files that are open for writing, which a folder never is.
                os.close(descriptor)
                descriptor = os.open(inside / f"{HIDDEN}lock", os.O_RDWR | os.O_CREAT, 0o666)
                self._lock(descriptor, inside)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, inside: Path) -> None:
        longest_s = min(self.options.timeout_s, _LOCK_S)
        deadline = time.monotonic() + longest_s
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    remedy = "find the process that holds it (lsof), then run the same command again"
                    cause = f"locked by another writer for {longest_s:g} s"
                    raise Unavailable(f"{inside}: {cause}; {remedy}") from None
            time.sleep(0.002)  # flock has no deadline of its own, so it is polled


def _write(draft: Path, content: memoryview) -> None:
    """Write and sync a file, which gets its name when it is complete where the file system supports that."""
    inside = draft.parent
    try:
        descriptor, unnamed = os.open(inside, os.O_TMPFILE | os.O_WRONLY, 0o666), True
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        descriptor, unnamed = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), False
    try:
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written:])
        # Kernel timestamps are coarse: two versions within a tick, in a reused inode, would have the same etag.
        now = time.time_ns()
        os.utime(descriptor, ns=(now, now))
        os.fsync(descriptor)
        if unnamed:
            # The path is absolute, so src_dir_fd only makes os.link follow the link in /proc.
            os.link(f"/proc/self/fd/{descriptor}", draft, src_dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_visit(entry: "os.DirEntry[str]", seen: set[tuple[int, int]]) -> bool:
    status = entry.stat()
    identity = (status.st_dev, status.st_ino)
    first = identity not in seen
    seen.add(identity)
    return first


def _info(path: str, status: os.stat_result) -> FileInfo:
    return FileInfo(path, status.st_size, _etag(status), datetime.fromtimestamp(status.st_mtime, UTC))


def _etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Turn an OSError into an error of one line."""
    try:
        yield
    except OSError as error:
        kind, text = _CAUSES.get(error.errno or 0, (StorageError, f"{error.strerror or error}; check the disk"))
        raise kind(f"{uri}: {text}") from error
