"""Batches of images that are encoded meanwhile have the same order, share and account as those of latents."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdp.config.train import TrainConfig
from sdp.datasets.manifest import Dataset
from sdp.datasets.outcomes import FAILED, Outcome
from sdp.encode import transform
from sdp.model.sources import resolve
from sdp.sources.reading import addresses
from sdp.train.data.encoded import EncodedRows, Engine, online
from sdp.train.data.images import ImagesDataset, Slice, open_images
from sdp.train.data.latents import WeightedDataset, open_latents
from sdp.train.data.mixture import MixturePlan
from sdp.train.data.reader import Reader
from sdp.train.data.rows import PAD, Rows, items_of
from tests.latents import SHUFFLE, latents_reader, make_latents
from tests.process_kit import make_images
from tests.training import config

ROWS = 203


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def dataset(root: Path) -> Dataset:
    return make_images(root, ROWS, unit_rows=40, fails=lambda row: row % 10 == 0)


@pytest.fixture(scope="module")
def latents(root: Path) -> Dataset:
    """Return the same rows in the same row groups."""
    return make_latents(root, ROWS, failed=10)


def settings(root: Path, **changes: Any) -> TrainConfig:
    return config(root, data__mode="collocated", model__source="builtin:tiny", **changes)


@pytest.fixture(scope="module")
def images(root: Path, dataset: Dataset) -> ImagesDataset:
    return open_images(settings(root), dataset, resolve("builtin:tiny"))


class Fake:
    """An engine that encodes a row as its address, and marks every seventh row as bad."""

    def __init__(self, images: ImagesDataset) -> None:
        self.images, self.asked = images, Counter[int]()

    def __call__(self, slices: Iterator[Slice]) -> Generator[Rows]:
        for data_slice in slices:
            rows = addresses(data_slice.piece)
            self.asked.update(rows[data_slice.needed].tolist())
            latents, text = self.images.columns
            bad = (rows % 7 == 0) & data_slice.needed
            values = np.zeros((len(rows), latents.width // 2), np.float16)
            values[:] = rows[:, None]
            yield Rows(
                rows,
                (data_slice.needed & ~bad).astype(np.float32),
                items_of(values),
                items_of(np.zeros((len(rows), text.width), np.uint8)),
                bad={row: Outcome(row, FAILED, "undecodable") for row in rows[bad].tolist()},
            )


def reader(images: ImagesDataset, engine: Engine, rank: int = 0, world: int = 1) -> Reader:
    return Reader(MixturePlan((images.row_groups,), 5, SHUFFLE), EncodedRows(images, engine), rank, world)


@pytest.mark.parametrize(("world", "batch", "position"), [(1, 16, 0), (2, 9, 0), (3, 20, 60), (5, 8, 41), (4, 50, 150)])
def test_every_trainer_takes_what_it_takes_of_latents(
    images: ImagesDataset, latents: Dataset, world: int, batch: int, position: int
) -> None:
    asked = Counter[int]()
    left: list[int] = []
    for rank in range(world):
        engine = Fake(images)
        actual = list(reader(images, engine, rank, world).batches(1, position, batch))
        stored = latents_reader(WeightedDataset(open_latents(latents, 64)), rank=rank, world=world)
        expected = list(stored.batches(1, position, batch))
        assert [b.rows.tolist() for b in actual] == [b.rows.tolist() for b in expected]
        for got in actual:
            valid = got.rows != PAD
            assert got.weights[valid].tolist() == [float(row % 7 > 0) for row in got.rows[valid].tolist()]
            good = got.weights > 0
            assert got.latents[good][:, 0, 0, 0].tolist() == got.rows[good].tolist()
            assert [outcome.row for outcome in got.bad] == [row for row in got.rows[valid].tolist() if row % 7 == 0]
        asked += engine.asked
        left += [row for got in expected for row in got.counted.tolist()]
    assert asked == Counter(left)  # nothing is encoded twice, nor what the epoch has behind it
    assert len(left) == len(set(left))


def test_run_ahead_is_bounded_and_results_come_in_order(images: ImagesDataset) -> None:
    under_way, most = [0], [0]
    inner = Fake(images)

    def ask(data_slice: Slice | None) -> Callable[[], Rows]:
        assert data_slice is not None
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])

        def get() -> Rows:
            under_way[0] -= 1
            (made,) = inner(iter([data_slice]))
            return made

        return get

    rows = [b.rows.tolist() for b in reader(images, online(ask, 5)).batches(0, 0, 16)]
    assert rows == [b.rows.tolist() for b in reader(images, inner).batches(0, 0, 16)]
    assert most[0] == 6


def test_rows_that_are_not_needed_are_not_decoded(images: ImagesDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    inner = transform.crop_image
    monkeypatch.setattr(transform, "crop_image", lambda *args: decoded.append(args[2]) or inner(*args))  # type: ignore[func-returns-value]
    uri = images.storage.uri_of(images.paths[0])
    data_slice = Slice.of(uri, 0, 8, 2, 0, np.array([True, False, True, False]))
    made, _ = images.prepare(data_slice)
    assert made.rows.tolist() == [3, 4, 5, 6]
    assert made.chunk.rows.tolist() == decoded == [3, 5]


def test_random_crops_are_drawn_anew_in_each_epoch_and_are_the_same_again(root: Path, dataset: Dataset) -> None:
    images = open_images(settings(root, transform__crop="random"), dataset, resolve("builtin:tiny"))
    uri = images.storage.uri_of(images.paths[0])

    def pixels(epoch: int) -> bytes:
        data_slice = Slice.of(uri, 0, 8, 0, epoch, np.ones(4, np.bool_))
        return bytes(images.prepare(data_slice)[0].chunk.crops[64][0].values.tobytes())

    assert pixels(0) == pixels(0)
    assert len({pixels(epoch) for epoch in range(3)}) == 3


def test_a_slice_is_cut_until_one_row_is_left() -> None:
    data_slice = Slice.of("uri", 0, 300, 20, 0, np.arange(256) % 3 > 0)
    pieces = data_slice.narrow()
    assert [len(piece) for piece in pieces] == [16] * 16
    assert np.array_equal(np.concatenate([piece.needed for piece in pieces]), data_slice.needed)
    assert [len(piece) for piece in pieces[3].narrow()] == [1] * 16
    assert pieces[3].narrow()[2].piece.skip == 70
    assert pieces[3].narrow()[2].needed.tolist() == [50 % 3 > 0]
