"""What a model folder in diffusers layout consists of: which files, whether they fit together, and their digest.

    model_index.json
    vae/           config.json, diffusion_pytorch_model.safetensors
    text_encoder/  config.json, model.safetensors
    tokenizer/     tokenizer_config.json, and vocab.json with merges.txt or tokenizer.json
    unet/          config.json, diffusion_pytorch_model.safetensors
    scheduler/     scheduler_config.json

Weights may be in several files with an index beside them. Other precisions, other formats and whatever else lies
in a published folder are not read, not downloaded and not part of the digest.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sdp.model.family import REQUIREMENTS

Exists = Callable[[str], bool]
"""Whether a name, relative to the model's folder, is a file."""

PARTS = ("vae", "text_encoder", "tokenizer", "unet", "scheduler")
INDEX = "model_index.json"

_WEIGHTS = {"vae": "diffusion_pytorch_model", "unet": "diffusion_pytorch_model", "text_encoder": "model"}
TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
)


def patterns() -> list[str]:
    """Of the files that belong to a model, relative to its folder."""
    found = [INDEX, "scheduler/scheduler_config.json", *(f"tokenizer/{name}" for name in TOKENIZER)]
    for part, stem in _WEIGHTS.items():
        found += [
            f"{part}/config.json",
            f"{part}/{stem}.safetensors",
            f"{part}/{stem}.safetensors.index.json",
            f"{part}/{stem}-?????-of-?????.safetensors",
        ]
    return found


def belonging(names: Iterable[str]) -> list[str]:
    """Those of the names that belong to a model, in the order of the digest."""
    known = patterns()
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in known))


def lacking(exists: Exists, parts: Sequence[str]) -> str | None:
    """The first file that one of the parts needs and that is not there, or None."""
    for part in parts:
        for alternatives in _needs(part):
            if not any(all(exists(f"{part}/{name}") for name in together) for together in alternatives):
                return f"{part}/{alternatives[0][0]}"
    return None


def contradiction(read: Callable[[str], bytes], parts: Sequence[str]) -> str | None:
    """Why these parts cannot work together as a Stable Diffusion, in a line, or None. Reads configurations only."""
    told: dict[str, dict[str, Any]] = {}
    for part in (part for part in parts if part in _WEIGHTS):
        try:
            told[part] = json.loads(read(f"{part}/config.json"))
        except ValueError:
            return f"{part}/config.json is not JSON"
        if not isinstance(told[part], dict):
            return f"{part}/config.json is not a JSON object"
    for path, wanted in REQUIREMENTS:
        part, key = path.split(".")
        if part in told and (got := told[part].get(key)) != wanted:
            return f"{part}/config.json: {key}: expected {wanted!r}, got {got!r}"
    if "unet" in told and "text_encoder" in told:
        width, takes = told["text_encoder"].get("hidden_size"), told["unet"].get("cross_attention_dim")
        if width != takes:
            return f"the text encoder gives {width} channels and the U-Net takes {takes}"
    return None


def damage(file: Path) -> str | None:
    """What is wrong with a file of weights by its header and length, in a few words, or None. Reads the header only."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_size = int.from_bytes(opened.read(8), "little")
        if size < 8 or header_size > min(size - 8, _LONGEST_HEADER):
            return "is no safetensors file"
        try:
            header = json.loads(opened.read(header_size))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "is no safetensors file"
    expected = 8 + header_size + max(ends, default=0)
    return None if size == expected else f"has {size:,} bytes, where its header speaks of {expected:,}"


def digest(folder: Path, names: Iterable[str]) -> str:
    """SHA-256 of the names and contents, as `sha256sum NAME… | sha256sum` in the folder prints it (names sorted)."""
    total = hashlib.sha256()
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{content}  {name}\n".encode())
    return total.hexdigest()


_LONGEST_HEADER = 100_000_000
"""Bytes; the format's own bound."""


def _needs(part: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Of a part: its needs; of a need: alternatives; of an alternative: the files that must be there together."""
    if part == "tokenizer":
        return ((("vocab.json", "merges.txt"), ("tokenizer.json",)),)
    if part == "scheduler":
        return ((("scheduler_config.json",),),)
    if part not in _WEIGHTS:
        raise ValueError(f"{part!r} is no part of a model; they are {', '.join(PARTS)}")
    stem = _WEIGHTS[part]
    return (
        (("config.json",),),
        ((f"{stem}.safetensors",), (f"{stem}.safetensors.index.json",)),
    )
