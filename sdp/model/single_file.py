"""Models as single files for ComfyUI and AUTOMATIC1111: diffusers' tensors under CompVis' names."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
_Rules = Sequence[tuple[str, str]]

_RESIDUAL: _Rules = (
    (r"\.norm1\.", ".in_layers.0."),
    (r"\.conv1\.", ".in_layers.2."),
    (r"\.norm2\.", ".out_layers.0."),
    (r"\.conv2\.", ".out_layers.3."),
    (r"\.time_emb_proj\.", ".emb_layers.1."),
    (r"\.conv_shortcut\.", ".skip_connection."),
)
_UNET: _Rules = (
    (r"^time_embedding\.linear_1\.", "time_embed.0."),
    (r"^time_embedding\.linear_2\.", "time_embed.2."),
    (r"^conv_in\.", "input_blocks.0.0."),
    (r"^conv_norm_out\.", "out.0."),
    (r"^conv_out\.", "out.2."),
    (r"^mid_block\.resnets\.0\.", "middle_block.0."),
    (r"^mid_block\.attentions\.0\.", "middle_block.1."),
    (r"^mid_block\.resnets\.1\.", "middle_block.2."),
)
_VAE: _Rules = (
    (r"\.conv_norm_out\.", ".norm_out."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.", ".mid.attn_1."),
    (r"\.down_blocks\.(\d+)\.resnets\.", r".down.\1.block."),
    (r"\.down_blocks\.(\d+)\.downsamplers\.0\.", r".down.\1.downsample."),
    (r"\.attn_1\.group_norm\.", ".attn_1.norm."),
    (r"\.attn_1\.to_([qkv])\.", r".attn_1.\1."),
    (r"\.attn_1\.to_out\.0\.", ".attn_1.proj_out."),
)
_OPEN_CLIP: _Rules = (
    (r"^embeddings\.token_embedding\.", "token_embedding."),
    (r"^embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"^final_layer_norm\.", "ln_final."),
    (r"^encoder\.layers\.", "transformer.resblocks."),
    (r"\.layer_norm([12])\.", r".ln_\1."),
    (r"\.mlp\.fc1\.", ".mlp.c_fc."),
    (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    (r"\.self_attn\.", ".attn."),
)


def single_file(unet: Any, vae: Any, text_encoder: Any) -> dict[str, Tensor]:
    """Return the tensors of three networks under the names of the original Stable Diffusion."""
    tensors = {f"model.diffusion_model.{name}": value for name, value in _unet(unet.state_dict(), unet.config).items()}
    tensors |= {f"first_stage_model.{name}": value for name, value in _vae(vae.state_dict()).items()}
    text = {name.removeprefix("text_model."): value for name, value in text_encoder.state_dict().items()}
    if _is_first(text_encoder):
        prefix = "cond_stage_model.transformer.text_model."
    else:
        prefix, text = "cond_stage_model.model.", _open_clip(text)
    return tensors | {f"{prefix}{name}": value for name, value in text.items()}


def architecture(text_encoder: Any, prediction: str) -> str:
    """Return the architecture's name in the ModelSpec standard."""
    if _is_first(text_encoder):
        return "stable-diffusion-v1"
    return "stable-diffusion-v2-768-v" if prediction == "v" else "stable-diffusion-v2-512"


def _is_first(text_encoder: Any) -> bool:
    """Return whether it is OpenAI's CLIP, of Stable Diffusion 1."""
    return bool(text_encoder.config.hidden_act == "quick_gelu")


def _unet(tensors: Tensors, config: Any) -> dict[str, Tensor]:
    layers = config.layers_per_block + 1

    def rename(name: str) -> str:
        match = re.match(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.*)", name)
        if match is None:
            return _renamed(name, _UNET)
        direction, kind, rest = match[1], match[3], match[5]
        block, layer = int(match[2]), int(match[4])
        side, number = "output", layers * block + layer
        if direction == "down":
            side, number = "input", number + 1
        if kind == "downsamplers":
            return f"input_blocks.{layers * (block + 1)}.0.{rest.replace('conv', 'op')}"
        if kind == "upsamplers":  # after the attention of its block's last layer, if any
            position = 2 if "CrossAttn" in config.up_block_types[block] else 1
            return f"output_blocks.{layers * (block + 1) - 1}.{position}.{rest}"
        return f"{side}_blocks.{number}.{int(kind == 'attentions')}.{rest}"

    renamed = {rename(name): value for name, value in tensors.items()}
    residual = re.compile(r"(input|output)_blocks\.\d+\.0\.|middle_block\.[02]\.")
    return {_renamed(name, _RESIDUAL) if residual.match(name) else name: value for name, value in renamed.items()}


def _vae(tensors: Tensors) -> dict[str, Tensor]:
    last = max(int(match[1]) for name in tensors if (match := re.match(r"decoder\.up_blocks\.(\d+)", name)))

    def up(match: re.Match[str]) -> str:  # the original counts from the highest resolution
        return f".up.{last - int(match[1])}.{'block.' if match[2] == 'resnets.' else 'upsample.'}"

    result = {}
    for name, value in tensors.items():
        new = re.sub(r"\.up_blocks\.(\d+)\.(resnets\.|upsamplers\.0\.)", up, _renamed(name, _VAE))
        is_projection = ".attn_1." in new and value.dim() == 2  # a 1 × 1 convolution in the original
        result[new] = value[:, :, None, None] if is_projection else value
    return result


def _open_clip(tensors: Tensors) -> dict[str, Tensor]:
    result = {}
    for name, value in tensors.items():
        new = _renamed(name, _OPEN_CLIP)
        if match := re.match(r"(.*\.attn)\.q_proj\.(weight|bias)", new):
            projections = [tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            result[f"{match[1]}.in_proj_{match[2]}"] = torch.cat(projections)
        elif not re.search(r"\.attn\.[kv]_proj\.", new):
            result[new] = value
    return result


def _renamed(name: str, rules: _Rules) -> str:
    for pattern, new in rules:
        name = re.sub(pattern, new, name)
    return name
