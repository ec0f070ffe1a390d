"""Files of datasets on the Hugging Face Hub, read from hf://datasets/OWNER/NAME[@REVISION]/path.

HF_ENDPOINT names the Hub, huggingface.co by default; the token is HF_TOKEN, or the one that `hf auth login` stored.
"""

import asyncio
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, unquote

from sdp.errors import UserError, one_line
from sdp.storage.base import SourceFile, StorageOptions
from sdp.storage.explain import Reported, StorageFailure, explaining
from sdp.storage.reader import RemoteObject, web_file
from sdp.storage.retry import Attempt, persist, wait
from sdp.storage.uri import join, parse

T = TypeVar("T")

FORM = "hf://datasets/OWNER/NAME[@REVISION]/path"
_FORM = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(/(?P<path>.*))?"
)


@dataclass(frozen=True, slots=True)
class HubPath:
    repo: str
    revision: str
    path: str
    """Path inside the repository, without outer slashes."""
    root: str
    """URI of the repository's top, as written by the user."""

    @classmethod
    def parse(cls, uri: str) -> "HubPath":
        if not (match := _FORM.fullmatch(uri)):
            raise UserError(f"{uri}: not a dataset on the Hub; write {FORM}")
        path = (match["path"] or "").strip("/")
        root = uri[: match.start("path")].rstrip("/") if match["path"] is not None else uri
        return cls(match["repo"], unquote(match["revision"] or "main"), path, root)

    def uri_of(self, path: str) -> str:
        return join(self.root, path)


def list_hub(folder: HubPath, options: StorageOptions, *, recursive: bool = True) -> list[SourceFile]:
    """List the files of a folder, with the content's hash as etag; [] if there is no such folder."""

    def listing() -> list[SourceFile]:
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import HfApi, RepoFile

        api = HfApi(endpoint=_endpoint(), token=_token() or False)
        path, revision = folder.path or None, folder.revision
        tree = api.list_repo_tree(folder.repo, path, recursive=recursive, revision=revision, repo_type="dataset")
        try:
            files = [entry for entry in tree if isinstance(entry, RepoFile)]
        except EntryNotFoundError:
            return []
        return [SourceFile(folder.uri_of(f.path), f.size, f.lfs.sha256 if f.lfs else f.blob_id) for f in files]

    async def call(attempt: Attempt) -> list[SourceFile]:
        # The Hub's HTTP client has no deadline, so it runs in a thread that can be left behind.
        return await attempt(_in_thread(listing))

    return wait(persist(call, options, explaining(folder.uri_of(folder.path)), parse(_endpoint()).bucket))


def open_hub(uri: str, options: StorageOptions) -> RemoteObject:
    file = HubPath.parse(uri)
    if not file.path:
        raise UserError(f"{uri}: names a repository, not a file; write {FORM}")
    token = _token()
    url = f"{_endpoint()}/datasets/{file.repo}/resolve/{quote(file.revision, safe='')}/{quote(file.path)}"
    return web_file(url, options, headers={"authorization": f"Bearer {token}"} if token else {}, name=uri)


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _token() -> str | None:
    from huggingface_hub import get_token

    return get_token()


async def _in_thread(work: Callable[[], T]) -> T:
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 (raised in the waiting thread)
            future.set_exception(Reported(_failure(error)))

    threading.Thread(target=run, name="sdp-hub", daemon=True).start()
    return await asyncio.wrap_future(future)


def _failure(error: Exception) -> StorageFailure:
    """Return the failure behind an exception of huggingface_hub or of its HTTP library."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", 0)
    unknown = isinstance(error, RepositoryNotFoundError)  # the Hub answers 401 for an unknown dataset
    if isinstance(error, GatedRepoError) or (status in (401, 403) and not unknown):
        return StorageFailure("denied", f"HTTP {status}; HF_TOKEN must belong to an account that may read this dataset")
    if unknown:
        return StorageFailure("missing", "no such dataset, or a private one that needs HF_TOKEN")
    if isinstance(error, RevisionNotFoundError):
        return StorageFailure("missing", "no such revision")
    if status == 429 or status >= 500:
        return StorageFailure("transient", f"HTTP {status}")
    if type(error).__module__.partition(".")[0] in ("httpx", "requests", "urllib3") and not status:
        return StorageFailure("transient", "cannot reach the Hub")
    return StorageFailure("other", one_line(error, 200) or type(error).__name__)
