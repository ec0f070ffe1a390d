"""Random numbers that belong to a row: drawn from (seed, phase, epoch, row) and nothing else.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): a bijection of a counter
under a key, so any number of any row can be computed anywhere, in any order, by any worker, for a whole batch at once
on the device where it is needed. The key is the seed with the phase. The counter's four words are

    0: the block of four numbers, its top byte what the numbers are for (a `Purpose`)
    1, 2: the row's address, low and high word
    3: the epoch

so no two rows, epochs or purposes ever share a number. Timesteps and dropout are integers compared with integers and
are the same on every device; noise is Box-Muller in fp32 and the same to within rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_CACHED = 65_536


class Purpose(IntEnum):
    """What random numbers are for. Never renumber: a resumed run would draw others."""

    NOISE = 1
    TIMESTEP = 2
    CAPTION_DROPOUT = 3
    OFFSET_NOISE = 4
    VAE = 5
    CAPTION = 7  # (6 was a crop's)


def seed_of_phase(seed: int, phase: int) -> int:
    """Return a seed for each phase of a training, so that a row's second phase does not repeat its first."""
    return seed + (phase << 32)


@dataclass(frozen=True, slots=True)
class RowRandom:
    """The random numbers of some rows (int64 addresses on the device that computes) in one epoch."""

    seed: int
    epoch: int | Tensor
    """One for all, or one of each row."""
    rows: Tensor

    def normal(self, purpose: Purpose, *shape: int) -> Tensor:
        """Standard normal numbers, fp32, of this shape for each row."""
        count = math.prod(shape)
        # A CPU takes a third of the time where what it works on stays in its cache.
        some = max(1, _CACHED // count) if self.rows.device.type == "cpu" else max(1, len(self.rows))
        pieces = torch.split(self.rows, some)
        epochs: Sequence[int | Tensor] = [self.epoch] * len(pieces)
        if isinstance(self.epoch, Tensor):
            epochs = torch.split(self.epoch, some)
        parts = [
            RowRandom(self.seed, epoch, rows)._normal(purpose, count)
            for epoch, rows in zip(epochs, pieces, strict=True)
        ]
        return torch.cat(parts).view(len(self.rows), *shape)

    def _normal(self, purpose: Purpose, count: int) -> Tensor:
        words = self._words(purpose, 2 * -(-count // 2))
        # 24 bits each: exact in fp32, and the radius stays away from log(0).
        radius = (words[:, 0::2] >> 8).float().add_(0.5).mul_(2**-24).log_().mul_(-2).sqrt_()
        angle = (words[:, 1::2] >> 8).float().mul_(2 * math.pi * 2**-24)
        return torch.cat((radius * angle.cos(), radius * angle.sin()), dim=1)[:, :count]

    def integers(self, purpose: Purpose, high: int) -> Tensor:
        """For each row a number in [0, high), each as likely as the other to within high / 2³²."""
        return (self._words(purpose, 1)[:, 0] * high) >> 32

    def chance(self, purpose: Purpose, probability: float) -> Tensor:
        """For each row whether an event of this probability happens."""
        return self._words(purpose, 1)[:, 0] < round(probability * 2**32)

    def _words(self, purpose: Purpose, count: int) -> Tensor:
        """`count` 32-bit words for each row, as int64."""
        blocks = torch.arange(-(-count // 4), device=self.rows.device) | (int(purpose) << 24)
        rows = self.rows.unsqueeze(1)
        shape = (len(rows), len(blocks))
        epochs = self.epoch.unsqueeze(1) if isinstance(self.epoch, Tensor) else torch.full_like(blocks, self.epoch)
        counter = (
            blocks.expand(shape),
            (rows & _WORD).expand(shape),
            ((rows >> 32) & _WORD).expand(shape),
            (epochs & _WORD).expand(shape),
        )
        words = philox(counter, (self.seed & _WORD, (self.seed >> 32) & _WORD))
        return torch.stack(words, dim=2).flatten(1)[:, :count]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of many counters under one key; words are int64 tensors that hold 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product's low 64 bits are right whatever the sign; the shift's sign bits are masked off.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ k0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ k1,
            p0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3
