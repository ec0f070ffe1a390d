"""Draws pictures during training."""

import json
import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from sdp.config.generate import SamplerConfig
from sdp.config.train import TrainConfig
from sdp.device import DTYPES, BatchLimit
from sdp.errors import OutOfMemory, StorageError
from sdp.generate.painter import Painter, text_encoding
from sdp.generate.sample import image_seed
from sdp.generate.worker import encode_png
from sdp.model import load
from sdp.model.checkpoints import trained_scheduler
from sdp.model.sources import resolve
from sdp.model.trained import TrainedNetworks, drawing_networks, empty_networks
from sdp.train.limits import is_due
from sdp.train.run_folder import PROMPTS, samples_folder
from sdp.train.trainer import Callback, StepReport, Trainer

log = logging.getLogger(__name__)

_BATCH = 4
"""Pictures drawn at once, since each needs GPU memory beside training's."""


@dataclass
class DrawSamples(Callback):
    """Draws a set of pictures on the main worker, with a copy of the weights; the other workers wait for it.

    A picture of 25 steps takes as long as 17 samples of training: both call the U-Net 50 times, counting a backward
    pass as two. The global random state stays untouched: training is the same to the bit with or without samples.
    """

    config: TrainConfig
    _trained: TrainedNetworks | None = None
    """The copy to draw with."""
    _painter: Painter | None = None

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        settings = self.config.samples
        if settings.every_steps is None or not is_due(self.config, trainer.state, settings.every_steps):
            return
        began = time.perf_counter()
        self._copy(trainer)
        if self._painter is None:  # on other workers than the main one
            return
        run, folder = trainer.checkpointer.run, samples_folder(report.step)
        try:
            seeds = [image_seed(self.config.seed, number) for number in range(len(settings.prompts))]
            drawn: dict[str, str] = {}
            for number, picture in enumerate(self._painter.paint(settings.prompts, seeds)):
                if picture is not None:
                    name = f"{number:03d}.png"
                    run.storage.publish(f"{folder}/{name}", encode_png(picture))
                    drawn[name] = settings.prompts[number]
            run.storage.publish(f"{folder}/{PROMPTS}", json.dumps(drawn, ensure_ascii=False).encode())
        except (StorageError, OutOfMemory) as error:
            log.warning("step %d: gave up the samples: %s", report.step, error)
            return
        trainer.gauges["samples_step"] = report.step
        seconds = round(time.perf_counter() - began, 3)
        run.record("samples", step=report.step, uri=run.storage.uri_of(folder), seconds=seconds)

    def _copy(self, trainer: Trainer) -> None:
        """Copy the moving average, or without one the weights; all workers take part, since they have the shards."""
        source = trainer.trained if trainer.ema is None else trainer.ema.state_dict()
        into = self._parameters(trainer) if trainer.world.is_main else {}
        for name, values in source.items():
            tensor: Tensor = values.detach()
            if hasattr(tensor, "full_tensor"):  # a collective
                tensor = tensor.full_tensor()
            if name in into:
                into[name].copy_(tensor)

    @torch.no_grad()
    def _parameters(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the parameters to draw with, by their names in checkpoints; the first call builds the networks."""
        if self._trained is None:
            config, device = self.config, trainer.world.device
            encodes = config.model.train_text_encoder
            model = resolve(config.model.source, storage=config.storage.options()).path
            dtype = DTYPES[config.precision] if device.type == "cuda" else torch.float32
            if config.lora.rank is not None and config.strategy.kind == "ddp":  # fsdp has shards
                trained = drawing_networks(trainer.networks, model, config.lora, dtype)
            else:
                trained = empty_networks(model, config.lora, text_encoder=encodes)
            trained = trained.eval().requires_grad_(False)
            if next(trained.denoiser.parameters()).is_meta:
                trained.denoiser.to_empty(device=device)
            self._trained = trained.to(device, dtype)
            objective = trainer.config.objective
            assert objective.prediction is not None, "resolved when the run began"
            overrides = trained_scheduler(objective.prediction, objective.zero_terminal_snr)
            # One that is not trained is loaded for a moment: trainers that receive embeddings have none.
            encoder = trained.text_encoder
            encoder = encoder or load.load_text_encoder(model, dtype=trainer.conditioning.empty.dtype, device=device)
            encode = text_encoding(model, encoder, device)
            if not encodes:
                prompts = ("", *config.samples.prompts)
                embeddings = dict(zip(prompts, encode(prompts), strict=True))
                encode = lambda texts: torch.stack([embeddings[text] for text in texts])  # noqa: E731
            self._painter = Painter(
                family=trained.family,
                denoiser=trained.denoiser,
                vae=load.load_vae(model, device=device),
                encode=encode,
                schedule={**load.load_scheduler_config(model), **overrides},
                sampler=SamplerConfig(steps=config.samples.steps),
                resolution=config.data.resolution,
                dtype=dtype,
                limit=BatchLimit(_BATCH),
            )
        return {name: weights.data for name, weights in self._trained.weights().items()}
