"""The callbacks that the configuration asks for."""

from sdp.config.train import TrainConfig
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.callbacks.garbage import CollectGarbage
from sdp.train.callbacks.metrics import RecordMetrics
from sdp.train.callbacks.profile import Profile
from sdp.train.callbacks.tensorboard import WriteEvents
from sdp.train.callbacks.trackers import trackers
from sdp.train.callbacks.watchdog import WATCHDOG_S, Watchdog
from sdp.train.trainer import Callback


def make_callbacks(config: TrainConfig) -> list[Callback]:
    """Return the callbacks of a worker."""
    callbacks: list[Callback] = [SaveCheckpoints(config.checkpoint.every_steps)]
    if config.evaluate.every_steps is not None:
        from sdp.train.callbacks.validation import MeasureValidationLoss

        callbacks.append(MeasureValidationLoss(config))
    if config.samples.every_steps is not None:
        from sdp.train.callbacks.samples import DrawSamples

        callbacks.append(DrawSamples(config))
    callbacks.append(RecordMetrics(config.log.every_steps))
    if config.log.tensorboard:
        callbacks.append(WriteEvents())
    callbacks += trackers(config.log)
    # Encoders elsewhere may wait for nodes at any time.
    callbacks.append(Watchdog(WATCHDOG_S, WATCHDOG_S / (1 if config.data.mode == "online" else 3)))
    if config.profile.steps is not None:
        callbacks.append(Profile(config.profile.steps))
    callbacks.append(CollectGarbage())
    return callbacks
