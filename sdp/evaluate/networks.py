"""Feature networks: each turns a picture into a row of features.

A network works in two steps: `prepare` one picture on the CPU, in any thread, and `embed` many on the device.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdp.device import share_cores
from sdp.errors import ModelError, one_line
from sdp.families import explained
from sdp.families.tokenizer import load_clip_tokenizer, token_ids
from sdp.imaging import Pixels
from sdp.model.clip import read_tensors
from sdp.model.load import load_network as load_network_of
from sdp.model.networks import FeatureNetwork

FeatureRows = NDArray[np.float32]
"""Features, one row for each picture."""
NetworkInput = NDArray[Any]
"""A picture in the form that a network expects."""


def square(pixels: Pixels) -> Pixels:
    """Return the centre square, as training crops it."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[top : top + side, left : left + side]


class Inception:
    """The network of FID: the 2048 features of torch-fidelity's InceptionV3 with the weights of 2015."""

    def __init__(self, weights: Path, device: torch.device) -> None:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        self._device = device
        with tempfile.TemporaryDirectory() as folder:  # the library would run code from a file that holds some
            plain = Path(folder) / "inception.pth"
            torch.save(read_tensors(weights.read_bytes(), str(weights)), plain)
            try:
                network = FeatureExtractorInceptionV3("", ["2048"], feature_extractor_weights_path=str(plain))
            except RuntimeError as error:
                line = one_line(error, 200)
                raise ModelError(f"{weights}: not FID's Inception ({line}); download it again") from error
        self._network: Any = network.to(device)
        share_cores(device, network)

    def prepare(self, pixels: Pixels) -> NetworkInput:
        return np.ascontiguousarray(square(pixels))

    @torch.no_grad()
    def embed(self, pictures: Sequence[NetworkInput]) -> FeatureRows:
        alike = len({picture.shape for picture in pictures}) == 1
        stacks = [np.stack(pictures)] if alike else [picture[None] for picture in pictures]
        rows = [self._network(torch.from_numpy(s).to(self._device).permute(0, 3, 1, 2))[0] for s in stacks]
        features: FeatureRows = torch.cat(rows).cpu().numpy()
        return features


_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("CLIPModel", {}),
    "dinov2": ("Dinov2Model", {}),
    "vit": ("ViTModel", {"add_pooling_layer": False}),
}
"""Classes of transformers, with their options, by the kind of network."""


class Transformers:
    """A network of transformers, with its own image processor.

    CLIP embeds pictures, and captions in the same space. Of DINOv2, or DINO as a ViT (the DreamBooth paper's is
    ViT-S/16), it is the feature of the whole picture.
    """

    def __init__(self, network: FeatureNetwork, device: torch.device) -> None:
        import transformers

        kind, options = _KINDS[network.kind]
        self._device, self._is_clip = device, network.kind == "clip"
        self._network: Any = load_network_of(getattr(transformers, kind), network.path, device, **options)
        share_cores(device, self._network)
        processor: Any = transformers.CLIPImageProcessor if self._is_clip else transformers.AutoImageProcessor
        with explained(network.path):
            self._processor = processor.from_pretrained(network.path)
        if self._is_clip:
            self._tokenizer: Any = load_clip_tokenizer(network.path)

    def prepare(self, pixels: Pixels) -> NetworkInput:
        tensors = self._processor(images=[np.ascontiguousarray(pixels)], return_tensors="pt")["pixel_values"]
        prepared: NetworkInput = tensors[0].numpy()
        return prepared

    @torch.no_grad()
    def embed(self, pictures: Sequence[NetworkInput]) -> FeatureRows:
        pixels = torch.from_numpy(np.stack(pictures)).to(self._device)
        if self._is_clip:
            rows: Tensor = self._network.get_image_features(pixel_values=pixels).pooler_output
        else:
            rows = self._network(pixel_values=pixels).last_hidden_state[:, 0]
        features: FeatureRows = rows.float().cpu().numpy()
        return features

    @torch.no_grad()
    def scores(self, rows: FeatureRows, captions: Sequence[str]) -> NDArray[np.float32]:
        """Return 100 times the cosine of each picture's embedding with its caption's; long captions are cut."""
        if not captions:
            return np.zeros(0, np.float32)
        tokens = token_ids(self._tokenizer, captions).to(self._device)
        texts = self._network.get_text_features(input_ids=tokens).pooler_output.float().cpu().numpy()
        norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(texts, axis=1)
        cosines: NDArray[np.float32] = (rows * texts).sum(axis=1) / norms
        return 100 * cosines


LoadedNetwork = Inception | Transformers


def load_network(network: FeatureNetwork, device: torch.device) -> LoadedNetwork:
    """Load the network of a folder."""
    return Inception(network.weights, device) if network.kind == "inception" else Transformers(network, device)
