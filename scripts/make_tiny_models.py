"""Make the tiny model `builtin:tiny`: all parts of a Stable Diffusion v2, in 2 MB.

    python scripts/make_tiny_models.py              writes sdp/model/tiny
    python scripts/make_tiny_models.py --out DIR    writes DIR
    python scripts/make_tiny_models.py --check      makes it in another folder; exits 1 if the bytes differ

The tokenizer has the words of the demo's captions as whole tokens and splits all other text into bytes. The text
encoder is trained to tell what a caption names, and the VAE on the demo's pictures. The U-Net is only initialised,
because training it is what the demo shows. With one thread, fixed seeds and deterministic algorithms, the same machine
and the same versions give the same bytes. `report` prints the measurements.
"""

import argparse
import filecmp
import json
import math
import string
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel

from scripts.demo.shapes import CAPTIONS, COLORS, SHAPES, Shape, dominant_shape_color, render_array, sample
from scripts.published import SCHEDULER
from sdp.families.tokenizer import load_tokenizer, tokenize
from sdp.model import latents as conventions
from sdp.model.load import load_text_encoder, load_vae

COMMITTED = Path(__file__).resolve().parent.parent / "sdp" / "model" / "tiny"
TRAINING, HELD_OUT = 7, 8
"""Seeds of the pictures for training, and of those for measuring."""
SCALING = 0.18215

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 77,
    "hidden_act": "gelu",
    "projection_dim": 64,
}
VAE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": [8, 16, 32, 32],
    "layers_per_block": 1,
    "norm_num_groups": 1,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "mid_block_add_attention": False,
    "sample_size": 64,
    "scaling_factor": SCALING,
}
UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": [2, 4],
    "cross_attention_dim": TEXT["hidden_size"],
    "norm_num_groups": 16,
    "use_linear_projection": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=COMMITTED, help="folder to write (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare a new one with the committed one instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if not arguments.check:
        make(arguments.out)
        report(arguments.out)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        report(Path(folder))
        return compare(Path(folder), COMMITTED)


def make(out: Path) -> None:
    """Write the whole model."""
    started = time.monotonic()
    for name, step in (
        ("tokenizer", make_tokenizer),
        ("text_encoder", make_text_encoder),
        ("vae", make_vae),
        ("unet", make_unet),
        ("scheduler", make_scheduler),
    ):
        (out / name).mkdir(parents=True, exist_ok=True)
        step(out)
        print(f"{name}: done after {time.monotonic() - started:.0f} s", flush=True)
    write_json(
        out / "model_index.json",
        {
            "_class_name": "StableDiffusionPipeline",
            "feature_extractor": [None, None],
            "requires_safety_checker": False,
            "safety_checker": [None, None],
            "scheduler": ["diffusers", "DDIMScheduler"],
            "text_encoder": ["transformers", "CLIPTextModel"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "unet": ["diffusers", "UNet2DConditionModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        },
    )


def compare(made: Path, committed: Path) -> int:
    """Print which files differ; return the exit code."""
    names = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    _, different, missing = filecmp.cmpfiles(made, committed, names, shallow=False)
    for name in sorted([*different, *missing]):
        print(f"{committed / name}: {'missing' if name in missing else 'differs from the one made here'}")
    if different or missing:
        print("possible causes: other versions or processor, or not made by this script; compare the figures")
        return 1
    print(f"{committed}: the same bytes")
    return 0


# --- tokenizer -------------------------------------------------------------------------------------------------


def make_tokenizer(out: Path) -> None:
    """Write a byte-pair encoding in CLIP's files and order of ids: bytes, word-final bytes, merges, two marks."""
    merges = learn_merges(words())
    characters = byte_characters()
    tokens = [*characters, *(c + "</w>" for c in characters), *(a + b for a, b in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    write_json(out / "tokenizer" / "vocab.json", {token: number for number, token in enumerate(tokens)})
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    (out / "tokenizer" / "merges.txt").write_text("\n".join(lines) + "\n")
    write_json(
        out / "tokenizer" / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": "<|startoftext|>",
            "do_lower_case": True,
            "eos_token": "<|endoftext|>",
            "errors": "replace",
            "model_max_length": 77,
            "pad_token": "!",  # id 0, as in Stable Diffusion v2
            "tokenizer_class": "CLIPTokenizer",
            "unk_token": "<|endoftext|>",
        },
    )


def words() -> list[str]:
    """Return every word that can occur in a caption of the demo."""
    fixed = {literal for form in CAPTIONS for literal, *_ in string.Formatter().parse(form)}
    return sorted({"an", *COLORS, *SHAPES, *(word for text in fixed for word in text.split())})


def byte_characters() -> list[str]:
    """Return the printable character for each byte, in the order of CLIP's ids, from "!" on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]


def learn_merges(vocabulary: list[str]) -> list[tuple[str, str]]:
    """Merge the most frequent pair repeatedly until each word is one token; return the merges."""
    split = [[*word[:-1], word[-1] + "</w>"] for word in vocabulary]
    merges = []
    while counts := Counter(pair for pieces in split for pair in pairwise(pieces)):
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        split = [merged(pieces, best) for pieces in split]
    return merges


def merged(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for piece in pieces:
        # A piece that was just merged is longer than the pair's first half, so it cannot match again.
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return out


# --- text encoder ----------------------------------------------------------------------------------------------


def make_text_encoder(out: Path, steps: int = 300, batch: int = 64) -> None:
    """Train it so that every position after the caption's end tells colour, background and shape.

    Attention is causal, so only those positions, most of the 77, have read the whole caption. The U-Net then attends to
    an output that represents the caption linearly, as a large encoder's does.
    """
    torch.manual_seed(0)
    tokenizer = load_tokenizer(out)
    start, end = tokenizer.token_to_id("<|startoftext|>"), tokenizer.token_to_id("<|endoftext|>")
    assert end is not None
    ids: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": start,
        "eos_token_id": end,
        "pad_token_id": 0,
    }
    config = CLIPTextConfig(**TEXT, **ids)
    model: Any = CLIPTextModel(config)
    nn.init.normal_(model.get_input_embeddings().weight, std=0.3)
    head = nn.Linear(config.hidden_size, sum(SIZES))

    samples = [sample(i, TRAINING) for i in range(6000)]
    tokens = torch.from_numpy(tokenize(tokenizer, [s.caption for s in samples]).astype(np.int64))
    named = named_numbers(samples)
    longest = int((tokens == end).int().argmax(1).max()) + 1
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.0, weight_decay=0.01)
    for step in range(steps):
        set_rate(optimizer, 3e-3, step, steps, warmup=20)
        chosen = torch.randint(0, len(samples), (batch,))
        # Every tenth step uses all 77 positions; otherwise a few after the end are enough.
        seen = tokens[chosen] if step % 10 == 0 else tokens[chosen, : longest + 8]
        logits = head(model(seen).last_hidden_state)
        after = torch.arange(seen.shape[1]) >= (seen == end).int().argmax(1, keepdim=True)
        loss = (
            sum(
                (
                    F.cross_entropy(part.transpose(1, 2), answer[:, None].expand(after.shape), reduction="none") * after
                ).sum()
                for part, answer in zip(logits.split(SIZES, 2), named[chosen].unbind(1), strict=True)
            )
            / after.sum()
        )
        learn(loss, model, optimizer)
    weights = {f"text_model.{name.removeprefix('text_model.')}": w for name, w in model.state_dict().items()}
    write_weights(out / "text_encoder" / "model.safetensors", weights)
    write_json(
        out / "text_encoder" / "config.json",
        {"architectures": ["CLIPTextModel"], "model_type": "clip_text_model", **TEXT, **ids},
    )


SIZES = [len(COLORS), len(COLORS), len(SHAPES)]


def named_numbers(samples: list[Shape]) -> Tensor:
    """Return each sample's colour, background and shape as numbers."""
    colors = list(COLORS)
    return torch.tensor([[colors.index(s.color), colors.index(s.background), SHAPES.index(s.shape)] for s in samples])


# --- VAE -------------------------------------------------------------------------------------------------------


def make_vae(out: Path, steps: int = 1200, batch: int = 16) -> None:
    """Train it on the demo's pictures, then scale its latents so that 0.18215 gives them unit deviation."""
    torch.manual_seed(0)
    new: Any = AutoencoderKL
    vae = new(**VAE).to(memory_format=torch.channels_last)
    start_from_averages(vae)
    small, large = pictures(0, 3000, 64), pictures(3000, 600, 128)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        set_rate(optimizer, 4e-3, step, steps, warmup=30)
        source, count = (small, batch) if step % 4 else (large, batch // 4)
        pixels = as_pixels(source[torch.randint(0, len(source), (count,))])
        mean = vae.encode(pixels).latent_dist.mean
        restored = vae.decode(mean + POSTERIOR_STD * torch.randn_like(mean)).sample
        # The KL divergence of a posterior of fixed width is the square of its mean.
        loss = (restored - pixels).square().mean() + 1e-3 * mean.square().mean()
        learn(loss, vae, optimizer)
    vae.eval().requires_grad_(False)
    scale_latents(vae, as_pixels(small[:512]))
    write_weights(out / "vae" / "diffusion_pytorch_model.safetensors", vae.state_dict())
    write_json(out / "vae" / "config.json", {"_class_name": "AutoencoderKL", **VAE})


POSTERIOR_STD = 0.1
LEVEL = 4.0


@torch.no_grad()
def start_from_averages(vae: Any) -> None:
    """Initialise the VAE so that it averages 8 × 8 pixels.

    It then has the colours from the first step on, and learns the edges. Each half of the network keeps red, green
    and blue in its first three channels. Its last two channels hold a constant level, because normalisation over all
    channels would otherwise remove a picture's overall brightness.
    """
    for module in vae.modules():
        if isinstance(module, ResnetBlock2D):
            module.conv2.weight.mul_(0.3)
            if module.conv_shortcut is not None:
                keep_first_channels(module.conv_shortcut, range(min(module.conv_shortcut.weight.shape[:2])))
    for block in vae.encoder.down_blocks:
        for down in block.downsamplers or ():
            keep_first_channels(down.conv, range(len(down.conv.weight)), slice(0, 2))
    for block in vae.decoder.up_blocks:
        for up in block.upsamplers or ():
            keep_first_channels(up.conv, range(len(up.conv.weight)), slice(1, 2))
    for half in (vae.encoder, vae.decoder):
        keep_first_channels(half.conv_in, range(3), slice(1, 2))
        half.conv_in.bias[-2:] = torch.tensor([-LEVEL, LEVEL])
        # SiLU is nearly linear from 3 on; subtracting silu(3) after it restores the value.
        half.conv_norm_out.bias[:3] = 3.0
        half.conv_out.weight.mul_(0.1)
        keep_first_channels(half.conv_out, range(3), slice(1, 2), noise=0.0)
        half.conv_out.bias[:3] = -float(F.silu(torch.tensor(3.0)))
    for conv, channels in ((vae.quant_conv, 8), (vae.post_quant_conv, 4)):
        keep_first_channels(conv, range(channels), noise=0.0)


def keep_first_channels(conv: nn.Conv2d, kept: range, window: slice = slice(None), noise: float = 0.5) -> None:
    """Pass these channels through, averaged over the window; mix the others with weak random weights."""
    _, inputs, high, wide = conv.weight.shape
    conv.weight.normal_(0, noise / math.sqrt(inputs * high * wide)) if noise else conv.weight[: len(kept)].zero_()
    conv.weight[:3] = 0
    nn.init.zeros_(conv.bias) if conv.bias is not None else None
    area = conv.weight[0, 0, window, window].numel()
    for channel in kept:
        conv.weight[channel, channel, window, window] += 1 / area


@torch.no_grad()
def scale_latents(vae: Any, pixels: Tensor) -> None:
    """Adjust the two 1 × 1 convolutions so that each latent channel has mean 0 and standard deviation 1/0.18215."""
    mean = torch.cat([vae.encode(part).latent_dist.mean for part in torch.split(pixels, 64)])
    center, spread = mean.mean((0, 2, 3)), mean.std((0, 2, 3))
    gain = 1 / (SCALING * spread)
    vae.post_quant_conv.bias += (vae.post_quant_conv.weight[..., 0, 0] * center).sum(1)
    vae.post_quant_conv.weight /= gain[None, :, None, None]
    vae.quant_conv.weight[:4] *= gain[:, None, None, None]
    vae.quant_conv.bias[:4] = (vae.quant_conv.bias[:4] - center) * gain
    vae.quant_conv.weight[4:] = 0
    vae.quant_conv.bias[4:] = 2 * torch.log(POSTERIOR_STD * gain)


def pictures(first: int, count: int, size: int, seed: int = TRAINING) -> Tensor:
    """Return pictures as bytes, count × size × size × 3."""
    return torch.from_numpy(np.stack([render_array(sample(i, seed), size) for i in range(first, first + count)]))


def as_pixels(images: Tensor) -> Tensor:
    return conventions.to_pixels(images).contiguous(memory_format=torch.channels_last)


# --- U-Net and schedule ----------------------------------------------------------------------------------------


def make_unet(out: Path) -> None:
    """Write a U-Net as diffusers initialises it, from seed 0."""
    torch.manual_seed(0)
    new: Any = UNet2DConditionModel
    unet = new(**UNET)
    write_weights(out / "unet" / "diffusion_pytorch_model.safetensors", unet.state_dict())
    write_json(out / "unet" / "config.json", {"_class_name": "UNet2DConditionModel", **UNET})


def make_scheduler(out: Path) -> None:
    write_json(out / "scheduler" / "scheduler_config.json", dict(SCHEDULER))


# --- shared helpers -----------------------------------------------------------------------------------------


def set_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int, warmup: int) -> None:
    """Set the learning rate: linear warm-up, then half a cosine to zero."""
    rate = peak * min(1.0, (step + 1) / warmup) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    for group in optimizer.param_groups:
        group["lr"] = rate


def learn(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write weights in fp16, sorted by name."""
    halved = {name: weights[name].half().contiguous() for name in sorted(weights)}
    save_file(halved, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


# --- figures ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def report(folder: Path) -> None:
    """Print the model's measurements on held-out pictures."""
    vae = load_vae(folder)
    for size, count in ((64, 400), (128, 100), (256, 100), (512, 20)):
        psnr, right = reconstruction(vae, size, count)
        print(
            f"vae at {size} px, {count} held-out pictures: PSNR mean {psnr.mean():.2f} dB, worst {psnr.min():.2f}; "
            f"colour right in {right:.1%}"
        )
    latents = torch.cat(list(encoded(vae, 64, 400)))
    print("latents at 64 px: std by channel", " ".join(f"{s:.2f}" for s in latents.std((0, 2, 3))))
    print("linear probe on the text encoder's output:", " ".join(f"{r:.1%}" for r in readable(folder)))
    sizes = {path.name: sum(f.stat().st_size for f in path.rglob("*")) for path in folder.iterdir() if path.is_dir()}
    print("bytes:", " ".join(f"{name} {size}" for name, size in sorted(sizes.items())), "sum", sum(sizes.values()))


def reconstruction(vae: Any, size: int, count: int) -> tuple[np.ndarray[Any, Any], float]:
    """Return the PSNR of each held-out picture in dB, and the share whose shape keeps its colour."""
    psnr: list[float] = []
    right = 0
    for start in range(0, count, 20):
        images = pictures(start, min(20, count - start), size, HELD_OUT)
        restored = conventions.to_images(conventions.decode(vae, latents_of(vae, images)))
        error = (restored.float() - images.float()).square().mean((1, 2, 3))
        psnr += (10 * torch.log10(255**2 / error)).tolist()
        for i, image in enumerate(restored.numpy()):
            original = sample(start + i, HELD_OUT)
            right += dominant_shape_color(image, original.background) == original.color
    return np.array(psnr), right / count


def encoded(vae: Any, size: int, count: int) -> Iterator[Tensor]:
    for start in range(0, count, 50):
        yield latents_of(vae, pictures(start, 50, size, HELD_OUT))


def latents_of(vae: Any, images: Tensor) -> Tensor:
    """Return the scaled mode of the VAE's posterior."""
    scaled: Tensor = vae.encode(conventions.to_pixels(images)).latent_dist.mean * vae.config.scaling_factor
    return scaled


def readable(folder: Path) -> list[float]:
    """Return how often a least-squares probe of the last position is right for colour, background and shape."""
    tokenizer, encoder = load_tokenizer(folder), load_text_encoder(folder)
    samples = [sample(i, HELD_OUT) for i in range(1200)]
    tokens = torch.from_numpy(tokenize(tokenizer, [s.caption for s in samples]).astype(np.int64))
    hidden = torch.cat([encoder(part).last_hidden_state[:, -1] for part in torch.split(tokens, 100)])
    hidden = torch.cat([hidden, torch.ones(len(hidden), 1)], 1)
    shares = []
    for answers, size in zip(named_numbers(samples).unbind(1), SIZES, strict=True):
        wanted = F.one_hot(answers, size).float()
        reading = torch.linalg.lstsq(hidden[:800], wanted[:800]).solution
        shares.append(float(((hidden[800:] @ reading).argmax(1) == answers[800:]).float().mean()))
    return shares


if __name__ == "__main__":
    sys.exit(main())
