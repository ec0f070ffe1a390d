"""Tiny untrained feature networks, and pictures for them."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from sdp.config import parse
from sdp.config.evaluate import EvaluateConfig

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

Pixels = NDArray[np.uint8]


def letter_tokenizer(folder: Path) -> "CLIPTokenizer":
    """Return CLIP's tokenizer with a vocabulary of letters, whose files it writes to a folder."""
    from transformers import CLIPTokenizer

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)


def tiny_clip(folder: Path) -> Path:
    """CLIP with a vocabulary of letters, as transformers saves it."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = letter_tokenizer(folder)
    tokenizer.save_pretrained(folder)
    layers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={
            **layers,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 77,
            "bos_token_id": len(tokenizer) - 2,
            "eos_token_id": len(tokenizer) - 1,
        },
        vision_config={**layers, "image_size": 32, "patch_size": 8},
        projection_dim=12,
    )
    CLIPModel(config).save_pretrained(folder)
    side = {"height": 32, "width": 32}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side).save_pretrained(folder)
    return folder


def tiny_first_dino(folder: Path) -> Path:
    """DINO's first version, a ViT, as transformers saves it."""
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=16
    )
    ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def tiny_dino(folder: Path) -> Path:
    """DINOv2, as transformers saves it."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    torch.manual_seed(1)
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=2, image_size=28, patch_size=14
    )
    Dinov2Model(config).save_pretrained(folder)
    side = {"height": 28, "width": 28}
    BitImageProcessor(size={"shortest_edge": 28}, crop_size=side).save_pretrained(folder)
    return folder


def noise_inception(folder: Path) -> Path:
    """Write random weights of FID's Inception, large enough that different pictures have different features."""
    from torch_fidelity import feature_extractor_inceptionv3 as theirs

    class Empty(theirs.FeatureExtractorInceptionV3):  # type: ignore[misc]  # its base has no types
        def load_state_dict(self, *_: Any) -> None:  # type: ignore[override]  # fetch nothing
            pass

    torch.manual_seed(2)
    folder.mkdir(parents=True, exist_ok=True)
    nothing = folder / "nothing.pth"
    torch.save({}, nothing)
    network = Empty("empty", ["2048"], feature_extractor_weights_path=str(nothing))
    nothing.unlink()
    for module in network.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    torch.save(network.state_dict(), folder / "pt_inception-2015-12-05-6726825d.pth")
    return folder


def picture(number: int, side: int = 40, wide: int = 0) -> Pixels:
    """Return a picture that is unique to its number: a gradient and some noise."""
    draw = np.random.default_rng(number)
    slope = np.linspace(0, 200, side)[:, None, None] * draw.random(3)
    noise = draw.integers(0, 56, (side, side + wide, 3))
    pixels: Pixels = (np.broadcast_to(slope, noise.shape) + noise).astype(np.uint8)
    return pixels


def encoded(pixels: Pixels, kind: str = "PNG") -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, kind)
    return sink.getvalue()


def write_pictures(folder: Path, numbers: Iterable[int], captions: bool = True) -> Path:
    """A folder of PNG files, with their captions beside them."""
    folder.mkdir(parents=True)
    for number in numbers:
        (folder / f"{number:06d}.png").write_bytes(encoded(picture(number)))
        if captions:
            (folder / f"{number:06d}.txt").write_text(caption_of(number))
    return folder


def caption_of(number: int) -> str:
    return f"picture {chr(ord('a') + number % 26)}"


def evaluate_config(out: Path, **settings: Any) -> EvaluateConfig:
    """Return the configuration of a job that takes a few seconds."""
    usual: dict[str, Any] = {"output": {"uri": str(out)}}
    for key, value in settings.items():
        usual[key] = usual[key] | value if isinstance(usual.get(key), dict) else value
    return parse("evaluate", json.loads(json.dumps(usual, default=str)))
