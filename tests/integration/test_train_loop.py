"""The training loop in one process."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp.datasets.ledger import Ledger
from sdp.errors import ModelError, OutOfMemory, UserError
from sdp.storage import open_storage
from sdp.train.assemble import assemble
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.run_folder import RunFolder
from sdp.train.settle import settled
from sdp.train.trainer import Callback, StepReport, Trainer
from sdp.train.world import World
from tests.tiny_model import make_tiny_model
from tests.training import Crash, CrashAt, Poison, Watch, config, train, weights


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(root: Path, kind: str) -> None:
    whole, watch = config(root, "whole", max_steps=11, optimizer__kind=kind), Watch()
    expected = weights(train(whole, callbacks=[watch]))

    continued = config(root, "again", max_steps=11, optimizer__kind=kind)
    first, second = Watch(), Watch()
    with pytest.raises(Crash):
        train(continued, callbacks=[first, SaveCheckpoints(3), CrashAt(8)])
    trainer = train(continued, callbacks=[second])
    assert first.losses[:6] + second.losses == watch.losses
    assert [report.step for report in second.reports] == [7, 8, 9, 10, 11]
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, expected[name]), name
    states = [
        json.loads((root / run / "checkpoints/step-000000011/complete.json").read_text())["state"]
        for run in ("whole", "again")
    ]
    for state in states:
        del state["seconds"], state["trainer_hours"]
    assert states[0] == states[1]


def test_the_checkpoints_ledger_holds_exactly_what_was_trained_on(root: Path) -> None:
    rows: list[list[int]] = []

    class Rows(Callback):
        def on_start(self, trainer: Trainer) -> None:
            step = trainer._step
            trainer._step = lambda batch: rows.append(batch.counted.tolist()) or step(batch)  # type: ignore[method-assign,func-returns-value]

    train(config(root, max_steps=10), callbacks=[Rows(), SaveCheckpoints(5)])
    for step in (5, 10):
        ledger = Ledger.from_bytes((root / f"run/checkpoints/step-{step:09d}/ledger.roaring").read_bytes())
        done = [row for some in rows[:step] for row in some]
        assert set(ledger.rows(0)) | set(ledger.rows(1)) == set(done)
        assert ledger.consumed(0) + ledger.consumed(1) == len(done)
    assert sorted(row for some in rows[:8] for row in some) == list(range(60))  # an epoch: 7 whole batches and a half


class Ahead(Callback):
    """Has the trainer begin a step before it reads the figures of the one before, as on a GPU."""

    def __init__(self, stop_at: int = 0) -> None:
        self._stop_at = stop_at
        self.begun: list[bool] = []
        """True for steps at whose end the next one had gradients."""

    def on_start(self, trainer: Trainer) -> None:
        trainer._ahead = True

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        self.begun.append(any(parameter.grad is not None for parameter in trainer.trained.values()))
        if report.step == self._stop_at:
            trainer.stop.reason = "SIGTERM"


def test_reading_figures_after_the_next_step_has_begun_changes_nothing(root: Path) -> None:
    changes = {"checkpoint__every_steps": 4, "max_steps": 10, "ema__decay": 0.9}
    ahead, watch, watch_ahead = Ahead(), Watch(), Watch()
    saver = SaveCheckpoints(4)
    plain = train(config(root, "plain", **changes), callbacks=[Poison(3, 6), watch, saver])
    early = train(config(root, "ahead", **changes), callbacks=[Poison(3, 6), ahead, watch_ahead, saver])
    # Step 8 ends an epoch, 4 and 8 are saved, and 10 is the last.
    assert ahead.begun == [step not in (4, 8, 10) for step in range(1, 11)]
    assert str(watch_ahead.losses) == str(watch.losses)  # NaN is no number
    states = [{**asdict(trainer.state), "seconds": 0, "trainer_hours": 0} for trainer in (plain, early)]
    assert states[0] == states[1]
    assert states[0]["taken"] == 8
    expected = weights(plain)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(early).items())
    for name in ("step-000000004/ledger.roaring", "step-000000010/ledger.roaring"):
        assert (root / "ahead/checkpoints" / name).read_bytes() == (root / "plain/checkpoints" / name).read_bytes()


def test_a_step_that_was_begun_before_a_stop_request_is_not_taken(root: Path) -> None:
    stopped = train(config(root, "stopped"), callbacks=[Ahead(stop_at=3)])
    expected = train(config(root, "short", max_steps=3))
    assert (stopped.state.step, stopped.state.samples) == (3, expected.state.samples)
    assert all(torch.equal(tensor, weights(expected)[name]) for name, tensor in weights(stopped).items())
    resumed = train(config(root, "stopped"), callbacks=[Ahead()])
    whole = weights(train(config(root, "whole")))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(resumed).items())


@pytest.mark.parametrize(
    ("limits", "state", "reason"),
    [
        ({"max_epochs": 2}, (16, 2, 0, 120), "max_epochs: 2 passes over the data"),
        ({"max_steps": 9}, (9, 1, 8, 68), "max_steps: 9 steps"),
        ({"max_steps": 9, "max_epochs": 1}, (8, 1, 0, 60), "max_epochs: 1 pass over the data"),
    ],
)
def test_a_run_ends_at_the_first_limit(root: Path, limits: dict[str, int], state: tuple[int, ...], reason: str) -> None:
    trainer = train(config(root, **{"max_steps": None, **limits}))
    done = trainer.state
    assert (done.step, done.epoch, done.position, done.samples) == state
    assert trainer.reason == reason


@pytest.mark.parametrize(
    ("batch_size", "advice"),
    [
        (8, r"8 samples do not fit into .* cpu \(no room for 8\); try 4 \(and keep data\.global_batch_size: 8"),
        (1, r"train on a larger GPU \(scaling\.accelerator\), or set strategy\.activation_checkpointing: true"),
    ],
)
def test_a_batch_too_large_for_memory_is_the_users_to_mend(
    root: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int, advice: str
) -> None:
    trainer = assemble(*settled(config(root, data__batch_size=batch_size)), World())

    def full(latents: torch.Tensor, *_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError(f"no room for {len(latents)}")

    monkeypatch.setattr(trainer.networks.unet, "forward", full)
    with pytest.raises(OutOfMemory, match=rf"^data\.batch_size: .*{advice}"):
        trainer.train()
    assert trainer.state.step == 0


def test_a_model_too_large_for_memory_is_the_users_to_mend(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("sdp.train.assemble.make_networks", full)
    with pytest.raises(
        OutOfMemory, match=r"^strategy\.kind: cpu has no memory for the model and its optimizer \(CUDA error: out of"
    ):
        assemble(*settled(config(root)), World())


def test_only_the_last_checkpoints_are_kept(root: Path) -> None:
    train(config(root, max_steps=9, checkpoint__keep_last=2), callbacks=[SaveCheckpoints(2)])
    assert list(RunFolder(open_storage(str(root / "run"))).steps()) == [8, 9]


def test_a_checkpoint_of_another_architecture_is_told_in_one_line(root: Path) -> None:
    train(config(root, max_steps=1))
    (root / "model").unlink()
    other = make_tiny_model(root / "model")
    (other / "unet/config.json").write_text(
        (other / "unet/config.json").read_text().replace('"cross_attention_dim": 16', '"cross_attention_dim": 24')
    )
    with pytest.raises(UserError, match=r"model\.source: .* is another model than the run began with"):
        train(config(root, max_steps=2))
    begun = {"model__start_from": str(root / "run/checkpoints/step-000000001"), "max_steps": 2}
    with pytest.raises(ModelError, match=r"another architecture: model\..* is \[.*\] there and \[.*\] here"):
        train(config(root, "other", **begun))


def test_another_runs_weights_are_begun_with(root: Path) -> None:
    first = train(config(root, "first", max_steps=3))
    second = assemble(*settled(config(root, "second", model__start_from=str(root / "first"), max_steps=1)), World())
    begun: dict[str, torch.Tensor] = {}

    class Begin(Callback):
        def on_start(self, trainer: Trainer) -> None:
            begun.update(weights(trainer))

    second.callbacks = [Begin()]
    second.train()
    for name, tensor in weights(first).items():
        if name.startswith(("model.", "ema.")):
            assert torch.equal(begun[name], tensor), name
        else:
            assert not begun[name].any()  # the optimizer is fresh
