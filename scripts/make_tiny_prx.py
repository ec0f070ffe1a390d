"""Make the tiny model `builtin:tiny-prx`: all parts of a PRX, with random weights, in 0.4 MB.

python -m scripts.make_tiny_prx [--out DIR]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3Model

COMMITTED = Path(__file__).resolve().parent.parent / "sdp" / "model" / "tiny_prx"
WIDTH, TOKENS, PAD = 32, 32, "<|endoftext|>"


def make(out: Path) -> None:
    """Write the whole model."""
    torch.manual_seed(0)
    library: Any = diffusers  # untyped
    networks: dict[str, Any] = {
        "transformer": library.PRXTransformer2DModel(
            in_channels=16, patch_size=2, context_in_dim=WIDTH, hidden_size=32, num_heads=2, depth=4, axes_dim=[8, 8]
        ),
        "vae": library.AutoencoderKL(
            latent_channels=16,
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=4,
            layers_per_block=1,
            mid_block_add_attention=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=0.3611,
            shift_factor=0.1159,
        ),
        "text_encoder": Qwen3Model(
            Qwen3Config(
                vocab_size=257,
                hidden_size=WIDTH,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
            )
        ),
    }
    for weight in networks["transformer"].parameters():
        if not weight.any():  # the gates of blocks begin at zero, and text would have no effect
            torch.nn.init.normal_(weight, std=0.1)
    for name, network in networks.items():
        network.save_pretrained(out / name, safe_serialization=True)
        (file,) = (out / name).glob("*.safetensors")
        save_file({key: value.half() for key, value in load_file(file).items()}, file, metadata={"format": "pt"})
        file.chmod(0o644)
    library.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(out / "scheduler")
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD])
    tokenizer.save(str(out / "tokenizer" / "tokenizer.json"))
    _write(
        out / "tokenizer" / "tokenizer_config.json",
        {"model_max_length": TOKENS, "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    _write(
        out / "model_index.json",
        {
            "_class_name": "PRXPipeline",
            "default_sample_size": 256,
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Qwen3Model"],
            "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
            "transformer": ["diffusers", "PRXTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=COMMITTED, help="folder to write (default: %(default)s)")
    make(parser.parse_args().out)
