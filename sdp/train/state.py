"""Where a run stands: everything that a resumed run needs and that is not a tensor or a set of addresses."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from sdp.model.checkpoints import FIRST, EpochStart


@dataclass(slots=True)
class TrainState:
    """Counts since the run began, over all of its restarts."""

    step: int = 0
    """Steps that are over, skipped ones included: what max_steps and the learning rate go by."""
    taken: int = 0
    """Of these, the steps that changed the weights."""
    empty: int = 0
    """Steps in which no row counted: all held out, taken down or bad. They change nothing."""
    samples: int = 0
    """Samples trained on."""
    skipped_samples: int = 0
    """Samples of bad steps: consumed as well, so that they do not come again."""
    counted_in_epoch: int = 0
    """Samples that the epoch under way has had, trained on or skipped."""
    epoch: int = 0
    """The epoch under way, from 0."""
    position: int = 0
    """Positions of the epoch's order that are consumed."""
    start: EpochStart = FIRST
    """What the epoch began with."""
    seconds: float = 0.0
    """Time spent training."""
    gpu_hours: float = 0.0
    """Of that time, over all trainers and encoders that had a GPU."""
    cost: float = 0.0
    """Of that time, at the configuration's prices."""
    optimized: int = 0
    """Steps that AdamW's averages have behind them, those of another run that it was begun with included."""
    averaged: int = 0
    """The same of the moving average."""
    loss: float | None = None
    """The loss, smoothed."""
    usual_norm: float = 0.0
    scale: float | None = None
    """The loss scaler's scale, in fp16."""
    scale_growth: int = 0

    @property
    def skipped(self) -> int:
        """Steps that were bad and therefore not taken."""
        return self.step - self.taken - self.empty

    @property
    def consumed(self) -> int:
        """Samples that ledgers have."""
        return self.samples + self.skipped_samples

    def count(self, samples: int, *, taken: bool) -> None:
        """Take in the samples of a step."""
        if taken:
            self.samples += samples
        else:
            self.skipped_samples += samples
        self.counted_in_epoch += samples
        self.empty += not samples

    def smooth(self, loss: float) -> None:
        """Take in a step's loss: a mean over the first steps, then over about the last hundred."""
        if self.loss is None:
            self.loss = loss
        else:
            self.loss += (loss - self.loss) * max(0.01, 1 / max(1, self.taken))

    def to_json(self) -> dict[str, Any]:
        """Return the numbers, without what the epoch began with."""
        return {name: value for name, value in asdict(self).items() if name != "start"}

    @staticmethod
    def from_json(data: dict[str, Any], start: EpochStart = FIRST) -> "TrainState":
        known = {field.name for field in fields(TrainState)} - {"start"}
        # Of checkpoints from before these had counts of their own.
        taken = data.get("taken", 0)
        older = {"averaged": taken, "optimized": taken, "counted_in_epoch": data.get("samples", 0)}
        return TrainState(**{**older, **{name: value for name, value in data.items() if name in known}}, start=start)
