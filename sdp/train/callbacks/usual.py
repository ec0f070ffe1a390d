"""The callbacks that the configuration asks for."""

from collections.abc import Callable
from typing import Any

from sdp.config import TrainConfig
from sdp.model.load import load_unet_config
from sdp.model.sources import resolve
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.callbacks.metrics import RecordMetrics
from sdp.train.callbacks.profile import Profile
from sdp.train.callbacks.stragglers import NameSlowest
from sdp.train.callbacks.telemetry import EmitMetrics
from sdp.train.callbacks.tensorboard import WriteEvents
from sdp.train.callbacks.watchdog import WATCHDOG_S, Watchdog
from sdp.train.callbacks.weights_and_biases import LogToWandb
from sdp.train.trainer import Callback
from sdp.train.world import World


def make_callbacks(
    config: TrainConfig,
    world: World,
    emit: EmitMetrics,
    publish: Callable[[dict[str, Any]], Any],
    samples_to_come: float,
) -> list[Callback]:
    """Return the callbacks of a worker; `publish` is called with each line of the metrics.

    `samples_to_come` are those of later phases, for the forecast of the end.
    """
    sinks: list[Callable[[dict[str, Any]], Any]] = [emit.line, publish]
    writers: list[Callback] = []
    if config.log.tensorboard:
        writers.append(events := WriteEvents())
        sinks.append(events.line)
    if config.log.wandb.project is not None:
        writers.append(wandb := LogToWandb(config.log.wandb.project))
        sinks.append(wandb.line)

    def write(line: dict[str, Any]) -> None:
        for sink in sinks:
            sink(line)

    callbacks: list[Callback] = [SaveCheckpoints(config.checkpoint.every_steps)]
    if config.evaluate.every_steps is not None:
        from sdp.train.callbacks.validation import MeasureValidationLoss

        callbacks.append(MeasureValidationLoss(config))
    if config.samples.every_steps is not None:
        from sdp.train.callbacks.samples import DrawSamples

        callbacks.append(DrawSamples(config))
    callbacks += [
        NameSlowest(config.log.every_steps),
        RecordMetrics(config.log.every_steps, _flops(config, world), write, samples_to_come),
        emit,
        *writers,
    ]
    # Encoders elsewhere may wait for nodes at any time.
    callbacks.append(Watchdog(WATCHDOG_S, WATCHDOG_S / (1 if config.data.mode == "online" else 3)))
    if config.profile.steps is not None:
        callbacks.append(Profile(config.profile.steps))
    return callbacks


def _flops(config: TrainConfig, world: World) -> float | None:
    """Return a sample's FLOPs for MFU; only on the main worker's GPU, since counting takes some seconds."""
    if not world.is_main or world.device.type != "cuda":
        return None
    from sdp.model.family import unet_flops

    model = resolve(config.model.source, storage=config.storage.options())
    return unet_flops(load_unet_config(model.path), config.data.resolution)
