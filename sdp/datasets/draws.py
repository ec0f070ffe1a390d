"""The random numbers of a row: its crop, its choice of a caption, its noise, whether it is held out.

Random numbers depend on (seed, row) and nothing else; online, each epoch has a seed of its own. Philox is a bijection
of a counter under a key, so a row's numbers can be drawn anywhere and in any order, and no two rows share any. They are
drawn on the host, so that the bits are the same whatever the device, the number of devices or the batch.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CROP = 1
"""The counter's word for crops; noise uses its resolution instead, so the two never share numbers."""
CAPTION = 2
"""The counter's word for the choice of a caption."""
LINE = 3
"""The counter's word for the choice of a line of it."""


def place(seed: int, row: int) -> tuple[float, float]:
    """Return a random crop's position, across and down: 0 is one edge of the image, 1 the other."""
    across, down = _generator(seed, row, CROP).random(2)
    return float(across), float(down)


def draw(seed: int, row: int, weights: Sequence[float], purpose: int = CAPTION) -> int:
    """Return the number that a row draws by weight; a weight of 0 is drawn only where all are 0, and then the first."""
    stops = np.cumsum(weights)
    if not stops[-1]:
        return 0
    return int(np.searchsorted(stops, _generator(seed, row, purpose).random() * stops[-1], side="right"))


def noise(seed: int, rows: NDArray[np.int64], shape: tuple[int, ...], *, resolution: int) -> NDArray[np.float32]:
    """Return standard normal numbers of a shape for each row."""
    out = np.empty((len(rows), *shape), np.float32)
    for number, row in enumerate(rows.tolist()):
        _generator(seed, row, resolution).standard_normal(dtype=np.float32, out=out[number])
    return out


def held_out(rows: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Return a mask of the addresses that are held out, by a hash (splitmix64) that is the same in every run and
    epoch."""
    with np.errstate(over="ignore"):
        mixed = rows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2**-53 < share


def _generator(seed: int, row: int, purpose: int) -> np.random.Generator:
    key = np.array([seed % 2**64, row], np.uint64)  # a list with a number above 2**63 would be rounded, as floats
    return np.random.Generator(np.random.Philox(counter=[0, 0, 0, purpose], key=key))
