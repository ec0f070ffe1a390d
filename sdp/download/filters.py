"""The filters on the source's columns, applied before anything is fetched."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from sdp.config.download import FiltersConfig
from sdp.datasets.scores import Mask, Score, numbers


def scores(filters: FiltersConfig) -> list[Score]:
    """Return the active filters on scores."""
    possible = (
        Score("similarity", filters.similarity_column, minimum=filters.min_similarity),
        Score("punsafe", filters.punsafe_column, maximum=filters.max_punsafe),
        Score("pwatermark", filters.pwatermark_column, maximum=filters.max_pwatermark),
        Score("aesthetic", filters.aesthetic_column, minimum=filters.min_aesthetic),
    )
    active = (score for score in possible if score.minimum is not None or score.maximum is not None)
    return [replace(score, keep_unknown=filters.keep_unknown) for score in active]


def columns(filters: FiltersConfig) -> list[str]:
    """Return the columns that the filters read."""
    sides = [filters.width_column, filters.height_column] if _filters_size(filters) else []
    return [name for name in [*sides, *(score.column for score in scores(filters))] if name is not None]


def masks(table: pa.Table, filters: FiltersConfig) -> Iterator[tuple[str, Mask]]:
    """Yield each filter's reason, and the rows that it leaves out."""
    if _filters_size(filters) and filters.width_column and filters.height_column:
        # A row without a size is filtered by its image instead.
        width, height = numbers(table, filters.width_column), numbers(table, filters.height_column)
        shorter, longer = np.fmin(width, height), np.fmax(width, height)
        with np.errstate(invalid="ignore"):
            if filters.min_side is not None:
                yield "min_size", shorter < filters.min_side
            if filters.max_aspect is not None:
                yield "aspect", longer > filters.max_aspect * shorter
    for score in scores(filters):
        yield score.reason, score.mask(table)


def _filters_size(filters: FiltersConfig) -> bool:
    return filters.min_side is not None or filters.max_aspect is not None
