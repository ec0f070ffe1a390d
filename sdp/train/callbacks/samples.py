"""Draws pictures during training, a little after each step."""

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sdp.config import TrainConfig
from sdp.device import DTYPES, out_of_memory
from sdp.errors import StorageError, one_line
from sdp.generate.painter import text_encoding
from sdp.generate.sample import SamplerNetworks, Sampling, Text, denoising, develop, image_seed
from sdp.generate.worker import encode_png
from sdp.model import load
from sdp.model.checkpoints import trained_scheduler
from sdp.model.sources import resolve
from sdp.model.trained import TrainedNetworks, empty_networks
from sdp.train.run_folder import PROMPTS, samples_folder
from sdp.train.trainer import Callback, StepReport, Trainer

log = logging.getLogger(__name__)

SHARE = 0.05
"""Share of the time that drawing may take."""
_GUIDANCE = 7.5
_BATCH = 4
"""Pictures drawn at once, since each needs GPU memory beside training's."""
_END_S = 60.0
"""Maximum time that the end of training waits for pictures that are being drawn."""


@dataclass
class DrawSamples(Callback):
    """Draws a set of pictures on the main worker, with a copy of the weights of its step.

    After each step it draws while it has credit, which grows by SHARE of the time that passes. So drawing
    takes at most that share, except that it always finishes one action: a call of the U-Net, a decoding or a write.
    It does not touch the global random state: training is the same to the bit with or without samples.
    """

    config: TrainConfig
    _drawing: Iterator[None] | None = None
    _drawn_step: int = 0
    _credit: float = 0.0
    _spent: float = 0.0
    _began: float = 0.0
    _trained: TrainedNetworks | None = None
    """The copy to draw with."""
    _networks: SamplerNetworks | None = None
    _text: Text | None = None

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        settings = self.config.samples
        if self._drawing is not None:
            self._credit += SHARE * report.seconds
        if settings.every_steps is not None and report.step % settings.every_steps == 0:
            self._begin(trainer, report.step)
        while self._drawing is not None and self._credit > 0:
            self._continue(trainer)

    def on_end(self, trainer: Trainer) -> None:
        deadline = time.monotonic() + _END_S
        while self._drawing is not None and time.monotonic() < deadline:
            self._continue(trainer)

    def _begin(self, trainer: Trainer, step: int) -> None:
        """Copy the weights and begin a set; all workers take part, since shards are gathered from all of them."""
        if trainer.world.any_of(self._drawing is not None):
            if trainer.world.is_main:
                log.warning(
                    "step %d: no samples, since those of step %d are still being drawn; raise samples.every_steps",
                    step,
                    self._drawn_step,
                )
            return
        began, self._began = time.perf_counter(), time.monotonic()
        self._copy(trainer)
        if trainer.world.is_main:
            self._drawing, self._drawn_step = self._draw(trainer, step), step
            self._spent = time.perf_counter() - began
            self._credit = -self._spent

    def _continue(self, trainer: Trainer) -> None:
        """Do one action of the set being drawn."""
        assert self._drawing is not None
        began = time.perf_counter()
        try:
            done = next(self._drawing, self) is self
        except (StorageError, RuntimeError) as error:
            if not isinstance(error, StorageError) and not out_of_memory(error):
                raise  # the others are no reason to end training
            line = one_line(error, 200)
            log.warning("step %d: gave up the samples of step %d: %s", trainer.state.step, self._drawn_step, line)
            self._drawing = None
            return
        if trainer.world.device.type == "cuda":
            torch.cuda.synchronize()  # so that the credit pays for the GPU's time
        seconds = time.perf_counter() - began
        self._credit -= seconds
        self._spent += seconds
        if done:
            self._drawing = None
            trainer.checkpointer.run.record(
                "samples",
                step=self._drawn_step,
                uri=trainer.checkpointer.run.storage.uri_of(samples_folder(self._drawn_step)),
                seconds=round(self._spent, 3),
                whole_s=round(time.monotonic() - self._began, 3),
            )

    def _copy(self, trainer: Trainer) -> None:
        """Copy the moving average, or without one the weights, and encode the prompts if needed."""
        averages = trainer.ema.state_dict() if trainer.ema is not None else None
        into = self._parameters(trainer) if trainer.world.is_main else {}
        for name, weights in trainer.trained.items():
            tensor: Tensor = averages[name] if averages is not None else weights.detach()
            if hasattr(tensor, "full_tensor"):  # a collective
                tensor = tensor.full_tensor()
            if name in into:
                into[name].copy_(tensor)
        if self._trained is not None and (self._text is None or self._trained.text_encoder is not None):
            self._text = self._encoded(trainer, self._trained.text_encoder)

    @torch.no_grad()
    def _parameters(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the parameters to draw with, by their names in checkpoints; the first call builds the networks."""
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
            assert objective.prediction is not None, "resolved when the run began"
            overrides = trained_scheduler(objective.prediction, objective.zero_terminal_snr)
            schedule = {**load.load_scheduler_config(model), **overrides}
            self._networks = SamplerNetworks(self._trained.unet, load.load_vae(model, device=device), schedule, dtype)
        return {name: weights.data for name, weights in self._trained.weights().items()}

    def _encoded(self, trainer: Trainer, trained: torch.nn.Module | None) -> Text:
        model = resolve(self.config.model.source, storage=self.config.storage.options()).path
        empty, device = trainer.conditioning.empty, trainer.world.device
        # Trainers that receive embeddings have no text encoder, so one is loaded here for a moment.
        encoder = trained or load.load_text_encoder(model, dtype=empty.dtype, device=device)
        encode = text_encoding(model, encoder, device)
        return Text(encode(self.config.samples.prompts), empty if trained is None else encode([""])[0])

    def _draw(self, trainer: Trainer, step: int) -> Iterator[None]:
        """Draw all pictures of a step, yielding after each action."""
        assert self._networks is not None
        assert self._text is not None
        settings, run = self.config.samples, trainer.checkpointer.run.storage
        sampling = Sampling("ddim", settings.steps, _GUIDANCE, self.config.data.resolution)
        drawn: dict[str, str] = {}
        for start in range(0, len(settings.prompts), _BATCH):
            numbers = range(start, min(start + _BATCH, len(settings.prompts)))
            text = Text(self._text.prompts[numbers.start : numbers.stop], self._text.negative)
            seeds = [image_seed(self.config.seed, number) for number in numbers]
            latents = torch.zeros(0)
            for latents in denoising(self._networks, text, seeds, sampling):  # noqa: B007 (the last ones are used)
                yield
            for number, latent in zip(numbers, latents, strict=True):
                if latent.isfinite().all():
                    (picture,) = develop(self._networks.vae, latent[None])
                    name = f"{number:03d}.png"
                    run.publish(f"{samples_folder(step)}/{name}", encode_png(picture))
                    drawn[name] = settings.prompts[number]
                yield
        run.publish(f"{samples_folder(step)}/{PROMPTS}", json.dumps(drawn, ensure_ascii=False).encode())
