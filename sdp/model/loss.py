"""The loss of each sample, and its weight by timestep."""

import torch
from torch import Tensor

from sdp.model.schedule import NoiseSchedule, Prediction


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
