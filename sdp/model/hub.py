"""Models from the model hub, and its errors as sdp's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from sdp import families
from sdp.errors import ModelError, Unavailable, UserError, named
from sdp.families.sd import MIRROR, PINNED
from sdp.model import layout
from sdp.model.layout import Exists, ModelSource

TIMEOUT_S = 10.0


def has_model(folder: Path) -> bool:
    return layout.missing_file(lambda name: (folder / name).is_file(), layout.PARTS, families.of(folder)) is None


def exists(source: ModelSource) -> Exists:
    """Return a test for files of the repository at the revision, by the local cache or one request to the hub."""
    if (cached := _cached_folder(source, layout.PATTERNS, has_model)) is not None:
        return lambda name: (cached / name).is_file()
    return _listed(source).__contains__


@lru_cache
def _listed(source: ModelSource) -> frozenset[str]:
    """Return the names of the repository's files, which never change at a revision."""
    from huggingface_hub import HfApi

    with _explained(source):
        info = HfApi().model_info(source.uri, revision=source.revision, timeout=TIMEOUT_S)
    return frozenset(file.rfilename for file in info.siblings or ())


def download(source: ModelSource, patterns: Sequence[str], is_complete: Callable[[Path], bool]) -> Path:
    """Return the folder of the files at the revision, in the hub library's own cache, which workers may share."""
    if (cached := _cached_folder(source, patterns, is_complete)) is not None:
        return cached
    with _explained(source):
        return _snapshot(source, patterns, etag_timeout=TIMEOUT_S)


def folder_with(source: ModelSource, name: str) -> Path:
    """Return the folder of the repository's files at the revision, in the library's cache, with this file in it."""
    from huggingface_hub import hf_hub_download

    with _explained(source):
        path = hf_hub_download(source.uri, name, revision=source.revision, etag_timeout=TIMEOUT_S)
    return Path(path).parents[name.count("/")]


def push(path: Path, repository: str) -> str:
    """Upload a folder or a file to a repository, made private if there is none; return the repository's address."""
    from huggingface_hub import HfApi, errors

    try:
        address = HfApi().create_repo(repository, private=True, exist_ok=True)
        if path.is_dir():
            HfApi().upload_folder(repo_id=repository, folder_path=path)
        else:
            HfApi().upload_file(repo_id=repository, path_or_fileobj=path, path_in_repo=path.name)
    except (errors.HTTPError, OSError, ValueError) as error:  # type: ignore[attr-defined]  # as below
        where, remedy = f"export: --push: hf://{repository}", f"then `hf upload {repository} {path}`"
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (400, 401, 403, 404) or isinstance(error, ValueError):  # or the card's YAML is invalid
            raise UserError(f"{where}: the hub refused ({named(error)}); set HF_TOKEN of a writer, {remedy}") from error
        raise Unavailable(f"{where}: the hub did not answer ({named(error)}); wait, {remedy}") from error
    return str(address)


def _cached_folder(source: ModelSource, patterns: Sequence[str], is_complete: Callable[[Path], bool]) -> Path | None:
    """Return the repository's folder in the cache if it is complete, or if the hub must not be asked."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(source, patterns, local_files_only=True)
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelError(
                f"model source {source}: incomplete in this machine's hub cache, and HF_HUB_OFFLINE forbids "
                "fetching it; unset HF_HUB_OFFLINE, or pass a local or s3:// folder"
            ) from error
        return None
    return folder if constants.HF_HUB_OFFLINE or is_complete(folder) else None


def _snapshot(source: ModelSource, patterns: Sequence[str], **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source.uri, revision=source.revision, allow_patterns=list(patterns), **options))


@contextmanager
def _explained(source: ModelSource) -> Iterator[None]:
    """Raise the hub library's errors as sdp's."""
    from huggingface_hub import errors

    where = f"model source {source}"
    # The repository that is missing is most often that of Stable Diffusion 2.
    copy = "" if source.uri == MIRROR else f" (Stable Diffusion 2 was removed in November 2025; {PINNED} is a copy)"
    try:
        yield
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{where}: the repository has no such revision; pin a commit from its history") from error
    except errors.RepositoryNotFoundError as error:  # a gated one, too
        raise ModelError(
            f"{where}: the hub has no such repository{copy}, or access to it needs HF_TOKEN, of an account that has "
            "accepted the owner's terms if it is gated; check both"
        ) from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # from requests or httpx, by the library's version
        raise Unavailable(
            f"{where}: the hub did not answer ({named(error)}); try again later, or pass a local or s3:// folder"
        ) from error
