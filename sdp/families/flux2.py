"""FLUX.2 klein: Black Forest Labs' transformer on flow matching, with states of three layers of Qwen3.

A caption is a message of a chat without thinking, padded to a fixed length. The transformer sees all states, those of
padding too; Qwen3 itself does not attend to padding.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from sdp.families import Family, TextSpace, flow_times, known_model, text_width
from sdp.families.prx import lengths

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor, nn

TOKENS: Final = 512
_BEFORE, _AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The texts that Qwen3's chat template puts around a message."""
_PAD = "<|endoftext|>"
_AUTHORS: Final = {
    "single_transformer_blocks": "single_blocks",
    ".attn.to_qkv_mlp_proj": ".linear1",
    "transformer_blocks": "double_blocks",
    ".attn.to_out.0": ".img_attn.proj",
    ".attn.to_out": ".linear2",
    ".attn.to_q": ".img_attn.qkv",
    ".attn.to_k": ".img_attn.qkv",
    ".attn.to_v": ".img_attn.qkv",
    ".attn.add_q_proj": ".txt_attn.qkv",
    ".attn.add_k_proj": ".txt_attn.qkv",
    ".attn.add_v_proj": ".txt_attn.qkv",
    ".attn.to_add_out": ".txt_attn.proj",
    ".ff.linear_in": ".img_mlp.0",
    ".ff.linear_out": ".img_mlp.2",
    ".ff_context.linear_in": ".txt_mlp.0",
    ".ff_context.linear_out": ".txt_mlp.2",
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "proj_out": "final_layer.linear",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "modulation.linear": "modulation.lin",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "modulation_img.linear": "modulation_img.lin",
    "modulation_txt.linear": "modulation_txt.lin",
}
"""Parts of layers' names in diffusers, and what the authors call them, which ComfyUI reads; replaced in this order."""
KLEIN_4B = known_model("FLUX.2 klein 4B")
"""The size of docs/families.md, with Qwen3-4B."""


class Flux2Klein(Family):
    """A transformer of double and single blocks over the latents and the text."""

    name = "FLUX.2 klein"
    pipeline = "Flux2KleinPipeline"
    denoiser = "transformer"
    denoiser_class = "Flux2Transformer2DModel"
    text_class = "Qwen3Model"
    kinds = (("vae", "_class_name", ("AutoencoderKLFlux2",)), ("text_encoder", "model_type", ("qwen3",)))
    text_key = "joint_attention_dim"
    tokens = TOKENS
    text_layers = (9, 18, 27)
    trains_text = False
    builtin = "tiny-klein"
    predictions = ("flow",)
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("to_qkv_mlp_proj", "attn.to_out"),
    )
    lora_names = "diffusers"
    known = (KLEIN_4B,)

    def problem(self, configs: Mapping[str, Mapping[str, Any]]) -> str | None:
        denoiser = configs.get(self.denoiser)
        if denoiser is not None and denoiser.get("guidance_embeds", True):  # as in diffusers
            return f"{self.denoiser}/config.json: guidance_embeds: expected false, as in klein, got true"
        layers = configs.get("text_encoder", {}).get("num_hidden_layers", self.text_layers[-1] + 1)
        if not isinstance(layers, int) or layers <= self.text_layers[-1]:
            needed = f"expected more than {self.text_layers[-1]}"
            return f"text_encoder/config.json: num_hidden_layers: {needed}, got {layers!r}"
        if (patch := configs.get("vae", {}).get("patch_size", [2, 2])) != [2, 2]:
            return f"vae/config.json: patch_size: expected [2, 2], got {patch!r}"
        return super().problem(configs)

    def text(self, model: Path, *, embedded: bool) -> TextSpace:
        return TextSpace(TOKENS, "uint32", len(self.text_layers) * text_width(model) if embedded else None)

    def load_tokenizer(self, folder: Path) -> "Tokenizer":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if missing := [mark for mark in (_PAD, "<|im_start|>", "<think>") if tokenizer.token_to_id(mark) is None]:
            raise ValueError(f"{missing[0]} is not in tokenizer.json")
        tokenizer.enable_truncation(TOKENS)
        tokenizer.enable_padding(pad_id=tokenizer.token_to_id(_PAD), pad_token=_PAD, length=TOKENS)
        return cast("Tokenizer", _Chat(tokenizer))  # all that is asked of one

    def prepare_text_encoder(self, text_encoder: Any, model: Path) -> None:
        """Drop the layers after the last one that is used, a quarter of the network, and the final norm."""
        from torch import nn

        from sdp.families.tokenizer import load_tokenizer

        text_encoder.config.pad_token_id = (load_tokenizer(model).padding or {})["pad_id"]
        del text_encoder.layers[self.text_layers[-1] :]
        text_encoder.norm = nn.Identity()

    def encode_text(self, text_encoder: Any, ids: "Tensor") -> "Tensor":
        import torch

        own = lengths(ids, text_encoder.config.pad_token_id).unsqueeze(1)
        attended = (torch.arange(ids.shape[1], device=ids.device) < own).long()
        states = text_encoder(input_ids=ids, attention_mask=attended, output_hidden_states=True, use_cache=False)
        return torch.cat([states.hidden_states[layer] for layer in self.text_layers], dim=2)

    def predict(
        self, denoiser: Any, latents: "Tensor", times: "Tensor", text: "Tensor", kept: "Tensor | None" = None
    ) -> "Tensor":
        assert kept is None, "refused when the run began"
        rows, columns = latents.shape[2:]
        exact, embed = flow_times(times).expand(len(latents)), denoiser.time_guidance_embed
        network = copy(denoiser)  # whose `forward` would round times to the latents' dtype, bf16 with FSDP
        vars(network)["time_guidance_embed"] = lambda *_: embed.timestep_embedder(
            embed.time_proj(exact * 1000).to(latents.dtype)
        )
        places = _places((1, rows, columns, 1), latents), _places((1, 1, 1, text.shape[1]), latents)
        predicted: Any = network(latents.flatten(2).transpose(1, 2), text, exact, *places, return_dict=False)[0]
        image: Tensor = predicted.transpose(1, 2).unflatten(2, (rows, columns))
        return image

    def set_timesteps(self, scheduler: Any, steps: int, image: "Tensor") -> None:
        """Set times that move towards the noise with the number of latents, by the formula of the model's authors."""
        count = image.shape[2] * image.shape[3]
        many = 0.00016927 * count + 0.45666666
        if count <= 4300:  # a line through the values for 10 and for 200 steps
            few = 8.73809524e-05 * count + 1.89833333
            many = (many - few) / 190 * (steps - 200) + many
        scheduler.set_timesteps(sigmas=[1 - step / steps for step in range(steps)], device=image.device, mu=many)

    def authors_layer(self, layer: str) -> str:
        for own, authors in _AUTHORS.items():
            layer = layer.replace(own, authors)
        return layer

    def initialise(self, denoiser: Any) -> None:
        """Begin the last layer at zero, as diffusion transformers do, so that the first prediction is 0."""
        denoiser.proj_out.weight.detach().zero_()

    def blocks(self, denoiser: Any) -> "Iterator[nn.Module]":
        yield from denoiser.transformer_blocks
        yield from denoiser.single_transformer_blocks


@dataclass(frozen=True)
class _Chat:
    """A tokenizer of messages: its library extracts special tokens before it could add text to a caption."""

    tokenizer: "Tokenizer"

    @property
    def padding(self) -> Any:
        return self.tokenizer.padding

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    def encode_batch_fast(self, captions: Sequence[str]) -> Any:
        return self.tokenizer.encode_batch_fast([f"{_BEFORE}{caption}{_AFTER}" for caption in captions])


def _places(sides: tuple[int, ...], like: "Tensor") -> "Tensor":
    """Return the places of a grid's cells, in the four axes of the rotary positions."""
    import torch

    grid: Tensor = torch.cartesian_prod(*(torch.arange(side, device=like.device) for side in sides))
    return grid


FLUX2: Final = Flux2Klein()
