"""Feature networks, which judge pictures. They have the same kinds of sources as models and layouts of their own.

    config.json, model.safetensors, preprocessor_config.json      CLIP, DINO or DINOv2, as transformers saves them
    and CLIP's tokenizer files
    pt_inception-2015-12-05-6726825d.pth                          FID's Inception: any *inception*.pth or .safetensors

Other files of a published repository are neither read nor downloaded, and are not part of the digest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from sdp.errors import ModelError
from sdp.model import cache, layout, sources
from sdp.model.layout import AnySource, ModelSource
from sdp.storage import StorageOptions

NetworkKind = Literal["clip", "dinov2", "vit", "inception", "captioner"]

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
CAPTIONER = (
    *(name for name in PATTERNS if "inception" not in name),
    *("processor_config.json", "video_preprocessor_config.json", "generation_config.json"),
    *("chat_template.json", "tokenizer.model"),
)
"""The patterns of the files of a model that reads pictures and writes text."""
_NEEDED = {
    "clip": ("model.safetensors", "preprocessor_config.json", "tokenizer_config.json"),
    "dinov2": ("model.safetensors", "preprocessor_config.json"),
    "vit": ("model.safetensors", "preprocessor_config.json"),
}
_SHARDED = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class FeatureNetwork:
    """A feature network on this machine."""

    kind: NetworkKind
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
        (file,) = (self.path / name for name in layout.present(self.path, PATTERNS) if "inception" in name)
        return file


def find(text: AnySource, key: str, *, storage: StorageOptions | None = None, captions: bool = False) -> FeatureNetwork:
    """Return a source's network, downloading it if needed; with `captions`, one that writes captions.

    Errors begin with the configuration's key.
    """
    patterns, kind_of = (CAPTIONER, _captioner) if captions else (PATTERNS, _kind)

    def is_complete(folder: Path) -> bool:
        try:
            kind_of(folder)
        except ValueError:
            return False
        return True

    try:
        source = sources.parse(text) if isinstance(text, str) else text
        if source.kind == "builtin":
            expected = sources.FORMS.removeprefix("builtin:tiny, ")
            raise ModelError(f"model source {source}: sdp has no builtin feature network; expected {expected}")
        path = sources.fetch(source, storage, patterns, is_complete)
        kind = kind_of(path)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    except ValueError as error:
        raise ModelError(f"{key}: model source {source}: {error}; choose another, or fetch it again") from error
    digest = cache.digest(path, layout.present(path, patterns))
    if source.sha256 not in (None, digest):
        raise ModelError(f"{key}: model source {source}: its content changed while it was in use; restore it")
    if source.kind == "local":  # workers may have another working directory
        source = replace(source, uri=str(path.resolve()))
    return FeatureNetwork(kind, path, replace(source, sha256=digest))


def _kind(path: Path) -> NetworkKind:
    """Return the kind of a network; raise ValueError if its files are incomplete."""
    names = layout.present(path, PATTERNS)
    if "config.json" not in names:
        inceptions = [name for name in names if "inception" in name]
        if len(inceptions) != 1:
            got = ", ".join(inceptions) or "neither"
            raise ValueError(f"no feature network: expected config.json or one file *inception*.pth, got {got}")
        return "inception"
    kind: Any = layout.json_object((path / "config.json").read_bytes()).get("model_type")
    if str(kind) not in _NEEDED:
        raise ValueError(f"unknown network type {kind!r}: expected clip, dinov2, vit or Inception's weights")
    _require(names, kind, _NEEDED[kind])
    return cast(NetworkKind, kind)


def _captioner(path: Path) -> NetworkKind:
    """Return "captioner"; raise ValueError if the files are not those of a model that writes about pictures."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as KNOWN

    names = layout.present(path, CAPTIONER)
    _require(names, "vision-language", ("config.json", "model.safetensors", "tokenizer_config.json"))
    kind = layout.json_object((path / "config.json").read_bytes()).get("model_type")
    if kind not in KNOWN:
        raise ValueError(f"unknown type {kind!r}: expected a vision-language model, such as smolvlm or qwen2_5_vl")
    return "captioner"


def _require(names: Sequence[str], kind: str, needed: Sequence[str]) -> None:
    """Raise ValueError if a file is missing."""
    if missing := [name for name in needed if name not in names and not (_SHARDED in names and "model" in name)]:
        raise ValueError(f"{missing[0]} is missing; a {kind} network needs {', '.join(needed)}")
