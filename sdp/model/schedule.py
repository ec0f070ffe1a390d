"""The noise schedule: the signal and noise at each timestep, and the target that the model predicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Prediction = Literal["epsilon", "v"]


@dataclass(frozen=True)
class NoiseSchedule:
    """The tables of x_t = √ᾱ_t · x_0 + √(1 − ᾱ_t) · ε, on the device that uses them."""

    signal: Tensor
    """√ᾱ, fp32, by timestep."""
    noise: Tensor
    """√(1 − ᾱ), fp32, by timestep."""

    def __len__(self) -> int:
        return len(self.signal)

    def to(self, device: torch.device) -> "NoiseSchedule":
        """Return the schedule on a device."""
        return NoiseSchedule(self.signal.to(device), self.noise.to(device))

    @property
    def alphas_cumprod(self) -> Tensor:
        """ᾱ, by timestep."""
        return self.signal**2

    def add_noise(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the noisy latents x_t of a batch."""
        return _at(self.signal, timesteps, latents) * latents + _at(self.noise, timesteps, latents) * noise

    def target(self, prediction: Prediction, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the target: the noise, or the velocity √ᾱ · ε − √(1 − ᾱ) · x_0."""
        if prediction == "epsilon":
            return noise
        return _at(self.signal, timesteps, latents) * noise - _at(self.noise, timesteps, latents) * latents

    def snr(self, timesteps: Tensor) -> Tensor:
        """Return the signal-to-noise ratio ᾱ / (1 − ᾱ) of each sample."""
        return (self.signal[timesteps] / self.noise[timesteps]) ** 2


def scaled_linear(
    steps: int = 1000, start: float = 0.00085, end: float = 0.012, *, zero_terminal_snr: bool = False
) -> NoiseSchedule:
    """Return Stable Diffusion's schedule, in which the square roots of the betas rise linearly."""
    betas = torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float64) ** 2
    return from_betas(betas, zero_terminal_snr=zero_terminal_snr)


def from_betas(betas: Tensor | Sequence[float], *, zero_terminal_snr: bool = False) -> NoiseSchedule:
    """Return the schedule of the betas, the variance of the noise that each step adds."""
    betas = torch.as_tensor(betas, dtype=torch.float64)
    return from_alphas_cumprod(torch.cumprod(1 - betas, 0), zero_terminal_snr=zero_terminal_snr)


def from_alphas_cumprod(alphas_cumprod: Tensor, *, zero_terminal_snr: bool = False) -> NoiseSchedule:
    """Return the schedule of ᾱ, the share of the signal's variance that is left at each step."""
    signal = alphas_cumprod.double().sqrt()
    if zero_terminal_snr:
        # Shift and scale: the last step has no signal and the first is unchanged (Lin et al., 2305.08891).
        signal = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
    return NoiseSchedule(signal.float(), (1 - signal**2).sqrt().float())


def _at(table: Tensor, timesteps: Tensor, like: Tensor) -> Tensor:
    return table[timesteps].view(-1, *[1] * (like.dim() - 1))
