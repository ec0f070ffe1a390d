"""A dataset that changes during a run: an epoch continues with the version that it started with."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp.config.train import TrainConfig
from sdp.datasets.ledger import Ledger
from sdp.errors import ConfigError, DatasetError
from sdp.lease import Lease
from sdp.storage import open_storage
from sdp.train.job import run
from sdp.train.plan import make_plan
from sdp.train.run_folder import RunFolder
from sdp.train.trainer import Trainer
from tests.latents import grow_latents, make_latents
from tests.tiny_model import make_tiny_model
from tests.training import config

ROWS, MORE, BATCH = 60, 24, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("versions") / "model"
    make_tiny_model(folder)
    return folder


@pytest.fixture
def root(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").symlink_to(model)
    make_latents(tmp_path, ROWS, unit_rows=20, group_rows=5, vocabulary=50)
    return tmp_path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> "Counter[int]":
    """Return how often each row was in a step of any job."""
    counts: Counter[int] = Counter()
    step = Trainer._step

    def count(trainer: Trainer, batch: object) -> object:
        report = step(trainer, batch)  # type: ignore[arg-type]
        counts.update(batch.rows[batch.weights > 0].tolist())  # type: ignore[attr-defined]
        return report

    monkeypatch.setattr(Trainer, "_step", count)
    return counts


def how(root: Path, **limits: object) -> TrainConfig:
    return config(root, **{"max_steps": None, "data__batch_size": BATCH, **limits})


def grow(root: Path) -> None:
    grow_latents(root, MORE, first=ROWS, group_rows=5, vocabulary=50)


def test_an_epoch_ends_with_the_rows_that_it_began_with_though_the_dataset_has_grown(
    root: Path, trained: "Counter[int]"
) -> None:
    run(how(root, max_steps=3))
    grow(root)
    assert make_plan(how(root, max_epochs=1)).rows == ROWS
    done = run(how(root, max_epochs=1))
    assert trained == Counter(range(ROWS))
    assert done.state.epoch == 1

    # And the next one begins with what is there by then.
    assert make_plan(how(root, max_epochs=2)).rows == ROWS + MORE
    trained.clear()
    run(how(root, max_epochs=2))
    assert trained == Counter(range(ROWS + MORE))
    folder = RunFolder(open_storage(str(root / "run")))
    step = folder.latest()
    assert step is not None
    ledger = Ledger.from_bytes(folder.checkpoint(step).read("ledger.roaring"))
    assert [ledger.consumed(epoch) for epoch in (0, 1)] == [ROWS, ROWS + MORE]


def test_a_job_that_waited_for_another_s_lease_goes_on_with_what_that_one_has_begun(
    root: Path, trained: "Counter[int]", monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = Lease.acquire

    def after_another(*arguments: Any, **named: Any) -> Lease:
        monkeypatch.setattr(Lease, "acquire", acquire)
        run(how(root, max_steps=3))
        grow(root)
        return acquire(*arguments, **named)

    monkeypatch.setattr(Lease, "acquire", after_another)
    run(how(root, max_epochs=1))
    assert trained == Counter(range(ROWS))


def test_another_dataset_at_the_same_address_is_refused_in_mid_epoch(root: Path) -> None:
    run(how(root, max_steps=3))
    shutil.rmtree(root / "latents")
    shutil.rmtree(root / "source")
    make_latents(root, ROWS + MORE, unit_rows=20, group_rows=5, vocabulary=50)
    with pytest.raises(DatasetError, match=r"not the dataset that this run began with \(version 1"):
        run(how(root, max_epochs=1))


@pytest.mark.parametrize("limit", [20, None])
def test_a_limit_changes_between_epochs_and_not_in_one(root: Path, trained: "Counter[int]", limit: int | None) -> None:
    run(how(root, limit=40, max_steps=3))
    with pytest.raises(ConfigError, match=rf"^limit: expected 40 until epoch 0 is over, got {limit}; set it back"):
        run(how(root, limit=limit, max_epochs=1))
    run(how(root, limit=40, max_epochs=1))
    assert trained == Counter(range(40))
    trained.clear()
    run(how(root, limit=limit, max_epochs=2))
    assert trained == Counter(range(limit or ROWS))


def test_a_damaged_note_is_named(root: Path) -> None:
    run(how(root, max_steps=3))
    (root / "run" / "_source" / "000.json").write_text('{"uri": "x"}')
    with pytest.raises(DatasetError, match=r"_source/000\.json: not the pinned version of a dataset"):
        run(how(root, max_epochs=1))
