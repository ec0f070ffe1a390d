"""Make `builtin:tiny-prx` and `builtin:tiny-klein`: all parts of a PRX and of a FLUX.2 klein, with random weights.

python -m scripts.make_tiny_flows [--out DIR]
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

COMMITTED = Path(__file__).resolve().parent.parent / "sdp" / "model"
PAD = "<|endoftext|>"
LIBRARY: Any = diffusers  # untyped
BLOCKS = {
    "block_out_channels": (8, 8, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "mid_block_add_attention": False,
}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
"""A template that makes of one message what Qwen3's own makes, with and without thinking."""


def make_prx(out: Path) -> None:
    """Write a PRX."""
    torch.manual_seed(0)
    networks: dict[str, Any] = {
        "transformer": LIBRARY.PRXTransformer2DModel(
            in_channels=16, patch_size=2, context_in_dim=32, hidden_size=32, num_heads=2, depth=4, axes_dim=[8, 8]
        ),
        "vae": LIBRARY.AutoencoderKL(
            latent_channels=16,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            **BLOCKS,
        ),
        "text_encoder": Qwen3Model(_qwen(vocab=257, width=32, layers=2)),
    }
    for weight in networks["transformer"].parameters():
        if not weight.any():  # the gates of blocks begin at zero, and text would have no effect
            torch.nn.init.normal_(weight, std=0.1)
    _write_model(out, "PRXPipeline", networks, [PAD], {"shift": 3.0}, {"default_sample_size": 256})
    _write(
        out / "tokenizer" / "tokenizer_config.json",
        {"model_max_length": 32, "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"},
    )


def make_klein(out: Path) -> None:
    """Write a FLUX.2 klein."""
    torch.manual_seed(0)
    width, marks = 16, [PAD, "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    networks: dict[str, Any] = {
        "transformer": LIBRARY.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            axes_dims_rope=(4, 4, 4, 4),
            joint_attention_dim=3 * width,
            timestep_guidance_channels=32,
            guidance_embeds=False,
        ),
        "vae": LIBRARY.AutoencoderKLFlux2(latent_channels=4, sample_size=32, **BLOCKS),
        "text_encoder": Qwen3ForCausalLM(_qwen(vocab=256 + len(marks), width=width, layers=30)),
    }
    networks["vae"].bn.running_mean.normal_(std=0.2)
    networks["vae"].bn.running_var.uniform_(0.5, 2.0)
    flow = {"use_dynamic_shifting": True, "shift": 3.0}
    _write_model(out, "Flux2KleinPipeline", networks, marks, flow, {"is_distilled": False})
    _write(
        out / "tokenizer" / "tokenizer_config.json",
        {"model_max_length": 131072, "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    (out / "tokenizer" / "chat_template.jinja").write_text(CHAT)


def _qwen(vocab: int, width: int, layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=layers > 2,  # as in Qwen3-4B
    )


def _write_model(
    out: Path,
    pipeline: str,
    networks: Mapping[str, Any],
    marks: Sequence[str],
    flow: Mapping[str, Any],
    index: Mapping[str, Any],
) -> None:
    """Write the networks in half precision, a scheduler, a tokenizer of bytes and of marks, and the index."""
    for name, network in networks.items():
        network.save_pretrained(out / name, safe_serialization=True)
        (file,) = (out / name).glob("*.safetensors")
        weights = {key: value.half() if value.is_floating_point() else value for key, value in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
        file.chmod(0o644)
    LIBRARY.FlowMatchEulerDiscreteScheduler(**flow).save_pretrained(out / "scheduler")
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, special="think" not in mark, normalized=False) for mark in marks])
    tokenizer.save(str(out / "tokenizer" / "tokenizer.json"))
    classes = {name: [type(each).__module__.partition(".")[0], type(each).__name__] for name, each in networks.items()}
    _write(
        out / "model_index.json",
        {
            "_class_name": pipeline,
            **index,
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
            **classes,
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(dict(sorted(content.items())), indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=COMMITTED, help="folder to write (default: %(default)s)")
    folder = parser.parse_args().out
    make_prx(folder / "tiny_prx")
    make_klein(folder / "tiny_klein")
