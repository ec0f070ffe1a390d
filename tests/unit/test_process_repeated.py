"""Rows that the images dataset marks as repeated, or that are on its takedown list, are not encoded."""

from pathlib import Path

import numpy as np

from sdp.datasets import repeated, tombstones
from sdp.datasets.manifest import finish
from sdp.datasets.outcomes import FILTERED
from sdp.datasets.output import read_output
from sdp.process.prepare import begin, prepare, with_tombstones
from sdp.sources.pieces import Planner
from tests.process_kit import config_of, make_images
from tests.tiny_model import make_tiny_model


def test_a_repeated_row_and_one_that_is_taken_down_are_filtered_with_their_reasons(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    storage = make_images(tmp_path, rows=20, unit_rows=20).storage

    def find(parts: object, digest: str) -> int:  # noqa: ARG001
        return repeated.keep(storage, digest, [np.array([3, 12], np.int64)], lambda: None)

    finish(read_output(storage), find_repeated=find)
    tombstones.add(storage, [tombstones.Takedown("row", "11")])
    prepared = prepare(config_of(tmp_path / "images", tmp_path / "latents", tmp_path / "model"))
    output = begin(prepared, only_failed=False)
    planner = Planner(output.index, prepared.pictures.dataset, prepared.piece_rows, prepared.spec.storage)
    spec = with_tombstones(prepared)
    (work,) = output.pending()
    chunks = [spec.prepare((piece, None))[0] for piece in planner(work)]
    outcomes = [outcome for chunk in chunks for outcome in chunk.outcomes]
    assert [(o.row, o.outcome, o.reason) for o in outcomes] == [
        (3, FILTERED, "duplicate_content"),
        (11, FILTERED, "tombstone"),
        (12, FILTERED, "duplicate_content"),
    ]
    encoded = np.concatenate([chunk.rows for chunk in chunks]).tolist()
    assert encoded == [row for row in range(20) if row not in (3, 7, 11, 12, 17)]
