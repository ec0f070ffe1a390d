"""Latents in a training loop of the user's own, through Ray Data and Ray Train."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.train
from ray.train.torch import TorchTrainer

import sdp
from sdp.datasets import tombstones
from sdp.datasets.draws import held_out
from sdp.datasets.tombstones import Takedown
from sdp.errors import UserError
from tests.latents import latent_of, make_latents, tokens_of
from tests.local_ray import one_node

ROWS, TAKEN_DOWN, HOLDOUT = 120, {3, 77}, 0.2


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with one_node(4):
        yield


def loop(config: dict[str, Any]) -> None:
    """Take every batch of this worker's shard, as the article's notebook does, and note its rows."""
    seen: list[int] = []
    for batch in ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=8):  # type: ignore[no-untyped-call]
        seen += batch["row"].tolist()
        assert batch["latents_64"].shape[1:] == (4, 8, 8)
    rank = ray.train.get_context().get_world_rank()
    Path(config["notes"], f"{rank}.json").write_text(json.dumps(seen))
    ray.train.report({"rows": len(seen)})


@pytest.mark.slow
def test_a_training_loop_of_ones_own_streams_every_row_that_counts_once(tmp_path: Path) -> None:
    dataset = make_latents(tmp_path, ROWS, failed=50)
    tombstones.add(dataset.storage, [Takedown("row", str(row)) for row in TAKEN_DOWN])
    (tmp_path / "notes").mkdir()
    trainer: Any = TorchTrainer(
        loop,
        train_loop_config={"notes": str(tmp_path / "notes")},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(tmp_path / "ray")),
        datasets={"train": sdp.ray_dataset(dataset.storage.uri, resolution=64, holdout=HOLDOUT)},
    )
    trainer.fit()
    shards = [json.loads((tmp_path / f"notes/{rank}.json").read_text()) for rank in (0, 1)]
    rows = np.arange(ROWS)
    kept = set(rows[~held_out(rows, HOLDOUT)].tolist()) - TAKEN_DOWN - {0, 50, 100}
    assert all(shards)
    assert sorted(shards[0] + shards[1]) == sorted(kept)


def test_its_rows_are_decoded_without_those_that_are_taken_down(tmp_path: Path) -> None:
    tombstones.add(make_latents(tmp_path, 20).storage, [Takedown("row", "3")])
    rows = sdp.ray_dataset(str(tmp_path / "latents"), resolution=64).take_all()
    assert sorted(row["row"] for row in rows) == [row for row in range(20) if row != 3]
    for row in rows:
        assert np.array_equal(row["latents_64"], latent_of(row["row"], 8))
        assert row["token_ids"].tolist() == tokens_of(row["row"], 1000).tolist()


def test_latents_of_several_shapes_are_refused(tmp_path: Path) -> None:
    make_latents(tmp_path, 20, buckets=True, resolution=256)
    with pytest.raises(UserError, match="expected latents of one shape"):
        sdp.ray_dataset(str(tmp_path / "latents"))
