"""`sdp score` on a real local Ray: pictures in, scores out, and a process job that leaves rows out by them."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image as Pillow

from sdp.config.score import ScoreConfig
from sdp.datasets import repeated, tombstones
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.errors import DatasetError, UserError
from sdp.imaging import decode
from sdp.process import job as processing
from sdp.score import job, near
from sdp.storage import open_storage
from tests.evaluate_kit import tiny_clip, tiny_dino
from tests.kit import accounted, not_none, reasons_of, rows_of, text_at
from tests.local_ray import one_node
from tests.process_kit import config_of, every_tenth, make_images, picture
from tests.score_kit import score_config, write_predictor

COPIES = {12: 3, 31: 3, 44: 9}
"""Rows with the picture of a lower row."""


def image(row: int) -> bytes:
    return picture(COPIES.get(row, row))


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP in `clip` and a predictor for it in `predictor.pth`."""
    folder = tmp_path_factory.mktemp("networks")
    tiny_clip(folder / "clip")
    write_predictor(folder / "predictor.pth", [12, 4, 1])
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    make_images(folder, rows=60, unit_rows=20, image=image)
    return folder


def wanted(networks: Path) -> tuple[str, ...]:
    return (
        f"score.clip_model={networks / 'clip'}",
        f"score.aesthetics={networks / 'predictor.pth'}",
        "score.duplicates.distance=0",
    )


@pytest.fixture(scope="module")
def scored(root: Path, networks: Path) -> Dataset:
    return run(score_config(root / "images", root / "scores", *wanted(networks)))


def run(config: ScoreConfig, **options: bool) -> Dataset:
    return not_none(job.run(config, **options).dataset)


def duplicates_of(dataset: Dataset) -> dict[int, int]:
    table = pq.read_table(dataset.storage.open(job.DUPLICATES))
    lines = table.filter(table["duplicate"].to_numpy() > 0).to_pylist()
    return {line["row"]: line["duplicate_of"] for line in lines}


def files_in(folder: Path) -> dict[str, float]:
    """The files that no run without work writes, with their times."""
    always = {"_lease", "_manifest.json"}
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and always.isdisjoint(path.parts))
    return {str(path.relative_to(folder)): path.stat().st_mtime for path in files}


# --- what comes out --------------------------------------------------------------------------------------------------


def test_every_written_image_has_the_scores_of_transformers_and_its_hash(
    networks: Path, root: Path, scored: Dataset
) -> None:
    from transformers import CLIPModel, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    table = rows_of(scored)
    rows = [row for row in range(60) if not every_tenth(row)]
    assert table["row"].to_pylist() == rows
    assert table["key"].to_pylist() == [f"k{row}" for row in rows]
    assert table.schema.names == ["row", "key", "aesthetics", "similarity", "hash"]
    pixels = [decode(image(row)).pixels for row in rows]
    assert table["hash"].to_pylist() == [near.perceptual_hash(each) for each in pixels]
    kind: Any = CLIPImageProcessorPil
    model: Any = CLIPModel.from_pretrained(networks / "clip").eval()
    predictor = write_predictor(networks / "predictor.pth", [12, 4, 1]).eval()
    tokenizer = CLIPTokenizer.from_pretrained(networks / "clip")
    tokens = tokenizer([f"picture number {row}" for row in rows], padding=True, return_tensors="pt")
    seen = kind.from_pretrained(networks / "clip")(images=pixels, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        output = model(pixel_values=seen, input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        aesthetics = predictor(output.image_embeds)[:, 0]
    similarity = (output.image_embeds * output.text_embeds).sum(1)
    # Views differ by roundings.
    np.testing.assert_allclose(table["similarity"].to_numpy(), similarity.numpy(), atol=1e-3)
    np.testing.assert_allclose(table["aesthetics"].to_numpy(), aesthetics.numpy(), atol=5e-3)
    assert len({round(score, 6) for score in table["aesthetics"].to_pylist()}) > 40

    assert duplicates_of(scored) == COPIES
    whole = pq.read_table(scored.storage.open(job.DUPLICATES)).to_pylist()
    assert [line["row"] for line in whole] == [3, 9, 12, 31, 44], "sorted, with those that stand for the others"
    assert scored.manifest.input is not None
    assert scored.manifest.input["manifest_digest"] == open_dataset(open_storage(str(root / "images"))).digest
    assert set(scored.manifest.models) == {"clip", "aesthetics"}
    assert "Complete: 54 of " in text_at(scored.storage.uri)


def test_process_leaves_rows_out_by_their_scores_and_accounts_for_them(
    tmp_path: Path, model: Path, root: Path, scored: Dataset
) -> None:
    scores = dict(zip(*(rows_of(scored)[name].to_pylist() for name in ("row", "aesthetics")), strict=True))
    bound = float(np.median(list(scores.values())))
    tables = f"[{{uri: '{root}/scores/parts'}}, {{uri: '{root}/scores/duplicates'}}]"
    filters = f"{{aesthetics: {{min: {bound}}}, duplicate: {{max: 0, keep_unknown: true}}}}"
    settings = f"source.tables={tables}", f"filters={filters}"
    dataset = not_none(processing.run(config_of(root / "images", tmp_path / "out", model, *settings)).dataset)
    expected = {row: "score:aesthetics" for row, score in scores.items() if score < bound}
    expected |= {row: "score:duplicate" for row in COPIES if row not in expected}
    assert reasons_of(dataset) == expected
    assert set(expected.values()) == {"score:aesthetics", "score:duplicate"}
    counts = dataset.manifest.counts
    assert (counts.input, counts.written, counts.filtered) == (54, 54 - len(expected), len(expected))
    assert Counter(accounted(dataset)) == Counter(list(scores))


def test_a_repeated_scoring_writes_only_what_is_damaged(
    networks: Path, root: Path, scored: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scored.storage.uri == str(root / "scores")
    before = files_in(root / "scores")
    result = job.run(score_config(root / "images", root / "scores", *wanted(networks)))
    said = capsys.readouterr().err
    assert "3 of a lower row, 5.6 %" in said
    assert "nothing to write: all parts existed" in said
    assert result.duplicates == 3
    assert files_in(root / "scores") == before, "and nothing is written again"
    (root / "scores" / job.DUPLICATES).write_bytes(b"torn")
    assert duplicates_of(run(score_config(root / "images", root / "scores", *wanted(networks)))) == COPIES


def test_another_distance_needs_no_other_parts_and_no_clip(tmp_path: Path) -> None:
    make_images(tmp_path, rows=20, image=lambda row: picture(row % 4))
    arguments = (tmp_path / "images", tmp_path / "out")
    first = run(score_config(*arguments, "score.duplicates.distance=0"))
    assert rows_of(first).schema.names == ["row", "key", "hash"]
    copies = {row: row % 4 for row in range(4, 20) if not every_tenth(row)}
    assert duplicates_of(first) == copies
    hashes = dict(zip(*(rows_of(first)[name].to_pylist() for name in ("row", "hash")), strict=True))
    before, table = files_in(tmp_path / "out/parts"), files_in(tmp_path / "out/duplicates")
    repeat = run(score_config(*arguments, "score.duplicates.distance=3"))
    pairs = [(a, b) for a in hashes for b in hashes if a < b and (hashes[a] ^ hashes[b]).bit_count() <= 3]
    left, right = (np.array(rows) for rows in zip(*pairs, strict=True))
    expected = near.groups([(left, right)]).filter(pc.field("duplicate") > 0)
    assert list(duplicates_of(repeat)) == expected["row"].to_pylist()
    assert files_in(tmp_path / "out/parts") == before
    assert files_in(tmp_path / "out/duplicates") != table


def test_plain_pictures_are_scored_and_hostile_ones_have_their_reason(tmp_path: Path, networks: Path) -> None:
    hostile = {
        2: (picture(2)[:-700], "undecodable"),
        4: (b"<html>", "not_an_image"),
        5: (None, "empty"),
        9: (huge(), "too_many_pixels"),
    }
    images = [hostile[row][0] if row in hostile else picture(row) for row in range(12)]
    captions = ["a", None, "c", " ", "e", "f", "", *["g"] * 5]
    (tmp_path / "plain").mkdir()
    table = pa.table({"image": pa.array(images, pa.binary()), "caption": captions})
    pq.write_table(table, tmp_path / "plain/a.parquet", row_group_size=5)
    dataset = run(score_config(tmp_path / "plain", tmp_path / "out", *wanted(networks)))
    assert reasons_of(dataset) == {row: reason for row, (_, reason) in hostile.items()}
    rows = rows_of(dataset)
    assert rows["row"].to_pylist() == [row for row in range(12) if row not in hostile]
    unknown = [
        row for row, score in zip(rows["row"].to_pylist(), rows["similarity"].to_pylist(), strict=True) if score is None
    ]
    assert unknown == [1, 3, 6]
    assert accounted(dataset) == list(range(12))


def test_pictures_without_captions_have_no_similarity(tmp_path: Path, networks: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/1.jpg").write_bytes(picture(1))
    dataset = run(score_config(tmp_path / "own", tmp_path / "out", *wanted(networks)))
    assert rows_of(dataset)["similarity"].to_pylist() == [None]


def huge() -> bytes:
    """Return a small PNG of more pixels than any image may have."""
    sink = io.BytesIO()
    Pillow.new("1", (10_001, 10_000)).save(sink, "PNG")
    return sink.getvalue()


def test_takedowns_are_left_out_and_stand_for_no_other_row(tmp_path: Path) -> None:
    make_images(tmp_path, rows=60, image=image)
    images = open_storage(str(tmp_path / "images"))
    tombstones.add(images, [tombstones.Takedown("row", "44")])
    config = score_config(images.uri, tmp_path / "out", "score.duplicates.distance=0")
    dataset = run(config)
    assert reasons_of(dataset) == {44: "tombstone"}
    assert duplicates_of(dataset) == {12: 3, 31: 3}
    tombstones.add(images, [tombstones.Takedown("row", "3")])
    assert duplicates_of(run(config)) == {31: 12}, "the next row stands for the group"


def test_near_duplicates_are_the_same_if_ray_looks_for_them(
    root: Path, networks: Path, scored: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = score_config(root / "images", scored.storage.uri, *wanted(networks), "score.duplicates.distance=2")
    tables = []
    with one_node(cpus=2):
        for partitions in (1, 3):
            monkeypatch.setattr(repeated, "PIECE_ROWS", 20)
            monkeypatch.setattr(repeated, "partitions_for", lambda _, number=partitions: number)
            (root / "scores" / job.DUPLICATES).unlink()
            tables.append(duplicates_of(run(config)))
    assert tables[0] == tables[1]
    assert tables[0].items() >= COPIES.items()


# --- before anything begins ------------------------------------------------------------------------------------------


def test_a_dry_run_prints_its_plan_and_writes_nothing(
    tmp_path: Path, networks: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = score_config(root / "images", tmp_path / "out", *wanted(networks))
    assert job.run(config, dry_run=True).dataset is None
    said = capsys.readouterr().err
    assert "0 of 3 parts written" in said
    assert "row, key, aesthetics, similarity, hash" in said
    assert "near-duplicates  equal hashes" in said
    assert not (tmp_path / "out").exists()


def test_an_output_keeps_its_networks(tmp_path: Path, networks: Path, root: Path, scored: Dataset) -> None:
    with pytest.raises(DatasetError, match=r"another configuration \(aesthetics.sha256 was"):
        job.run(score_config(root / "images", scored.storage.uri, wanted(networks)[0]))
    with pytest.raises(UserError, match=r"score\.clip_model: expected a CLIP model, got .* of type dinov2"):
        job.run(score_config(root / "images", tmp_path / "o", f"score.clip_model={tiny_dino(tmp_path / 'dino')}"))
