"""Helpers for tests of the score stage: predictors of aesthetics, and jobs that take a moment."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from sdp.config import load
from sdp.config.score import ScoreConfig


def write_predictor(path: Path, widths: Sequence[int], seed: int = 1) -> nn.Module:
    """A predictor of aesthetics as LAION's: linear layers with dropout between them, under numbers."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Dropout(0.2)]
    network = nn.Sequential()
    network.layers = nn.Sequential(*layers[:-1])
    tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    network.forward = network.layers.forward  # type: ignore[method-assign]
    return network


def score_config(source: object, output: object, *settings: str) -> ScoreConfig:
    usual = ["encode.dtype=fp32", "encode.batch_size=8", "output.rows_per_file=20"]
    return load("score", None, [f"source.uri={source}", f"output.uri={output}", *usual, *settings])
