"""Random numbers that belong to a row: drawn from (seed, epoch, row, variant) and nothing else.

Philox is a bijection of a counter under a key, so each row's numbers can be had anywhere, in any order, and no two
rows share any. They are drawn on the host: the same bits come whatever the device, its count, or the batch.
"""

import numpy as np
from numpy.typing import NDArray

CROP = 1
"""What numbers are for: the word of the counter that keeps crops and noise apart. Noise takes its resolution."""


def place(seed: int, row: int, variant: int = 0, epoch: int = 0) -> tuple[float, float]:
    """Where a crop lies in the room that it has: two numbers in [0, 1)."""
    across, down = _generator(seed, epoch, row, variant, CROP).random(2)
    return float(across), float(down)


def noise(
    seed: int,
    rows: NDArray[np.int64],
    variants: NDArray[np.int16],
    shape: tuple[int, ...],
    *,
    resolution: int,
    epoch: int = 0,
) -> NDArray[np.float32]:
    """Standard normal numbers of a shape for each (row, variant)."""
    out = np.empty((len(rows), *shape), np.float32)
    for number, (row, variant) in enumerate(zip(rows.tolist(), variants.tolist(), strict=True)):
        _generator(seed, epoch, row, variant, resolution).standard_normal(dtype=np.float32, out=out[number])
    return out


def _generator(seed: int, epoch: int, row: int, variant: int, purpose: int) -> np.random.Generator:
    key = np.array([seed % 2**64, row], np.uint64)  # a list with a number above 2**63 would be rounded, as floats
    return np.random.Generator(np.random.Philox(counter=[0, epoch, variant, purpose], key=key))
