"""Random access to a remote object through ranged reads, for pyarrow.parquet.

The first request fetches the last bytes, where Parquet begins reading. Small reads fetch more than they need; large
ones (pre_buffer=True makes them) go out in parallel. All reads are of one version of the object: a write in between is
an error.
"""

import asyncio
import io
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import obstore
from obstore.store import HTTPStore

from sdp.storage.base import OpenFile, StorageOptions
from sdp.storage.explain import REPORTED, Explain, classify, explaining
from sdp.storage.retry import Attempt, persist, wait
from sdp.storage.uri import parse, shown

TAIL = 64 * 1024
"""Bytes of a Parquet file's end that pyarrow reads first."""
AHEAD = 1024 * 1024
"""Bytes that a small read fetches if it continues the previous one."""
PIECE = 8 * 1024 * 1024
"""Bytes of one request of a parallel read."""
_PARALLEL = 8


class RemoteObject:
    """One version of an object: its size, etag and last bytes, as the first request returned them."""

    def __init__(self, store: Any, key: str, options: StorageOptions, explain: Explain, address: str) -> None:
        self._store = store
        self._key = key
        self._persistence = (options, explain, address)
        self.size, self.etag, self.tail = wait(self._open())

    async def _open(self) -> tuple[int, str | None, bytes]:
        async def call(attempt: Attempt) -> tuple[int, str | None, bytes]:
            try:
                response = await attempt(obstore.get_async(self._store, self._key, options={"range": {"suffix": TAIL}}))
                return response.meta["size"], response.meta["e_tag"], await _body(response, TAIL, attempt)
            except REPORTED as error:
                if classify(error).kind not in ("beyond", "unranged"):
                    raise
                meta = await attempt(obstore.head_async(self._store, self._key))
                if meta["size"]:
                    raise
                return 0, meta["e_tag"], b""  # an empty object has no last byte, and some stores send it whole

        return await persist(call, *self._persistence)

    def fetch(self, start: int, length: int) -> bytes:
        """Return exactly this range; a large one is fetched in pieces, each with its own retries."""
        starts = range(start, start + length, PIECE)
        if len(starts) == 1:
            return wait(self._piece(start, length))

        async def pieces() -> list[bytes]:
            free = asyncio.Semaphore(_PARALLEL)

            async def fetch_piece(at: int) -> bytes:
                async with free:
                    return await self._piece(at, min(PIECE, start + length - at))

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(fetch_piece(at)) for at in starts]
            return [task.result() for task in tasks]

        try:
            return b"".join(wait(pieces()))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _piece(self, start: int, length: int) -> bytes:
        async def call(attempt: Attempt) -> bytes:
            end = start + length
            response = await attempt(obstore.get_async(self._store, self._key, options={"range": (start, end)}))
            if (response.meta["size"], response.meta["e_tag"]) != (self.size, self.etag):
                raise obstore.exceptions.PreconditionError("another version")
            return await _body(response, length, attempt)

        return await persist(call, *self._persistence)

    def open(self) -> OpenFile:
        """Open the object as a pyarrow file."""
        import pyarrow as pa

        return pa.PythonFile(RangeFile(self), mode="r")


async def _body(response: Any, most: int, attempt: Attempt) -> bytes:
    """Return the bytes of an answer; refuse more than `most`, which a web server may send whatever it was asked for."""
    stream, pieces, size = response.stream(min_chunk_size=PIECE + 1), list[bytes](), 0
    with suppress(StopAsyncIteration):
        while size <= most:
            pieces.append(await attempt(anext(stream), most))
            size += len(pieces[-1])
        raise obstore.exceptions.NotSupportedError("more bytes than were asked for")
    return b"".join(pieces)


def web_file(
    url: str, options: StorageOptions, *, headers: Mapping[str, str] | None = None, name: str | None = None
) -> RemoteObject:
    """Return the file at a web address; redirects are followed.

    `headers` go to this host only, not to one it redirects to; messages call the file `name`.
    """
    client = options.client(url)
    client["client_options"]["default_headers"] = dict(headers or {})
    explain = explaining(name or shown(url))
    try:
        store = HTTPStore(url.partition("#")[0], **client)
    except obstore.exceptions.BaseError as error:
        raise explain(classify(error), "") from None
    # The store is the file itself: a path below it would lose the query, which signs many addresses.
    return RemoteObject(store, "", options, explain, parse(url).bucket)


class RangeFile(io.RawIOBase):
    """A read-only file over ranged reads, for pyarrow.PythonFile, which serialises its calls with a lock."""

    def __init__(self, remote: RemoteObject) -> None:
        self._remote = remote
        self._at = 0
        self._ahead = (0, b"")
        self._end = -1  # where the last read ended

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._remote.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, length: int | None = -1, /) -> bytes:
        size = self._remote.size
        left = max(0, size - self._at)
        length = left if length is None or length < 0 else min(length, left)
        data = self._get(self._at, length) if length else b""
        self._at += length
        self._end = self._at
        return data

    def _get(self, start: int, length: int) -> bytes:
        tail = self._remote.tail
        for begin, block in ((self._remote.size - len(tail), tail), self._ahead):
            if begin <= start and start + length <= begin + len(block):
                return block[start - begin : start - begin + length]
        least = AHEAD if start == self._end else TAIL
        block = self._remote.fetch(start, min(max(length, least), self._remote.size - start))
        if length == len(block):
            return block
        self._ahead = (start, block)
        return block[:length]
