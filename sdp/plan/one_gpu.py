"""Settings with which one GPU fine-tunes Stable Diffusion 2, by the estimate of its memory."""

import math
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from sdp.config import draft
from sdp.config.dump import scalar
from sdp.console import either
from sdp.errors import UserError
from sdp.hardware import GIB, GPUS, Gpu
from sdp.plan.memory import MARGIN, Memory, TrainerGpus, estimate

_LORA = {"lora.rank": 16, "optimizer.learning_rate": 1e-4}
_LESS = {"strategy.activation_checkpointing": True}
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "all of the U-Net": {},
    "all of the U-Net, with activation checkpointing": _LESS,
    "a LoRA": _LORA,
    "a LoRA, with activation checkpointing": {**_LORA, **_LESS},
}
"""Keys of `sdp train`, the best first: LoRA, and checkpointing, which takes time, only where memory needs them."""
_AT_ONCE = 4
"""Fewer samples at once leave a GPU idle."""


def find(name: str) -> Gpu:
    """Return the GPU with this name or Ray accelerator type, with this memory (24GB), or of this machine (auto)."""
    if name == "auto":
        return _local()
    if match := re.fullmatch(r"([0-9]{1,4}) ?Gi?B?", name, re.IGNORECASE):
        return Gpu(f"a GPU of {match[1]} GB", (), (), int(match[1]) * GIB, 0.0)
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes):  # of several of a type, the smallest
        if name.casefold() in (known.casefold() for known in (gpu.name, *gpu.accelerators)):
            return gpu
    raise UserError(f"init: --gpu: expected {either([*GPUS, 'a size such as 24GB', 'auto'])}, got {name!r}")


def _local() -> Gpu:
    """Return this machine's GPU with the least memory, as its driver reports it."""
    command = ("nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits")
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        mebibytes, name = min((int(line.partition(",")[0]), line.partition(",")[2].strip()) for line in lines)
    except (OSError, ValueError, subprocess.SubprocessError):
        raise UserError("init: --gpu auto: nvidia-smi finds no GPU here; name one or its size: --gpu 24GB") from None
    return Gpu(name, (), (), mebibytes << 20, 0.0)


def settings(gpu: Gpu, train: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return further keys of `sdp train`, whose data.batch_size is that of a step so far, and a sentence on them."""
    step = train["data.batch_size"]
    least = min(_AT_ONCE, step)
    for trained, way in _WAYS.items():
        memory = _memory(gpu, {**train, **way})
        if memory.largest_batch >= least:
            own = {**way, "data.batch_size": min(step, memory.largest_batch), "data.global_batch_size": step}
            memory = _memory(gpu, {**train, **own})
            at_once = f"{memory.batch} of a step's {step} pictures at once, at {memory.resolution} px"
            needed = f"{memory.total / GIB:.1f} of {gpu.memory_bytes / GIB:.0f} GiB"
            return {**own, "data.batch_size": memory.batch}, f"{gpu.name}: train {trained}, {at_once}: {needed}"
    gigabytes = math.ceil((sum(memory.parts.values()) + least * memory.per_sample) / (1 - MARGIN) / GIB)
    raise UserError(
        f"init: --gpu: expected {gigabytes} GB or more, got {gpu.name}; without --gpu, you train a tiny model"
    )


def _memory(gpu: Gpu, values: Mapping[str, Any]) -> Memory:
    config: Any = draft("train", None, [f"{key}={scalar(value)}" for key, value in values.items()]).config
    return estimate(config, TrainerGpus(gpu, 1, embedded=False))
