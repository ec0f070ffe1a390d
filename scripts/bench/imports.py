"""CPU seconds and modules of each kind of process from Python's start until it has begun to work.

Each round starts every kind once, so that a busy moment of the machine affects all alike. A kind has a limit, and
packages that it must not load.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.bench._cases import exit_status, sized
from sdp.console import table

ROOT = Path(__file__).resolve().parent.parent.parent
ROUNDS = sized(3, 1)

_MEASURE = """
import os, sys
def used():
    times = os.times()
    return times.user + times.system
{first}
before = used()
{code}
loaded = {{name.partition(".")[0] for name in sys.modules}} | ({{"torch._dynamo"}} & sys.modules.keys())
print("measured:", used() - before, len(sys.modules), *(package for package in {never} if package in loaded))
"""
_ENCODER = """
import numpy as np
from sdp.encode.chunk import Chunk, ShapeGroup
from sdp.encode.encoder import Encoder
from sdp.encode.recipe import EncoderSettings
from sdp.model import load, sources
encoder = Encoder(load.load_vae(sources.resolve("builtin:tiny").path), EncoderSettings(batch_sizes={64: 1}))
crops = {64: [ShapeGroup(np.zeros(1, np.int64), np.zeros((1, 64, 64, 3), np.uint8))]}
encoder(Chunk(np.zeros(1, np.int64), [""], np.zeros((1, 77), np.uint16), crops, np.zeros(1, np.int16)))
"""
_TRANSFORM = """
import sdp.encode.work
from sdp.model import sources
from sdp.families.tokenizer import load_tokenizer, tokenize
tokenize(load_tokenizer(sources.resolve("builtin:tiny").path), ["a caption"])
"""
_PAINTER = """
from sdp.config import parse
from sdp.generate.painter import load_painter
from sdp.generate.source import choose
config = {"checkpoint": "builtin:tiny", "prompts": ["a picture"], "output": {"uri": "unused"}, "resolution": 64}
config = parse("generate", {**config, "sampler": {"steps": 2}})
load_painter(choose(config), config).paint(["a picture"], [1])
"""


@dataclass(frozen=True)
class Kind:
    """A kind of process."""

    code: str
    first: str = ""
    """Code that is run before, and not counted."""
    limit_s: float | None = None
    """The most CPU seconds, without those of `first` and of Python's start."""
    never: tuple[str, ...] = ()


_NETWORKS = ("torch", "transformers", "diffusers")
KINDS: Mapping[str, Kind] = {
    "command line": Kind("import sdp.cli", never=(*_NETWORKS, "ray", "pyarrow", "numpy", "pydantic")),
    "encoder": Kind(
        _ENCODER, limit_s=6.0, never=("torch._dynamo", "transformers", "peft", "accelerate", "sympy", "torchvision")
    ),
    "transform": Kind(_TRANSFORM, limit_s=0.4, never=(*_NETWORKS, "ray")),
    "desk, without Ray": Kind("import sdp.runners.desk", "import ray", limit_s=0.4, never=_NETWORKS),
    "painter": Kind(_PAINTER),
    **{
        f"driver of {job}": Kind(f"import sdp.{job}.job", never=_NETWORKS)
        for job in ("process", "download", "generate", "evaluate")
    },
    "driver of train": Kind("import sdp.train.job, sdp.train.launch", never=_NETWORKS),
    "Ray Train's controller": Kind("import sdp.train.group, sdp.ray.internals", "import ray.train", never=_NETWORKS),
}


def run(kind: Kind) -> tuple[float, int, list[str]]:
    """Start a process; return its CPU seconds, its modules, and the packages that it loaded though it must not."""
    code = _MEASURE.format(code=kind.code, first=kind.first, never=kind.never)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind.code}\n{done.stderr}")
    seconds, modules, *packages = done.stdout.partition("measured:")[2].split()
    return float(seconds), int(modules), packages


def main() -> int:
    """Start each kind in turns; print the medians, and return 1 if one exceeds its limit or loads what it must not."""
    names = sized(tuple(KINDS), ("transform", "painter"))  # tests/integration/test_process_imports.py runs the others
    taken: dict[str, list[tuple[float, int, list[str]]]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            taken[name].append(run(KINDS[name]))
    rows, met = [], True
    for name in names:
        kind = KINDS[name]
        seconds = statistics.median(seconds for seconds, _, _ in taken[name])
        _, modules, packages = taken[name][-1]
        fast = kind.limit_s is None or seconds <= kind.limit_s
        met = met and fast and not packages
        limit = "" if kind.limit_s is None else f"{kind.limit_s:g} s{'' if fast else ', EXCEEDED'}"
        rows.append((name, f"{seconds:.2f} s", f"{modules:,}", limit, ", ".join(packages)))
    print(f"medians of {ROUNDS} processes (load {os.getloadavg()[0]:.1f})")
    print(table(rows, ("process", "CPU", "modules", "at most", "loads what it must not")))
    return exit_status(met)


if __name__ == "__main__":
    sys.exit(main())
