"""Runs on several datasets at once, and on latents written by other programs."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sdp.datasets import tombstones
from sdp.datasets.audit import audit
from sdp.datasets.draws import held_out
from sdp.datasets.tombstones import Takedown
from sdp.encode.table import npy_bytes
from sdp.errors import DatasetError
from sdp.model.sources import resolve
from sdp.storage import open_storage
from sdp.train.assemble import assemble, make_conditioning
from sdp.train.data.mixture import Mixture
from sdp.train.job import run
from sdp.train.plan import make_plan
from sdp.train.settle import settled
from sdp.train.world import World
from tests.latents import latent_of, make_latents, split_address, tokens_of
from tests.training import config, ledger, tiny_inputs, train


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_inputs(tmp_path_factory.mktemp("sources"), 60, unit_rows=20)
    make_latents(root / "other", 20, unit_rows=10, vocabulary=50)
    return root


def how(root: Path, run_name: str = "run", **changes: Any) -> Any:
    usual = {"max_steps": None, "max_epochs": 1}
    return config(root, run_name, **{**usual, **changes})


def test_datasets_mixed_by_weight_are_each_accounted_for_also_after_a_stop(root: Path) -> None:
    mixed = {"source__also": [{"uri": str(root / "other/latents"), "weight": 0.5}]}
    run(how(root, **mixed, max_epochs=None, max_steps=4))
    summary = run(how(root, **mixed, data__batch_size=7))
    positions = Mixture((60, 20), (1.0, 0.5)).rows
    account = ledger(summary)
    rows = [(epoch, *split_address(row)) for epoch in account.epochs() for row in account.rows(epoch)]
    assert [row for epoch, dataset, row in rows if (epoch, dataset) == (0, 0)] == list(range(60))
    assert [row for epoch, dataset, row in rows if (epoch, dataset) == (0, 1)] == list(range(20))
    assert len(rows) == summary.state.samples == positions
    second_epoch = [row for epoch, dataset, row in rows if (epoch, dataset) == (1, 1)]
    assert len(second_epoch) == positions - 80
    (trace,) = audit([str(root / "run"), str(root / "other/latents")], row=second_epoch[0])
    assert trace.checkpoints[-1]["epochs"] == [0, 1]
    assert trace.checkpoints[-1]["dataset"] == str(root / "other/latents")

    with pytest.raises(DatasetError, match=r"another configuration \(source\.also"):
        run(how(root))


def test_the_plan_counts_rows_by_their_use(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_latents(tmp_path / "own", 20, unit_rows=20, vocabulary=50)
    latents = tmp_path / "own/latents"
    tombstones.add(open_storage(str(latents)), [Takedown("row", "3"), Takedown("row", "5")])
    (phase,) = settled(how(root, source__uri=str(latents), data__holdout=0.1))
    held = set(np.flatnonzero(held_out(np.arange(20), 0.1)).tolist()) - {3, 5}
    assert held
    counts = f"{18 - len(held)} rows to train on, {len(held)} held out, 2 taken down, "
    assert make_plan(phase).lines()[0].startswith(f"train: {counts}")
    monkeypatch.setattr("sdp.train.plan._COUNTED", 10)
    assert make_plan(phase).lines()[0].startswith("train: 20 rows (2 taken down), ")


def test_the_reference_s_own_latents_are_trained_on_by_naming_their_columns(root: Path) -> None:
    (root / "reference").mkdir()
    latents = np.stack([latent_of(row, 8) for row in range(60)]).astype(np.float32)
    tokens = np.stack([tokens_of(row, 50) for row in range(60)]).astype(np.int64)
    flat, offsets = pa.array(latents.reshape(-1)), pa.array(np.arange(61, dtype=np.int64) * 256)
    table = pa.table({"image_latents_64": pa.LargeListArray.from_arrays(offsets, flat), "ids": tokens.tolist()})
    pq.write_table(table, root / "reference/0.parquet", row_group_size=8)
    columns = {"latents": "image_latents_{resolution}", "text": ["ids"]}
    reference = run(how(root, "theirs", source__uri=str(root / "reference"), source__columns=columns))
    assert list(ledger(reference).rows(0)) == list(range(60))
    (trace,) = audit([str(root / "theirs")], row=5)
    assert trace.checkpoints[-1]["epochs"] == [0]

    # The same rows as sdp writes them, in the same row groups: the same training.
    make_latents(root / "ours", 60, unit_rows=60, vocabulary=50)
    encoded = run(how(root, "ours-run", source__uri=str(root / "ours/latents")))
    assert encoded.state.loss == reference.state.loss


# --- captions as embeddings ------------------------------------------------------------------------------------------


def test_where_the_dataset_holds_embeddings_no_text_encoder_is_loaded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_latents(root / "embedded", 16, unit_rows=16, text_width=16)
    empty = np.random.default_rng(3).standard_normal((1, 77, 16)).astype(np.float16)
    dataset.storage.publish("_text/empty.npy", npy_bytes(empty))
    monkeypatch.setattr("sdp.model.load.load_text_encoder", lambda *_, **__: pytest.fail("a text encoder was loaded"))
    trainer = train(config(root, "no-encoder", source__uri=dataset.storage.uri, max_steps=1))
    assert np.array_equal(trainer.conditioning.empty.numpy(), empty[0].astype(np.float32))
    assert trainer.state.samples == 8


def test_an_empty_caption_that_the_dataset_lacks_is_encoded(root: Path) -> None:
    dataset = make_latents(root / "lacking", 16, unit_rows=16, text_width=16)
    how_ = config(root, "lacking-run", source__uri=dataset.storage.uri)
    expected = make_conditioning(how_, resolve(how_.model.source), World()).empty
    assert torch.allclose(assemble(*settled(how_), World()).conditioning.empty, expected, atol=2e-3)
