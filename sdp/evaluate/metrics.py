"""Distances between two sets of pictures by their features: FID, FID-infinity and KID. Numbers in, numbers out.

    frechet = Frechet(Moments.of(reference).gaussian())
    frechet.to(Moments.of(generated).gaussian())

All in float64: a Fréchet distance is a small difference of large sums.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.floating]
"""Features, one row for each picture."""
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Gaussian:
    """The normal distribution fitted to a set of features."""

    count: int
    mean: Doubles
    covariance: Doubles


class Moments:
    """Sums over batches of features, in the same memory for a set of any size."""

    def __init__(self) -> None:
        self.count = 0
        self._shift: Doubles | None = None
        self._sum = self._products = np.zeros(())

    @staticmethod
    def of(features: Features, batch: int = 4096) -> "Moments":
        """Return the moments of features in memory."""
        moments = Moments()
        for start in range(0, len(features), batch):
            moments.add(features[start : start + batch])
        return moments

    def add(self, features: Features) -> None:
        """Add a batch."""
        if not len(features):
            return
        rows = features.astype(np.float64)
        if self._shift is None:  # near the mean, so that no large sums are subtracted
            self._shift = rows.mean(axis=0)
        rows -= self._shift
        self.count += len(rows)
        self._sum = self._sum + rows.sum(axis=0)
        self._products = self._products + rows.T @ rows

    def gaussian(self) -> Gaussian:
        """Return the mean and the unbiased covariance."""
        if self.count < 2 or self._shift is None:
            raise ValueError(f"expected 2 pictures or more for a covariance, got {self.count}")
        mean = self._sum / self.count
        covariance = (self._products - self.count * np.outer(mean, mean)) / (self.count - 1)
        return Gaussian(self.count, self._shift + mean, covariance)


@dataclass(frozen=True)
class Frechet:
    """Fréchet distances from a reference."""

    reference: Gaussian

    @cached_property
    def _root(self) -> Doubles:
        """The covariance's symmetric square root."""
        values, vectors = np.linalg.eigh(self.reference.covariance)
        root: Doubles = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
        return root

    def to(self, other: Gaussian) -> float:
        """Return ‖m₁ − m₂‖² + Tr(C₁ + C₂ − 2·√(C₁C₂)).

        √(C₁C₂) is taken from the eigenvalues of √C₁·C₂·√C₁, which equal those of C₁C₂ and are real despite rounding.
        """
        difference = self.reference.mean - other.mean
        between = np.linalg.eigvalsh(self._root @ other.covariance @ self._root).clip(min=0)
        spread = np.trace(self.reference.covariance) + np.trace(other.covariance)
        return float(difference @ difference + spread - 2 * np.sqrt(between).sum())


@dataclass(frozen=True, slots=True)
class Extrapolated:
    """FID extrapolated to an infinite set, with the sizes and values behind it."""

    value: float
    sizes: tuple[int, ...]
    values: tuple[float, ...]


LEAST_FOR_INFINITY = 1000
"""Fewest pictures for an extrapolation."""


def frechet_infinity(features: Features, frechet: Frechet, points: int, seed: int) -> Extrapolated | None:
    """Extrapolate FID to infinitely many pictures (Chong and Forsyth, 1911.07023); None for too small a set.

    FID's bias falls as 1/N, so this fits a line through distances at several N and reads it at 1/N = 0. The
    reference's size is not extrapolated.
    """
    if points < 2 or len(features) < LEAST_FOR_INFINITY:
        return None
    draw = np.random.RandomState(seed)
    sizes = np.linspace(max(len(features) // 10, LEAST_FOR_INFINITY // 2), len(features), points).astype(int)
    values = [
        frechet.to(Moments.of(features[np.sort(draw.permutation(len(features))[:size])]).gaussian()) for size in sizes
    ]
    _, limit = np.polyfit(1 / sizes, values, 1)
    return Extrapolated(float(limit), tuple(sizes.tolist()), tuple(values))


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over subsets, and their standard deviation."""

    mean: float
    deviation: float
    subsets: int
    size: int


def kernel_distance(these: Features, those: Features, subsets: int, size: int, seed: int) -> Spread | None:
    """Return KID: the squared maximum mean discrepancy under (x·y/d + 1)³, over random subsets of both sets.

    None if a set has fewer than two pictures.
    """
    size = min(size, len(these), len(those))
    if subsets < 1 or size < 2:
        return None
    draw = np.random.RandomState(seed)
    values = []
    for _ in range(subsets):
        first = these[draw.choice(len(these), size, replace=False)]
        second = those[draw.choice(len(those), size, replace=False)]
        values.append(squared_discrepancy(first.astype(np.float64), second.astype(np.float64)))
    return Spread(float(np.mean(values)), float(np.std(values)), subsets, size)


def squared_discrepancy(these: Doubles, those: Doubles) -> float:
    """Return the unbiased estimate of the squared maximum mean discrepancy of two sets of equal size."""
    count = len(these)

    def kernel(a: Doubles, b: Doubles) -> Doubles:
        values: Doubles = (a @ b.T / a.shape[1] + 1) ** 3
        return values

    within = sum(k.sum() - np.trace(k) for k in (kernel(these, these), kernel(those, those)))
    return float(within / (count * (count - 1)) - 2 * kernel(these, those).mean())


def mean_and_error(values: NDArray[np.floating]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    doubles = values.astype(np.float64)
    error = doubles.std(ddof=1) / np.sqrt(len(doubles)) if len(doubles) > 1 else 0.0
    return float(doubles.mean()), float(error)


def moments_and_sample(batches: Iterable[Features], most: int, total: int, seed: int) -> tuple[Moments, Features]:
    """Return the moments of a set's features, and a uniform sample of at most `most` of its `total` rows."""
    in_sample = np.zeros(total, np.bool_)
    in_sample[np.random.RandomState(seed).permutation(total)[:most]] = True
    moments, seen = Moments(), 0
    rows: list[Features] = []
    for features in batches:
        moments.add(features)
        rows.append(features[in_sample[seen : seen + len(features)]])
        seen += len(features)
    return moments, np.concatenate(rows)
