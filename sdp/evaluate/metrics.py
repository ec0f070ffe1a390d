"""Distances between sets of pictures, from the features of each: FID, FID-infinity and KID. Numbers in, numbers out.

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
"""A row for each picture."""
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Gaussian:
    """The normal distribution that is fitted to a set of features."""

    count: int
    mean: Doubles
    covariance: Doubles


class Moments:
    """Sums over features that come in batches: a set of any size takes the same memory."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self._shift: Doubles | None = None
        self._sum = np.zeros(width)
        self._products = np.zeros((width, width))

    @staticmethod
    def of(features: Features, batch: int = 4096) -> "Moments":
        """Of features that are all there."""
        moments = Moments(features.shape[1])
        for start in range(0, len(features), batch):
            moments.add(features[start : start + batch])
        return moments

    def add(self, features: Features) -> None:
        """Take in a batch."""
        if not len(features):
            return
        rows = features.astype(np.float64)
        if self._shift is None:  # about where the mean is, so that no large sums are taken from each other
            self._shift = rows.mean(axis=0)
        rows -= self._shift
        self.count += len(rows)
        self._sum += rows.sum(axis=0)
        self._products += rows.T @ rows

    def gaussian(self) -> Gaussian:
        """The mean and the unbiased covariance."""
        if self.count < 2 or self._shift is None:
            raise ValueError(f"{self.count} pictures have no covariance")
        mean = self._sum / self.count
        covariance = (self._products - self.count * np.outer(mean, mean)) / (self.count - 1)
        return Gaussian(self.count, self._shift + mean, covariance)


@dataclass(frozen=True)
class Frechet:
    """Distances from one set."""

    reference: Gaussian

    @cached_property
    def _root(self) -> Doubles:
        """The covariance's square root, a symmetric one."""
        values, vectors = np.linalg.eigh(self.reference.covariance)
        root: Doubles = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
        return root

    def to(self, other: Gaussian) -> float:
        """‖m₁ − m₂‖² + Tr(C₁ + C₂ − 2·√(C₁C₂)), the last of these by the eigenvalues of √C₁·C₂·√C₁: the same as
        C₁C₂'s, and real whatever the rounding."""
        apart = self.reference.mean - other.mean
        between = np.linalg.eigvalsh(self._root @ other.covariance @ self._root).clip(min=0)
        spread = np.trace(self.reference.covariance) + np.trace(other.covariance)
        return float(apart @ apart + spread - 2 * np.sqrt(between).sum())


@dataclass(frozen=True, slots=True)
class Extrapolated:
    """FID for a set without end, and what it was extrapolated from."""

    value: float
    sizes: tuple[int, ...]
    values: tuple[float, ...]


LEAST_FOR_INFINITY = 1000
"""Pictures below which an extrapolation says nothing."""


def frechet_infinity(features: Features, frechet: Frechet, points: int, seed: int) -> Extrapolated | None:
    """FID's bias falls with the number of pictures as 1/N: a line through distances at several N, at 1/N = 0.

    (Chong and Forsyth, 1911.07023.) None of too small a set. The reference's own size is not extrapolated.
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
    """A mean over subsets, and how far they lie apart."""

    mean: float
    deviation: float
    subsets: int
    size: int


def kernel_distance(these: Features, those: Features, subsets: int, size: int, seed: int) -> Spread | None:
    """KID: the squared maximum mean discrepancy under (x·y/d + 1)³, over random subsets of both sets.

    None where no subset of two pictures can be had.
    """
    size = min(size, len(these), len(those))
    if subsets < 1 or size < 2:
        return None
    draw = np.random.RandomState(seed)
    values = []
    for _ in range(subsets):
        ours = these[draw.choice(len(these), size, replace=False)]
        theirs = those[draw.choice(len(those), size, replace=False)]
        values.append(squared_discrepancy(ours.astype(np.float64), theirs.astype(np.float64)))
    return Spread(float(np.mean(values)), float(np.std(values)), subsets, size)


def squared_discrepancy(these: Doubles, those: Doubles) -> float:
    """The unbiased estimate of the squared maximum mean discrepancy of two sets of the same size."""
    count = len(these)

    def kernel(a: Doubles, b: Doubles) -> Doubles:
        values: Doubles = (a @ b.T / a.shape[1] + 1) ** 3
        return values

    within = sum(k.sum() - np.trace(k) for k in (kernel(these, these), kernel(those, those)))
    return float(within / (count * (count - 1)) - 2 * kernel(these, those).mean())


def mean_and_error(values: NDArray[np.floating]) -> tuple[float, float]:
    """The mean, and its standard error."""
    doubles = values.astype(np.float64)
    error = doubles.std(ddof=1) / np.sqrt(len(doubles)) if len(doubles) > 1 else 0.0
    return float(doubles.mean()), float(error)


@dataclass
class Held:
    """Features as they come by: the moments of all, and so many rows of them, drawn evenly, to take subsets of."""

    most: int
    total: int
    """Rows that there will be."""
    seed: int
    moments: Moments | None = None

    def __post_init__(self) -> None:
        chosen = np.random.RandomState(self.seed).permutation(self.total)[: self.most]
        self._wanted = np.zeros(self.total, np.bool_)
        self._wanted[chosen] = True
        self._seen = 0
        self._rows: list[Features] = []

    def take(self, batches: Iterable[Features]) -> "Held":
        for features in batches:
            self.moments = self.moments or Moments(features.shape[1])
            self.moments.add(features)
            wanted = self._wanted[self._seen : self._seen + len(features)]
            self._rows.append(features[wanted])
            self._seen += len(features)
        return self

    @property
    def rows(self) -> Features:
        """Those that were kept."""
        return np.concatenate(self._rows)
