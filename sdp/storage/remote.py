"""A prefix of an S3 or Google Cloud Storage bucket, over obstore.

A write is one PUT of serialised data, so the store has all of it or none. The server decides the conditions of `create`
and `replace`: If-None-Match and If-Match on S3, generations on Google Cloud Storage. Only an object too large for one
PUT is uploaded in parts, and appears when the upload completes. obstore does not always abort a failed upload, so a
bucket for such objects needs a lifecycle rule that removes incomplete uploads.
"""

import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import GCSStore, S3Store

from sdp.errors import AccessDenied, AlreadyExists, Conflict, NotFound, SdpError, StorageError, Unavailable
from sdp.storage import aws
from sdp.storage.base import Data, FileInfo, FileList, Names, Storage, StorageOptions, checked, folder, view
from sdp.storage.explain import FailureKind, StorageFailure, classify
from sdp.storage.retry import FIRST_RETRIES, Attempt, persist, wait, watch
from sdp.storage.uri import Location, shown

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

MULTIPART = 4 * 1024**3
"""Bytes from which an object is uploaded in parts; S3 accepts 5 GiB in one PUT."""
_PART = 64 * 1024 * 1024
_PAGE = 1000  # objects that S3 lists at once

_ERRORS: Mapping[FailureKind, tuple[type[SdpError], str]] = {
    "missing": (NotFound, "{uri}: no such object; check the path"),
    "bucket": (NotFound, "{named}: no bucket '{bucket}'{at} ({cause}); create it or correct the URI"),
    "denied": (AccessDenied, "{uri}: access denied{at} ({cause}); check {remedy}"),
    "credentials": (AccessDenied, "{named}: {credentials}"),
    "region": (AccessDenied, "{named}: the bucket is not in region '{region}' ({cause}); set storage.region"),
    "exists": (AlreadyExists, "{uri}: exists already; another writer was first, run the same command again"),
    "changed": (Conflict, "{uri}: changed or deleted by another writer; run the same command again"),
    "transient": (
        Unavailable,
        "{uri}: {cause}{at} ({tried}); check that the store is up and reachable, then run the same command again",
    ),
}
"""Errors by kind of failure. Those of the bucket name what the user `named`, not a file that sdp chose."""
_OTHER = (StorageError, "{uri}: {cause}{at}; check the URI and the store's settings")
_NO_GOOGLE_CREDENTIALS = "no Google credentials found; set GOOGLE_APPLICATION_CREDENTIALS"


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
        files = self._listed(prefix, _info)
        return [files[path] for path in sorted(files)]

    def names(self, prefix: str = "", limit: int | None = None) -> Names:
        return sorted(self._listed(prefix, lambda path, _: path, limit))[:limit]

    def folders(self) -> Names:
        store = self._ready("")

        async def call(attempt: Attempt) -> Any:
            return await attempt(obstore.list_with_delimiter_async(store, self._root or None))

        listed = self._run("", call, missing="bucket")
        return sorted(prefix[len(self._root) :].strip("/") for prefix in listed["common_prefixes"])

    def _listed(self, prefix: str, make: Callable[[str, Any], T], limit: int | None = None) -> dict[str, T]:
        """List page by page; the deadline is one page's, so that a long listing may go on while it progresses."""
        inside = folder(prefix)
        below = f"{self._root}{inside}".rstrip("/") or None
        listed: dict[str, T] = {}
        empty: set[str] = set()
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

            # A folder is never missing: a 404 means the bucket.
            while batch := await persist(page, self.options, self._explain(inside, missing="bucket")):
                last = batch[-1]["path"]
                for meta in batch:
                    path = meta["path"][len(self._root) :]
                    listed[path] = make(path, meta)
                    if not meta["size"]:
                        empty.add(path)
                if limit is not None and len(listed) >= limit:
                    return

        wait(pages())
        for marker in _markers(listed, empty):
            del listed[marker]
        return listed

    def stat(self, path: str) -> FileInfo:
        info = self._head(path)
        if info is None:
            raise self._explain(path)(StorageFailure("missing", ""), "")
        return info

    def exists(self, path: str) -> bool:
        return self._head(path) is not None

    def _head(self, path: str) -> FileInfo | None:
        """Describe an object; None where only the object is missing, and not the bucket."""
        key, store = self._key(path), self._ready(path)

        async def call(attempt: Attempt) -> FileInfo | None:
            try:
                return _info(path, await attempt(obstore.head_async(store, key)))
            except FileNotFoundError:
                pass
            # A response to HEAD has no body: only GET distinguishes a missing object from a missing bucket.
            try:
                return _info(path, (await attempt(obstore.get_async(store, key))).meta)
            except FileNotFoundError as error:
                if classify(error).kind == "missing":
                    return None
                raise

        return self._run(path, call)

    def read(self, path: str) -> bytes:
        key, store = self._key(path), self._ready(path)

        async def call(attempt: Attempt) -> bytes:
            response = await attempt(obstore.get_async(store, key))
            return (await attempt(response.bytes_async(), response.meta["size"])).to_bytes()

        return self._run(path, call)

    def read_range(self, path: str, start: int, length: int) -> bytes:
        if not length:
            return b""
        key, store = self._key(path), self._ready(path)

        async def call(attempt: Attempt) -> bytes:
            try:
                response = await attempt(obstore.get_async(store, key, options={"range": (start, start + length)}))
            except obstore.exceptions.BaseError as error:
                if classify(error).kind == "beyond":
                    return b""
                raise
            return (await attempt(response.bytes_async(), length)).to_bytes()

        return self._run(path, call)

    def open(self, path: str) -> "pa.NativeFile":
        from sdp.storage.reader import RemoteObject

        return RemoteObject(self._ready(path), self._key(path), self.options, self._explain(path)).open()

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
        try:
            response = await attempt(obstore.get_async(store, key))
            if response.meta["size"] == len(content):
                stored = await attempt(response.bytes_async(), len(content))
                if memoryview(stored) == content:
                    return response.meta
        except FileNotFoundError:
            pass
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
        return wait(persist(call, self.options, self._explain(path, **kinds)))

    def _explain(self, path: str, **kinds: FailureKind) -> Callable[[StorageFailure, str], SdpError]:
        """Return a function that makes errors; `kinds` maps failures to their meaning in this operation."""
        access, location = self._bucket.access, self._bucket.location

        def error(failure: StorageFailure, tried: str) -> SdpError:
            skewed = "RequestTimeTooSkewed" in failure.cause
            kind, text = _ERRORS.get(kinds.get(failure.kind, failure.kind), _OTHER)
            return kind(
                text.format(
                    uri=self.uri_of(path),
                    named=location.uri,
                    bucket=location.bucket,
                    at=f" at {shown(access.endpoint)}" if access and access.endpoint else "",
                    cause=failure.cause,
                    tried=tried,
                    remedy=f"the clock of {socket.gethostname()}" if skewed else "credentials and permissions",
                    credentials=access.no_credentials if access else _NO_GOOGLE_CREDENTIALS,
                    region=access.region if access else "",
                )
            )

        return error


def _markers(paths: Iterable[str], empty: set[str]) -> set[str]:
    """Return the empty objects that only stand for a folder: "folder/", whose slash obstore drops."""
    if not empty:
        return set()
    folders = {""}  # the listed folder's own
    for path in paths:
        while (path := path.rpartition("/")[0]) and path not in folders:
            folders.add(path)
    return folders & empty


def _info(path: str, meta: Any) -> FileInfo:
    return FileInfo(path, meta["size"], meta["e_tag"], meta["last_modified"])
