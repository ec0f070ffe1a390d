"""What the pipeline relies on in Ray Data: blocks pass unmerged, each with its note; the two stages stay apart."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray

from sdp.encode.chunk import TransformStats
from sdp.encode.pipeline import Note, Pipeline, Placement, unpack
from sdp.errors import DatasetError

PIECES = 24


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield
    ray.shutdown()


@dataclass(frozen=True)
class Toy:
    """Stages whose results tell who made them."""

    breaks_at: int = -1

    def transform(self, item: int) -> tuple[tuple[int, int], TransformStats]:
        if item == self.breaks_at:
            raise DatasetError(f"item {item} is damaged")
        return (item, os.getpid()), TransformStats(items=1)

    def load(self) -> Any:
        return threading.get_ident

    def encode(self, encoder: Any, value: tuple[int, int]) -> tuple[int, int, int]:
        assert encoder()
        return (*value, os.getpid())


def placement(least: int = 1, most: int = 1) -> Placement:
    return Placement(least, most, None, 0.0, 1.0, 600.0, {}, None, "out")


def collect(pipeline: Pipeline, count: int) -> list[tuple[Note, Any]]:
    results: list[tuple[Note, Any]] = []
    deadline = time.monotonic() + 400
    while len(results) < count and time.monotonic() < deadline:
        pipeline.state()
        results += [(note, unpack(ray.get(ref))[1]) for note, ref in pipeline.results(0.5)]
    return results


def test_each_piece_comes_back_once_as_one_block_with_its_note() -> None:
    with Pipeline(Toy(), placement()) as pipeline:
        for number in range(PIECES):
            pipeline.feed(number, 100 + number)
        results = collect(pipeline, PIECES)
        state = pipeline.state()
    assert sorted(note.number for note, _ in results) == list(range(PIECES))
    assert all(value[0] == 100 + note.number for note, value in results)
    assert all(note.transformed.items == 1 and note.encoded_on for note, _ in results)
    assert (state.transformed_stats.items, state.encoders, state.deaths) == (PIECES, 1, 0)
    (encoder,) = {value[2] for _, value in results}
    assert encoder not in {value[1] for _, value in results}, "transforms and encoders are processes of their own"


def test_pieces_can_be_fed_because_of_what_has_come_back() -> None:
    with Pipeline(Toy(), placement()) as pipeline:
        for number in range(5):
            pipeline.feed(number, number)
            ((note, _),) = collect(pipeline, 1)
            assert note.number == number


def test_an_error_of_ours_comes_back_as_the_note_of_its_piece() -> None:
    with Pipeline(Toy(breaks_at=2), placement()) as pipeline:
        for number in range(3):
            pipeline.feed(number, number)
        errors = {note.number: note.error for note, _ in collect(pipeline, 3)}
    assert isinstance(errors.pop(2), DatasetError)
    assert set(errors.values()) == {None}
