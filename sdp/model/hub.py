"""The model hub as a source: what is asked of it, and its failures in our words."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sdp.errors import ModelError, Unavailable, one_line
from sdp.model import layout
from sdp.model.family import MIRROR
from sdp.model.layout import Exists

if TYPE_CHECKING:
    from sdp.model.sources import ModelSource

TIMEOUT_S = 10.0


def exists(source: "ModelSource") -> Exists:
    """Tells which files the repository has at the revision: from the local cache, else by one question to the hub."""
    cached = _cached(source)
    if cached is not None:
        return lambda name: (cached / name).is_file()
    from huggingface_hub import HfApi

    with explained(source):
        told = HfApi().model_info(source.uri, revision=source.revision, timeout=TIMEOUT_S)
    return {file.rfilename for file in told.siblings or ()}.__contains__


def download(source: "ModelSource") -> Path:
    """The repository's model files at the revision, in the hub library's own cache, which many workers may share."""
    cached = _cached(source)
    if cached is not None:
        return cached
    from huggingface_hub import snapshot_download

    with explained(source):
        return Path(
            snapshot_download(
                source.uri, revision=source.revision, allow_patterns=layout.patterns(), etag_timeout=TIMEOUT_S
            )
        )


def read(source: "ModelSource", name: str) -> bytes:
    """Return one small file of the repository at the revision."""
    cached = _cached(source)
    if cached is not None:
        return (cached / name).read_bytes()
    from huggingface_hub import hf_hub_download

    with explained(source):
        path = hf_hub_download(source.uri, name, revision=source.revision, etag_timeout=TIMEOUT_S)
    return Path(path).read_bytes()


def _cached(source: "ModelSource") -> Path | None:
    """The repository's folder on this machine if it is whole, or all that may be had; a revision never changes."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                source.uri, revision=source.revision, allow_patterns=layout.patterns(), local_files_only=True
            )
        )
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise offline(source) from error
        return None
    whole = layout.lacking(lambda name: (folder / name).is_file(), layout.PARTS) is None
    return folder if whole or constants.HF_HUB_OFFLINE else None


def offline(source: "ModelSource") -> ModelError:
    """That it would have to be fetched, and must not."""
    return ModelError(
        f"model source {source}: not (wholly) in this machine's hub cache, and HF_HUB_OFFLINE forbids to fetch it; "
        "unset HF_HUB_OFFLINE, or give a local or s3:// folder"
    )


@contextmanager
def explained(source: "ModelSource") -> Iterator[None]:
    """What goes wrong between us and the hub, in our words."""
    from huggingface_hub import errors

    where = f"model source {source}"
    mirror = "" if source.uri == MIRROR else f" (Stable Diffusion 2 left it in November 2025; a mirror is {MIRROR})"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(f"{where}: its owner gates it; accept its terms on the hub and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{where}: the repository has no such revision; pin a commit of its history") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{where}: the hub has no such repository{mirror}, or it is private and HF_TOKEN is not set to one "
            "that may read it"
        ) from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # requests or httpx, as it has
        line = one_line(error, 200)
        raise Unavailable(
            f"{where}: the hub did not answer ({type(error).__name__}: {line}); try again later, or give a local or "
            "s3:// folder"
        ) from error
