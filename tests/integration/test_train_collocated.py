"""Images, transform, encoders and training on one node: `data.mode: collocated`."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from transformers import CLIPTokenizer

from sdp.config.train import TrainConfig
from sdp.datasets.ledger import Ledger
from sdp.errors import DatasetError, UserError
from sdp.imaging import centre_box, cut, decode
from sdp.model.latents import to_pixels
from sdp.model.sources import resolve
from sdp.storage import open_storage
from sdp.train.assemble import assemble, make_reader
from sdp.train.data.batch import Batch
from sdp.train.data.rows import PAD
from sdp.train.job import run
from sdp.train.run_folder import RunFolder
from sdp.train.settle import settled
from sdp.train.world import World
from tests.process_kit import images_table, make_images, picture
from tests.training import Watch, bad_rows, config, train

ROWS = 72
BAD = 13


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, one of which cannot be decoded."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("collocated")
    make_images(root, 80, unit_rows=20, fails=lambda row: row % 10 == 0)
    broken = root / "images/parts/000000000.parquet"
    table = pq.read_table(broken)
    spoilt = [b"no picture" if row == BAD else picture(row) for row in table["row"].to_pylist()]
    metadata = pq.read_schema(broken).metadata
    changed = table.set_column(table.column_names.index("image"), "image", [spoilt]).replace_schema_metadata(metadata)
    pq.write_table(changed, broken, row_group_size=8)
    return root


def how(root: Path, run: str = "run", **changes: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "source__uri": str(root / "images"), "model__source": "builtin:tiny", "data__mode": "collocated",
        "data__readers": 2, "encode__dtype": "fp32", "encode__batch_size": 8,
    }  # fmt: skip
    return config(root, run, **{**usual, **changes})


def batches(root: Path, **changes: Any) -> list[Batch]:
    settings = how(root, **changes)
    reader, *_ = make_reader(settings, resolve("builtin:tiny"), World())
    return list(reader.batches(0, 0, 16))


def test_a_rows_moments_are_those_that_diffusers_computes_and_its_tokens_its_captions(root: Path) -> None:
    moments: dict[int, tuple[Tensor, Tensor]] = {}
    for batch in batches(root):
        assert batch.token_ids is not None
        moments |= dict(zip(batch.rows.tolist(), zip(batch.latents, batch.token_ids, strict=True), strict=True))
    moments.pop(PAD, None)
    assert sorted(moments) == [row for row in range(80) if row % 10]
    model = resolve("builtin:tiny")
    kind: Any = AutoencoderKL
    vae = kind.from_pretrained(model.path / "vae").eval()
    tokenizer = CLIPTokenizer.from_pretrained(model.path / "tokenizer")
    table = images_table(range(80))
    for row in (1, 14, 57, 79):
        image = decode(picture(row), min_side=64)
        pixels = to_pixels(torch.from_numpy(cut(image, centre_box(96, 80, 1.0), 64, 64))[None])
        with torch.no_grad():
            posterior = vae.encode(pixels).latent_dist
        scale = vae.config.scaling_factor
        expected = torch.cat([posterior.mean * scale, posterior.logvar + 2 * np.log(scale)], dim=1)[0]
        assert torch.allclose(moments[row][0].float(), expected, atol=5e-3), row
        ids = tokenizer(table["caption"][row].as_py(), padding="max_length", max_length=77, truncation=True).input_ids
        assert moments[row][1].tolist() == ids


def test_a_training_run_takes_each_good_row_once_and_keeps_why_the_bad_one_was_left_out(root: Path) -> None:
    watch = Watch()
    trainer = train(how(root, max_steps=None, max_epochs=1), callbacks=[watch])
    good = [row for row in range(80) if row % 10 and row != BAD]
    folder = RunFolder(open_storage(str(root / "run")))
    ledger = Ledger.from_bytes((root / f"run/checkpoints/step-{trainer.state.step:09d}/ledger.roaring").read_bytes())
    assert list(ledger.rows(0)) == good
    assert trainer.state.samples == len(good)
    assert bad_rows(folder) == {BAD: "not_an_image"}
    assert all(np.isfinite(watch.losses))


def test_encoding_is_an_activity_of_its_own_and_the_activities_fit_into_the_step(root: Path) -> None:
    watch = Watch()
    train(how(root, "timed", max_steps=6), callbacks=[watch])
    assert sum(report.parts.get("encode", 0.0) for report in watch.reports) > 0
    for report in watch.reports:
        assert sum(report.parts.values()) <= report.seconds


def test_a_resumed_run_is_the_uninterrupted_one(root: Path) -> None:
    whole, first, second = Watch(), Watch(), Watch()
    train(how(root, "whole", max_steps=12), callbacks=[whole])
    train(how(root, "parts", max_steps=5), callbacks=[first])
    train(how(root, "parts", max_steps=12), callbacks=[second])
    # Rows of a window that are consumed are not encoded again, and another batch of the encoder rounds otherwise.
    assert first.losses + second.losses == pytest.approx(whole.losses, abs=1e-6)


def test_embeddings_by_the_encoder_train_as_tokens_do(root: Path) -> None:
    tokens, embedded = Watch(), Watch()
    train(how(root, "tokens", max_steps=2), callbacks=[tokens])
    train(how(root, "embedded", max_steps=2, encode__text="text_embedding"), callbacks=[embedded])
    assert embedded.losses == pytest.approx(tokens.losses, abs=1e-3)


def test_online_without_a_cluster_is_refused(root: Path) -> None:
    with pytest.raises(UserError, match=r"data\.mode: expected offline or collocated without Ray"):
        assemble(*settled(how(root, data__mode="online")), World())


def test_captions_scores_and_filters_of_a_table_are_those_of_the_batches(root: Path) -> None:
    curated = {**curation(root), "data__batch_size": 16}
    good = [row for row in range(80) if row % 10 and row != BAD and row % 3]
    captions = images_table(range(80))["caption"].to_pylist()
    tokenizer = CLIPTokenizer.from_pretrained(resolve("builtin:tiny").path / "tokenizer")
    reader, *_ = make_reader(how(root, **curated), resolve("builtin:tiny"), World())
    drawn: list[dict[int, bool]] = []
    for epoch in range(2):
        tokens: dict[int, list[int]] = {}
        for batch in reader.batches(epoch, 0, 16):
            assert batch.token_ids is not None
            kept = batch.weights > 0
            tokens |= dict(zip(batch.rows[kept].tolist(), batch.token_ids[kept].tolist(), strict=True))
        assert sorted(tokens) == good
        texts = {row: [captions[row], synthetic(row)] for row in good}
        ids = {row: [tokenizer(text, padding="max_length").input_ids for text in texts[row]] for row in good}
        assert all(tokens[row] in ids[row] for row in good)
        drawn.append({row: tokens[row] == ids[row][1] for row in good})
    shares = [sum(of_epoch.values()) / len(good) for of_epoch in drawn]
    assert all(0.5 < share < 1 for share in shares), "three of four rows draw the synthetic caption"
    assert drawn[0] != drawn[1], "each epoch draws anew"
    train(how(root, "curated", max_steps=None, max_epochs=1, **curated))
    assert bad_rows(RunFolder(open_storage(str(root / "curated")))) == {BAD: "not_an_image"}, (
        "filtered rows are not bad"
    )


def test_a_run_continues_with_a_moved_table_and_refuses_a_changed_one(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdp.train.job._trains_here", lambda _: True)
    first, changed = curation(root, "a.parquet"), curation(root, "changed.parquet", lowest=1)
    (root / "b.parquet").write_bytes((root / "a.parquet").read_bytes())
    moved = {**first, "source__tables": [{**first["source__tables"][0], "uri": str(root / "b.parquet")}]}
    run(how(root, "tabled", max_steps=2, **first))
    said = capsys.readouterr().err
    assert "72 rows before filters" in said
    assert run(how(root, "tabled", max_steps=3, **moved)).state.step == 3
    with pytest.raises(DatasetError, match=r"another configuration \(source\.tables was \[.*\] and is"):
        run(how(root, "tabled", max_steps=4, **changed))
    with pytest.raises(DatasetError, match=r"another configuration \(source\.tables was \[.*\] and is"):
        make_reader(how(root, "tabled", **changed), resolve("builtin:tiny"), World())  # as a restarted trainer does
    with pytest.raises(DatasetError, match=r"source\.tables\.0\.uri: no column blurb or aesthetic in"):
        run(how(root, "other", **{**first, "source__caption_column": "blurb"} | {"source__tables": [
            {"uri": str(root / "metadata.parquet"), "by": "row"}]}), dry_run=True)  # fmt: skip


def curation(root: Path, name: str = "table.parquet", lowest: float = 0.0) -> dict[str, Any]:
    """Write a table of captions and scores; return the keys that use it: a third of all rows is filtered."""
    rows = list(range(80))
    columns = {
        "row": rows,
        "synthetic": [synthetic(row) for row in rows],
        "aesthetic": [lowest + (row % 3) * 2.0 for row in rows],
    }
    pq.write_table(pa.table(columns), root / name)
    pq.write_table(pa.table({"row": rows}), root / "metadata.parquet")
    return {
        "source__caption_column": {"caption": 1, "synthetic": 3},
        "source__tables": [{"uri": str(root / name)}],
        "filters": {"aesthetic": {"min": 2.0}},
    }


def synthetic(row: int) -> str:
    return f"made by a model for {row}"
