"""The state of a run: all that a resumed run needs besides tensors and the ledger."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from sdp.model.checkpoints import FIRST, EpochStart


@dataclass(slots=True)
class TrainState:
    """Counts since the run began, over all of its restarts."""

    step: int = 0
    """Finished steps, skipped ones included; max_steps and the learning rate count these."""
    taken: int = 0
    """Steps that changed the weights."""
    empty: int = 0
    """Steps without a row that counts, which change nothing."""
    samples: int = 0
    """Samples trained on."""
    skipped_samples: int = 0
    """Samples of bad steps, which are consumed as well."""
    counted_in_epoch: int = 0
    """Samples of the current epoch, trained on or skipped."""
    epoch: int = 0
    """The current epoch, from 0."""
    position: int = 0
    """Consumed positions of the epoch's order."""
    start: EpochStart = FIRST
    """The beginning of the current epoch."""
    seconds: float = 0.0
    """Time spent training."""
    gpu_hours: float = 0.0
    """GPU-hours of trainers and encoders during that time."""
    cost: float = 0.0
    """Cost of that time at the configuration's prices."""
    optimized: int = 0
    """Steps in AdamW's moments, with those of the run that they were taken from."""
    averaged: int = 0
    """Steps in the moving average, with those of the run that it was taken from."""
    loss: float | None = None
    """The smoothed loss."""
    usual_norm: float = 0.0
    scale: float | None = None
    """The loss scaler's scale, in fp16."""
    scale_growth: int = 0

    @property
    def skipped(self) -> int:
        """Steps that were bad and therefore skipped."""
        return self.step - self.taken - self.empty

    @property
    def consumed(self) -> int:
        """Samples in the ledger."""
        return self.samples + self.skipped_samples

    def count(self, samples: int, *, taken: bool) -> None:
        """Count the samples of a step."""
        if taken:
            self.samples += samples
        else:
            self.skipped_samples += samples
        self.counted_in_epoch += samples
        self.empty += not samples

    def smooth(self, loss: float) -> None:
        """Add a step's loss to the smoothed loss: a mean at first, then a moving average over about 100 steps."""
        if self.loss is None:
            self.loss = loss
        else:
            self.loss += (loss - self.loss) * max(0.01, 1 / max(1, self.taken))

    def to_json(self) -> dict[str, Any]:
        """Return the counts, without the epoch's start."""
        return {name: value for name, value in asdict(self).items() if name != "start"}

    @staticmethod
    def from_json(data: dict[str, Any], start: EpochStart = FIRST) -> "TrainState":
        known = {field.name for field in fields(TrainState)} - {"start"}
        # Older checkpoints lack these counts.
        taken = data.get("taken", 0)
        older = {"averaged": taken, "optimized": taken, "counted_in_epoch": data.get("samples", 0)}
        return TrainState(**{**older, **{name: value for name, value in data.items() if name in known}}, start=start)
