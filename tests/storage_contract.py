"""Tests for every kind of storage, which a module imports and runs with its own fixture `storage`."""

from collections.abc import Callable

import pytest

from sdp.errors import Conflict, NotFound
from sdp.storage import Storage

OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "list": lambda storage: storage.list(),
    "names": lambda storage: storage.names(),
    "stat": lambda storage: storage.stat("k"),
    "exists": lambda storage: storage.exists("k"),
    "read": lambda storage: storage.read("k"),
    "read_range": lambda storage: storage.read_range("k", 0, 1),
    "open": lambda storage: storage.open("k"),
    "publish": lambda storage: storage.publish("k", b"1"),
    "create": lambda storage: storage.create("k", b"1"),
    "replace": lambda storage: storage.replace("k", b"1", '"0"'),
    "delete": lambda storage: storage.delete("k"),
}


def test_published_content_is_read_back_unchanged(storage: Storage) -> None:
    data = bytes(range(256)) * 1000
    info = storage.publish("parts/1.bin", data)
    assert (info.path, info.size) == ("parts/1.bin", len(data))
    assert storage.stat("parts/1.bin").etag == storage.list()[0].etag == info.etag
    assert storage.read("parts/1.bin") == storage.open("parts/1.bin").read() == data
    assert storage.read_range("parts/1.bin", 300, 20) == data[300:320]
    assert storage.read_range("parts/1.bin", len(data) - 5, 20) == data[-5:]
    assert storage.read_range("parts/1.bin", len(data), 20) == b""
    assert storage.exists("parts/1.bin")
    assert not storage.exists("parts")
    storage.publish("parts/1.bin", memoryview(b"x12y")[1:3])
    assert storage.read("parts/1.bin") == b"12"
    for name in ("parts/1.bin", "parts/1.bin", "never/was"):
        storage.delete(name)
    assert not storage.exists("parts/1.bin")
    with pytest.raises(NotFound, match=r"/parts/1\.bin: "):
        storage.read("parts/1.bin")


def test_listings_are_sorted_recursive_and_by_folder(storage: Storage) -> None:
    assert storage.names() == storage.list() == []
    for path in ("b/2", "b/10", "bb/1", "a", "b/c/d/e"):
        storage.publish(path, b"x" * len(path))
    assert storage.names() == ["a", "b/10", "b/2", "b/c/d/e", "bb/1"]
    assert storage.names("b") == storage.names("b/") == ["b/10", "b/2", "b/c/d/e"]
    assert [(info.path, info.size) for info in storage.list("b/c")] == [("b/c/d/e", 7)]
    assert storage.child("b").names() == ["10", "2", "c/d/e"]
    assert storage.names("a") == storage.names("nothing") == storage.list("nothing") == []


def test_replace_wants_the_version_that_was_read(storage: Storage) -> None:
    old = storage.publish("k", b"one")
    new = storage.replace("k", b"two", old.etag or "")
    assert storage.read("k") == b"two"
    with pytest.raises(Conflict, match=r"/k: .*run the same command again$"):
        storage.replace("k", b"three", old.etag or "")
    assert storage.read("k") == b"two"
    storage.delete("k")
    with pytest.raises(Conflict, match="deleted meanwhile"):
        storage.replace("k", b"four", new.etag or "")
    assert not storage.exists("k")
