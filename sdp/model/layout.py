"""Model folders in diffusers layout: their files, the checks that these fit together, and their digest.

    model_index.json
    vae/           config.json, diffusion_pytorch_model.safetensors
    text_encoder/  config.json, model.safetensors
    tokenizer/     tokenizer_config.json, and vocab.json with merges.txt or tokenizer.json
    unet/          config.json, diffusion_pytorch_model.safetensors (transformer/ in some families)
    scheduler/     scheduler_config.json

Weights may be split into several files with an index. Other precisions, formats and files in a published folder are
neither read nor downloaded, and are not part of the digest.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sdp.errors import ModelError
from sdp.families import DENOISER, INDEX, Family, every

Prediction = Literal["epsilon", "v", "flow"]
Exists = Callable[[str], bool]
"""Returns true if a name, relative to the model's folder, is a file."""

PARTS = ("vae", "text_encoder", "tokenizer", DENOISER, "scheduler")

FLOW = "FlowMatchEulerDiscreteScheduler"
"""The scheduler of a model of flow matching."""

_STEPS = 100_000
"""The most steps of a noise schedule, which is computed as a whole; models have 1000."""
_WEIGHTS = {
    **dict.fromkeys(("vae", *(family.denoiser for family in every())), "diffusion_pytorch_model"),
    "text_encoder": "model",
}
TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "chat_template.jinja",
)
_WEIGHT_FILES = ("config.json", "{0}.safetensors", "{0}.safetensors.index.json", "{0}-?????-of-?????.safetensors")
PATTERNS = (
    INDEX,
    "scheduler/scheduler_config.json",
    *(f"tokenizer/{name}" for name in TOKENIZER),
    *(f"{part}/{name.format(stem)}" for part, stem in _WEIGHTS.items() for name in _WEIGHT_FILES),
)
"""The patterns of a model's files, relative to its folder."""
_REQUIRED = {
    "tokenizer": ((("vocab.json", "merges.txt"), ("tokenizer.json",)),),
    "scheduler": ((("scheduler_config.json",),),),
    **{
        part: ((("config.json",),), ((f"{stem}.safetensors",), (f"{stem}.safetensors.index.json",)))
        for part, stem in _WEIGHTS.items()
    },
}
"""The files of each part: for each need its alternatives, each a group of files needed together."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A source named by a configuration. `parse` makes and validates it."""

    kind: Literal["builtin", "hub", "local", "bucket"]
    uri: str
    """URI without the revision."""
    revision: str | None = None
    """Commit of a hub source, 40 hexadecimal digits."""
    sha256: str | None = None
    """Digest that the content must have; see `digest`."""

    def __str__(self) -> str:
        return f"{self.uri}@{self.revision}" if self.revision else self.uri


AnySource = ModelSource | str
"""A source, or the text that names it in a configuration."""


def present(folder: Path, patterns: Sequence[str] = PATTERNS) -> list[str]:
    """Return the names of a folder's files that match a pattern, in the order of the digest."""
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return sorted(file.relative_to(folder).as_posix() for file in files)


def missing_file(exists: Exists, parts: Sequence[str], family: Family, *, pretrained: bool = True) -> str | None:
    """Return the first missing file that one of the parts needs, or None; only a `pretrained` denoiser has weights."""
    for part in map(family.folder, parts):
        needs = _REQUIRED[part] if pretrained or part != family.denoiser else _REQUIRED[part][:1]
        for alternatives in needs:
            if not any(all(exists(f"{part}/{name}") for name in names) for names in alternatives):
                return f"{part}/{alternatives[0][0]}"
    return None


def contradiction(read: Callable[[str], bytes], parts: Sequence[str], family: Family) -> str | None:
    """Return why these parts cannot form a model of the family, or None. Reads their configurations only."""
    configs: dict[str, dict[str, Any]] = {}
    for part in (part for part in map(family.folder, parts) if part in _WEIGHTS):
        try:
            configs[part] = json_object(read(f"{part}/config.json"))
        except ValueError as error:
            return f"{part}/config.json is {error}"
    return family.problem(configs)


def json_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object; raise ValueError if the data is anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def prediction_type(scheduler: Mapping[str, Any], where: str) -> Prediction:
    """Return what a model predicts, by its scheduler's configuration; refuse one of no or too many steps.

    `where` begins the errors.
    """
    steps = scheduler.get("num_train_timesteps", 1000)
    if type(steps) is not int or not 0 < steps <= _STEPS:
        raise ModelError(f"{where}: num_train_timesteps: expected 1 to {_STEPS:,}, got {steps!r}; restore the file")
    if scheduler.get("_class_name") == FLOW:
        return "flow"
    known: dict[Any, Prediction] = {"epsilon": "epsilon", "v_prediction": "v"}
    if (prediction := str(scheduler.get("prediction_type", "epsilon"))) not in known:
        expected = "expected epsilon or v_prediction"
        raise ModelError(f"{where}: prediction_type: {expected}, got {prediction!r}; choose another model")
    return known[prediction]


def digest(folder: Path, names: Iterable[str]) -> str:
    """Return the SHA-256 that `sha256sum NAME… | sha256sum` prints in the folder, with the names sorted."""
    total = hashlib.sha256()
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{content}  {name}\n".encode())
    return total.hexdigest()
