"""LoRA: small matrices, trained beside linear layers that stay frozen.

The names are PEFT's: `….to_q.lora_A.weight` beside `….to_q.weight`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sdp.errors import UserError
from sdp.families import LoraNames


class LoraLinear(nn.Linear):
    """A frozen linear layer plus the product of two small matrices, which are trained."""

    lora_A: nn.Linear  # noqa: N815 (PEFT's name)
    lora_B: nn.Linear  # noqa: N815

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = layer.in_features, layer.out_features, scale
        self.weight, self.bias = layer.weight, layer.bias
        device = layer.weight.device
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False, device=device)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False, device=device)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)  # the initial output is the frozen layer's

    def forward(self, values: Tensor) -> Tensor:
        update: Tensor = self.lora_B(self.lora_A(values))
        return functional.linear(values, self.weight, self.bias) + self.scale * update

    def merged(self) -> nn.Linear:
        """Return one linear layer with the same output."""
        layer = nn.Linear(1, 1, device="meta")
        layer.in_features, layer.out_features, layer.bias = self.in_features, self.out_features, self.bias
        with torch.no_grad():
            layer.weight = nn.Parameter(self.weight + self.scale * (self.lora_B.weight @ self.lora_A.weight))
        return layer


def add_lora(network: nn.Module, rank: int, scale: float, targets: Sequence[str], key: str = "lora.targets") -> None:
    """Freeze a network, and add LoRA to the linear layers whose names end with one of the targets."""
    network.requires_grad_(False)
    chosen = list(_layers(network, nn.Linear, targets))
    for target in targets:
        if not any(_ends_with(name, target) for name, _ in chosen):
            example = next(_layers(network, nn.Linear, ("",)))[0].rpartition(".")[2]
            raise UserError(f"{key}: no linear layer has a name that ends with {target}; expected such as {example}")
    for name, layer in chosen:
        if rank > (most := min(layer.in_features, layer.out_features)):
            raise UserError(f"lora.rank: expected at most {most}, the size of layer {name}, got {rank}; lower it")
        network.set_submodule(name, LoraLinear(layer, rank, scale))


def merge_lora(network: nn.Module) -> None:
    """Replace each layer with LoRA by one linear layer."""
    for name, layer in list(_layers(network, LoraLinear, ("",))):
        network.set_submodule(name, layer.merged())


def published(weights: Mapping[str, Tensor], scale: float, names: LoraNames) -> dict[str, Tensor]:
    """Return LoRA's tensors as other programs read them; diffusers knows no scale, so B is multiplied by it.

    The text encoder's layers get the names that transformers gave them before version 5, which all versions read.
    """
    old = re.compile(r"^text_encoder\.(?!text_model\.)")
    tensors = {
        old.sub("text_encoder.text_model.", name): value * (scale if ".lora_B." in name else 1)
        for name, value in weights.items()
    }
    if names == "diffusers":
        return tensors
    from diffusers.utils import state_dict_utils

    convert: Any = state_dict_utils.convert_state_dict_to_kohya  # untyped
    made: dict[str, Tensor] = convert(tensors)
    return {name.replace("lora_te1_", "lora_te_"): value for name, value in made.items()}  # te1 is SDXL's


def strengths(about: Mapping[str, Any]) -> dict[str, float]:
    """Return the scale of each network's LoRA from what diffusers writes about it; ValueError if it is not one."""
    scales = dict[str, float]()
    for name, alpha in about.items():
        part, _, field = name.rpartition(".")
        if field in ("alpha_pattern", "rank_pattern", "use_rslora", "use_dora") and alpha:
            raise ValueError(f"its layers differ by {name}")
        if field == "lora_alpha":
            scales[part] = float(alpha) / float(about[f"{part}.r"])
            if not math.isfinite(scales[part]):
                raise ValueError(f"{name} is {alpha}")
    return scales


def matrices_of(
    tensors: Mapping[str, Tensor], layers: Mapping[str, str], scales: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """Return the matrices of another program's LoRA by our names; B has the file's scale.

    `layers` are ours, each with the name of the authors' layer that it is, or is a part of. `scales` are those of
    layers without an alpha, by network. Raise ValueError for a tensor that has no place, and for what is no LoRA of
    one rank.
    """
    known: dict[str, list[str]] = defaultdict(list)
    for layer, authors in layers.items():
        for name in _spellings(layer) | _spellings(authors):
            known[name].append(layer)
    read: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        stem, _, end = _OLD_ENDS.sub(r".lora_\1", name.removesuffix(".weight").removesuffix(".default")).rpartition(".")
        if stem not in known:
            raise ValueError(f"no linear layer here is meant by {name}")
        fits = value.numel() == 1 if end == "alpha" else value.dim() == 2 and value.is_floating_point()
        if end not in _ENDS or not fits or not value.float().isfinite().all():
            raise ValueError(f"{name} is not a LoRA's: expected two finite matrices, and at most one number alpha")
        if _ENDS[end] in read[stem]:
            raise ValueError(f"{name} has two spellings")
        read[stem][_ENDS[end]] = value.float()
    made: dict[str, Tensor] = {}
    for stem, own in read.items():
        if missing := {"lora_A", "lora_B"} - own.keys():
            raise ValueError(f"{stem} lacks {min(missing)}")
        down, up = own["lora_A"], own["lora_B"]
        if len(down) != up.shape[1]:
            raise ValueError(f"{stem} has matrices of ranks {len(down)} and {up.shape[1]}")
        network = known[stem][0].partition(".")[0]
        up = up * (own["alpha"].view(()) / len(down) if "alpha" in own else (scales or {}).get(network, 1.0))
        for layer, rows in zip(known[stem], up.chunk(len(known[stem])), strict=True):
            if f"{layer}.lora_A.weight" in made:
                raise ValueError(f"{stem} has two spellings")
            made |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": rows}
    ranks = {len(value) for name, value in made.items() if ".lora_A." in name}
    if len(ranks) != 1 or 0 in ranks:
        raise ValueError(f"expected layers of one rank, got {sorted(ranks) or 'no tensors'}")
    return made


_OLD_ENDS = re.compile(r"\.lora(?:_linear_layer)?\.(down|up)$")
"""Diffusers' own scripts still write these, which it once gave all LoRAs."""
_ENDS = {"lora_A": "lora_A", "lora_down": "lora_A", "lora_B": "lora_B", "lora_up": "lora_B", "alpha": "alpha"}


def _spellings(layer: str) -> set[str]:
    """Return the names that programs give a layer in a LoRA's file."""
    part, _, rest = layer.partition(".")
    if part == "text_encoder":
        old = rest if rest.startswith("text_model.") else f"text_model.{rest}"
        return {layer, f"{part}.{old}", f"lora_te_{old.replace('.', '_')}"}
    prefixes = (f"{part}.", "", "diffusion_model.", "base_model.model.")
    return {f"lora_unet_{rest.replace('.', '_')}", *(prefix + rest for prefix in prefixes)}


TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""Name endings of the text encoder's layers that get a LoRA: all of attention, as in diffusers."""


def _layers(network: nn.Module, kind: type[nn.Linear], ends: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the names and layers of a kind whose names end with one of `ends`."""
    for name, layer in network.named_modules():
        if isinstance(layer, kind) and any(_ends_with(name, end) for end in ends):
            yield name, layer


def _ends_with(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}" if end else "")
