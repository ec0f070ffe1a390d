"""Which piece goes next, and that nothing is lost or done twice whatever dies."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdp.datasets.units import Unit, Work
from sdp.runners.units import OpenUnits
from sdp.sources.groups import RowGroup
from sdp.sources.pieces import Piece

Row = tuple[int, int]
"""The stand-in for a piece: (unit, position)."""


def work(number: int) -> Work:
    return Work(Unit(number, number * 100, number * 100 + 100))


def pieces_of(unit: Work, sizes: list[int]) -> list[Piece]:
    group = RowGroup("file", 0, max(sum(sizes), 1), 0)
    pieces, skip = [], 0
    for size in sizes:
        pieces.append(Piece(unit, 0, (group,), skip, size))
        skip += size
    return pieces


def units_of(sizes: list[list[int]]) -> OpenUnits:
    def planned() -> Iterator[tuple[Work, list[Piece]]]:
        for number, size in enumerate(sizes):
            yield work(number), pieces_of(work(number), size)

    return OpenUnits(planned())


def rows_in(piece: Piece) -> list[Row]:
    return [(piece.work.unit.number, row) for row in range(piece.skip, piece.skip + piece.take)]


def gather(units: OpenUnits, piece: Piece | None, rows: Any) -> None:
    assert piece is not None
    units.gather(piece, rows)


def test_a_unit_is_written_when_all_its_pieces_are_there_and_in_their_order() -> None:
    units = units_of([[5, 5, 5]])
    first, second, third = (units.next_piece() for _ in range(3))
    for piece, name in ((third, "C"), (first, "A"), (second, "B")):
        assert units.next_complete() is None
        gather(units, piece, name)
    assert units.next_complete() == (work(0), ["A", "B", "C"])
    assert not units.finished
    del units.open[work(0)]
    assert units.next_piece() is None
    assert units.finished


def test_a_unit_without_rows_is_written_all_the_same() -> None:
    units = units_of([[], [3], []])
    piece = units.next_piece()
    assert units.next_complete() == (work(0), [])
    assert units.next_complete() is None
    gather(units, piece, "X")
    assert units.next_complete() == (work(1), ["X"])
    assert units.next_piece() is None
    assert units.next_complete() == (work(2), [])
    units.open.clear()
    assert units.finished


def test_units_that_cannot_be_written_hold_up_new_ones() -> None:
    units = units_of([[1]] * 50)
    for _ in range(50):
        piece = units.next_piece()
        if piece is None:
            break
        gather(units, piece, "rows")
    else:
        pytest.fail("units piled up without end")
    assert not units.finished


def test_a_piece_that_kills_is_cut_until_the_row_that_kills_is_alone() -> None:
    killer = (0, 37)
    units = units_of([[100]])
    cuts, alone = 0, []
    while (piece := units.next_piece()) is not None:
        if killer in rows_in(piece) and piece.take > 1:
            cuts += 1
            units.cut(piece)
        else:
            alone += rows_in(piece) if killer in rows_in(piece) else []
            units.gather(piece, rows_in(piece))  # type: ignore[arg-type]  # stands for a reference
    assert alone == [killer]
    complete = units.next_complete()
    assert complete is not None
    assert [row for rows in complete[1] for row in rows] == [(0, n) for n in range(100)]  # type: ignore[attr-defined]
    assert cuts == 2, "cut in roots, not halves: each death costs a worker"


@settings(max_examples=120)
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
    killers=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=3),
)
def test_each_row_is_written_once_whatever_dies(sizes: list[list[int]], seed: int, killers: set[Row]) -> None:
    draw = random.Random(seed)
    units = units_of(sizes)
    under_way: list[Piece] = []
    writing: dict[Work, list[Any]] = {}
    written: list[Row] = []
    for _ in range(20_000):
        while (piece := units.next_piece()) is not None:
            under_way.append(piece)
        while (complete := units.next_complete()) is not None:
            assert complete[0] not in writing
            writing[complete[0]] = complete[1]
        if units.finished:
            break
        luck = draw.random()
        if under_way and (not writing or draw.random() < 0.7):
            piece = under_way.pop(draw.randrange(len(under_way)))
            if killers & set(rows_in(piece)) and piece.take > 1:
                units.cut(piece)
            else:
                units.gather(piece, rows_in(piece))  # type: ignore[arg-type]  # stands for a reference
        else:
            unit = draw.choice(list(writing))
            rows = writing.pop(unit)
            if luck < 0.2:
                units.restart(unit)
            else:
                written += [row for chunk in rows for row in chunk]
                del units.open[unit]
    assert units.finished
    assert Counter(written) == Counter((n, row) for n, size in enumerate(sizes) for row in range(sum(size)))
