"""Draws pictures while training goes on, a little after each step."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdp.config import TrainConfig
from sdp.errors import StorageError, one_line
from sdp.generate.sample import Networks, Sampling, Text, denoising, develop, image_seed
from sdp.generate.source import trained_scheduler
from sdp.generate.worker import encode_png
from sdp.model import load
from sdp.model.family import encode_text
from sdp.model.sources import resolve
from sdp.model.trained import TrainedNetworks, empty_networks
from sdp.train.callbacks.base import Callback, StepReport
from sdp.train.run_folder import PROMPTS, samples_folder
from sdp.train.strategies import DTYPES

if TYPE_CHECKING:
    from sdp.train.trainer import Trainer

log = logging.getLogger(__name__)

_END_S = 60.0
"""How long the end of training waits for pictures that are being drawn."""


@dataclass
class DrawSamples(Callback):
    """The weights are copied at the step; from then on the main worker draws with the copy, after each step as long as
    it has time to its credit. Credit grows by `samples.share` of the time that passes, so that drawing never takes more
    than that share, but for the last piece of work: one call of the U-Net, a decoding or the writing of a picture.

    Nothing is drawn from the global random numbers: training is the same to the bit with samples or without.
    """

    config: TrainConfig
    _drawing: Iterator[None] | None = None
    _of_step: int = 0
    _credit: float = 0.0
    _spent: float = 0.0
    _began: float = 0.0
    _trained: TrainedNetworks | None = None
    """The copy that draws."""
    _networks: Networks | None = None
    _text: Text | None = None

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:
        told = self.config.samples
        if self._drawing is not None:
            self._credit += told.share * report.seconds
        if told.every_steps is not None and report.step % told.every_steps == 0:
            self._begin(trainer, report.step)
        while self._drawing is not None and self._credit > 0:
            self._draw_on(trainer)

    def on_end(self, trainer: "Trainer") -> None:
        deadline = time.monotonic() + _END_S
        while self._drawing is not None and time.monotonic() < deadline:
            self._draw_on(trainer)

    def _begin(self, trainer: "Trainer", step: int) -> None:
        """On all workers at the same step: shards are gathered from all of them."""
        if trainer.world.agree([self._drawing is not None])[0]:
            if trainer.world.is_main:
                log.warning(
                    "step %d: the samples of step %d are still being drawn, so none are drawn now; raise "
                    "samples.every_steps or samples.share",
                    step,
                    self._of_step,
                )
            return
        began, self._began = time.perf_counter(), time.monotonic()
        self._copy(trainer)
        if trainer.world.is_main:
            self._drawing, self._of_step = self._draw(trainer, step), step
            self._spent = time.perf_counter() - began
            self._credit = -self._spent

    def _draw_on(self, trainer: "Trainer") -> None:
        """One piece of work."""
        assert self._drawing is not None
        began = time.perf_counter()
        try:
            done = next(self._drawing, self) is self
        except (StorageError, torch.OutOfMemoryError) as error:  # pictures are worth no run
            line = one_line(error, 200)
            log.warning("step %d: the samples of step %d are given up: %s", trainer.state.step, self._of_step, line)
            self._drawing = None
            return
        if trainer.world.device.type == "cuda":
            torch.cuda.synchronize()  # what was asked for is paid for when it is done
        seconds = time.perf_counter() - began
        self._credit -= seconds
        self._spent += seconds
        if done:
            self._drawing = None
            trainer.checkpointer.run.record(
                "samples",
                step=self._of_step,
                uri=trainer.checkpointer.run.storage.uri_of(samples_folder(self._of_step)),
                seconds=round(self._spent, 3),
                whole_s=round(time.monotonic() - self._began, 3),
            )

    def _copy(self, trainer: "Trainer") -> None:
        """The average, or the weights, as they are now."""
        averages = trainer.ema.state_dict() if trainer.ema is not None else None
        into = self._ready(trainer) if trainer.world.is_main else {}
        for name, weights in trainer.trained.items():
            tensor: Tensor = averages[name] if averages is not None else weights.detach()
            if hasattr(tensor, "full_tensor"):  # of all workers' shards, by all workers
                tensor = tensor.full_tensor()
            if name in into:
                into[name].copy_(tensor)
        if self._trained is not None and (self._text is None or self._trained.text_encoder is not None):
            self._text = self._encoded(trainer, self._trained.text_encoder)

    @torch.no_grad()
    def _ready(self, trainer: "Trainer") -> dict[str, Tensor]:
        """The parameters to draw with, by their names in checkpoints; made the first time, with all else."""
        if self._trained is None or self._networks is None:
            model = resolve(self.config.model.source, storage=self.config.storage.options()).path
            device = trainer.world.device
            dtype = DTYPES[self.config.precision] if device.type == "cuda" else torch.float32
            encodes = self.config.model.train_text_encoder
            self._trained = empty_networks(model, self.config.lora, text_encoder=encodes).eval().requires_grad_(False)
            if next(self._trained.unet.parameters()).is_meta:
                self._trained.unet.to_empty(device=device)
            self._trained.to(device, dtype)
            objective = trainer.config.objective
            assert objective.prediction is not None, "settled when the run began"
            overrides = trained_scheduler(objective.prediction, objective.zero_terminal_snr)
            schedule = {**load.load_scheduler_config(model), **overrides}
            self._networks = Networks(self._trained.unet, load.load_vae(model, device=device), schedule, dtype)
        return {name: weights.data for name, weights in self._trained.weights().items()}

    @torch.no_grad()
    def _encoded(self, trainer: "Trainer", trained: torch.nn.Module | None) -> Text:
        model = resolve(self.config.model.source, storage=self.config.storage.options()).path
        empty, device = trainer.conditioning.empty, trainer.world.device
        # Trainers that are sent embeddings have no text encoder, so that one is loaded here, and let go of.
        encoder: Any = trained or load.load_text_encoder(model, dtype=empty.dtype, device=device)
        tokenizer = load.load_tokenizer(model)

        def encode(prompts: Sequence[str]) -> Tensor:
            ids = load.tokenize(tokenizer, prompts).astype("int64")
            return encode_text(encoder, torch.from_numpy(ids).to(device))

        return Text(encode(self.config.samples.prompts), empty if trained is None else encode([""])[0])

    def _draw(self, trainer: "Trainer", step: int) -> Iterator[None]:
        """All pictures of a step, in pieces of work."""
        assert self._networks is not None
        assert self._text is not None
        told, run = self.config.samples, trainer.checkpointer.run.storage
        how = Sampling("ddim", told.steps, told.guidance_scale, self.config.data.resolution)
        drawn: dict[str, str] = {}
        for start in range(0, len(told.prompts), told.batch_size):
            some = range(start, min(start + told.batch_size, len(told.prompts)))
            text = Text(self._text.prompts[some.start : some.stop], self._text.negative)
            seeds = [image_seed(self.config.seed, number) for number in some]
            latents = torch.zeros(0)
            for after_step in denoising(self._networks, text, seeds, how):
                latents = after_step
                yield
            for number, latent in zip(some, latents, strict=True):
                if latent.isfinite().all():
                    (picture,) = develop(self._networks.vae, latent[None])
                    name = f"{number:03d}.png"
                    run.publish(f"{samples_folder(step)}/{name}", encode_png(picture))
                    drawn[name] = told.prompts[number]
                yield
        run.publish(f"{samples_folder(step)}/{PROMPTS}", json.dumps(drawn, ensure_ascii=False).encode())
