"""The noise schedule of training: how much of a picture is left at each timestep, and what the model is to predict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Prediction = Literal["epsilon", "v"]


@dataclass(frozen=True)
class NoiseSchedule:
    """x_t = √ᾱ_t · x_0 + √(1 − ᾱ_t) · ε, with a table of √ᾱ and √(1 − ᾱ) on the device where it is used."""

    signal: Tensor
    """√ᾱ, fp32, by timestep."""
    noise: Tensor
    """√(1 − ᾱ), fp32, by timestep."""

    def __len__(self) -> int:
        return len(self.signal)

    def to(self, device: torch.device) -> "NoiseSchedule":
        return NoiseSchedule(self.signal.to(device), self.noise.to(device))

    @property
    def alphas_cumprod(self) -> Tensor:
        """ᾱ, by timestep."""
        return self.signal**2

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The noisy pictures x_t of a batch."""
        return _at(self.signal, timesteps, latents) * latents + _at(self.noise, timesteps, latents) * noise

    def target(self, prediction: Prediction, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """What the model should say: the noise, or the velocity √ᾱ · ε − √(1 − ᾱ) · x_0."""
        if prediction == "epsilon":
            return noise
        return _at(self.signal, timesteps, latents) * noise - _at(self.noise, timesteps, latents) * latents

    def snr(self, timesteps: Tensor) -> Tensor:
        """The signal-to-noise ratio ᾱ / (1 − ᾱ) of each sample."""
        return (self.signal[timesteps] / self.noise[timesteps]) ** 2


def scaled_linear(
    steps: int = 1000, start: float = 0.00085, end: float = 0.012, *, zero_terminal_snr: bool = False
) -> NoiseSchedule:
    """Stable Diffusion's schedule: the square roots of the betas rise linearly."""
    betas = torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float64) ** 2
    return from_betas(betas, zero_terminal_snr=zero_terminal_snr)


def from_betas(betas: Tensor | Sequence[float], *, zero_terminal_snr: bool = False) -> NoiseSchedule:
    """A schedule from the share of noise that each step adds."""
    betas = torch.as_tensor(betas, dtype=torch.float64)
    return from_alphas_cumprod(torch.cumprod(1 - betas, 0), zero_terminal_snr=zero_terminal_snr)


def from_alphas_cumprod(alphas_cumprod: Tensor, *, zero_terminal_snr: bool = False) -> NoiseSchedule:
    """A schedule from the share of the signal's variance that is left at each step."""
    signal = alphas_cumprod.double().sqrt()
    if zero_terminal_snr:
        # Shift and scale so that the last step has no signal and the first keeps its own (Lin et al., 2305.08891).
        signal = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
    return NoiseSchedule(signal.float(), (1 - signal**2).sqrt().float())


def _at(table: Tensor, timesteps: Tensor, like: Tensor) -> Tensor:
    return table[timesteps].view(-1, *[1] * (like.dim() - 1))
