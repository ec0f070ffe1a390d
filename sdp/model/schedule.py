"""The noise schedule: the signal and noise at each timestep, the target that the model predicts, and its loss."""

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


def from_alphas_cumprod(alphas_cumprod: Tensor, *, zero_terminal_snr: bool = False) -> NoiseSchedule:
    """Return the schedule of ᾱ, the share of the signal's variance that is left at each step."""
    signal = alphas_cumprod.double().sqrt()
    if zero_terminal_snr:
        # Shift and scale: the last step has no signal and the first is unchanged (Lin et al., 2305.08891).
        signal = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
    return NoiseSchedule(signal.float(), (1 - signal**2).sqrt().float())


def sample_losses(predicted: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of each sample, always in fp32."""
    return (predicted.float() - target.float()).square().flatten(1).mean(1)


def min_snr_weights(schedule: NoiseSchedule, timesteps: Tensor, prediction: Prediction, gamma: float) -> Tensor:
    """Return min-SNR weights, which keep easy timesteps from dominating: min(SNR, γ) for x_0 (Hang et al., 2303.09556).

    At a timestep without signal (zero terminal SNR) the weight is its limit, which avoids a division by zero.
    """
    snr = schedule.snr(timesteps)
    if prediction == "v":
        return snr.clamp(max=gamma) / (snr + 1)
    return torch.where(snr > 0, snr.clamp(max=gamma) / snr.clamp(min=1e-12), 1.0)


def _at(table: Tensor, timesteps: Tensor, like: Tensor) -> Tensor:
    return table[timesteps].view(-1, *[1] * (like.dim() - 1))
