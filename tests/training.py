"""A small run for tests: a configuration, and a trainer of this process."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sdp.config import parse
from sdp.config.train import TrainConfig
from sdp.datasets.ledger import Ledger
from sdp.model.schedule import NoiseSchedule, from_alphas_cumprod
from sdp.storage import open_storage
from sdp.train.assemble import assemble
from sdp.train.run_folder import RunFolder
from sdp.train.settle import settled
from sdp.train.trainer import Callback, StepReport, Trainer
from sdp.train.world import World
from tests.latents import make_latents
from tests.tiny_model import make_tiny_model
from tests.waiting import as_soon_as

if TYPE_CHECKING:
    from sdp.train.driver import TrainSummary


def scaled_linear(*, zero_terminal_snr: bool = False) -> NoiseSchedule:
    """Return Stable Diffusion's noise schedule, in which the square roots of the betas rise linearly."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return from_alphas_cumprod(torch.cumprod(1 - betas, 0), zero_terminal_snr=zero_terminal_snr)


def config(root: Path, run: str = "run", **changes: Any) -> TrainConfig:
    """Return the configuration of a run in root/run over root/latents; `changes` are dotted paths, __ for the dot."""
    data: dict[str, Any] = {
        "source": {"uri": str(root / "latents")},
        "output": {"uri": str(root / run)},
        "model": {"source": str(root / "model")},
        "data": {"resolution": 64, "batch_size": 8, "global_batch_size": None},
        "strategy": {"kind": "ddp", "compile": False},
        "precision": "fp32",
        "max_steps": 6,
        "max_epochs": None,
        "optimizer": {"warmup_steps": 2, "learning_rate": 1e-3},
    }
    for path, value in changes.items():
        *sections, last = path.split("__")
        here = data
        for section in sections:
            here = here.setdefault(section, {})
        here[last] = value
    return parse("train", data)


def bad_rows(run: RunFolder) -> dict[int, str]:
    """Return the reason of each bad row of a run."""
    problems: list[str] = []
    reasons = {line["row"]: line["reason"] for line in run.bad_rows(problems)}
    assert not problems
    return reasons


def tiny_inputs(root: Path, rows: int = 40, **latents: Any) -> Path:
    """A tiny model and rows of latents in a folder, computed with one thread."""
    torch.set_num_threads(1)
    make_tiny_model(root / "model")
    make_latents(root, rows, vocabulary=50, **latents)
    return root


def linked(inputs: Path, folder: Path) -> Path:
    """Link shared inputs into a folder for runs, and return the folder."""
    for entry in inputs.iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


def when(folder: RunFolder, event: str, then: Callable[[dict[str, Any]], object]) -> threading.Thread:
    """Run an action on a run's first event of a kind, in a thread."""
    return as_soon_as(lambda: next((entry for entry in folder.events() if entry["event"] == event), None), then)


class Watch(Callback):
    """Keeps the report of every step."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
        self.reports.append(report)

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.reports]


class Crash(Exception):
    """An error that a test raises in the loop."""


class CrashAt(Callback):
    """Ends the job by an error at a step, when the checkpoint in progress is complete."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step == self._step:
            trainer.checkpointer.finish()  # or it would depend on the disk which checkpoint is gone on from
            raise Crash


class Poison(Callback):
    """Makes the latents of some steps infinite."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.rows: list[int] = []
        """The rows of the last one."""

    def on_start(self, trainer: Trainer) -> None:
        step = trainer._step

        def poisoned(batch: Any) -> None:
            if trainer.state.step + 1 + (trainer._unfinished is not None) in self.steps:
                batch.latents.fill_(float("inf"))
                self.rows = batch.counted.tolist()
            step(batch)

        trainer._step = poisoned  # type: ignore[method-assign]


class Gauges(Callback):
    """Keeps the validation losses by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, float]] = {}

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if trainer.gauges.get("validation_step") == report.step:
            self.by_step[report.step] = trainer.gauges["validation"]


def ledger(summary: "TrainSummary") -> Ledger:
    """Return the ledger of a run's last checkpoint."""
    assert summary.checkpoint is not None
    return Ledger.from_bytes(open_storage(summary.checkpoint).read("ledger.roaring"))


def train(how: TrainConfig, world: World | None = None, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Train to the end, or to the error."""
    trainer = assemble(*settled(how), world or World(), callbacks=callbacks)
    trainer.train()
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all tensors of a run, unsharded."""
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        for name, tensor in trainer.tensors().items()
    }
