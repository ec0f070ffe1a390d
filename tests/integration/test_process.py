"""`sdp process` on a real local Ray: images in, latents out, whatever happens in between."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.config.process import ProcessConfig
from sdp.datasets import parts
from sdp.datasets.draws import draw
from sdp.datasets.manifest import Dataset, finish, open_dataset
from sdp.datasets.outcomes import WRITTEN, Outcome, account_table
from sdp.datasets.output import read_output
from sdp.datasets.parts import Layout, write_part
from sdp.datasets.source import order_retry
from sdp.encode.encoder import Encoder
from sdp.encode.recipe import EncoderSettings, Recipe
from sdp.encode.transform import Transform
from sdp.errors import DatasetError, ModelError, SdpError, UserError
from sdp.families.tokenizer import load_tokenizer, tokenize
from sdp.model.load import load_text_encoder, load_vae
from sdp.process import job
from sdp.sources.reading import SourceRow
from sdp.storage import open_storage
from tests.kit import account_of, line_of, not_none, rows_of, text_at
from tests.process_kit import config_of, every_tenth, images_table, make_images, picture, write_model, write_plain


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    make_images(folder, rows=60, unit_rows=20)
    return folder


@pytest.fixture(scope="module")
def images(root: Path) -> Path:
    """A dataset that no test changes."""
    return root / "images"


USUAL = ("output.rows_per_file=25", "seed=4", "transform.crop=random")


@pytest.fixture(scope="module")
def processed(root: Path, images: Path, model: Path) -> Dataset:
    """Return the processed dataset. A test that damages it must repair it."""
    return run(config_of(images, root / "out", model, *USUAL))


def latents_of(table: pa.Table, side: int = 64) -> dict[int, Any]:
    shape = (-1, side // 8, side // 8)
    cells = zip(table["row"].to_pylist(), table[f"latents_{side}"].to_pylist(), strict=True)
    return {row: np.frombuffer(cell, np.float16).reshape(shape) for row, cell in cells}


def files_in(folder: Path) -> dict[str, tuple[int, float]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "_lease" not in path.parts
    }


def run(config: ProcessConfig, **options: bool) -> Dataset:
    return not_none(job.run(config, **options).dataset)


# --- what comes out --------------------------------------------------------------------------------------------------


def test_a_folder_of_pictures_with_one_caption_becomes_latents_and_a_bad_picture_can_be_mended(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "own").mkdir()
    for number in range(5):
        (tmp_path / f"own/{number}.jpg").write_bytes(b"no picture" if number == 3 else picture(number))
    caption = "a photo of unqtkn cat"
    config = config_of(tmp_path / "own", tmp_path / "out", model, f"source.caption={caption}", "seed=4")
    dataset = run(config)
    table, account = rows_of(dataset), account_of(dataset)
    assert table["row"].to_pylist() == [0, 1, 2, 4]
    assert table["key"].to_pylist() == ["0", "1", "2", "4"]
    expected = tokenize(load_tokenizer(model), [caption])[0].astype(np.uint16).tobytes()
    assert {cell.as_py() for cell in table["token_ids"]} == {expected}
    assert account.filter(pa.compute.equal(account["row"], 3))["reason"].to_pylist() == ["not_an_image"]
    (tmp_path / "own/3.jpg").write_bytes(picture(3))
    assert job.run(config, only_failed=True).figures.images_encoded == 1
    mended = run(config)
    assert (mended.manifest.counts.written, mended.manifest.version) == (5, 2)


def test_an_images_dataset_becomes_latents_row_by_row(images: Path, model: Path, processed: Dataset) -> None:
    counts = processed.manifest.counts
    assert (counts.input, counts.written, counts.failed) == (54, 54, 0), "upstream's failures are upstream's"
    assert processed.storage.names("_lease") == ["_lease/0000000001.json"], "no other job could write meanwhile"
    table = rows_of(processed)
    assert table["row"].to_pylist() == [row for row in range(60) if not every_tenth(row)]
    assert table["key"].to_pylist()[:3] == ["k0", "k1", "k2"]
    assert processed.manifest.input == open_dataset(open_storage(str(images))).lineage

    # The same by hand, one row at a time.
    transform = Transform(Recipe((64,), seed=4, crop="random"), load_tokenizer(model))
    encoder = Encoder(load_vae(model), EncoderSettings(seed=4, batch_sizes={64: 1, 0: 1}), device="cpu")
    stored = latents_of(table)
    for row in (0, 33, 59):
        chunk = transform([SourceRow(row, "", picture(row), f"picture number {row}")])
        alone = encoder(chunk).latents[64][0].values[0]
        assert np.allclose(stored[row], alone, atol=2e-3)
        at = table["row"].to_pylist().index(row)
        assert table["token_ids"][at].as_py() == chunk.tokens[0].astype(np.uint16).tobytes()


def test_failures_keep_their_place_in_the_account_and_can_be_tried_again(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    pictures = [picture(row)[:300] if row == 5 else b"<html>" if row == 36 else picture(row) for row in range(40)]
    captions = ["" if row == 9 else None if row == 31 else f"c{row}" for row in range(40)]
    table = pa.table({"image": pa.array(pictures, pa.binary()), "caption": captions})
    pq.write_table(table, folder / "a.parquet", row_group_size=16)
    config = config_of(folder, tmp_path / "out", model, "output.rows_per_file=15")

    dataset = run(config)
    counts = dataset.manifest.counts
    assert (counts.input, counts.written, counts.failed) == (40, 36, 4)
    assert counts.reasons == {"no_caption": 2, "not_an_image": 1, "undecodable": 1}
    account = account_of(dataset)
    assert sorted(account["row"].to_pylist()) == list(range(40))
    reasons = dict(zip(account["row"].to_pylist(), account["reason"].to_pylist(), strict=True))
    failed = {5: "undecodable", 9: "no_caption", 31: "no_caption", 36: "not_an_image"}
    assert {row: reason for row, reason in reasons.items() if reason} == failed

    summary = job.run(config, only_failed=True)
    assert summary.dataset is not None
    assert (summary.figures.parts_written, summary.figures.images_encoded) == (2, 0)
    assert summary.dataset.manifest.counts == counts, "each address has one outcome still"
    assert summary.dataset.parts["attempt"].to_pylist() == [0, 1, 0, 0, 1]
    first_unit = summary.dataset.parts["path"].to_pylist()[:2]
    both = parts.resolve([parts.read_account(dataset.storage, path) for path in first_unit])
    tries = dict(zip(both["row"].to_pylist(), both["attempts"].to_pylist(), strict=True))
    assert (tries[4], tries[5], tries[9]) == (1, 2, 2)


def test_new_captions_and_scores_from_tables_decide_each_rows_tokens_and_account(
    tmp_path: Path, images: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = {"row": range(10, 50), "synthetic": [f"new {row}" if row % 3 else "" for row in range(10, 50)]}
    pq.write_table(pa.table(new), tmp_path / "captions.parquet", row_group_size=8)
    rated = [row for row in range(60) if row != 42]
    scores = {"key": [f"k{row}" for row in rated], "aesthetic": [float(row % 10) for row in rated]}
    pq.write_table(pa.table(scores), tmp_path / "scores.parquet")
    settings = [
        "seed=4", "output.rows_per_file=25", "source.caption_column={caption: 1, synthetic: 2}",
        f"source.tables=[{{uri: {tmp_path}/captions.parquet}}, {{uri: {tmp_path}/scores.parquet, by: key}}]",
        "filters={aesthetic: {min: 5}}",
    ]  # fmt: skip
    config = config_of(images, tmp_path / "out", model, *settings)
    job.run(config, dry_run=True)
    plan = capsys.readouterr().err
    assert "rows before filters" in plan

    dataset = run(config)
    kept = [row for row in range(60) if row % 10 >= 5 and not every_tenth(row)]
    counts = dataset.manifest.counts
    assert (counts.input, counts.written, counts.filtered, counts.failed) == (54, len(kept), 54 - len(kept), 0)
    assert counts.reasons == {"score:aesthetic": 54 - len(kept)}
    assert sorted(account_of(dataset)["row"].to_pylist()) == [row for row in range(60) if not every_tenth(row)]
    assert "score:aesthetic" in text_at(dataset.storage.uri)

    table, drawn = rows_of(dataset), []
    assert table["row"].to_pylist() == kept
    for row in kept:
        has_new = 10 <= row < 50 and row % 3
        drawn.append(f"new {row}" if has_new and draw(4, row, [1, 2]) else f"picture number {row}")
    assert 4 < sum(text.startswith("new") for text in drawn) < len(kept) - 8, "both kinds are there"
    expected = tokenize(load_tokenizer(model), drawn).astype(np.uint16)
    assert [cell.as_py() for cell in table["token_ids"]] == [ids.tobytes() for ids in expected]

    assert run(config).manifest.counts == counts, "a second run has nothing to do"
    pq.write_table(pa.table(new | {"synthetic": ["other"] * 40}), tmp_path / "captions.parquet")
    with pytest.raises(DatasetError, match=r"source\.tables was .* and is .* now"):
        run(config)


def test_two_resolutions_embeddings_and_random_crops_in_one_pass(tmp_path: Path, images: Path, model: Path) -> None:
    settings = ["resolutions=[64,128]", "transform.crop=random", "encode.text=text_embedding"]
    dataset = run(config_of(images, tmp_path / "out", model, *settings))
    table = rows_of(dataset)
    assert table.num_rows == 54
    assert len(table["latents_64"][0].as_py()) == 2 * 4 * 8 * 8
    assert len(table["latents_128"][0].as_py()) == 2 * 4 * 16 * 16
    assert table["latents_64"][0] != table["latents_64"][1]

    tokens = tokenize(load_tokenizer(model), ["picture number 3", ""])
    text = Encoder(
        load_vae(model), EncoderSettings(batch_sizes={0: 2}), text_encoder=load_text_encoder(model), device="cpu"
    )
    expected, nothing = text.embed(tokens)
    at = table["row"].to_pylist().index(3)
    assert np.allclose(np.frombuffer(table["text_embedding"][at].as_py(), np.float16), expected.ravel(), atol=1e-2)
    empty = np.load(tmp_path / "out" / "_text" / "empty.npy")
    assert empty.shape == (1, 77, 32)
    assert np.allclose(empty[0], nothing, atol=1e-2)


# --- again -----------------------------------------------------------------------------------------------------------


def test_running_again_does_nothing(
    root: Path, images: Path, model: Path, processed: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_in(root / "out")
    second = run(config_of(images, root / "out", model, *USUAL))
    assert second.digest == processed.digest
    after = files_in(root / "out")
    assert {name for name in after if before.get(name) != after[name]} <= {"_manifest.json"}
    assert "nothing to write" in capsys.readouterr().err


def test_a_run_writes_only_missing_parts(root: Path, images: Path, model: Path, processed: Dataset) -> None:
    before = files_in(root / "out")
    missing = processed.parts["path"][1].as_py()
    content = processed.storage.read(missing)
    (root / "out" / missing).unlink()
    summary = job.run(config_of(images, root / "out", model, *USUAL))
    assert (summary.figures.parts_written, summary.figures.rows_total) == (1, 25)
    assert processed.storage.read(missing) == content, "whoever makes a part makes the same one"
    after = files_in(root / "out")
    assert {name for name in before if name.startswith("parts/") and before[name] != after[name]} == {missing}


def test_a_dataset_grows_with_its_limit_its_source_and_upstreams_retries(tmp_path: Path, model: Path) -> None:
    make_images(tmp_path, rows=40, unit_rows=20)
    arguments = (tmp_path / "images", tmp_path / "out", model, "output.rows_per_file=20")
    first = run(config_of(*arguments, "limit=20"))
    assert rows_of(first)["row"].to_pylist()[-1] == 19
    before = files_in(tmp_path / "out" / "parts")

    make_images(tmp_path, rows=70, unit_rows=20)
    summary = job.run(config_of(*arguments))
    assert summary.dataset is not None
    assert summary.figures.images_encoded == 45, "what was there is not done again"
    assert summary.dataset.manifest.counts.written == 63
    assert summary.dataset.manifest.version == 2
    after = files_in(tmp_path / "out" / "parts")
    assert {name: after[name] for name in before} == before

    storage = open_storage(str(tmp_path / "images"))
    retry = order_retry(read_output(storage), open_dataset(storage))
    for work in retry.pending():
        rescued = [row for row in range(work.unit.start, work.unit.stop) if every_tenth(row)]
        account = account_table([Outcome(row, WRITTEN) for row in rescued])
        retried = {"http_status": len(rescued)}
        write_part(storage, "images", work, images_table(rescued), account, layout=Layout(), retried=retried)
    finish(retry)
    summary = job.run(config_of(*arguments))
    assert summary.dataset is not None
    assert summary.figures.images_encoded == 7
    assert rows_of(summary.dataset)["row"].to_pylist() == list(range(70))
    assert set(summary.dataset.parts["attempt"].to_pylist()) == {0, 1}


# --- before anything begins ------------------------------------------------------------------------------------------


def test_a_dry_run_prints_its_plan_and_writes_nothing(
    tmp_path: Path, root: Path, images: Path, model: Path, processed: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.run(config_of(images, tmp_path / "out", model, *USUAL), dry_run=True).dataset is None
    said = capsys.readouterr().err
    assert "0 of 3 parts written" in said
    assert "60 rows" in said
    assert "before filters" not in said
    assert not (tmp_path / "out").exists()

    missing = root / "out" / processed.parts["path"][1].as_py()
    content = missing.read_bytes()
    missing.unlink()
    before = files_in(root / "out")
    job.run(config_of(images, root / "out", model, *USUAL), dry_run=True)
    assert "2 of 3 parts written" in capsys.readouterr().err
    assert files_in(root / "out") == before
    missing.write_bytes(content)


def refused(config: ProcessConfig, kind: type[SdpError] = UserError) -> str:
    return line_of(lambda: job.run(config), kind)


def test_missing_inputs_are_reported_in_one_line_before_work_begins(tmp_path: Path, images: Path, model: Path) -> None:
    out = tmp_path / "out"
    assert "no such folder" in refused(config_of(images, out, tmp_path / "nowhere"), ModelError)
    (tmp_path / "half").mkdir()
    assert "vae" in refused(config_of(images, out, tmp_path / "half"), ModelError)
    assert "nothing" in refused(config_of(tmp_path / "nothing", out, model)).lower()
    write_plain(tmp_path / "plain", 10)
    line = refused(config_of(tmp_path / "plain", out, model, "source.image_column=jpg"), DatasetError)
    assert "no column jpg" in line
    assert not out.exists()


def test_an_accelerator_that_no_node_has_is_refused_with_the_existing_ones(
    tmp_path: Path, images: Path, model: Path
) -> None:
    line = refused(config_of(images, tmp_path / "out", model, "encode.accelerator=A10G"))
    assert line.startswith("encode.accelerator: expected an accelerator type that a node offers, got 'A10G'")


def test_an_output_of_another_configuration_or_model_is_refused(
    tmp_path: Path, root: Path, images: Path, model: Path, processed: Dataset
) -> None:
    out = root / "out"
    assert processed.storage.uri == str(out)
    assert "seed was 4 and is 1 now" in refused(config_of(images, out, model, *USUAL, "seed=1"), DatasetError)
    other = write_model(tmp_path / "model2", seed=1)
    assert "model.digest" in refused(config_of(images, out, other, *USUAL), DatasetError)
