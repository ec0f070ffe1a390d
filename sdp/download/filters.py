"""The filters on the source's columns, applied before anything is fetched."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sdp.config.download import FiltersConfig

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Score:
    """The bounds on one column of numbers."""

    reason: str
    column: str
    minimum: float | None = None
    maximum: float | None = None

    def mask(self, table: pa.Table, *, keep_unknown: bool) -> Mask:
        """Return the rows to leave out."""
        values = _numbers(table, self.column)
        excluded = np.zeros(len(values), bool)
        with np.errstate(invalid="ignore"):
            if self.minimum is not None:
                excluded |= values < self.minimum
            if self.maximum is not None:
                excluded |= values > self.maximum
        return excluded if keep_unknown else excluded | np.isnan(values)


def scores(filters: FiltersConfig) -> list[Score]:
    """Return the active filters on scores."""
    possible = (
        Score("similarity", filters.similarity_column, minimum=filters.min_similarity),
        Score("punsafe", filters.punsafe_column, maximum=filters.max_punsafe),
        Score("pwatermark", filters.pwatermark_column, maximum=filters.max_pwatermark),
        Score("aesthetic", filters.aesthetic_column, minimum=filters.min_aesthetic),
    )
    return [score for score in possible if score.minimum is not None or score.maximum is not None]


def columns(filters: FiltersConfig) -> list[str]:
    """Return the columns that the filters read."""
    sides = [filters.width_column, filters.height_column] if _filters_size(filters) else []
    return [name for name in [*sides, *(score.column for score in scores(filters))] if name is not None]


def masks(table: pa.Table, filters: FiltersConfig) -> Iterator[tuple[str, Mask]]:
    """Yield each filter's reason, and the rows that it leaves out."""
    if _filters_size(filters) and filters.width_column and filters.height_column:
        # A row without a size is filtered by its image instead.
        width, height = _numbers(table, filters.width_column), _numbers(table, filters.height_column)
        shorter, longer = np.fmin(width, height), np.fmax(width, height)
        with np.errstate(invalid="ignore"):
            if filters.min_side is not None:
                yield "min_size", shorter < filters.min_side
            if filters.max_aspect is not None:
                yield "aspect", longer > filters.max_aspect * shorter
    for score in scores(filters):
        yield score.reason, score.mask(table, keep_unknown=filters.keep_unknown)


def _filters_size(filters: FiltersConfig) -> bool:
    return filters.min_side is not None or filters.max_aspect is not None


def _numbers(table: pa.Table, column: str) -> npt.NDArray[np.float64]:
    """Return a column as numbers, NaN for any other value."""
    values = table[column]
    if not (pa.types.is_floating(values.type) or pa.types.is_integer(values.type) or pa.types.is_decimal(values.type)):
        values = pa.chunked_array([pa.nulls(len(values), pa.float64())]) if len(values) else values.cast(pa.float64())
    numbers = pc.fill_null(values.cast(pa.float64(), safe=False), float("nan"))
    return np.asarray(numbers.to_numpy(), dtype=np.float64)
