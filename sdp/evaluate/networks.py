"""Feature networks: each turns a picture into a row of features.

A network works in two steps: `prepare` one picture on the CPU, in any thread, and `embed` many on the device.
"""

import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdp.errors import ModelError, UserError, one_line
from sdp.imaging import Pixels
from sdp.model.clip import embedding, read_tensors
from sdp.model.load import load_network as load_network_of
from sdp.model.load import load_tokenizer
from sdp.model.networks import FeatureNetwork

FeatureRows = NDArray[np.float32]
"""Features, one row for each picture."""
NetworkInput = NDArray[Any]
"""A picture in the form that a network expects."""

_FIDELITY = "torch_fidelity"
"""A library that only Inception needs; it is not among sdp's requirements."""
_SIDE = 299
"""Side of Inception's input pictures."""
_INCEPTION = (
    *("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "MaxPool_1", "Conv2d_3b_1x1", "Conv2d_4a_3x3", "MaxPool_2"),
    *("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"),
    *("Mixed_7a", "Mixed_7b", "Mixed_7c", "AvgPool"),
)
"""Inception's layers up to the 2048 features, in order."""


def load_network(network: FeatureNetwork, resize: str, device: torch.device) -> "LoadedNetwork":
    """Load the network of a folder; `resize` is the setting `features.resize`, for Inception alone."""
    if network.kind == "inception":
        return Inception(network.weights, resize, device)
    if network.kind == "clip":
        return Clip(network.path, device)
    return Dino(network.path, device, first=network.kind == "vit")


def square(pixels: Pixels) -> Pixels:
    """Return the centre square, as training crops it."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[top : top + side, left : left + side]


class Inception:
    """The network of FID: the 2048 features of torch-fidelity's InceptionV3 with the weights of 2015."""

    width = 2048

    def __init__(self, weights: Path, resize: str, device: torch.device) -> None:
        self._clean, self._device = resize == "clean", device
        self._network = _inception(weights).to(device)

    def prepare(self, pixels: Pixels) -> NetworkInput:
        """Return the square, resized with antialiasing and without rounding unless the network is to resize it."""
        from PIL import Image

        pixels = square(pixels)
        if not self._clean:
            return np.ascontiguousarray(pixels)
        size = (_SIDE, _SIDE)
        channels = [
            np.asarray(Image.fromarray(np.ascontiguousarray(pixels[:, :, c], np.float32)).resize(size, _BICUBIC))
            for c in range(3)
        ]
        return np.stack(channels, axis=2).clip(0, 255)

    def embed(self, pictures: Sequence[NetworkInput]) -> FeatureRows:
        with torch.no_grad():
            rows = self._resized(pictures)
            rows = (rows - 128) / 128
            for layer in _INCEPTION:
                rows = getattr(self._network, layer)(rows)
            features: FeatureRows = rows.flatten(1).cpu().numpy()
        return features

    def _resized(self, pictures: Sequence[NetworkInput]) -> Tensor:
        if self._clean:
            return _channels_first(np.stack(pictures), self._device)
        resize = import_module(f"{_FIDELITY}.interpolate_compat_tensorflow").interpolate_bilinear_2d_like_tensorflow1x

        alike = len({picture.shape for picture in pictures}) == 1
        stacks = [np.stack(pictures)] if alike else [picture[None] for picture in pictures]
        tensors = [_channels_first(stack, self._device) for stack in stacks]
        return torch.cat([resize(stack, size=(_SIDE, _SIDE), align_corners=False) for stack in tensors])


class _Transformers:
    """A vision network of transformers, with its own image processor."""

    width: int
    """Number of features per picture."""

    def __init__(self, path: Path, device: torch.device, kind: Any, processor: Any, **options: Any) -> None:
        self._device = device
        self._network: Any = load_network_of(kind, path, device, **options)
        self._processor = processor.from_pretrained(path)

    def prepare(self, pixels: Pixels) -> NetworkInput:
        tensors = self._processor(images=[np.ascontiguousarray(pixels)], return_tensors="pt")["pixel_values"]
        prepared: NetworkInput = tensors[0].numpy()
        return prepared

    def embed(self, pictures: Sequence[NetworkInput]) -> FeatureRows:
        with torch.no_grad():
            rows: FeatureRows = self._rows(torch.from_numpy(np.stack(pictures)).to(self._device)).float().cpu().numpy()
        return rows

    def _rows(self, pixels: Tensor) -> Tensor:
        raise NotImplementedError


class Clip(_Transformers):
    """CLIP: embeddings of pictures, and of captions in the same space."""

    def __init__(self, path: Path, device: torch.device) -> None:
        from transformers import CLIPImageProcessor, CLIPModel

        super().__init__(path, device, CLIPModel, CLIPImageProcessor)
        self.width = int(self._network.config.projection_dim)
        self._longest = int(self._network.config.text_config.max_position_embeddings)
        self._tokenizer: Any = load_tokenizer(path, "")

    def scores(self, rows: FeatureRows, captions: Sequence[str]) -> NDArray[np.float32]:
        """Return, for each picture, 100 times the cosine between its embedding and its caption's, cut if too long."""
        if not captions:
            return np.zeros(0, np.float32)
        tokens = self._tokenizer(
            list(captions), padding=True, truncation=True, max_length=self._longest, return_tensors="pt"
        ).to(self._device)
        with torch.no_grad():
            output = self._network.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            )
        texts = embedding(output).float().cpu().numpy()
        norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(texts, axis=1)
        cosines: NDArray[np.float32] = (rows * texts).sum(axis=1) / norms
        return 100 * cosines

    def _rows(self, pixels: Tensor) -> Tensor:
        return embedding(self._network.get_image_features(pixel_values=pixels))


class Dino(_Transformers):
    """DINOv2, or DINO as a ViT (the DreamBooth paper's is ViT-S/16): the feature of the whole picture."""

    def __init__(self, path: Path, device: torch.device, *, first: bool) -> None:
        from transformers import AutoImageProcessor, Dinov2Model, ViTModel

        if first:
            super().__init__(path, device, ViTModel, AutoImageProcessor, add_pooling_layer=False)
        else:
            super().__init__(path, device, Dinov2Model, AutoImageProcessor)
        self.width = int(self._network.config.hidden_size)

    def _rows(self, pixels: Tensor) -> Tensor:
        rows: Tensor = self._network(pixel_values=pixels).last_hidden_state[:, 0]
        return rows


LoadedNetwork = Inception | Clip | Dino


def _channels_first(pictures: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(pictures).to(device).permute(0, 3, 1, 2).float()


def _inception(weights: Path) -> Any:
    """Return torch-fidelity's network with these weights; a file that holds anything but tensors is refused."""
    try:
        extractors = import_module(f"{_FIDELITY}.feature_extractor_inceptionv3")
    except ModuleNotFoundError as error:
        raise UserError(
            "features.model: Inception needs the library torch-fidelity, which is not installed; install it, or use "
            "CLIP or DINOv2"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "inception.pth"
        torch.save(read_tensors(weights.read_bytes(), str(weights)), plain)
        try:
            return extractors.FeatureExtractorInceptionV3(
                "inception-v3-compat", ["2048"], feature_extractor_weights_path=str(plain)
            )
        except RuntimeError as error:
            line = one_line(error, 200)
            raise ModelError(f"{weights}: not the weights of FID's Inception ({line}); download them again") from error


_BICUBIC = 3
"""Pillow's number for bicubic resampling."""
