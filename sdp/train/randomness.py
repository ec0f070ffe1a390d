"""Random numbers of rows, which depend on (seed, phase, epoch, row) and nothing else.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"): a bijection of a counter
under a key, so any worker can compute any number of any row, in any order, for a whole batch at once on its device. The
key is the seed with the phase. The counter's four words are

    0: the block of four numbers, with their purpose (a `Purpose`) in the top byte
    1, 2: the row's address, low and high word
    3: the epoch

so no two rows, epochs or purposes share a number. Timesteps and dropout use integers only and are the same on every
device; noise is Box-Muller in fp32 and the same to within rounding.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_CACHED = 65_536


class Purpose(IntEnum):
    """The use of random numbers. Never renumber, or a resumed run draws others."""

    NOISE = 1
    TIMESTEP = 2
    CAPTION_DROPOUT = 3
    OFFSET_NOISE = 4
    VAE = 5
    TOKENS = 6


def seed_of_phase(seed: int, phase: int) -> int:
    """Return a phase's own seed, so that the second phase does not repeat the first."""
    return seed + (phase << 32)


@dataclass(frozen=True, slots=True)
class RowRandom:
    """The random numbers of some rows."""

    seed: int
    epochs: Tensor
    """The epoch of each row, int64."""
    rows: Tensor
    """Addresses, int64, on the device that computes."""

    def normal(self, purpose: Purpose, *shape: int) -> Tensor:
        """Return standard normal numbers, fp32, of this shape for each row."""
        count = math.prod(shape)
        # A CPU takes a third of the time if the numbers stay in its cache.
        rows_per_piece = max(1, _CACHED // count) if self.rows.device.type == "cpu" else max(1, len(self.rows))
        pieces = zip(torch.split(self.epochs, rows_per_piece), torch.split(self.rows, rows_per_piece), strict=True)
        parts = [RowRandom(self.seed, epochs, rows)._normal(purpose, count) for epochs, rows in pieces]
        return torch.cat(parts).view(len(self.rows), *shape)

    def _normal(self, purpose: Purpose, count: int) -> Tensor:
        words = self._words(purpose, 2 * -(-count // 2))
        # 24 bits each are exact in fp32, and 0.5 keeps the logarithm away from log(0).
        radius = (words[:, 0::2] >> 8).float().add_(0.5).mul_(2**-24).log_().mul_(-2).sqrt_()
        angle = (words[:, 1::2] >> 8).float().mul_(2 * math.pi * 2**-24)
        return torch.cat((radius * angle.cos(), radius * angle.sin()), dim=1)[:, :count]

    def integers(self, purpose: Purpose, high: int) -> Tensor:
        """Return for each row a number in [0, high), uniform to within high / 2³²."""
        return (self._words(purpose, 1)[:, 0] * high) >> 32

    def chance(self, purpose: Purpose, probability: float) -> Tensor:
        """Return for each row whether an event of this probability happens."""
        return self._words(purpose, 1)[:, 0] < round(probability * 2**32)

    def some(self, purpose: Purpose, count: int, high: int) -> Tensor:
        """Return for each row `count` different numbers in [0, high), uniformly chosen and ascending."""
        # The number itself breaks ties, so that all devices choose the same.
        keys = self._words(purpose, high) * high + torch.arange(high, device=self.rows.device)
        return keys.topk(count, largest=False).indices.sort().values

    def _words(self, purpose: Purpose, count: int) -> Tensor:
        """Return `count` 32-bit words for each row, as int64."""
        blocks = torch.arange(-(-count // 4), device=self.rows.device) | (int(purpose) << 24)
        rows = self.rows.unsqueeze(1)
        shape = (len(rows), len(blocks))
        counter = (
            blocks.expand(shape),
            (rows & _WORD).expand(shape),
            ((rows >> 32) & _WORD).expand(shape),
            (self.epochs.unsqueeze(1) & _WORD).expand(shape),
        )
        words = philox(counter, (self.seed & _WORD, (self.seed >> 32) & _WORD))
        return torch.stack(words, dim=2).flatten(1)[:, :count]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Compute Philox4x32-10 of many counters under one key; words are int64 tensors that hold 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product's low 64 bits are correct whatever the sign, and each word is masked before it is multiplied.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) ^ c1 ^ k0) & _WORD, p1
        c2, c3 = ((p0 >> 32) ^ c3 ^ k1) & _WORD, p0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD
