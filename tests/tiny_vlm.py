"""A tiny vision-language model that names the colour of a picture, as transformers saves one."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 40, 220), "yellow": (230, 220, 30)}
_WORDS = ("<pad>", "<s>", "</s>", "<image>", "<unk>", ":", "a", "picture", *COLOURS)
_SIDE, _PATCH = 32, 16
_CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
)


def coloured(name: str, number: int = 0) -> NDArray[np.uint8]:
    """A picture of one colour, with some noise."""
    noise = np.random.default_rng(number).integers(-25, 26, (40, 48, 3))
    return np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)


def caption_for(name: str) -> str:
    """The caption of a picture of this colour."""
    return f"a {name} picture"


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)  # joins words by spaces
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks, extra_special_tokens={"image_token": "<image>"})


def make_tiny_florence(folder: Path) -> Path:
    """Save a Florence-2 of random weights, which has no chat template."""
    from transformers import (
        BartConfig,
        CLIPImageProcessor,
        Florence2Config,
        Florence2ForConditionalGeneration,
        Florence2Processor,
        Florence2VisionConfig,
    )

    fast, size, ends = _tokenizer(), {"height": 64, "width": 64}, {"pad_token_id": 0, "eos_token_id": 2}
    pictures = CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False)
    pictures.image_seq_length = (64 // 32) ** 2 + 1
    processor = Florence2Processor(pictures, fast, num_additional_image_tokens=0)
    one, heads = [1] * 4, {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    vision = Florence2VisionConfig(
        embed_dim=[8, 8, 8, 32], num_heads=one, num_groups=one, depths=one, projection_dim=32, window_size=4
    )
    text = BartConfig(
        vocab_size=len(fast), d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=64, bos_token_id=1, decoder_start_token_id=2, **heads, **ends,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Florence2ForConditionalGeneration(
        Florence2Config(text_config=text, vision_config=vision, image_token_id=3, is_encoder_decoder=True)
    )
    model.generation_config.update(**ends, decoder_start_token_id=2, min_new_tokens=3)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def make_tiny_vlm(folder: Path) -> Path:
    """Train a LLaVA of 0.1 M parameters to name colours, and save it."""
    from PIL import Image
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    fast = _tokenizer()
    size = {"height": _SIDE, "width": _SIDE}
    processor = LlavaProcessor(
        CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False),
        fast,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=_CHAT,
    )
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model: Any = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**layers, image_size=_SIDE, patch_size=_PATCH),
            text_config=LlamaConfig(
                **layers,
                vocab_size=len(fast),
                max_position_embeddings=512,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
            ),
            image_token_index=3,
            vision_feature_layer=-1,
            image_seq_length=(_SIDE // _PATCH) ** 2,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    names = [*COLOURS]
    for step in range(40):
        chosen = [names[(step + number) % len(names)] for number in range(8)]
        pictures = [Image.fromarray(coloured(name, 1000 + 8 * step + n)) for n, name in enumerate(chosen)]
        prompts = ["", "Describe this image in one sentence.", "Which colour?"]
        texts = [f"<image>{prompts[(step + n) % 3]}: {caption_for(name)}</s>" for n, name in enumerate(chosen)]
        inputs = processor(images=pictures, text=texts, return_tensors="pt", padding=True, padding_side="left")
        labels = inputs["input_ids"].clone()
        answers = [len(fast(f"{caption_for(name)}</s>")["input_ids"]) for name in chosen]
        for row, answer in enumerate(answers):
            labels[row, :-answer] = -100
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
