"""Feature networks, which judge pictures: from the same kinds of sources as models, each in a folder of its own layout.

    config.json, model.safetensors, preprocessor_config.json      CLIP, DINO or DINOv2, as transformers saves them
    and CLIP's tokenizer files
    pt_inception-2015-12-05-6726825d.pth                          FID's Inception: any *inception*.pth or .safetensors

What else lies in a published repository is not read, not downloaded and not part of the digest.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sdp.errors import ModelError
from sdp.model import cache, layout, sources
from sdp.model.sources import ModelSource

if TYPE_CHECKING:
    from sdp.storage import FileInfo, Storage, StorageOptions

Kind = Literal["clip", "dinov2", "vit", "inception"]

PATTERNS = (
    "config.json",
    "preprocessor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-?????-of-?????.safetensors",
    *layout.TOKENIZER,
    "*inception*.pth",
    "*inception*.safetensors",
)
_NEEDED = {
    "clip": ("model.safetensors", "preprocessor_config.json", "tokenizer_config.json"),
    "dinov2": ("model.safetensors", "preprocessor_config.json"),
    "vit": ("model.safetensors", "preprocessor_config.json"),
}
_SHARDED = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class FeatureNetwork:
    """A feature network on this machine."""

    kind: Kind
    path: Path
    source: ModelSource
    """Pinned by its digest."""

    @property
    def digest(self) -> str:
        assert self.source.sha256 is not None
        return self.source.sha256

    @property
    def weights(self) -> Path:
        """Inception's file."""
        (file,) = (self.path / name for name in present(self.path) if "inception" in name)
        return file


def find(text: str | ModelSource, key: str, *, storage: "StorageOptions | None" = None) -> FeatureNetwork:
    """The network of a source, downloaded if it has to be; errors begin with the configuration's key."""
    try:
        source = sources.parse(text) if isinstance(text, str) else text
        path = _here(source, storage)
        kind = _kind(source, path)
        digest = cache.digest(path, present(path))
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    if source.sha256 not in (None, digest):
        raise ModelError(f"{key}: model source {source}: its content has changed while it was in use; restore it")
    if source.kind == "local":  # workers may have another working directory
        source = replace(source, uri=str(path.resolve()))
    return FeatureNetwork(kind, path, replace(source, sha256=digest))


def present(folder: Path) -> list[str]:
    """The files of a folder that belong to a network."""
    return belonging(file.name for file in folder.iterdir() if file.is_file())


def belonging(names: Iterable[str]) -> list[str]:
    """Those of the names that belong to a network, in the order of the digest."""
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in PATTERNS))


def _here(source: ModelSource, storage: "StorageOptions | None") -> Path:
    """The folder of this machine that holds it."""
    if source.kind == "builtin":
        raise ModelError(f"model source {source}: sdp carries no feature network; expected {sources.FORMS}")
    if source.kind == "hub":
        return _from_hub(source)
    if source.kind == "bucket":
        return cache.download(source, storage, _listing)
    return sources.local_folder(source)


def _from_hub(source: ModelSource) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from sdp.model import hub

    try:
        cached = Path(
            snapshot_download(
                source.uri, revision=source.revision, allow_patterns=list(PATTERNS), local_files_only=True
            )
        )
        if constants.HF_HUB_OFFLINE or _lacking(cached) is None:
            return cached
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise hub.offline(source) from error
    with hub.explained(source):
        return Path(
            snapshot_download(
                source.uri, revision=source.revision, allow_patterns=list(PATTERNS), etag_timeout=hub.TIMEOUT_S
            )
        )


def _listing(storage: "Storage") -> "list[FileInfo]":
    wanted = set(belonging(name for name in storage.names() if "/" not in name))
    return [file for file in storage.list() if file.path in wanted]


def _kind(source: ModelSource, path: Path) -> Kind:
    """What it is by its files; a line that says what is lacking otherwise."""
    lacking = _lacking(path)
    if lacking is not None:
        raise ModelError(f"model source {source}: {lacking}")
    if (path / "config.json").is_file():
        kind: Kind = json.loads((path / "config.json").read_bytes())["model_type"]
        return kind
    return "inception"


def _lacking(path: Path) -> str | None:
    names = present(path)
    if "config.json" in names:
        try:
            kind = json.loads((path / "config.json").read_bytes()).get("model_type")
        except (ValueError, AttributeError):
            return "its config.json is not a JSON object; fetch it again"
        if kind not in _NEEDED:
            return f"a network of type {kind!r}, expected clip, dinov2, vit or Inception's weights; take another one"
        missing = [name for name in _NEEDED[kind] if name not in names and not (_SHARDED in names and "model" in name)]
        if missing:
            return f"{missing[0]} is missing; a network of type {kind} needs {', '.join(_NEEDED[kind])}"
        return None
    inceptions = [name for name in names if "inception" in name]
    if len(inceptions) == 1:
        return None
    if inceptions:
        return f"{len(inceptions)} files of Inception's weights ({', '.join(inceptions)}); keep one"
    return "no feature network in it: neither config.json nor a file *inception*.pth; check the address"
