"""The storage on a local disk."""

import errno
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdp.errors import AccessDenied, AlreadyExists, NotFound, StorageError, Unavailable
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.storage import local as local_module
from sdp.storage.base import HIDDEN
from tests.kit import raising
from tests.storage_contract import (  # noqa: F401 (tests)
    test_listings_are_sorted_recursive_and_by_folder,
    test_published_content_is_read_back_unchanged,
    test_replace_wants_the_version_that_was_read,
)

OLD = b"the version before"
WRITES: dict[str, Callable[[Storage, bytes], object]] = {
    "publish": lambda storage, data: storage.publish("folder/k", data),
    "create": lambda storage, data: storage.create("folder/k", data),
    "replace": lambda storage, data: storage.replace("folder/k", data, storage.stat("folder/k").etag or ""),
}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "top"))


def everything(tmp_path: Path) -> list[str]:
    """All files, hidden ones too."""
    return sorted(str(path.relative_to(tmp_path / "top")) for path in (tmp_path / "top").rglob("*") if path.is_file())


name = st.text(st.characters(exclude_characters="/\x7f", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)
name = name.filter(lambda n: n not in (".", "..") and not n.startswith(HIDDEN))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(name, min_size=1, max_size=3).map("/".join))
def test_every_name_makes_the_round_trip(tmp_path: Path, path: str) -> None:
    storage = open_storage(str(tmp_path / token_hex(8)))
    storage.publish(path, path.encode())
    assert storage.names() == [path]
    assert [info.path for info in storage.list()] == [path]
    assert storage.read(path) == storage.open(path).read() == path.encode()
    storage.delete(path)
    assert storage.names() == []


def test_links_are_followed_and_circles_end(storage: Storage, tmp_path: Path) -> None:
    storage.publish("real/file", b"1")
    top = tmp_path / "top"
    (top / "real" / "up").symlink_to(top)
    (top / "link").symlink_to(top / "real" / "file")
    (top / "broken").symlink_to(top / "nowhere")
    names = storage.names()
    assert {"link", "real/file"} <= set(names)
    assert "broken" not in names
    assert len(names) < 10


def test_a_pipe_is_no_file_since_its_reader_would_wait(storage: Storage, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert storage.find("pipe") is None
    assert storage.names() == []


def test_a_storage_travels_as_its_uri_and_options(storage: Storage) -> None:
    options = StorageOptions(timeout_s=3)
    copy = pickle.loads(pickle.dumps(open_storage(storage.uri, options)))
    assert copy == storage
    assert hash(copy) == hash(storage)
    assert copy.options == options
    assert copy != open_storage(storage.uri + "2")


# Whole or not at all


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("step", ["write", "utime", "fsync", "link"])
def test_a_write_that_fails_at_any_step_leaves_the_old_content(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, step: str
) -> None:
    storage.publish("folder/other", OLD)
    if write == "replace":
        storage.publish("folder/k", OLD)
    before = everything(tmp_path)
    real = getattr(os, step)
    calls = 0

    def fail(*args: object, **_: object) -> object:
        nonlocal calls
        calls += 1
        if step == "write" and calls == 1:  # half of it goes to the disk
            return real(args[0], memoryview(args[1])[:500_000])  # type: ignore[arg-type]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(StorageError, match="no space left") as caught:
        WRITES[write](storage, bytes(1_000_000))
    monkeypatch.undo()
    assert str(caught.value).startswith(storage.uri_of("folder/k"))
    assert calls
    assert everything(tmp_path) == before
    if write == "replace":
        assert storage.read("folder/k") == OLD


@pytest.mark.parametrize("write", ["publish", "create"])
def test_a_writer_killed_in_the_middle_of_a_write_leaves_nothing(storage: Storage, tmp_path: Path, write: str) -> None:
    # The writer stops itself after half of its data, and is then killed by SIGKILL: no handler of its own runs.
    code = (
        "import os, signal, sys\n"
        "from sdp.storage import open_storage\n"
        "real = os.write\n"
        "def half(descriptor, data):\n"
        "    if len(data) < 1_000_000: return real(descriptor, data)\n"
        "    real(descriptor, data[:1_000_000])\n"
        "    print('half', flush=True)\n"
        "    signal.pause()\n"
        "os.write = half\n"
        f"open_storage({storage.uri!r}).{write}('folder/k', bytes(2_000_000))\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert writer.stdout
    assert writer.stdout.readline() == "half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert storage.names() == []
    assert not storage.exists("folder/k")
    # Nothing hidden either, where the file system can write without a name (ext4, xfs, btrfs, tmpfs).
    assert everything(tmp_path) == []
    storage.create("folder/k", b"whole")


@pytest.mark.parametrize("write", WRITES)
def test_without_unnamed_files_a_hidden_draft_is_used_and_cleaned_up(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    """As on NFS."""
    real = os.open
    seen = []

    def no_tmpfile(path: str, flags: int, *args: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "")
        return real(path, flags, *args)

    def fail(_: int) -> None:
        seen.extend([everything(tmp_path), storage.names()])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if write == "replace":
        storage.publish("folder/k", OLD)
    before = storage.names()
    monkeypatch.setattr(os, "open", no_tmpfile)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(StorageError):
            WRITES[write](storage, b"new")
    assert seen[0] != before  # the draft was there …
    assert seen[1] == before  # … and it was never visible
    assert everything(tmp_path) == before
    WRITES[write](storage, b"new")
    assert storage.read("folder/k") == b"new"
    assert everything(tmp_path) == ["folder/k"]


# One of many


def test_content_published_during_a_replace_is_not_lost(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publish waits until the replace has compared and swapped, and so comes after it."""
    old = storage.publish("k", b"old")
    real = local_module._etag
    others: list[threading.Thread] = []

    def meanwhile(stat: os.stat_result) -> str:
        if not others:  # the replace has just read the old content
            others.append(threading.Thread(target=storage.publish, args=("k", b"published")))
            others[0].start()
            others[0].join(0.3)
        return real(stat)

    monkeypatch.setattr(local_module, "_etag", meanwhile)
    storage.replace("k", b"replaced", old.etag or "")
    others[0].join()
    assert storage.read("k") == b"published"


def test_two_versions_never_share_an_etag(storage: Storage) -> None:
    etags = [storage.publish("k", b"same size").etag for _ in range(200)]
    assert len(set(etags)) == 200


def test_create_refuses_an_existing_name(storage: Storage) -> None:
    storage.create("k", b"one")
    with pytest.raises(AlreadyExists, match="another writer was first") as caught:
        storage.create("k", b"two")
    assert str(caught.value).startswith(storage.uri_of("k"))
    assert storage.read("k") == b"one"


def test_waiting_for_another_writer_ends_by_the_deadline(storage: Storage) -> None:
    storage.publish("k", OLD)
    impatient = storage.with_options(timeout_s=0.2)
    descriptor = os.open(storage.uri, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    start = time.monotonic()
    with pytest.raises(Unavailable, match="locked by another writer"):
        impatient.publish("k", b"new")
    assert time.monotonic() - start < 2
    os.close(descriptor)
    impatient.publish("k", b"new")
    assert storage.read("k") == b"new"


def test_if_folders_cannot_be_locked_a_hidden_file_is(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on NFS."""
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(descriptor, operation)

    monkeypatch.setattr(local_module.fcntl, "flock", flock)
    info = storage.publish("k", b"1")
    storage.replace("k", b"2", info.etag or "")
    assert storage.read("k") == b"2"
    assert storage.names() == ["k"]
    assert everything(tmp_path) == [".sdp-lock", "k"]


# Errors


def test_a_missing_name_is_reported(storage: Storage) -> None:
    storage.publish("file", b"")
    for call in (storage.stat, storage.read, storage.open, lambda path: storage.read_range(path, 0, 1)):
        for path in ("no/such", "file/below"):
            with pytest.raises(NotFound) as caught:
                call(path)
            assert str(caught.value).startswith(storage.uri_of(path))
            assert "check the path" in str(caught.value)
    storage.publish("x/y", b"")
    for call in (storage.read, storage.open):
        with pytest.raises(NotFound, match="is a folder"):
            call("x")
    assert not storage.exists("file/below")
    with pytest.raises(NotFound, match="a part of the path is a file"):
        storage.publish("file/below", b"")


def test_an_unreadable_name_is_denied_and_not_absent(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.publish("shut/k", b"")

    shut = raising(PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    for function, call in (("stat", lambda: storage.exists("shut/k")), ("scandir", storage.names)):
        with monkeypatch.context() as patched:
            patched.setattr(os, function, shut)
            with pytest.raises(AccessDenied, match="permission denied"):
                call()


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (errno.EACCES, AccessDenied, "permission denied"),
        (errno.EROFS, AccessDenied, "mounted read-only"),
        (errno.EDQUOT, StorageError, "quota"),
        (errno.EIO, StorageError, "Input/output error"),
    ],
)
def test_the_kernels_errors_become_one_line(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StorageError], says: str
) -> None:
    monkeypatch.setattr(os, "write", raising(OSError(code, os.strerror(code))))
    with pytest.raises(kind, match=says) as caught:
        storage.publish("k", b"1")
    assert str(caught.value).startswith(storage.uri_of("k"))
    assert "\n" not in str(caught.value)
