"""A prefix of an S3 or Google Cloud Storage bucket, over obstore.

A write is one PUT of serialised data, so the store has all of it or none. The server decides the conditions of `create`
and `replace`: If-None-Match and If-Match on S3, generations on Google Cloud Storage. Only an object too large for one
PUT is uploaded in parts, and appears when the upload completes. obstore does not always abort a failed upload, so a
bucket for such objects needs a lifecycle rule that removes incomplete uploads.
"""

import os
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import GCSStore, S3Store

from sdp.storage import aws
from sdp.storage.base import Data, FileInfo, FileList, OpenFile, Storage, StorageOptions, checked, folder, view
from sdp.storage.explain import Explain, FailureKind, classify, explaining
from sdp.storage.retry import FIRST_RETRIES, Attempt, persist, wait, watch
from sdp.storage.uri import Location, shown

T = TypeVar("T")

MULTIPART = 4 * 1024**3
"""Bytes from which an object is uploaded in parts; S3 accepts 5 GiB in one PUT."""
_PART = 64 * 1024 * 1024
_PAGE = 1000  # objects that S3 lists at once


@dataclass(frozen=True)
class Bucket:
    """The connections to a bucket, opened at first use and shared by a storage and its children."""

    location: Location
    """The folder that was opened first, which the user has named."""
    options: StorageOptions
    _stores: dict[int, S3Store | GCSStore] = field(default_factory=dict)

    @cached_property
    def access(self) -> aws.S3Access | None:
        """The settings for S3; None for Google Cloud Storage, where obstore finds everything itself."""
        return aws.find_access(self.location.uri, self.options) if self.location.scheme == "s3" else None

    @property
    def address(self) -> str:
        """The server and the bucket."""
        return f"{(self.access and self.access.endpoint) or self.location.scheme}/{self.location.bucket}"

    def store(self, retries: int = 0) -> "S3Store | GCSStore":
        """Return the store. obstore retries by itself only in multipart uploads: only it can send a part again."""
        if retries not in self._stores:
            name, access = self.location.bucket, self.access
            # obstore reads GOOGLE_BASE_URL for the address of a server in place of Google's.
            endpoint = access.endpoint if access else os.environ.get("GOOGLE_BASE_URL")
            shared = self.options.client(endpoint or "", retries)
            if access and access.credentials:
                shared["credential_provider"] = access.credentials
            store = S3Store(name, config=access.config, **shared) if access else GCSStore(name, **shared)
            self._stores[retries] = store
        return self._stores[retries]


class ObjectStorage(Storage):
    def __init__(self, location: Location, options: StorageOptions, bucket: Bucket | None = None) -> None:
        super().__init__(location, options)
        self._bucket = bucket or Bucket(location, options)
        self._root = f"{location.path}/" if location.path else ""

    def list(self, prefix: str = "") -> FileList:
        # Page by page; the deadline is one page's, so that a long listing may go on while it progresses.
        inside = folder(prefix)
        below = f"{self._root}{inside}".rstrip("/") or None
        files: dict[str, FileInfo] = {}
        last: str | None = None
        store = self._ready(inside)

        async def pages() -> None:
            nonlocal last
            stream: Any = None

            async def page(attempt: Attempt) -> Any:
                nonlocal stream
                if stream is None or attempt.before:  # continue behind the last listed object
                    stream = obstore.list(store, below, offset=last, chunk_size=_PAGE)
                with suppress(StopAsyncIteration):
                    return await attempt(anext(stream))
                return None

            explain = self._explain(inside, missing="bucket")  # a folder is never missing: a 404 means the bucket
            while batch := await persist(page, self.options, explain, self._bucket.address):
                last = batch[-1]["path"]
                for meta in batch:
                    path = meta["path"][len(self._root) :]
                    files[path] = _info(path, meta)

        wait(pages())
        names = sorted(files)
        return [files[name] for name in names if not _is_marker(files[name], names)]

    def find(self, path: str) -> FileInfo | None:
        key, store = self._key(path), self._ready(path)

        async def call(attempt: Attempt) -> FileInfo | None:
            with suppress(FileNotFoundError):
                return _info(path, await attempt(obstore.head_async(store, key)))
            # A response to HEAD has no body: only GET distinguishes a missing object from a missing bucket.
            try:
                return _info(path, (await attempt(obstore.get_async(store, key))).meta)
            except FileNotFoundError as error:
                if classify(error).kind == "missing":
                    return None
                raise

        return self._run(path, call)

    def read_range(self, path: str, start: int, length: int | None) -> bytes:
        if length == 0:
            return b""
        key, store = self._key(path), self._ready(path)
        options: Any = None if length is None else {"range": (start, start + length)}

        async def call(attempt: Attempt) -> bytes:
            try:
                response = await attempt(obstore.get_async(store, key, options=options))
            except obstore.exceptions.BaseError as error:
                if classify(error).kind == "beyond":
                    return b""
                raise
            return (await attempt(response.bytes_async(), length or response.meta["size"])).to_bytes()

        return self._run(path, call)

    def open(self, path: str) -> OpenFile:
        from sdp.storage.reader import RemoteObject

        store, explain = self._ready(path), self._explain(path)
        return RemoteObject(store, self._key(path), self.options, explain, self._bucket.address).open()

    def publish(self, path: str, data: Data) -> FileInfo:
        return self._put(path, view(data), "overwrite")

    def create(self, path: str, data: Data) -> FileInfo:
        return self._put(path, view(data), "create")

    def replace(self, path: str, data: Data, etag: str) -> FileInfo:
        return self._put(path, view(data), {"e_tag": etag})

    def _put(self, path: str, content: memoryview, mode: Any) -> FileInfo:
        multipart = mode == "overwrite" and len(content) >= MULTIPART
        part_retries = FIRST_RETRIES if self.options.retries is None else self.options.retries
        key, store = self._key(path), self._ready(path, part_retries if multipart else 0)

        async def call(attempt: Attempt) -> FileInfo:
            how = {"mode": mode, "use_multipart": multipart, "chunk_size": _PART, "max_concurrency": 4}
            if isinstance(mode, dict) and self.location.scheme == "gs":
                how["mode"] = await self._generation(attempt, store, key, mode["e_tag"])
            try:
                # A view of its own: a connection may hold it for longer than the request lasts.
                result = await attempt(obstore.put_async(store, key, watch(content[:]), **how), len(content))
            except (AlreadyExistsError, PreconditionError):
                # The previous attempt may have succeeded although its response was lost.
                if not attempt.before or (meta := await self._same(attempt, store, key, content)) is None:
                    raise
                return _info(path, meta)
            return FileInfo(path, len(content), result["e_tag"], datetime.now(UTC))

        if mode == "overwrite":  # there is no precondition, so a 409 means something else
            return self._run(path, call, exists="other", changed="other")
        return self._run(path, call)

    async def _same(self, attempt: Attempt, store: Any, key: str, content: memoryview) -> Any:
        """Return an object's metadata if it holds exactly this content, else None."""
        with suppress(FileNotFoundError):
            response = await attempt(obstore.get_async(store, key))
            if response.meta["size"] == len(content):
                stored = await attempt(response.bytes_async(), len(content))
                if memoryview(stored) == content:
                    return response.meta
        return None

    async def _generation(self, attempt: Attempt, store: Any, key: str, etag: str) -> dict[str, Any]:
        """Return the generation of this etag, as Google Cloud Storage compares generations only."""
        try:
            meta = await attempt(obstore.head_async(store, key))
        except FileNotFoundError as error:
            raise PreconditionError(str(error)) from None
        if meta["e_tag"] != etag:
            raise PreconditionError("412: the etag differs")
        return {"e_tag": etag, "version": meta["version"]}

    def delete(self, path: str) -> None:
        key, store = self._key(path), self._ready(path)

        async def call(attempt: Attempt) -> None:
            try:
                await attempt(obstore.delete_async(store, key))
            except FileNotFoundError as error:
                if classify(error).kind != "missing":
                    raise

        self._run(path, call)

    def child(self, path: str) -> "ObjectStorage":
        below = Location(self.location.scheme, self.location.bucket, self._key(path))
        return ObjectStorage(below, self.options, self._bucket)

    def _key(self, path: str) -> str:
        return self._root + checked(path)

    def _ready(self, path: str, retries: int = 0) -> "S3Store | GCSStore":
        """Return the store; obstore checks its configuration when it is created."""
        try:
            return self._bucket.store(retries)
        except obstore.exceptions.BaseError as error:
            raise self._explain(path)(classify(error), "") from None

    def _run(self, path: str, call: Callable[[Attempt], Awaitable[T]], **kinds: FailureKind) -> T:
        return wait(persist(call, self.options, self._explain(path, **kinds), self._bucket.address))

    def _explain(self, path: str, **kinds: FailureKind) -> Explain:
        access, location = self._bucket.access, self._bucket.location
        at = f" at {shown(access.endpoint)}" if access and access.endpoint else ""
        region = access.region if access else ""
        return explaining(self.uri_of(path), kinds, at, named=location.uri, bucket=location.bucket, region=region)


def _is_marker(file: FileInfo, names: Sequence[str]) -> bool:
    """Return whether an object only stands for a folder: "folder/", whose slash obstore drops."""
    if file.size:
        return False
    if not file.path:
        return True
    below = f"{file.path}/"
    at = bisect_left(names, below)
    return at < len(names) and names[at].startswith(below)


def _info(path: str, meta: Any) -> FileInfo:
    return FileInfo(path, meta["size"], meta["e_tag"], meta["last_modified"])
