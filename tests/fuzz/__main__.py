"""Read damaged images, sources, datasets and checkpoints; count the results: `make fuzz IMAGES=10000 FILES=500 SEED=1`.

An image goes through the sandbox as in a job. The result must be pixels of the requested shape or one of the account's
reasons, and its decoder must survive. A damaged dataset or checkpoint must be read, or refused in one line. Images that
break a promise are kept in .fuzz; each becomes a test. Then the growth of cost is measured at full size
(`tests/growth`).
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sdp.console import Progress, counted, say, table
from sdp.encode.recipe import Recipe
from sdp.encode.transform import SandboxedCrops, bucket_shapes
from sdp.imaging import RowError
from tests.fuzz.files import damaged_files
from tests.fuzz.images import Seed, mutate, seeds
from tests.growth import cases, problem
from tests.programs import peak_bytes
from tests.sandbox_kit import decoders

KEPT = Path(".fuzz")
SIDE = 64
SLOWEST_S = 10.0
"""More than any image of these sizes may take, under load too."""
_WORKERS = 2
_BATCH = 50
UNEXPECTED = ("crashed", "internal")
"""Reasons that no damaged file may have: its decoder died, or raised an unexpected exception."""


@dataclass
class Result:
    """The outcomes of some images."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Images by format and reason ("pixels" for a decoded one)."""
    broken: dict[str, bytes] = field(default_factory=dict)
    """Images that broke a promise, by a line that says how."""
    slowest_s: float = 0.0
    peak_bytes: int = 0
    """The most memory that a decoder held."""


def run(count: int, seed: int, update: Callable[[int], None] = lambda _: None) -> Result:
    """Mutate and decode images; `update` is called with the number that is done."""
    files, result = seeds(), Result()
    recipe = Recipe(resolutions=(SIDE,), crop="buckets", seed=seed, max_upscale=1000.0)
    shapes = {(tall, wide, 3) for wide, tall in bucket_shapes(SIDE)}

    def decode(numbers: Sequence[int], crops: SandboxedCrops) -> None:
        for number in numbers:
            draw = random.Random(f"{seed} {number}")
            file = files[number % len(files)]
            check(file, mutate(file, draw, files), number, crops, shapes, result)

    pools = [SandboxedCrops(recipe) for _ in range(_WORKERS)]
    with ThreadPoolExecutor(_WORKERS) as executor:
        for first in range(0, count, _BATCH * _WORKERS):
            batches = [range(first + n, min(count, first + _BATCH * _WORKERS), _WORKERS) for n in range(_WORKERS)]
            list(executor.map(decode, batches, pools))
            result.peak_bytes = max(result.peak_bytes, *map(peak_bytes, decoders()))
            update(min(count, first + _BATCH * _WORKERS))
    return result


def check(
    file: Seed, data: bytes, number: int, crops: SandboxedCrops, shapes: set[tuple[int, ...]], result: Result
) -> None:
    """Decode one image, and compare the result with the promises."""
    began = time.monotonic()
    reason, detail = "pixels", ""
    try:
        _, pixels = crops(data, number)
    except RowError as error:
        reason, detail = error.reason, error.detail
    else:
        if (shape := pixels[SIDE].shape) not in shapes:
            reason, detail = "wrong shape", str(shape)
    seconds = time.monotonic() - began
    result.outcomes[file.name, reason] += 1
    result.slowest_s = max(result.slowest_s, seconds)
    if reason in (*UNEXPECTED, "wrong shape") or seconds > SLOWEST_S:
        result.broken[f"{number} {file.name}: {reason} ({detail}) in {seconds:.1f} s"] = data


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a table, and keep what broke."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--files", type=int, default=500, help="readings of damaged sources, datasets and checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    broken = [*_fuzz_images(options.images, options.seed), *_fuzz_files(options.files, options.seed), *_growth()]
    for line in broken:
        say(f"broken: {line}")
    return 1 if broken else 0


def _fuzz_images(count: int, seed: int) -> list[str]:
    began = time.monotonic()
    with Progress("fuzz") as progress:
        result = run(count, seed, lambda done: progress.update(f"{done:,} of {counted(count, 'image')}"))
    names = sorted({name for name, _ in result.outcomes})
    reasons = [reason for reason, _ in Counter({r: n for (_, r), n in result.outcomes.items()}).most_common()]
    rows = [(name, *(str(result.outcomes[name, reason]) for reason in reasons)) for name in names]
    say(table(rows, ("file", *reasons)))
    KEPT.mkdir(exist_ok=True)
    for line, data in result.broken.items():
        (KEPT / f"{seed}-{line.split()[0]}").write_bytes(data)
    say(
        f"{counted(count, 'image')} in {time.monotonic() - began:.0f} s, the slowest {result.slowest_s:.1f} s, "
        f"a decoder's peak {result.peak_bytes / 1e6:.0f} MB: {len(result.broken)} broke a promise"
    )
    return list(result.broken)


def _fuzz_files(count: int, seed: int) -> list[str]:
    began, verdicts, broken = time.monotonic(), Counter[tuple[str, str]](), list[str]()
    with tempfile.TemporaryDirectory(prefix="sdp-fuzz-") as folder, Progress("fuzz") as progress:
        for number, reading in enumerate(damaged_files(Path(folder), count, seed), 1):
            verdicts[reading.reader, reading.verdict] += 1
            broken += [str(reading)] if reading.broken else []
            progress.update(f"{number:,} of {counted(count, 'damaged file')}")
    say(table([(*which, str(count)) for which, count in sorted(verdicts.items())], ("reader", "result", "files")))
    say(f"{counted(count, 'damaged file')} in {time.monotonic() - began:.0f} s: {len(broken)} broke a promise")
    return broken


def _growth() -> list[str]:
    with Progress("growth") as progress:
        broken = []
        for case in cases():
            progress.update(case.name)
            broken += filter(None, [problem(case, case.full * case.size)])
    say(f"{counted(len(cases()), 'entry point')} at full size: {len(broken)} grew faster than the input")
    return broken


if __name__ == "__main__":
    sys.exit(main())
