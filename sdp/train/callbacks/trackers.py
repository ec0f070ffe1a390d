"""Sends configuration, metrics and samples to Weights & Biases and MLflow. The user installs their libraries."""

import hashlib
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from typing import Any

from sdp.config.base import changed
from sdp.config.train import LogConfig, TrainConfig
from sdp.errors import StorageError, UserError, one_line
from sdp.telemetry.emit import run_name
from sdp.train.callbacks.tensorboard import numbers
from sdp.train.trainer import Callback, Trainer

log = logging.getLogger(__name__)


def trackers(config: LogConfig) -> "list[LogToTracker]":
    """Return a callback for each tracker that is set."""
    kinds = {kind.key: kind for kind in (LogToWandb, LogToMlflow)}
    return [kinds[key](place) for key, place in config.trackers.items()]


@dataclass
class LogToTracker(Callback):
    """Logs the main worker's metrics to a tracker's run, which a resumed run continues.

    A refusal ends a new run. A later failure loses only what was being sent.
    """

    place: str
    _run: Any = None
    """The library's run; None where there is none, and on other workers than the main one."""
    _drawn: int | None = None
    """The step whose samples it has."""

    library = key = remedy = ""

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.world.is_main:
            return
        uri = trainer.checkpointer.run.storage.uri
        try:
            self._run = self.begin(run_name(uri), hashlib.sha256(uri.encode()).hexdigest()[:16], trainer)
        except Exception as error:
            refusal = f"{self.key}: {self.place}: {self.library} refused ({one_line(error, 200)})"
            if trainer.state.step == 0:
                raise UserError(f"{refusal}; {self.remedy}, or the key to null") from error
            log.warning("%s; this job goes on without it", refusal)

    def on_metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:
        from PIL import Image

        def send() -> None:
            pictures, drawn = [], line.get("samples_step")
            if drawn not in (None, self._drawn):
                self._drawn = drawn
                with suppress(StorageError):  # training needs no samples
                    samples = trainer.checkpointer.run.samples(drawn)
                    pictures = [(Image.open(BytesIO(data)), text) for _, text, data in samples]
            self.send(int(line["step"]), numbers(line), pictures)

        self._try(send)

    def close(self) -> None:
        self._try(self.end)
        self._run = None

    def _try(self, action: Callable[[], None]) -> None:
        if self._run is not None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 (a library may raise anything, and training needs none)
                log.warning("%s: %s: this was not sent: %s", self.key, self.library, one_line(error, 200))

    def begin(self, name: str, identity: str, trainer: Trainer) -> Any:
        """Return the tracker's run of this identity: that of an earlier job, or a new one."""

    def send(self, step: int, values: dict[str, float], pictures: list[tuple[Any, str]]) -> None:
        """Log the values of a step and new pictures with their prompts."""

    def end(self) -> None:
        """End the tracker's run."""


class LogToWandb(LogToTracker):
    """A run of Weights & Biases."""

    library, key, remedy = "wandb", "log.wandb.project", "set WANDB_API_KEY"

    def begin(self, name: str, identity: str, trainer: Trainer) -> Any:
        config = dict(trainer.checkpointer.config)
        return import_module("wandb").init(project=self.place, name=name, id=identity, resume="allow", config=config)

    def send(self, step: int, values: dict[str, float], pictures: list[tuple[Any, str]]) -> None:
        images = [import_module("wandb").Image(picture, caption=text) for picture, text in pictures]
        self._run.log({**values, **({"pictures": images} if images else {})}, step=step)  # W&B ignores repeated steps

    def end(self) -> None:
        self._run.finish()


class LogToMlflow(LogToTracker):
    """A run of MLflow, which is found again by a tag. Its parameters are the first job's settings."""

    library, key, remedy = "mlflow", "log.mlflow.experiment", "set MLFLOW_TRACKING_URI"
    _client: Any = None

    def begin(self, name: str, identity: str, trainer: Trainer) -> Any:
        client = self._client = import_module("mlflow").MlflowClient()
        known, filters = client.get_experiment_by_name(self.place), f"tags.sdp_run = '{identity}'"
        experiment = known.experiment_id if known else client.create_experiment(self.place)
        earlier = client.search_runs([experiment], filters, max_results=1)
        if not earlier:
            run = client.create_run(experiment, tags={"sdp_run": identity}, run_name=name).info.run_id
            for key, value in changed(TrainConfig, trainer.checkpointer.config).items():
                client.log_param(run, key, value)
        else:
            run = earlier[0].info.run_id
            client.update_run(run, status="RUNNING")
        client.log_dict(run, dict(trainer.checkpointer.config), "config.json")
        return run

    def send(self, step: int, values: dict[str, float], pictures: list[tuple[Any, str]]) -> None:
        entities: Any = import_module("mlflow.entities")
        now = int(1000 * time.time())
        metrics = [entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics, synchronous=False)  # a slow server does not hold training up
        for number, (picture, text) in enumerate(pictures):
            name = re.sub(r"[^\w ./-]+", " ", f"{number:03d} {text}", flags=re.ASCII)[:80]
            self._client.log_image(self._run, picture, key=name, step=step)

    def end(self) -> None:
        self._client.set_terminated(self._run)
