"""No row is lost or repeated, wherever and however often workers die.

The model is a fake that counts the rows it has been trained on: the counts are among its tensors, so they are saved
and restored with it, and are what the weights of a real one would have learned from.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdp.datasets.ledger import Ledger
from sdp.families.sd import SD
from sdp.model.checkpoints import read_weights
from sdp.model.trained import TrainedNetworks
from sdp.storage import open_storage
from sdp.train.assemble import latents_reader
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.checkpoint import CheckpointManager
from sdp.train.data.sources import open_sources
from sdp.train.run_folder import RunFolder
from sdp.train.step import Conditioning, Objective
from sdp.train.stopwatch import Stopwatch
from sdp.train.trainer import Callback, StepReport, Trainer
from sdp.train.world import World
from tests.latents import make_latents
from tests.training import config, scaled_linear
from tests.workers import WorkersFailed, run_workers

ROWS, EPOCHS = 230, 2


class CountingUnet(nn.Module):
    """Learns one number, and counts how often it has seen each row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.counts = nn.Parameter(torch.zeros(ROWS))

    def forward(self, noisy: Tensor, *_: Tensor, **__: Any) -> tuple[Tensor]:
        return (noisy * self.weight + 0 * self.counts.sum(),)  # what has no gradient is in no checkpoint


class Dies(Callback):
    """Ends this process after some steps, by an error or silently."""

    def __init__(self, after: int, quietly: bool) -> None:
        self._left = after
        self._quietly = quietly

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
        self._left -= 1
        if self._left == 0:
            if self._quietly:
                os._exit(9)
            raise RuntimeError("struck by the test")


def dying_storage(folder: RunFolder, after: int) -> None:
    """Make a write of this process its last."""
    storage, left = type(folder.storage), [after]

    def counted(write: Any) -> Any:
        def last(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return write(*arguments)

        return last

    for name in ("publish", "create", "replace"):
        setattr(storage, name, counted(getattr(storage, name)))  # this process is a fork


def segment(world: World, root: Path, batch: int, fate: tuple[str, int, int]) -> None:
    """Train until the end, or until this worker dies."""
    changes = {"ema__decay": None, "optimizer__weight_decay": 0.0}  # which would change the counts
    how = config(root, max_steps=None, max_epochs=EPOCHS, data__batch_size=batch, **changes)
    kind, rank, after = fate
    run = RunFolder(open_storage(how.output.uri))
    callbacks: list[Callback] = [SaveCheckpoints(3)]
    if world.rank == rank and kind in ("error", "quiet"):
        callbacks.append(Dies(after, quietly=kind == "quiet"))
    if world.rank == rank and kind == "write":
        dying_storage(run, after)
    unet = CountingUnet()
    trainer = Trainer(
        config=how,
        world=world,
        networks=TrainedNetworks(SD, unet),
        objective=Objective(scaled_linear(), how.objective),
        conditioning=Conditioning(torch.zeros(77, 4), lambda ids: torch.zeros(*ids.shape, 4)),
        reader=latents_reader(how, open_sources(how), world),
        checkpointer=CheckpointManager(run, world, {}),
        stopwatch=Stopwatch(world.device),
        callbacks=callbacks,
    )
    update = trainer._update

    def counting(batch: Any, *figures: Any) -> None:
        update(batch, *figures)
        seen = torch.zeros(ROWS).index_add_(0, batch.counted, torch.ones(len(batch.counted)))
        unet.counts.data += world.sum_of(seen)

    trainer._update = counting  # type: ignore[method-assign]
    trainer.train()


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("survival")
    make_latents(root, ROWS, unit_rows=60, group_rows=7, failed=9)
    return root / "latents"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_every_row_is_trained_on_once_an_epoch_whatever_dies(seed: int, latents: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "latents").symlink_to(latents)
    chance = random.Random(seed)

    deaths = 0
    for _ in range(4):
        world, batch = chance.randint(1, 3), chance.randint(3, 12)
        kind = chance.choice(["error", "quiet", "write"])
        fate = (kind, chance.randrange(world), chance.randint(1, 12))
        try:
            run_workers(world, segment, tmp_path, batch, fate)
        except WorkersFailed:
            deaths += 1
    run_workers(chance.randint(1, 3), segment, tmp_path, chance.randint(3, 12), ("", -1, 0))

    run = RunFolder(open_storage(str(tmp_path / "run")))
    step = run.latest()
    assert step is not None
    assert deaths or seed not in (0, 1, 2)  # the test does kill
    written = {row for row in range(ROWS) if row % 9}
    counts = read_weights(run.checkpoint(step), ema=False)["counts"]
    assert {row for row in range(ROWS) if counts[row]} == written
    assert set(counts[counts > 0].tolist()) == {EPOCHS}
    ledger = Ledger.from_bytes(run.checkpoint(step).read("ledger.roaring"))
    assert [set(ledger.rows(epoch)) for epoch in range(EPOCHS)] == [written] * EPOCHS
