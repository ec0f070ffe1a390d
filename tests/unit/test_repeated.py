"""Rows whose content a lower row has."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdp.datasets import repeated
from sdp.datasets.inspect import accounts, describe
from sdp.datasets.manifest import finish, open_dataset, part_infos
from sdp.datasets.output import read_output
from sdp.storage import open_storage
from sdp.train.data.weights import RowWeights
from tests.kit import accounted, make_images


@settings(max_examples=100)
@given(st.lists(st.integers(0, 8), max_size=40), st.integers(1, 4), st.randoms())
def test_all_rows_of_a_content_but_the_lowest_are_repeated(contents: list[int], pieces: int, draw: object) -> None:
    rows = np.arange(len(contents), dtype=np.int64) * 3 + 5
    keys = np.array(contents, np.uint64)
    order = np.arange(len(rows))
    draw.shuffle(order)  # type: ignore[attr-defined]
    cut = np.array_split(order, pieces)
    result = repeated.repeated(*((keys[piece], rows[piece]) for piece in cut))
    seen, expected = set(), []
    for content, row in zip(contents, rows.tolist(), strict=True):
        if content in seen:
            expected.append(row)
        seen.add(content)
    assert result.tolist() == expected


def test_a_stored_set_has_its_rows_and_no_others(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert repeated.keep(storage, "set", [np.array([0, 99]), np.array([2_000_000_000])], lambda: None) == 3
    asked = np.array([2_000_000_000, -1, 350, 351, 0, 77_777], np.int64)
    assert repeated.Repeated(storage, "_repeated/set").mask(asked).tolist() == [True, False, False, False, True, False]


def test_parts_are_looked_through_in_pieces_and_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_images(tmp_path)
    infos = part_infos(dataset.storage)
    monkeypatch.setattr(repeated, "PIECE_ROWS", 10)
    pieces = repeated.pieces(infos)
    assert sorted(path for piece in pieces for path in piece) == sorted(info.path for info in infos)
    assert len(pieces) > 1
    shares = [repeated.read_hashes(dataset.storage, piece, 3) for piece in pieces]
    seen = np.concatenate([rows for share in shares for _, rows in share])
    assert len(seen) == len(set(seen.tolist())) == dataset.manifest.counts.written
    assert all((keys % np.uint64(3) == number).all() for share in shares for number, (keys, _) in enumerate(share))


@given(st.lists(st.integers(0, 30)), st.integers(1, 7))
def test_each_partition_has_its_rows_in_order(keys: list[int], partitions: int) -> None:
    shares = repeated.partitioned(np.array(keys, np.uint64), np.arange(len(keys)), partitions)
    expected = [[(key, row) for row, key in enumerate(keys) if key % partitions == n] for n in range(partitions)]
    assert [list(zip(*(column.tolist() for column in share), strict=True)) for share in shares] == expected


def test_repeated_rows_are_counted_as_filtered_and_everybody_says_so(tmp_path: Path) -> None:
    dataset = make_images(tmp_path)
    before = dataset.manifest.counts
    rows = next(iter(accounts(dataset.storage, []))).filter(pa.compute.field("outcome") == "written")["row"].to_pylist()
    repeats = rows[1:4]

    def find(parts: object, digest: str) -> int:  # noqa: ARG001
        return repeated.keep(dataset.storage, digest, [np.array(repeats, np.int64)], lambda: None)

    output = read_output(dataset.storage)
    finished = finish(output, input={"uri": "src"}, find_repeated=find)
    counts = finished.manifest.counts
    assert counts.input == before.input
    assert (counts.written, counts.filtered) == (before.written - 3, before.filtered + 3)
    assert counts.reasons["duplicate_content"] == 3
    assert finished.manifest.version == dataset.manifest.version + 1
    assert finish(output, input={"uri": "src"}, find_repeated=find).digest == finished.digest

    reopened = open_dataset(dataset.storage)
    assert reopened.repeated_rows is not None
    assert [row for row in range(counts.input) if row in reopened.repeated_rows] == repeats
    assert sorted(accounted(reopened)) == list(range(counts.input))
    account = pa.concat_tables(list(accounts(dataset.storage, [])))
    filtered = account.filter(pa.compute.field("reason") == "duplicate_content")
    assert filtered["row"].to_pylist() == repeats
    assert set(filtered["outcome"].to_pylist()) == {"repeated"}
    assert describe(dataset.storage).counts == counts

    weights = RowWeights(repeated=reopened.repeated_rows)
    assert weights(np.array([-1, *rows[:5]], np.int64)).tolist() == [1, 1, 0, 0, 0, 1]


def test_known_repeats_are_not_searched_for_again(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert repeated.known(storage, "a" * 64) is None
    assert repeated.keep(storage, "a" * 64, [], lambda: None) == 0
    assert repeated.known(storage, "a" * 64) == 0
    storage.publish(f"_repeated/{'a' * 16}.json", b'{"rows": "x"}')
    assert repeated.known(storage, "a" * 64) is None, "a damaged record is made again"
