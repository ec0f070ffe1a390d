"""A prefix of an S3 or Google Cloud Storage bucket, over obstore.

A write is one PUT of data that was serialised before it starts: the store has all of it or none. `create` and `replace`
are conditional requests that the server decides: If-None-Match and If-Match on S3, generations on Google Cloud Storage.
Only what one PUT cannot take goes up in parts, to be seen when it is completed. obstore does not always abort such an
upload when it fails, so a bucket that gets objects of that size needs a rule that clears incomplete uploads away.
"""

import os
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import GCSStore, S3Store

from sdp.errors import AccessDenied, AlreadyExists, Conflict, NotFound, SdpError, StorageError, Unavailable
from sdp.storage import aws
from sdp.storage.base import Data, FileInfo, Files, Names, Storage, StorageOptions, checked, checked_range, folder, view
from sdp.storage.explain import Failure, Kind, classify
from sdp.storage.retry import Patience, persist, wait
from sdp.storage.uri import Location, shown

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

MULTIPART = 4 * 1024**3
"""S3 takes 5 GiB in one PUT."""
_PART = 64 * 1024 * 1024
_PAGE = 1000  # what S3 lists at once


class Bucket:
    """The connections to a bucket, made when first used and shared by a storage and its children."""

    def __init__(self, location: Location, options: StorageOptions) -> None:
        self._scheme = location.scheme
        self.name = location.bucket
        self.uri = location.uri
        """The folder that was opened first: the one that somebody has named."""
        self._options = options
        self._access: aws.Access | None = None
        self._stores: dict[int, S3Store | GCSStore] = {}

    def access(self, uri: str) -> aws.Access | None:
        """None for Google Cloud Storage, where obstore finds everything itself."""
        if self._access is None and self._scheme == "s3":
            self._access = aws.find_access(uri, self._options, os.environ)
        return self._access

    def store(self, uri: str, retries: int = 0) -> "S3Store | GCSStore":
        """obstore's own retries are for multipart uploads: a part is safe to send again, and only it can do that."""
        if retries not in self._stores:
            self._stores[retries] = self._make(self.access(uri), retries)
        return self._stores[retries]

    def _make(self, access: aws.Access | None, retries: int) -> "S3Store | GCSStore":
        options, limit = self._options, timedelta(seconds=self._options.timeout_s)
        # GOOGLE_BASE_URL is obstore's name for the address of something that stands in for Google's.
        endpoint = (access.endpoint if access else os.environ.get("GOOGLE_BASE_URL")) or ""
        shared: dict[str, Any] = {
            "client_options": {
                "timeout": limit,
                "connect_timeout": timedelta(seconds=min(options.connect_timeout_s, options.timeout_s)),
                "allow_http": endpoint.startswith("http:"),
            },
            "retry_config": {"max_retries": retries, "retry_timeout": limit},
        }
        if access is None:
            return GCSStore(self.name, **shared)
        if access.credentials:
            shared["credential_provider"] = access.credentials
        return S3Store(self.name, config=access.config, **shared)


class ObjectStorage(Storage):
    def __init__(self, location: Location, options: StorageOptions, bucket: Bucket | None = None) -> None:
        super().__init__(location, options)
        self._location = location
        self._bucket = bucket or Bucket(location, options)

    def list(self, prefix: str = "") -> Files:
        found = self._listed(prefix, _info)
        return [found[path] for path in sorted(found)]

    def names(self, prefix: str = "", limit: int | None = None) -> Names:
        return sorted(self._listed(prefix, lambda path, _: path, limit))[:limit]

    def folders(self) -> Names:
        root = f"{self._location.path}/" if self._location.path else ""
        store = self._ready("")

        async def call(patience: Patience, _: Failure | None) -> Any:
            return await patience(obstore.list_with_delimiter_async(store, root or None))

        listed = self._run("", call, missing="bucket")
        return sorted(prefix[len(root) :].strip("/") for prefix in listed["common_prefixes"])

    def _listed(self, prefix: str, make: Callable[[str, Any], T], limit: int | None = None) -> dict[str, T]:
        """The deadline is one page's: a listing takes as long as it is long, but never without progress."""
        inside = folder(prefix)
        root = f"{self._location.path}/" if self._location.path else ""
        below = f"{root}{inside}".rstrip("/") or None
        found: dict[str, T] = {}
        empty: set[str] = set()
        last: str | None = None
        store = self._ready(inside)

        async def pages() -> None:
            nonlocal last
            stream: Any = None

            async def page(patience: Patience, failed: Failure | None) -> Any:
                nonlocal stream
                if stream is None or failed:  # go on behind what has been listed
                    stream = obstore.list(store, below, offset=last, chunk_size=_PAGE)
                return await patience(anext(stream, None))

            # A folder is never missing: a 404 means the bucket.
            while batch := await persist(page, self.options, self._explain(inside, missing="bucket")):
                last = batch[-1]["path"]
                for meta in batch:
                    path = meta["path"][len(root) :]
                    found[path] = make(path, meta)
                    if not meta["size"]:
                        empty.add(path)
                if limit is not None and len(found) >= limit:
                    return

        wait(pages)
        for marker in _markers(found, empty):
            del found[marker]
        return found

    def stat(self, path: str) -> FileInfo:
        info = self._head(path)
        if info is None:
            raise self._explain(path)(Failure("missing", ""), "")
        return info

    def exists(self, path: str) -> bool:
        return self._head(path) is not None

    def _head(self, path: str) -> FileInfo | None:
        """None where there is no object, and that is all that is wrong."""
        key, store = self._key(path), self._ready(path)

        async def call(patience: Patience, _: Failure | None) -> FileInfo | None:
            try:
                return _info(path, await patience(obstore.head_async(store, key)))
            except FileNotFoundError:
                pass
            # The answer to HEAD has no body: only GET tells a missing object from a missing bucket.
            try:
                return _info(path, (await patience(obstore.get_async(store, key))).meta)
            except FileNotFoundError as error:
                if classify(error).kind == "missing":
                    return None
                raise

        return self._run(path, call)

    def read(self, path: str) -> bytes:
        key, store = self._key(path), self._ready(path)

        async def call(patience: Patience, _: Failure | None) -> bytes:
            answer = await patience(obstore.get_async(store, key))
            return (await patience(answer.bytes_async(), answer.meta["size"])).to_bytes()

        return self._run(path, call)

    def read_range(self, path: str, start: int, length: int) -> bytes:
        checked_range(start, length)
        if not length:
            return b""
        key, store = self._key(path), self._ready(path)

        async def call(patience: Patience, _: Failure | None) -> bytes:
            try:
                answer = await patience(obstore.get_async(store, key, options={"range": (start, start + length)}))
            except obstore.exceptions.BaseError as error:
                if classify(error).kind == "beyond":
                    return b""
                raise
            return (await patience(answer.bytes_async(), length)).to_bytes()

        return self._run(path, call)

    def open(self, path: str) -> "pa.NativeFile":
        from sdp.storage.reader import open_ranges

        return open_ranges(self._ready(path), self._key(path), self.options, self._explain(path))

    def publish(self, path: str, data: Data) -> FileInfo:
        return self._put(path, view(data), "overwrite")

    def create(self, path: str, data: Data) -> FileInfo:
        return self._put(path, view(data), "create")

    def replace(self, path: str, data: Data, etag: str) -> FileInfo:
        return self._put(path, view(data), {"e_tag": etag})

    def _put(self, path: str, content: memoryview, mode: Any) -> FileInfo:
        multipart = mode == "overwrite" and len(content) >= MULTIPART
        key, store = self._key(path), self._ready(path, self.options.retries if multipart else 0)

        async def call(patience: Patience, failed: Failure | None) -> FileInfo:
            condition = mode
            if isinstance(mode, dict) and self._location.scheme == "gs":
                condition = await self._generation(patience, store, key, mode["e_tag"])
            work = obstore.put_async(
                store, key, content, mode=condition, use_multipart=multipart, chunk_size=_PART, max_concurrency=4
            )
            try:
                done = await patience(work, len(content))
            except (AlreadyExistsError, PreconditionError):
                # An earlier attempt may have landed although its answer was lost: then the other writer is us.
                if not failed:
                    raise
                found = await self._same(patience, store, key, content)
                if found is None:
                    raise
                return _info(path, found)
            return FileInfo(path, len(content), done["e_tag"], datetime.now(UTC))

        if mode == "overwrite":  # no precondition to fail: a 409 is something else
            return self._run(path, call, exists="other", changed="other")
        return self._run(path, call)

    async def _same(self, patience: Patience, store: Any, key: str, content: memoryview) -> Any:
        """What the store says of the object if it holds exactly this content, else None."""
        try:
            answer = await patience(obstore.get_async(store, key))
            if answer.meta["size"] == len(content):
                held = await patience(answer.bytes_async(), len(content))
                if memoryview(held) == content:
                    return answer.meta
        except FileNotFoundError:
            pass
        return None

    async def _generation(self, patience: Patience, store: Any, key: str, etag: str) -> dict[str, Any]:
        """Google Cloud Storage compares generations, not etags: the one that this etag belongs to."""
        try:
            meta = await patience(obstore.head_async(store, key))
        except FileNotFoundError as error:
            raise PreconditionError(str(error)) from None
        if meta["e_tag"] != etag:
            raise PreconditionError("412: the etag differs")
        return {"e_tag": etag, "version": meta["version"]}

    def delete(self, path: str) -> None:
        key, store = self._key(path), self._ready(path)

        async def call(patience: Patience, _: Failure | None) -> None:
            try:
                await patience(obstore.delete_async(store, key))
            except FileNotFoundError as error:
                if classify(error).kind != "missing":
                    raise

        self._run(path, call)

    def child(self, path: str) -> "ObjectStorage":
        below = Location(self._location.scheme, self._location.bucket, self._key(path))
        return ObjectStorage(below, self.options, self._bucket)

    def _key(self, path: str) -> str:
        return f"{self._location.path}/{checked(path)}".lstrip("/")

    def _ready(self, path: str, retries: int = 0) -> "S3Store | GCSStore":
        """The store, or in one line why there can be none: obstore checks its configuration when it is made."""
        try:
            return self._bucket.store(self._bucket.uri, retries)
        except obstore.exceptions.BaseError as error:
            raise self._explain(path)(classify(error), "") from None

    def _run(self, path: str, call: Callable[[Patience, Failure | None], Awaitable[T]], **kinds: Kind) -> T:
        explain = self._explain(path, **kinds)
        return wait(lambda: persist(call, self.options, explain))

    def _explain(self, path: str, **kinds: Kind) -> Callable[[Failure, str], SdpError]:
        """Makes errors; `kinds` says what a kind of failure means in this operation."""
        uri, bucket = self.uri_of(path), self._bucket
        whole = bucket.uri  # what is wrong with all of it is not said of a file that nobody has named
        access = bucket.access(whole)

        def error(failure: Failure, tried: str) -> SdpError:
            at = f" at {shown(access.endpoint)}" if access and access.endpoint else ""
            match kinds.get(failure.kind, failure.kind):
                case "missing":
                    return NotFound(f"{uri}: no such object; check the path")
                case "bucket":
                    return NotFound(
                        f"{whole}: no bucket '{bucket.name}'{at} ({failure.cause}); create it or correct the URI"
                    )
                case "denied":
                    return AccessDenied(
                        f"{uri}: access denied{at} ({failure.cause}); check credentials and permissions"
                    )
                case "credentials":
                    if access is None:
                        return AccessDenied(f"{whole}: no Google credentials found; set GOOGLE_APPLICATION_CREDENTIALS")
                    return AccessDenied(aws.no_credentials(whole, access.looked_in))
                case "region":
                    region = access.region if access else ""
                    return AccessDenied(
                        f"{whole}: the bucket is not in region '{region}' ({failure.cause}); set storage.region"
                    )
                case "exists":
                    return AlreadyExists(f"{uri}: exists already; another writer was first")
                case "changed":
                    return Conflict(f"{uri}: changed or deleted by another writer; read it again")
                case "transient":
                    return Unavailable(
                        f"{uri}: {failure.cause}{at} ({tried}); check that the store is up and reachable (or raise "
                        "storage.timeout_s), then run the same command again"
                    )
                case _:
                    return StorageError(f"{uri}: {failure.cause}{at}; check the URI and the store's settings")

        return error


def _markers(paths: Iterable[str], empty: set[str]) -> set[str]:
    """The empty objects that only stand for a folder: named "folder/", of which obstore drops the slash."""
    if not empty:
        return set()
    folders = {""}  # that of the listed folder itself
    for path in paths:
        while (path := path.rpartition("/")[0]) and path not in folders:
            folders.add(path)
    return folders & empty


def _info(path: str, meta: Any) -> FileInfo:
    return FileInfo(path, meta["size"], meta["e_tag"], meta["last_modified"])
