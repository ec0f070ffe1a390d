"""The ways to add noise, each with the target that is predicted: a noise schedule (diffusion) or a line (flow)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from sdp.families import TICKS
from sdp.model.layout import Prediction

Integers = Callable[[int], Tensor]
"""Returns for each row a random number below the given one."""


@dataclass(frozen=True)
class Flow:
    """The line x_t = (1 − t) · z + t · n from latents to noise, along which the velocity n − z is predicted."""

    logit_normal: bool = False
    """Draw times near the middle more often (Esser et al., 2403.03206), rather than all alike."""
    shift: float = 1.0
    """Moves times towards the noise, as pictures of more pixels need: t becomes s · t / (1 + (s − 1) · t)."""
    parts: ClassVar[int] = 1000
    """The parts into which a validation divides time, from no noise on."""

    def times(self, integers: Integers) -> Tensor:
        """Return the times to train at."""
        part = self.times_in(integers, 0, self.parts) / TICKS
        if self.logit_normal:
            part = torch.special.ndtri(part).sigmoid()
        part = self.shift * part / (1 + (self.shift - 1) * part)
        return (part * TICKS).round().long()

    def times_in(self, integers: Integers, low: int, high: int) -> Tensor:
        """Return times that are uniform over the parts from `low` to before `high`."""
        first, last = TICKS * low // self.parts, TICKS * high // self.parts
        return first + integers(last - first)

    def add_noise(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return the noisy latents of a batch."""
        part = (times / TICKS).view(-1, *[1] * (latents.dim() - 1))
        return (1 - part) * latents + part * noise

    def target(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:  # noqa: ARG002 (the same at all times)
        """Return what the model should predict."""
        return noise - latents

    def min_snr_weights(self, times: Tensor, gamma: float) -> Tensor:
        """Return the weight of each sample's loss."""
        raise NotImplementedError("a flow's losses have equal weights")


@dataclass(frozen=True)
class NoiseSchedule:
    """The tables of x_t = √ᾱ_t · x_0 + √(1 − ᾱ_t) · ε, on the device that uses them."""

    signal: Tensor
    """√ᾱ, fp32, by timestep."""
    noise: Tensor
    """√(1 − ᾱ), fp32, by timestep."""
    prediction: Prediction = "epsilon"

    def to(self, device: torch.device) -> "NoiseSchedule":
        """Return the schedule on a device."""
        return replace(self, signal=self.signal.to(device), noise=self.noise.to(device))

    @property
    def parts(self) -> int:
        return len(self.signal)

    def times(self, integers: Integers) -> Tensor:
        return integers(len(self.signal))

    def times_in(self, integers: Integers, low: int, high: int) -> Tensor:
        return low + integers(high - low)

    @property
    def alphas_cumprod(self) -> Tensor:
        """ᾱ, by timestep."""
        return self.signal**2

    def add_noise(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        return _values_at(self.signal, times, latents) * latents + _values_at(self.noise, times, latents) * noise

    def target(self, latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return the noise, or the velocity √ᾱ · ε − √(1 − ᾱ) · x_0."""
        if self.prediction == "epsilon":
            return noise
        return _values_at(self.signal, times, latents) * noise - _values_at(self.noise, times, latents) * latents

    def min_snr_weights(self, times: Tensor, gamma: float) -> Tensor:
        """Keep easy timesteps from dominating: min(SNR, γ) for x_0 (Hang et al., 2303.09556).

        At a timestep without signal (zero terminal SNR) the weight is its limit, which avoids a division by zero.
        """
        snr = (self.signal[times] / self.noise[times]) ** 2
        if self.prediction == "v":
            return snr.clamp(max=gamma) / (snr + 1)
        return torch.where(snr > 0, snr.clamp(max=gamma) / snr.clamp(min=1e-12), 1.0)


Process: TypeAlias = Flow | NoiseSchedule
"""Adds noise to latents at a time of each sample."""


def from_alphas_cumprod(
    alphas_cumprod: Tensor, prediction: Prediction = "epsilon", *, zero_terminal_snr: bool = False
) -> NoiseSchedule:
    """Return the schedule of ᾱ, the share of the signal's variance that is left at each step."""
    signal = alphas_cumprod.double().sqrt()
    if zero_terminal_snr:
        # Shift and scale: the last step has no signal and the first is unchanged (Lin et al., 2305.08891).
        signal = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
    return NoiseSchedule(signal.float(), (1 - signal**2).sqrt().float(), prediction)


def sample_losses(predicted: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of each sample, always in fp32."""
    return (predicted.float() - target.float()).square().flatten(1).mean(1)


def _values_at(table: Tensor, timesteps: Tensor, like: Tensor) -> Tensor:
    return table[timesteps].view(-1, *[1] * (like.dim() - 1))
