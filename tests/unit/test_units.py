"""Units, extents and the names of parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp.datasets.units import Extent, Unit, Units, parse_part_name, part_name
from sdp.errors import DatasetError


def units_of(lengths: list[int], unit_rows: int) -> Units:
    extents, start = [], 0
    for length in lengths:
        extents.append(Extent(start, start + length))
        start += length
    return Units(extents, unit_rows)


def test_units_cover_an_extent_and_the_last_is_shorter() -> None:
    assert list(units_of([25], 10)) == [Unit(0, 0, 10), Unit(1, 10, 20), Unit(2, 20, 25)]


def test_a_source_that_grows_leaves_the_units_that_are_there_as_they_are() -> None:
    before, after = units_of([25], 10), units_of([25, 12], 10)
    assert list(after)[: len(before)] == list(before)
    assert list(after)[len(before) :] == [Unit(3, 25, 35), Unit(4, 35, 37)]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(1, 120))
def test_every_address_belongs_to_exactly_one_unit(lengths: list[int], unit_rows: int) -> None:
    units = units_of(lengths, unit_rows)
    covered = [row for unit in units for row in range(unit.start, unit.stop)]
    assert covered == list(range(sum(lengths)))
    numbers = units.of_rows(np.arange(sum(lengths), dtype=np.int64))
    assert numbers.tolist() == [unit.number for unit in units for _ in range(len(unit))]


def test_an_address_outside_the_dataset_is_named() -> None:
    with pytest.raises(DatasetError, match="row 25: no such address"):
        units_of([25], 10).of_rows(np.array([3, 25], dtype=np.int64))


@given(st.integers(0, 10**11), st.integers(0, 5000))
def test_a_part_is_found_again_by_its_name(unit: int, attempt: int) -> None:
    assert parse_part_name(part_name(unit, attempt)) == (unit, attempt)


@pytest.mark.parametrize(
    "path", ["parts/12.parquet", "parts/000000012.parquet.tmp", "000000012.parquet", "parts/x.parquet"]
)
def test_a_file_of_another_name_is_no_part(path: str) -> None:
    assert parse_part_name(path) is None
