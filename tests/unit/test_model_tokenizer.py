"""Token ids, compared with those of transformers' own tokenizer."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import CLIPTokenizer

from sdp.families.tokenizer import load_clip_tokenizer, load_tokenizer, tokenize
from sdp.model.sources import resolve

TEXTS = (
    *("a red circle", "on a blue background", "It's", "I'LL", "don’t", "#1", "1234", "!!!", "a" * 90, "zwx", "NEW_tok"),
    *("<|endoftext|>", "<|startoftext|>", "<|EndOfText|>", "<|endoftext|>x"),
    *("new_tok", "İstanbul", "ß", "ﬁ", "e\u0301"),
)
SCRIPTS = (
    *((0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF)),
    *((0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x1E00, 0x1EFF), (0x2000, 0x206F), (0x2190, 0x21FF)),
    *((0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xE010), (0xFF00, 0xFFEF), (0x1D400, 0x1D7FF)),
    *((0x1F300, 0x1F6FF), (0x10FFF0, 0x10FFFF), (0, 0x1F)),
)
"""Ranges of characters, of which most are letters, marks, digits, symbols, spaces or control characters."""


def captions(count: int) -> list[str]:
    """Return captions of texts and random words of many scripts, with one space, several or none between them."""
    drawn = random.Random(0)
    words = [*TEXTS] * 20
    for first, last in SCRIPTS * 100:
        words.append("".join(chr(drawn.randint(first, last)) for _ in range(drawn.randint(1, 8))))
    spaced = [word + space for word in words for space in ("", " ", " ", " \u3000")]
    return ["".join(drawn.choices(spaced, k=number % 10)) for number in range(count)]


def mark(content: str, **more: object) -> dict[str, object]:
    return {"content": content, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False, **more}


MARKS: dict[str, Any] = {
    **{"bos_token": mark("<|startoftext|>"), "eos_token": mark("<|endoftext|>"), "unk_token": mark("<|endoftext|>")},
    "pad_token": "<|endoftext|>",
}


def published(folder: Path) -> None:
    """The files of Stable Diffusion 1."""
    old = json.loads((folder / "tokenizer_config.json").read_text())
    typed = {name: {"__type": "AddedToken", **value} for name, value in MARKS.items() if name != "pad_token"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**old, **MARKS, **typed}))
    (folder / "special_tokens_map.json").write_text(json.dumps(MARKS))


def with_words(folder: Path) -> None:
    """Words that textual inversion has added, in the files of earlier versions."""
    published(folder)
    (folder / "added_tokens.json").write_text(json.dumps({"zwx": 584, "new_tok": 583}))


def without_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()


def saved(folder: Path) -> None:
    """The files that transformers writes today, with added words."""
    tokenizer: Any = CLIPTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["new_tok"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["zwx"]})
    shutil.rmtree(folder)
    tokenizer.save_pretrained(folder)


def trained(folder: Path) -> None:
    """A vocabulary with as many merges as a few captions give."""
    tokenizer = load_clip_tokenizer(folder)
    letters, marks = ByteLevel.alphabet(), ["!", "<|startoftext|>", "<|endoftext|>"]
    trainer = BpeTrainer(vocab_size=5000, special_tokens=marks, initial_alphabet=letters, end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(captions(1000), trainer)
    tokenizer.model.save(str(folder))


FORMS: list[Callable[[Path], None]] = [lambda _: None, published, with_words, without_settings, saved, trained]
LARGE = pytest.param(trained, 20_000, marks=pytest.mark.slow)


@pytest.mark.parametrize(("change", "count"), [*((form, 500) for form in FORMS), LARGE])
def test_token_ids_are_those_of_transformers(change: Callable[[Path], None], count: int, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve("builtin:tiny").path / "tokenizer", tmp_path / "tokenizer"))
    change(folder)
    texts = captions(count)
    expected = CLIPTokenizer.from_pretrained(folder)(texts, padding="max_length", max_length=77, truncation=True)
    ids = tokenize(load_tokenizer(tmp_path), texts)
    different = np.flatnonzero((ids != np.array(expected["input_ids"])).any(axis=1))
    assert not len(different), texts[different[0]]
