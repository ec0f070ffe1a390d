"""The networks that a run trains, and loading them from its checkpoints."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sdp.config.train import LoraConfig
from sdp.errors import DatasetError, ModelError, UserError, one_line
from sdp.families import Family, of
from sdp.model import load, sources
from sdp.model.checkpoints import read_config, read_weights
from sdp.model.layout import AnySource
from sdp.model.lora import TEXT_TARGETS, add_lora, matrices_of, merge_lora, strengths
from sdp.storage import Storage, StorageOptions, open_source

_TEXT_ENCODER = "text_encoder."
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, SafetensorError, TypeError, ValueError)
"""Exceptions that a LoRA's file leads to that is none."""


class TrainedNetworks(nn.Module):
    """The denoiser, and the text encoder if it is trained too, as one module that one strategy wraps.

    Its children have the names of a model's parts. In checkpoints the denoiser's parameters have no prefix, and the
    text encoder's begin with `text_encoder.`.
    """

    def __init__(self, family: Family, denoiser: Any, text_encoder: Any = None) -> None:
        super().__init__()
        self.family = family
        self.add_module(family.denoiser, denoiser)
        self.text_encoder: Any = text_encoder

    @property
    def denoiser(self) -> Any:
        """The network that predicts, untyped because diffusers' decorators hide its methods."""
        return getattr(self, self.family.denoiser)

    def forward(self, latents: Tensor, times: Tensor, text: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the denoiser's prediction; `text` is token ids if the text encoder is trained, else its output."""
        if self.text_encoder is not None:
            text = self.family.encode_text(self.text_encoder, text)
        return self.family.predict(self.denoiser, latents, times, text, kept)

    def weights(self) -> dict[str, nn.Parameter]:
        """Return all parameters, by their names in checkpoints."""
        prefix = f"{self.family.denoiser}."
        return {name.removeprefix(prefix): parameter for name, parameter in self.named_parameters()}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters."""
        return {name: parameter for name, parameter in self.weights().items() if parameter.requires_grad}

    def blocks(self) -> Iterator[nn.Module]:
        """Yield the modules that are sharded separately, in forward order."""
        if self.text_encoder is not None:
            yield from self.family.text_blocks(self.text_encoder)
        yield from self.family.blocks(self.denoiser)

    def recompute_activations(self) -> None:
        """Compute activations again in the backward pass instead of keeping them."""
        self.denoiser.enable_gradient_checkpointing()
        if self.text_encoder is None:
            return
        for layer in self.family.text_blocks(self.text_encoder):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def add_lora(self, lora: LoraConfig) -> None:
        """Freeze all weights, and add LoRA."""
        assert lora.rank is not None
        targets = self.family.lora_targets if lora.targets == LoraConfig().targets else lora.targets
        add_lora(self.denoiser, lora.rank, lora.scale, targets, "lora.targets")
        if self.text_encoder is not None:
            add_lora(self.text_encoder, lora.rank, lora.scale, TEXT_TARGETS, "model.train_text_encoder")

    @torch.no_grad()
    def begin_lora(self, matrices: Mapping[str, Tensor], scale: float) -> None:
        """Begin with the matrices of a LoRA's file; layers that it lacks begin with none."""
        own = dict(self.named_parameters())
        for name, value in matrices.items():
            if name not in own or own[name].shape != value.shape:
                raise UserError(f"lora.start_from: no place for {name} of {tuple(value.shape)}; choose another file")
            own[name].copy_(value / scale if ".lora_B." in name else value)


def load_networks(
    path: Path,
    *,
    text_encoder: bool,
    pretrained: bool = True,
    device: torch.device | str = "cpu",
    empty: bool = False,
    matrices: torch.dtype | None = None,
) -> TrainedNetworks:
    """Load the model's denoiser, or one with new weights, and its text encoder if that is trained too.

    An `empty` denoiser has memory on the device, to copy weights into. Its matrices are in fp32 or the given dtype.
    """
    if empty:
        denoiser = _on_meta(path, matrices).to_empty(device=device)
    else:
        denoiser = load.load_denoiser(path, pretrained=pretrained, device=device, matrices=matrices)
    encoder = load.load_text_encoder(path, device=device).requires_grad_(True).train() if text_encoder else None
    return TrainedNetworks(of(path), denoiser, encoder)


def empty_networks(path: Path, lora: LoraConfig, *, text_encoder: bool) -> TrainedNetworks:
    """Return networks to load a run's weights into. Without LoRA the denoiser is on torch's meta device."""
    if lora.rank is not None:
        networks = load_networks(path, text_encoder=text_encoder)
        networks.add_lora(lora)
        return networks
    # The text encoder also has buffers, which checkpoints lack.
    encoder = load.load_text_encoder(path).requires_grad_(True) if text_encoder else None
    return TrainedNetworks(of(path), _on_meta(path), encoder)


def drawing_networks(networks: TrainedNetworks, path: Path, lora: LoraConfig, dtype: torch.dtype) -> TrainedNetworks:
    """Return the networks of a run to draw with: the frozen weights are shared, and a LoRA's are empty."""
    encoder = load.load_text_encoder(path) if networks.text_encoder is not None else None
    drawing = TrainedNetworks(networks.family, _on_meta(path), encoder)
    drawing.add_lora(lora)
    weights = {
        name: torch.empty_like(own, dtype=dtype) if own.requires_grad else own.detach().to(dtype)
        for name, own in networks.named_parameters()
    }
    drawing.load_state_dict(weights, strict=False, assign=True)
    return drawing


def _on_meta(path: Path, matrices: torch.dtype | None = None) -> Any:
    with torch.device("meta"):  # initialising weights would be wasted
        return load.load_denoiser(path, pretrained=False, device="meta", matrices=matrices)


def load_trained(folder: Storage, path: Path, *, ema: bool, name: str) -> TrainedNetworks:
    """Load a checkpoint's networks, trained from the model in the folder `path`. LoRA is merged."""
    weights, lora = read_weights(folder, ema=ema), lora_of(folder)
    networks = empty_networks(path, lora, text_encoder=any(n.startswith(_TEXT_ENCODER) for n in weights))
    frozen = {n for n, weight in networks.named_parameters() if not weight.requires_grad}
    try:
        result = networks.load_state_dict(by_network(weights, networks.family), strict=lora.rank is None, assign=True)
        if unmatched := [*result.unexpected_keys, *(set(result.missing_keys) - frozen)]:
            raise RuntimeError(f"{len(unmatched)} names do not match, such as {unmatched[0]}")
    except RuntimeError as error:
        cause = one_line(error, 200)
        raise ModelError(
            f"{folder.uri}: not weights of {name} ({cause}); set model to the one that the run was trained from"
        ) from error
    if not all(torch.isfinite(tensor).all() for tensor in weights.values()):
        raise DatasetError(f"{folder.uri}: has NaN or infinite weights; use an earlier checkpoint")
    merge_lora(networks)
    return networks


def by_network(weights: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with the network's name as a prefix of every name."""
    return {
        name if name.startswith(_TEXT_ENCODER) else f"{family.denoiser}.{name}": value
        for name, value in weights.items()
    }


def refuse_lora(lora: LoraConfig, source: AnySource, options: StorageOptions, *, text_encoder: bool) -> None:
    """Raise UserError if a LoRA does not fit a model's networks."""
    if lora.rank is not None:
        with torch.device("meta"):
            path = sources.resolve(source, storage=options).path
            encoder = load.new_text_encoder(path) if text_encoder else None
            networks = TrainedNetworks(of(path), _on_meta(path), encoder)
            networks.add_lora(lora)
        if lora.start_from is not None:
            networks.begin_lora(read_lora(lora, source, options), lora.scale)


def read_lora(lora: LoraConfig, source: AnySource, options: StorageOptions) -> dict[str, Tensor]:
    """Return the matrices of the file lora.start_from, by the names of a model's networks."""
    assert lora.start_from is not None
    path = sources.resolve(source, storage=options).path
    family = of(path)
    with torch.device("meta"):
        networks = TrainedNetworks(family, _on_meta(path), load.new_text_encoder(path) if family.trains_text else None)
    layers = [name for name, layer in networks.named_modules() if isinstance(layer, nn.Linear)]
    try:
        data = open_source(lora.start_from, options).read()
        tensors, authors = load_tensors(data), {layer: family.authors_layer(layer) for layer in layers}
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # which load_tensors has read
        about = json.loads(header.get("__metadata__", {}).get("lora_adapter_metadata", "{}"))
        return matrices_of(tensors, authors, strengths(about))
    except _MALFORMED as error:
        problem = f"not a LoRA for {family.name} ({one_line(error, 200)})"
        raise UserError(f"lora.start_from: {lora.start_from}: {problem}; choose another file") from error


def lora_of(folder: Storage) -> LoraConfig:
    """Return the LoRA configuration of a checkpoint's run."""
    return LoraConfig.model_validate(read_config(folder).get("lora", {}), strict=False)
