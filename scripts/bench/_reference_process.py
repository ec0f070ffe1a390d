"""The reference's processing: one map_batches after another, fp32 between them.

The reference is Anyscale's pre-training of Stable Diffusion v2 with Ray (docs/process.md, Coming from Anyscale's pipeline).
This is written from its published text:
read_parquet → SDTransform (PIL, torchvision; float32 CHW) → SDLatentEncoder (VAE and text encoder) → write_parquet
"""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torchvision.transforms.functional as functional
from PIL import Image
from torchvision import transforms
from transformers import CLIPTokenizer

from scripts.bench._cases import start_ray
from sdp.model.load import load_text_encoder, load_vae
from sdp.model.sources import resolve
from sdp.ray.cluster import worker_environment

SCALE = 0.18215
Batch = dict[str, Any]


class LargestCenterSquare:
    """Resizes the shorter side to `size`, then cuts the centre square, as the published text means."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        resized = functional.resize(image, self.size)
        width, height = resized.size
        top, left = (height - self.size) // 2, (width - self.size) // 2
        cropped: Image.Image = functional.crop(resized, top, left, self.size, self.size)
        return cropped


def image_transform(size: int) -> Any:
    """Return the transform from image bytes to a float32 tensor in [−1, 1]."""
    crop = LargestCenterSquare(size)
    normalise = transforms.Normalize((0.5,) * 3, (0.5,) * 3)
    to_tensor = transforms.Compose([transforms.ToTensor(), normalise])

    def apply(data: bytes) -> torch.Tensor:
        tensor: torch.Tensor = to_tensor(crop(Image.open(io.BytesIO(data)).convert("RGB")))
        return tensor

    return apply


class SDTransform:
    def __init__(self, resolution: int, model: Path) -> None:
        self.resolution = resolution
        self.transform = image_transform(resolution)
        self.tokenizer: Any = CLIPTokenizer.from_pretrained(model / "tokenizer")

    def __call__(self, batch: Batch) -> Batch:
        ids = [
            self.tokenizer(text, padding="max_length", max_length=77, truncation=True, return_tensors="np")[
                "input_ids"
            ][0]
            for text in batch["caption"]
        ]
        images = [self.transform(image).numpy() for image in batch["image"]]
        return {"caption_ids": np.stack(ids), f"image_{self.resolution}": np.stack(images)}


class SDLatentEncoder:
    def __init__(self, resolution: int, model: Path) -> None:
        self.resolution = resolution
        self.vae: Any = load_vae(model)
        self.text_encoder = load_text_encoder(model)

    def __call__(self, batch: Batch) -> Batch:
        with torch.no_grad():
            images = torch.as_tensor(batch[f"image_{self.resolution}"])
            latents = self.vae.encode(images)["latent_dist"].sample() * SCALE
            embeddings = self.text_encoder(torch.as_tensor(batch["caption_ids"]))[0]
        return {
            f"image_latents_{self.resolution}": latents.numpy().astype(np.float32),
            "caption_embeddings": embeddings.numpy().astype(np.float32),
        }


def run(source: Path, output: Path, model: Path, resolution: int) -> None:
    """Run the published script with one encoder; its batch size, there set to the resolution, is a suitable one here."""
    kwargs: dict[str, Any] = {"resolution": resolution, "model": model}
    dataset = ray.data.read_parquet(str(source), columns=["image", "caption"], override_num_blocks=16)
    dataset = dataset.map_batches(SDTransform, fn_constructor_kwargs=kwargs, num_cpus=1, batch_size=64, concurrency=2)
    dataset = dataset.map_batches(
        SDLatentEncoder, fn_constructor_kwargs=kwargs, num_cpus=1, batch_size=64, concurrency=1
    )
    dataset.write_parquet(str(output), min_rows_per_file=5000)


def main(source: str, output: str, side: str) -> None:
    """Run it on a private Ray with four logical CPUs, even if another Ray runs here."""
    start_ray(num_cpus=4, object_store_memory=2_000_000_000, runtime_env=worker_environment())
    ray.data.DataContext.get_current().enable_progress_bars = False
    run(Path(source), Path(output), resolve("builtin:tiny").path, int(side))


if __name__ == "__main__":
    main(*sys.argv[1:])
