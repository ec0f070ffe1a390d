"""Model sources: checking them, and fetching them to this machine.

    builtin:tiny, builtin:tiny-prx, builtin:tiny-klein    the tiny models that are part of sdp
    owner/name@0123…cdef              a repository on the model hub, at one revision
    /folder, ./folder, file://…       a local folder
    s3://bucket/folder, gs://…        a folder in a bucket, downloaded once per machine

`check` verifies a source on the driver, without torch, before anything expensive starts. `resolve` returns the local
folder and its digest. A source pinned by `sha256` is refused when its content has changed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sdp import families
from sdp.errors import ModelError
from sdp.families import INDEX, Family, KnownModel
from sdp.model import cache, hub, layout
from sdp.model.layout import PARTS, AnySource, Exists, ModelSource, Prediction
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.storage.uri import parse as parse_uri

BUILTIN = "builtin:"
ENCODER = "_sdp_encoder"
"""The key of an export's index for the digest of the model whose VAE and text encoder it has; others skip it."""
FORMS = "builtin:tiny, owner/name@REVISION on the model hub, a local folder (./model), or an s3:// or gs:// folder"

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>.*))?")
_REVISION = re.compile(r"[0-9a-f]{40}")
_LARGEST = 16 << 20
"""Bytes of a configuration; those of published models have a few kilobytes."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine."""

    path: Path
    digest: str
    source: ModelSource

    @property
    def encoder_digest(self) -> str:
        """The digest of the model that VAE and text encoder came from: named by an export; else its own."""
        index = self.path / INDEX
        return (families.parse_index(index.read_bytes()).get(ENCODER) if index.is_file() else None) or self.digest

    @property
    def family(self) -> Family:
        return families.of(self.path)


def parse(text: str) -> ModelSource:
    """Return the source that a configuration names."""
    if not text.strip() or text != text.strip():
        raise ModelError(f"model source {text!r}: expected {FORMS}")
    if text.startswith(BUILTIN):
        return ModelSource("builtin", text)
    if text.startswith(("s3://", "gs://")):
        return ModelSource("bucket", text.rstrip("/"))
    match = _HUB_ID.fullmatch(text)
    # An existing folder comes first, as in the libraries. A revision means the hub.
    if match and (match["revision"] is not None or not Path(text).is_dir()):
        if not _REVISION.fullmatch(match["revision"] or ""):
            raise ModelError(
                f"model source {text}: no such folder, and a hub repository needs a revision that cannot move; check "
                f"the path, or write {match['repo']}@COMMIT with the 40 hexadecimal digits of a commit"
            )
        return ModelSource("hub", match["repo"], match["revision"])
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:(?!//)|(?!file:)[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ModelError(f"model source {text}: unknown form; expected {FORMS}")
    return ModelSource("local", text)


def _model(source: AnySource) -> ModelSource:
    """Return the source of a diffusion model; refuse a hub's repository whose name shows an unsupported kind."""
    if not isinstance(source, str):
        return source
    if (match := _HUB_ID.fullmatch(source)) and not Path(source).is_dir():
        families.refuse_unsupported(match["repo"].rpartition("/")[2], f"model source {source}")
    return parse(source)


def check(
    source: AnySource, parts: Sequence[str] = PARTS, *, storage: StorageOptions | None = None, pretrained: bool = False
) -> ModelSource:
    """Raise ModelError unless the source exists and has these parts, which must fit together.

    The denoiser must have weights if `pretrained`; a run with new ones needs only its configuration.
    This reads names and configurations, a few kilobytes, but no weights. It needs no torch.
    """
    source = _model(source)
    exists, read = _files(source, storage)
    family = _family(source, exists, read)
    _require_files(source, exists, parts, family, pretrained=pretrained)
    # A hub's configurations would be a request each.
    if source.kind != "hub" and (problem := layout.contradiction(read, parts, family)):
        raise ModelError(f"model source {source}: {problem}; use the parts of one {family.name} model")
    return source


def resolve(source: AnySource, *, storage: StorageOptions | None = None) -> LocalModel:
    """Return the source as a local folder, downloaded if needed and once for all processes of a machine.

    Raise ModelError if it has no files, or if the digest of their content is not the pinned `sha256`.
    """
    source = _model(source)
    path = fetch(source, storage, layout.PATTERNS, hub.has_model)
    names = layout.present(path)
    if not names:
        _require_files(source, lambda name: name in names, PARTS, families.of(path))  # raises
    digest = cache.digest(path, names)
    if source.sha256 is not None and digest != source.sha256:
        raise ModelError(
            f"model source {source}: its content has changed: expected sha256 {source.sha256}, got {digest}; "
            "restore the model, or pin the new digest if the change is wanted"
        )
    return LocalModel(path, digest, source)


def fetch(
    source: ModelSource, storage: StorageOptions | None, patterns: Sequence[str], is_complete: Callable[[Path], bool]
) -> Path:
    """Return the local folder of a source, downloading the files that match a pattern if needed."""
    if source.kind == "hub":
        return hub.download(source, patterns, is_complete)
    if source.kind == "bucket":
        return cache.download(source, storage, patterns)
    return local_folder(source)


def prediction_type(source: AnySource, *, storage: StorageOptions | None = None) -> Prediction:
    """Return the prediction type of a source, by its scheduler_config.json. Reads nothing else."""
    name = "scheduler/scheduler_config.json"
    return layout.prediction_type(_read_config(source, name, storage), f"model source {source}: {name}")


def family(source: AnySource, *, storage: StorageOptions | None = None) -> Family:
    """Return the family of a source."""
    source = _model(source)
    return _family(source, *_files(source, storage))


def is_distilled(source: AnySource, *, storage: StorageOptions | None = None) -> bool:
    """Return whether a source draws in few steps without guidance, which training would undo."""
    exists, read = _files(_model(source), storage)
    return exists(INDEX) and families.parse_index(read(INDEX)).get("is_distilled") is True


def known(source: AnySource, *, storage: StorageOptions | None = None) -> KnownModel | None:
    """Return the known model whose denoiser has the source's size, or None."""
    config = denoiser_config(source, storage=storage)
    return next((model for model in family(source, storage=storage).known if model.has_size_of(config)), None)


def denoiser_config(source: AnySource, *, storage: StorageOptions | None = None) -> dict[str, Any]:
    """Return the configuration of a source's denoiser."""
    return _read_config(source, f"{family(source, storage=storage).denoiser}/config.json", storage)


def _read_config(source: AnySource, name: str, storage: StorageOptions | None) -> dict[str, Any]:
    """Read one JSON file of a source."""
    source = check(source, (name.partition("/")[0],), storage=storage)
    _, read = _files(source, storage)
    try:
        return layout.json_object(read(name))
    except ValueError as error:
        raise ModelError(f"model source {source}: {name} is {error}; fetch it again") from error


def local_folder(source: ModelSource) -> Path:
    """Return the folder of a builtin or local source."""
    if source.kind == "builtin":
        name = source.uri.removeprefix(BUILTIN)
        names = [each.builtin for each in families.every()]
        if name not in names:
            expected = " or ".join(f"{BUILTIN}{each}" for each in names)
            raise ModelError(f"model source {source}: unknown builtin model; expected {expected}")
        return Path(str(files("sdp.model") / name.replace("-", "_")))
    path = Path(parse_uri(source.uri).path)
    if not path.is_dir():
        raise ModelError(f"model source {source}: no such folder; pass one that every node can read, or {FORMS}")
    return path


def _files(source: ModelSource, storage: StorageOptions | None) -> tuple[Exists, Callable[[str], bytes]]:
    """Return a test for a source's files, and a reader of small ones."""
    opened = None if source.kind == "hub" else _open(source, storage)

    def read(name: str) -> bytes:
        folder = opened or open_storage(str(hub.folder_with(source, name)))
        if (file := folder.find(name)) is not None and file.size > _LARGEST:
            raise ModelError(f"model source {source}: {name} is too large ({file.size:,} bytes); restore it")
        return folder.read(name)

    return (opened.exists if opened else hub.exists(source)), read


def _family(source: ModelSource, exists: Exists, read: Callable[[str], bytes]) -> Family:
    return families.by_index(read(INDEX) if exists(INDEX) else b"{}", str(source))


def _open(source: ModelSource, storage: StorageOptions | None) -> Storage:
    """Return the folder of a source that is not on the hub."""
    return open_storage(source.uri if source.kind == "bucket" else str(local_folder(source)), storage)


def _require_files(
    source: ModelSource, exists: Exists, parts: Sequence[str], family: Family, *, pretrained: bool = False
) -> None:
    if (missing := layout.missing_file(exists, parts, family, pretrained=pretrained)) is not None:
        expected = ", ".join(map(family.folder, parts))
        raise ModelError(
            f"model source {source}: {missing} is missing: expected {expected} in diffusers layout, with "
            "safetensors, since reading a .bin may run code; complete it, or use another source"
        )
