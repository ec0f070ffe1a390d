"""Settings with which one GPU fine-tunes Stable Diffusion 2, by the estimate of its memory."""

import math
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from sdp.config import draft_of
from sdp.console import either, nearest
from sdp.errors import UserError
from sdp.hardware import GIB, GPUS, Gpu
from sdp.plan.memory import MARGIN, Memory, estimate

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


_CARDS: Mapping[int, tuple[str, ...]] = {
    8: ("3060ti", "3070", "3070ti", "4060", "5060"),
    10: ("3080",),
    11: ("1080ti", "2080ti"),
    12: ("3060", "3080ti", "4070", "4070ti", "5070"),
    16: ("4060ti16gb", "4070tisuper", "4080", "5060ti16gb", "5070ti", "5080", "a4000", "p100", "t4", "v100"),
    24: ("3090", "3090ti", "4090", "a5000", "a10", "titanrtx"),
    32: ("5090",),
    48: ("a6000", "a40", "6000ada"),
}
"""Cards that people have at home or at work, by their gigabytes; a name of several sizes is the smallest."""
_MAKERS = re.compile("nvidia|geforce|quadro|rtx|gtx|[^a-z0-9]")
"""The parts of a card's name that people write or leave out."""


def find(name: str, option: str = "init: --gpu") -> Gpu:
    """Return the GPU with this name or Ray accelerator type, with this memory (24GB), or of this machine (auto)."""
    if name == "auto":
        return _local(option)
    plain = _MAKERS.sub("", name.casefold())
    named = next((size for size, cards in _CARDS.items() if plain in cards), None)
    match = re.fullmatch(r"([0-9]{1,3}) ?(Gi?B?)?", name.strip(), re.IGNORECASE)
    if size := named or (match and int(match[1])):
        return Gpu(f"a GPU of {size} GB", (), (), size * GIB, 0.0)
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes):  # of several of a type, the smallest
        if name.casefold() in (known.casefold() for known in (gpu.name, *gpu.accelerators)):
            return gpu
    near = nearest(plain, [card for cards in _CARDS.values() for card in cards] + [gpu.casefold() for gpu in GPUS])
    hint = f"; did you mean {near}?" if near else "; a size is enough"
    raise UserError(f"{option}: expected {either([*GPUS, 'a card such as 4090', '24GB', 'auto'])}, got {name!r}{hint}")


def _local(option: str) -> Gpu:
    """Return this machine's GPU with the least memory, as its driver reports it."""
    command = ("nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits")
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        mebibytes, name = min((int(line.partition(",")[0]), line.partition(",")[2].strip()) for line in lines)
    except (OSError, ValueError, subprocess.SubprocessError):
        raise UserError(f"{option} auto: nvidia-smi finds no GPU here; name one or its size, such as 24GB") from None
    return Gpu(name, (), (), mebibytes << 20, 0.0)


def settings(gpu: Gpu, train: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the keys that make `train` fit, and a sentence; its data.batch_size is read as a step's samples."""
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
    hint = "without --gpu, you train a tiny model"
    raise UserError(f"init: --gpu: expected {gigabytes} GB or more, got {gpu.name}; {hint}")


def _memory(gpu: Gpu, values: Mapping[str, Any]) -> Memory:
    config: Any = draft_of("train", values).config
    return estimate(config, gpu, 1, embedded=False)
