"""Data sets on the Hugging Face Hub, for reading: hf://datasets/OWNER/NAME[@REVISION]/path.

The Hub is the one that HF_ENDPOINT names, else huggingface.co; the token is HF_TOKEN, or what `hf auth login` has kept.
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
from sdp.storage import web
from sdp.storage.base import StorageOptions
from sdp.storage.explain import Failure, Reported
from sdp.storage.retry import Patience, persist, wait

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
    """Inside the repository, without slashes around it."""
    root: str
    """The URI of the repository's top, as it was given."""

    @classmethod
    def parse(cls, uri: str) -> "HubPath":
        match = _FORM.fullmatch(uri)
        if not match:
            raise UserError(f"{uri}: not an address on the Hub; write {FORM}")
        path = (match["path"] or "").strip("/")
        root = uri[: match.start("path")].rstrip("/") if match["path"] is not None else uri
        return cls(match["repo"], unquote(match["revision"] or "main"), path, root)


@dataclass(frozen=True, slots=True)
class HubFile:
    path: str
    size: int
    etag: str


def list_hub(folder: HubPath, options: StorageOptions, *, recursive: bool = True) -> list[HubFile]:
    """The files of a folder of a repository, with the hash of the content as etag; [] if there is no such folder."""

    def listing() -> list[HubFile]:
        from huggingface_hub.errors import EntryNotFoundError
        from huggingface_hub.hf_api import HfApi, RepoFile

        api = HfApi(endpoint=_endpoint(), token=_token() or False)
        tree = api.list_repo_tree(
            folder.repo,
            folder.path or None,
            recursive=recursive,
            revision=folder.revision,
            repo_type="dataset",
        )
        try:
            files = [entry for entry in tree if isinstance(entry, RepoFile)]
        except EntryNotFoundError:
            return []
        return [HubFile(f.path, f.size, f.lfs.sha256 if f.lfs else f.blob_id) for f in files]

    async def call(patience: Patience, _: Failure | None) -> list[HubFile]:
        # Its HTTP client waits without limit, so it waits in a thread that can be left behind.
        return await patience(asyncio.wrap_future(_in_thread(listing)))

    return wait(lambda: persist(call, options, web.explaining(f"{folder.root}/{folder.path}".rstrip("/"))))


def open_hub(uri: str, options: StorageOptions) -> web.WebFile:
    at = HubPath.parse(uri)
    if not at.path:
        raise UserError(f"{uri}: names a repository, not a file; write {FORM}")
    token = _token()
    url = f"{_endpoint()}/datasets/{at.repo}/resolve/{quote(at.revision, safe='')}/{quote(at.path)}"
    return web.WebFile(url, options, headers={"authorization": f"Bearer {token}"} if token else {}, name=uri)


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _token() -> str | None:
    """Of HF_TOKEN, or of `hf auth login`."""
    from huggingface_hub import get_token

    return get_token()


def _in_thread(work: Callable[[], T]) -> "Future[T]":
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 (handed to whoever waits)
            future.set_exception(Reported(_failure(error)))

    threading.Thread(target=run, name="sdp-hub", daemon=True).start()
    return future


def _failure(error: Exception) -> Failure:
    """What an exception of huggingface_hub, or of the HTTP library below it, means."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", 0)
    hidden = isinstance(error, RepositoryNotFoundError)  # the Hub answers 401 for what it does not know
    if isinstance(error, GatedRepoError) or (status in (401, 403) and not hidden):
        return Failure("denied", f"HTTP {status}; HF_TOKEN must belong to an account that may read this data set")
    if hidden:
        return Failure("missing", "no such data set, or a private one that needs HF_TOKEN")
    if isinstance(error, RevisionNotFoundError):
        return Failure("missing", "no such revision")
    if status == 429 or status >= 500:
        return Failure("transient", f"HTTP {status}")
    if type(error).__module__.partition(".")[0] in ("httpx", "requests", "urllib3") and not status:
        return Failure("transient", "cannot reach the Hub")
    return Failure("other", one_line(error, 200) or type(error).__name__)
