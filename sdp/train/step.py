"""One forward pass of training: from a batch to the loss of each sample.

Everything random is drawn from (seed, phase, epoch, row), so a sample's loss does not depend on the worker, the batch
or the number of restarts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sdp.config.train import ObjectiveConfig
from sdp.families import kept_tokens
from sdp.model.schedule import Process, sample_losses
from sdp.train.data.batch import Batch
from sdp.train.randomness import Purpose, RowRandom


class Draws(NamedTuple):
    """The random numbers of a batch."""

    times: Tensor
    dropped: Tensor
    """True for the rows whose caption is dropped."""
    noise: Tensor
    vae: Tensor | None
    """Noise to sample latents with, if the batch has moments."""
    kept: Tensor | None
    """The places of each row's image tokens that pass all blocks; None if all do."""


def draw(objective: "Objective", batch: Batch, random: RowRandom) -> Draws:
    """Draw all random numbers of a batch. Compiled, they are 8 kernels on a GPU rather than 349."""
    channels, *sides = batch.latents.shape[1:]
    shape, settings = (channels // 2 if batch.moments else channels, *sides), objective.settings
    tokens = math.prod(sides) // objective.patch**2
    kept = kept_tokens(tokens, settings.skipped_tokens)
    noise = random.normal(Purpose.NOISE, *shape)
    if settings.offset_noise:
        noise = noise + settings.offset_noise * random.normal(Purpose.OFFSET_NOISE, shape[0], 1, 1)
    return Draws(
        objective.process.times(partial(random.integers, Purpose.TIMESTEP)),
        random.chance(Purpose.CAPTION_DROPOUT, settings.caption_dropout),
        noise,
        random.normal(Purpose.VAE, *shape) if batch.moments else None,
        random.some(Purpose.TOKENS, kept, tokens) if settings.skipped_tokens else None,
    )


@dataclass(frozen=True)
class Objective:
    """The training objective."""

    process: Process
    settings: ObjectiveConfig
    patch: int = 1
    """The side of an image token in latents."""
    draw: Callable[["Objective", Batch, RowRandom], Draws] = draw
    """The function `draw`, or the same compiled."""


@dataclass(frozen=True)
class Conditioning:
    """The text input of the networks: embeddings, or token ids if the text encoder is trained with the U-Net."""

    empty: Tensor
    """The empty caption: its embedding, (77, width), or its token ids, (77,)."""
    encode: Callable[[Tensor], Tensor]
    """Encodes token ids; the identity if the text encoder is trained. Not needed if batches have embeddings."""

    @torch.no_grad()
    def text_or_empty(self, batch: Batch, dropped: Tensor) -> Tensor:
        """Return the text of each sample, or the empty caption where it is dropped."""
        if batch.text is not None:
            encoded = batch.text.to(self.empty.dtype)
        else:
            assert batch.token_ids is not None, "a batch has one of both"
            with torch.autocast(batch.token_ids.device.type, enabled=False):  # as `empty` was encoded
                encoded = self.encode(batch.token_ids.to(torch.int64))
        empty = self.empty[: encoded.shape[1]].to(encoded.dtype)
        # Rows of weight 0 too, so that padding cannot bring NaN into the gradients.
        left_out = (dropped | (batch.weights == 0)).view(-1, *[1] * empty.dim())
        return torch.where(left_out, empty, encoded)


def weighted_losses(
    networks: nn.Module, objective: Objective, conditioning: Conditioning, batch: Batch, random: RowRandom
) -> Tensor:
    """Return the loss of each sample times its weight; the caller divides by the sum of all weights."""
    draws = objective.draw(objective, batch, random)
    text = conditioning.text_or_empty(batch, draws.dropped)
    losses = losses_at(networks, objective, batch, draws, text)
    weights, gamma = batch.weights, objective.settings.min_snr_gamma
    if gamma is not None:
        weights = weights * objective.process.min_snr_weights(draws.times, gamma)
    return losses * weights


def losses_at(networks: nn.Module, objective: Objective, batch: Batch, draws: Draws, text: Tensor) -> Tensor:
    """Return the unweighted loss of each sample at its time."""
    process, noise, times = objective.process, draws.noise, draws.times
    latents = torch.where(batch.weights[:, None, None, None] > 0, batch.latents.float(), 0.0)
    if draws.vae is not None:  # the VAE's mean and log-variance, both of the scaled latent
        mean, log_variance = latents.chunk(2, dim=1)
        latents = mean + (log_variance.clamp(-30, 20) / 2).exp() * draws.vae
    predicted = networks(process.add_noise(latents, noise, times), times, text, draws.kept)
    return sample_losses(predicted, process.target(latents, noise, times))
