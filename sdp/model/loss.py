"""The loss of one sample: how far the model's prediction is off, and how much its timestep counts."""

import torch
from torch import Tensor

from sdp.model.schedule import NoiseSchedule, Prediction


def sample_losses(predicted: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of each sample, in fp32 whatever the model computes in."""
    return (predicted.float() - target.float()).square().flatten(1).mean(1)


def min_snr_weights(schedule: NoiseSchedule, timesteps: Tensor, prediction: Prediction, gamma: float) -> Tensor:
    """Weights that keep easy timesteps from dominating: min(SNR, γ), in terms of x_0 (Hang et al., 2303.09556).

    Where the signal is nothing (zero terminal SNR) the weight's limit is taken, so that nothing divides by zero.
    """
    snr = schedule.snr(timesteps)
    if prediction == "v":
        return snr.clamp(max=gamma) / (snr + 1)
    return torch.where(snr > 0, snr.clamp(max=gamma) / snr.clamp(min=1e-12), 1.0)
