"""Sends configuration, metrics and samples to Weights & Biases. The user installs its library."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Any

from sdp.errors import StorageError, UserError, one_line
from sdp.telemetry.emit import run_name
from sdp.train.callbacks.tensorboard import numbers
from sdp.train.trainer import Callback, Trainer


def require_wandb(project: str | None) -> None:
    """Raise a UserError if a project is set and the library is missing."""
    if project is not None and find_spec("wandb") is None:
        raise UserError(
            f"log.wandb.project: {project!r} needs wandb, which is not installed; pip install wandb (in the image, "
            "if the job runs on a cluster), or set it to null"
        )


@dataclass
class LogToWandb(Callback):
    """Logs the main worker's metrics to a W&B run; a resumed run continues the same W&B run."""

    project: str
    _run: Any = None
    _drawn: int | None = None
    """The step whose samples it has."""

    def on_metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:
        from PIL import Image

        values: dict[str, Any] = dict(numbers(line))
        if (drawn := line.get("samples_step")) not in (None, self._drawn):
            self._drawn = drawn
            wandb, samples = import_module("wandb"), trainer.checkpointer.run.samples(drawn)
            with suppress(StorageError):  # training needs no samples
                values["pictures"] = [wandb.Image(Image.open(BytesIO(data)), caption=text) for _, text, data in samples]
        self._run.log(values, step=int(line["step"]))  # W&B ignores repeated steps

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        wandb: Any = import_module("wandb")
        uri = trainer.checkpointer.run.storage.uri
        try:
            self._run = wandb.init(
                project=self.project,
                name=run_name(uri),
                id=hashlib.sha256(uri.encode()).hexdigest()[:16],
                resume="allow",
                config=dict(trainer.checkpointer.config),
            )
        except wandb.Error as error:
            cause = one_line(error, 200)
            raise UserError(
                f"log.wandb.project: {self.project}: W&B refused ({cause}); set WANDB_API_KEY, or the key to null"
            ) from error

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
