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


def load_network(network: FeatureNetwork, device: torch.device) -> "LoadedNetwork":
    """Load the network of a folder."""
    if network.kind == "inception":
        return Inception(network.weights, device)
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

    def __init__(self, weights: Path, device: torch.device) -> None:
        self._device, self._network = device, _inception(weights).to(device)

    def prepare(self, pixels: Pixels) -> NetworkInput:
        return np.ascontiguousarray(square(pixels))

    def embed(self, pictures: Sequence[NetworkInput]) -> FeatureRows:
        alike = len({picture.shape for picture in pictures}) == 1
        stacks = [np.stack(pictures)] if alike else [picture[None] for picture in pictures]
        with torch.no_grad():
            rows = [self._network(torch.from_numpy(s).to(self._device).permute(0, 3, 1, 2))[0] for s in stacks]
            features: FeatureRows = torch.cat(rows).cpu().numpy()
        return features


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


def _inception(weights: Path) -> Any:
    """Return torch-fidelity's network with these weights; a file that holds anything but tensors is refused."""
    try:
        extractors = import_module("torch_fidelity.feature_extractor_inceptionv3")
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
