"""PRX: Photoroom's transformer on flow matching, with Qwen3's states of a caption's own tokens.

Captions have lengths, since padding must be masked. Padding's states are stored as zeros, which no token has, so text
tells its own length.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sdp.errors import ModelError
from sdp.families import Family, TextSpace, flow_times, known_model, text_width

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor, nn

_LONGEST = 1024
"""The largest number of tokens of a caption: at 1 kB and more for each, a larger one is a mistake."""

_STEP = 64
"""A batch's captions are cut to a multiple of so many tokens, of which every block projects each."""

_FIRST, _LAST = 2, 3
"""The first and last blocks, which no token skips: of 16, blocks 2 to 12 are skipped, as Photoroom published."""

PRX_424M, PRX_1B = known_model("PRX 424M"), known_model("PRX 1.2B")
"""The sizes of docs/families.md, with Qwen3-0.6B."""


class Prx(Family):
    """A transformer over patches of latents."""

    name = "PRX"
    pipeline = "PRXPipeline"
    pipeline_options = ("skip_text_cleaning=True",)
    denoiser = "transformer"
    denoiser_class = "PRXTransformer2DModel"
    text_class = "Qwen3Model"
    kinds = (("vae", "_class_name", ("AutoencoderKL", "AutoencoderDC")), ("text_encoder", "model_type", ("qwen3",)))
    text_key = "context_in_dim"
    tokens = _STEP
    builtin = "tiny-prx"
    predictions = ("flow",)
    lora_targets = ("img_qkv_proj", "txt_kv_proj", "to_out.0")
    known = (PRX_424M, PRX_1B)

    def skips_tokens(self, denoiser: Mapping[str, Any]) -> bool:
        return int(denoiser.get("depth", 16)) > _FIRST + _LAST

    def text(self, model: Path, *, embedded: bool) -> TextSpace:
        from sdp.families.tokenizer import load_tokenizer

        padding = load_tokenizer(model).padding
        assert padding is not None
        width = text_width(model) if embedded else None
        return TextSpace(int(padding["length"]), "uint32", width, int(padding["pad_id"]), _STEP)

    def load_tokenizer(self, folder: Path) -> "Tokenizer":
        from tokenizers import Tokenizer

        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_bytes())
        length, pad = settings["model_max_length"], settings["pad_token"]
        if not 1 <= length <= _LONGEST:
            expected = f"expected 1 to {_LONGEST} tokens a caption, got {length:g}"
            raise ModelError(f"{file}: model_max_length: {expected}; set 256")
        pad = pad if isinstance(pad, str) else pad["content"]
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        number = tokenizer.token_to_id(pad)
        if number is None:
            raise ValueError(f"pad_token: {pad!r} is not in tokenizer.json")
        tokenizer.enable_truncation(int(length))
        tokenizer.enable_padding(pad_id=number, pad_token=pad, length=int(length))
        return tokenizer

    def prepare_text_encoder(self, text_encoder: Any, model: Path) -> None:
        text_encoder.config.pad_token_id = self.text(model, embedded=False).pad

    def encode_text(self, text_encoder: Any, ids: "Tensor") -> "Tensor":
        import torch

        own = lengths(ids, text_encoder.config.pad_token_id).unsqueeze(1)
        at = torch.arange(ids.shape[1], device=ids.device)
        # The empty caption attends to one token of padding: with none, attention and its gradients would be NaN.
        attended = (at < own.clamp(min=1)).long()
        states = text_encoder(input_ids=ids, attention_mask=attended).last_hidden_state
        return torch.where((at < own).unsqueeze(2), states, 0)

    def predict(
        self, denoiser: Any, latents: "Tensor", times: "Tensor", text: "Tensor", kept: "Tensor | None" = None
    ) -> "Tensor":
        part = flow_times(times)  # the network multiplies by 1000 itself
        if kept is not None:
            denoiser = _skipping(denoiser, kept)
        # A mask rules out flash attention, whose gain would be small: attention is a few percent of a step.
        predicted: Tensor = denoiser(
            latents, part.expand(len(latents)), text, attention_mask=(text != 0).any(2), return_dict=False
        )[0]
        return predicted

    def initialise(self, denoiser: Any) -> None:
        """Begin the last layer at zero, as diffusion transformers do, so that the first prediction is 0."""
        for weight in denoiser.final_layer.linear.parameters():
            weight.detach().zero_()

    def blocks(self, denoiser: Any) -> "Iterator[nn.Module]":
        yield from denoiser.blocks


def _skipping(denoiser: Any, kept: "Tensor") -> Any:
    """Return the denoiser with a loop of our own, in which only the kept image tokens pass its middle blocks (TREAD).

    Hooks on the blocks would see each call twice under activation checkpointing. All modules are the denoiser's, so
    what wraps or compiles them stays.
    """
    blocks = list(denoiser.blocks)

    def through(some: Sequence[Any], image: "Tensor", places: "Tensor", **rest: Any) -> "Tensor":
        for block in some:
            inputs = (image, rest["encoder_hidden_states"], rest["temb"], places, rest["attention_mask"])
            recompute = denoiser.gradient_checkpointing
            image = denoiser._gradient_checkpointing_func(block, *inputs) if recompute else block(*inputs)
        return image

    def loop(hidden_states: "Tensor", image_rotary_emb: "Tensor", **rest: Any) -> "Tensor":
        image, places = through(blocks[:_FIRST], hidden_states, image_rotary_emb, **rest), image_rotary_emb
        index = kept.unsqueeze(2).expand(-1, -1, image.shape[2])
        kept_places = places.take_along_dim(kept[:, None, :, None, None, None], 2)
        some = through(blocks[_FIRST:-_LAST], image.gather(1, index), kept_places, **rest)
        return through(blocks[-_LAST:], image.scatter(1, index, some), places, **rest)

    own = copy(denoiser)
    vars(own).update(blocks=[loop], gradient_checkpointing=False)
    return own


def lengths(ids: "Tensor", pad: int) -> "Tensor":
    """Return the number of tokens of each caption: all up to the last one that is not padding."""
    import torch

    at = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    return torch.where(ids != pad, at, 0).amax(1)


PRX: Final = Prx()
