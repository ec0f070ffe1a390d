"""Bounds on columns of numbers, by which rows are left out."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sdp.config.shared import Bounds
from sdp.datasets.columns import kind_of
from sdp.datasets.outcomes import SCORE

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Score:
    """A bound on one column of numbers."""

    reason: str
    column: str
    minimum: float | None = None
    maximum: float | None = None
    keep_unknown: bool = False
    """True if rows without a number are kept."""

    def mask(self, table: pa.Table) -> Mask:
        """Return the rows to leave out."""
        values = numbers(table, self.column)
        low = -np.inf if self.minimum is None else self.minimum
        high = np.inf if self.maximum is None else self.maximum
        excluded = (values < low) | (values > high)  # False where it is NaN
        return excluded if self.keep_unknown else excluded | np.isnan(values)


def scores_of(filters: Mapping[str, Bounds]) -> list[Score]:
    """Return the bounds of a configuration."""
    return [
        Score(f"{SCORE}:{column}", column, bounds.min, bounds.max, bounds.keep_unknown)
        for column, bounds in sorted(filters.items())
    ]


def numbers(table: pa.Table, column: str) -> npt.NDArray[np.float64]:
    """Return a column as numbers, NaN for any other value."""
    values = table[column]
    if kind_of(values.type) != "numbers":
        return np.full(len(values), np.nan)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    cells = pc.fill_null(values.cast(pa.float64(), safe=False), float("nan"))
    return np.asarray(cells.to_numpy(), dtype=np.float64)
