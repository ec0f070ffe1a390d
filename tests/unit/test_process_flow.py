"""What is started next, and that nothing is lost or done twice whatever dies."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdp.datasets.units import Unit, Work
from sdp.encode.reading import Piece, RowGroup
from sdp.process.flow import TRIES, Flow, Room, Tuner

Row = tuple[int, int]
"""(unit, position): what a piece stands for here."""


def work(number: int) -> Work:
    return Work(Unit(number, number * 100, number * 100 + 100))


def pieces_of(unit: Work, sizes: list[int]) -> list[Piece]:
    group = RowGroup("file", 0, max(sum(sizes), 1), 0)
    pieces, skip = [], 0
    for size in sizes:
        pieces.append(Piece(unit, 0, (group,), skip, size))
        skip += size
    return pieces


def planned(sizes: list[list[int]]) -> Iterator[tuple[Work, list[Piece]]]:
    return ((work(number), pieces_of(work(number), each)) for number, each in enumerate(sizes))


def room(transforms: int = 4, ready: int = 4, chunks: int = 12, writes: int = 2) -> Room:
    return Room(transforms, ready, chunks, writes)


def rows_in(piece: Piece) -> list[Row]:
    return [(piece.work.unit.number, row) for row in range(piece.skip, piece.skip + piece.take)]


def test_a_unit_is_written_when_all_its_pieces_are_there_and_in_their_order() -> None:
    flow: Flow[str, str] = Flow(planned([[5, 5, 5]]), room())
    first, second, third = (flow.start_transform() for _ in range(3))
    for piece, name in ((third, "c"), (first, "a"), (second, "b")):
        assert piece is not None
        assert flow.start_write() is None
        flow.transformed(piece, name)
        taken = flow.start_encode()
        assert taken == (piece, name)
        flow.encoded(piece, name.upper())
    assert flow.start_write() == (work(0), ["A", "B", "C"])
    assert not flow.finished
    flow.written(work(0))
    assert flow.start_transform() is None
    assert flow.finished


def test_a_unit_without_rows_is_written_all_the_same() -> None:
    flow: Flow[str, str] = Flow(planned([[], [3], []]), room())
    piece = flow.start_transform()
    assert piece is not None
    assert flow.start_write() == (work(0), [])
    flow.transformed(piece, "x")
    assert flow.start_encode()
    flow.encoded(piece, "X")
    flow.written(work(0))
    assert flow.start_write() == (work(1), ["X"])
    flow.written(work(1))
    assert flow.start_transform() is None
    assert flow.start_write() == (work(2), [])
    flow.written(work(2))
    assert flow.finished


def test_transforms_stop_when_pieces_wait_for_encoders() -> None:
    flow: Flow[Piece, Piece] = Flow(planned([[1] * 50]), room(transforms=3, ready=2))
    started = [piece for _ in range(10) if (piece := flow.start_transform())]
    assert len(started) == 3
    for piece in started:
        flow.transformed(piece, piece)
    assert flow.waiting == 3
    assert flow.start_transform() is None
    assert flow.start_encode()
    assert flow.start_encode()
    assert flow.start_transform() is not None


def test_no_more_is_under_way_than_memory_has_room_for() -> None:
    flow: Flow[Piece, Piece] = Flow(planned([[1] * 50]), room(transforms=10, ready=10, chunks=4))
    started = [piece for _ in range(10) if (piece := flow.start_transform())]
    assert len(started) == 4
    flow.transformed(started[0], started[0])
    assert flow.start_encode()
    assert flow.start_transform() is None, "a piece that is being encoded takes its room still"
    flow.encoded(started[0], started[0])
    assert flow.start_transform() is not None


def test_units_that_cannot_be_written_off_hold_up_new_ones() -> None:
    flow: Flow[Piece, Piece] = Flow(planned([[1]] * 50), room(writes=2))
    for _ in range(200):
        piece = flow.start_transform()
        if piece is None:
            break
        flow.transformed(piece, piece)
        assert flow.start_encode()
        flow.encoded(piece, piece)
        flow.start_write()
    else:
        pytest.fail("units piled up without end")


def test_a_piece_that_kills_is_cut_until_the_row_that_kills_is_alone() -> None:
    killer = (0, 37)
    flow: Flow[Piece, list[Row]] = Flow(planned([[100]]), room())
    deaths, given_up = 0, []
    while (piece := flow.start_transform()) is not None:
        if killer in rows_in(piece):
            deaths += 1
            lost = flow.transform_died(piece)
            if lost is not None:
                given_up += rows_in(lost)
                flow.given_up(lost, [])
            continue
        flow.transformed(piece, piece)
        assert flow.start_encode()
        flow.encoded(piece, rows_in(piece))
    assert given_up == [killer]
    written = flow.start_write()
    assert written is not None
    assert [row for rows in written[1] for row in rows] == [(0, n) for n in range(100) if n != 37]
    assert deaths <= 4 * TRIES, "cut in roots, not halves: each death costs a worker"


def test_one_death_is_nobodys_fault() -> None:
    flow: Flow[Piece, Piece] = Flow(planned([[1]]), room())
    piece = flow.start_transform()
    assert piece is not None
    assert flow.transform_died(piece) is None
    assert flow.start_transform() == piece
    assert flow.transform_died(piece) == piece


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
    killers=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=3),
)
def test_whatever_dies_each_row_is_written_once(sizes: list[list[int]], seed: int, killers: set[Row]) -> None:
    draw = random.Random(seed)
    flow: Flow[Piece, list[Row]] = Flow(planned(sizes), room())
    transforming: list[Piece] = []
    encoding: list[Piece] = []
    writing: dict[Work, list[list[Row]]] = {}
    written: list[Row] = []
    given_up: list[Row] = []

    def bury(piece: Piece | None) -> None:
        if piece is not None:
            given_up.extend(rows_in(piece))
            flow.given_up(piece, [])

    for _ in range(20_000):
        while (piece := flow.start_transform()) is not None:
            transforming.append(piece)
        if (taken := flow.start_encode()) is not None:
            encoding.append(taken[0])
        if (complete := flow.start_write()) is not None:
            assert complete[0] not in writing
            writing[complete[0]] = complete[1]
        if flow.finished:
            break
        kind = draw.choice([name for name, some in _under_way(transforming, encoding, writing) if some])
        luck = draw.random()
        if kind == "transform":
            piece = transforming.pop(draw.randrange(len(transforming)))
            if killers & set(rows_in(piece)):
                bury(flow.transform_died(piece))
            elif luck < 0.05:
                flow.not_transformed(piece)
            else:
                flow.transformed(piece, piece)
        elif kind == "encode":
            piece = encoding.pop(draw.randrange(len(encoding)))
            if luck < 0.05:
                flow.not_encoded(piece, piece)
            elif luck < 0.1:
                flow.lost(piece)
            else:
                flow.encoded(piece, rows_in(piece))
        else:
            unit = draw.choice(list(writing))
            rows = writing.pop(unit)
            if luck < 0.1:
                flow.not_written(unit)
            elif luck < 0.2:
                flow.rows_lost(unit)
                given_up = [row for row in given_up if row[0] != unit.unit.number]
            else:
                written += [row for some in rows for row in some]
                flow.written(unit)
    assert flow.finished
    expected = Counter((number, row) for number, each in enumerate(sizes) for row in range(sum(each)))
    assert Counter(written) + Counter(given_up) == expected
    assert set(given_up) == killers & set(expected)


def _under_way(*some: object) -> Iterator[tuple[str, object]]:
    return zip(("transform", "encode", "write"), some, strict=True)


# --- how many transforms ---------------------------------------------------------------------------------------------


def tuned(transform_s: float, encode_s: float, most: int | None = 100) -> Tuner:
    tuner = Tuner(most=most, first=3)
    tuner.transformed(transform_s)
    tuner.encoded(encode_s)
    return tuner


def test_before_anything_is_measured_the_first_guess_holds() -> None:
    assert Tuner(most=100, first=3).transforms(encoders=5, starved=True) == 3


def test_transforms_follow_the_encoders_pace_with_something_to_spare() -> None:
    assert tuned(4.0, 1.0).transforms(encoders=2, starved=False) == 11
    assert tuned(4.0, 1.0).transforms(encoders=4, starved=False) == 21
    assert tuned(0.1, 1.0).transforms(encoders=1, starved=False) == 2


def test_starving_encoders_get_more_but_never_more_than_there_may_be() -> None:
    assert tuned(4.0, 1.0).transforms(encoders=2, starved=True) == 22
    assert tuned(4.0, 1.0, most=15).transforms(encoders=2, starved=True) == 15


def test_without_a_limit_encoders_get_what_they_need_however_few_cpus_there_are_yet() -> None:
    assert tuned(4.0, 1.0, most=None).transforms(encoders=100, starved=False) == 501
