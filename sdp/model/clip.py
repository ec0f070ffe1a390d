"""CLIP: its networks and its view of a picture, and predictors of aesthetics, which read its embeddings."""

import hashlib
import json
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sdp.errors import ModelError, StorageError, one_line
from sdp.families import TextSpace
from sdp.imaging import Pixels
from sdp.model.layout import json_object
from sdp.model.networks import FeatureNetwork
from sdp.storage import StorageOptions, open_source

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class View:
    """CLIP's view of a picture: how its processor resizes, crops and normalises."""

    shortest: int
    """Length in pixels of the shorter side after resizing."""
    side: int
    """Side of the square that is cut from the middle."""
    filter: int
    """Pillow's number of the filter."""
    scale: float
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def cut(self, pixels: Pixels) -> Pixels:
        """Return the pixels that CLIP sees, not yet normalised."""
        from PIL import Image

        height, width = pixels.shape[:2]
        shorter = min(width, height)
        wide, tall = int(self.shortest * width / shorter), int(self.shortest * height / shorter)
        left, top = (wide - self.side) // 2, (tall - self.side) // 2
        # `box` resizes only the cut: all of a picture of 1 × 1,000,000 pixels would take gigabytes.
        across, down = width / wide, height / tall
        box = (left * across, top * down, (left + self.side) * across, (top + self.side) * down)
        resized = Image.fromarray(pixels).resize((self.side, self.side), Image.Resampling(self.filter), box=box)
        return np.asarray(resized, np.uint8)


def view_of(network: FeatureNetwork) -> View:
    """Return a CLIP model's view, from its processor's configuration."""
    where = network.path / "preprocessor_config.json"
    try:
        settings = json_object(where.read_bytes())
        size, crop = settings.get("size", 224), settings.get("crop_size", 224)
        shortest = size if isinstance(size, int) else size["shortest_edge"]
        side = crop if isinstance(crop, int) else crop["height"]
        colours = settings["image_mean"], settings["image_std"]
        mean, deviation = ((float(r), float(g), float(b)) for r, g, b in colours)
        resample, scale = int(settings.get("resample", 3)), float(settings.get("rescale_factor", 1 / 255))
        view = View(int(shortest), int(side), resample, scale, mean, deviation)
        text = json_object((network.path / "config.json").read_bytes()).get("text_config") or {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        line = one_line(error, 120)
        raise ModelError(f"{where}: not the configuration of a CLIP processor ({line}); fetch it again") from error
    tokens = TextSpace().tokens
    if view.side > view.shortest or text.get("max_position_embeddings", tokens) != tokens:
        raise ModelError(f"{network.path}: expected pictures cut from larger ones, and {tokens} tokens; choose another")
    return view


def read_tensors(data: bytes, name: str) -> "dict[str, Tensor]":
    """Return the tensors of a file of weights; a file that holds anything else is refused."""
    import torch
    from safetensors.torch import load

    try:
        if name.endswith(".safetensors"):
            tensors: dict[str, Tensor] = load(data)
        else:
            tensors = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
            raise ValueError("it holds more than tensors")
    except Exception as error:  # whatever a forged pickle leads to
        line = one_line(error, 200)
        raise ModelError(f"{name}: not a readable file of weights ({line}); download it again") from error
    return tensors


@dataclass(frozen=True, slots=True)
class Predictor:
    """A predictor of aesthetics: linear layers, pinned by the digest of their file."""

    uri: str
    sha256: str

    def load(self, options: StorageOptions | None) -> "list[tuple[Tensor, Tensor]]":
        """Return the weight and the bias of each layer, in order."""
        data = _read(self.uri, options)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise ModelError(f"{self.uri}: its content changed while it was in use; restore it")
        return _layers(read_tensors(data, self.uri), self.uri)


def find_predictor(uri: str, network: FeatureNetwork, options: StorageOptions | None) -> Predictor:
    """Check a predictor of aesthetics for a CLIP model's embeddings."""
    data = _read(uri, options)
    width = json.loads((network.path / "config.json").read_bytes()).get("projection_dim", 512)
    layers = _layers(read_tensors(data, uri), uri)
    if layers[0][0].shape[1] != width:
        raise ModelError(
            f"{uri}: expected {width} inputs, the width of {network.source}'s embeddings, got {layers[0][0].shape[1]}; "
            "name the CLIP model that it was trained with"
        )
    return Predictor(uri, hashlib.sha256(data).hexdigest())


def _read(uri: str, options: StorageOptions | None) -> bytes:
    try:
        return bytes(open_source(uri, options).read())
    except StorageError:
        raise
    except OSError as error:
        raise ModelError(f"{uri}: cannot be read ({one_line(error, 160)}); check the URI") from error


def _layers(tensors: "dict[str, Tensor]", uri: str) -> "list[tuple[Tensor, Tensor]]":
    def order(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]

    stems = sorted({name.rpartition(".")[0] for name in tensors} - {""}, key=order)
    names = [(f"{stem}.weight", f"{stem}.bias") for stem in stems] or [("weight", "bias")]
    if {name for pair in names for name in pair} == set(tensors):
        layers = [(tensors[weight].float(), tensors[bias].float()) for weight, bias in names]
        shapes = [tuple(weight.shape) for weight, _ in layers]
        fits = all(len(shape) == 2 for shape in shapes) and all(b[1] == a[0] for a, b in pairwise(shapes))
        if fits and shapes[-1][0] == 1 and all(len(bias) == len(weight) for weight, bias in layers):
            return layers
    raise ModelError(
        f"{uri}: expected linear layers, one after another, to one number, got {', '.join(sorted(tensors))[:160]}; "
        "choose another predictor"
    )
