"""Captions to token ids; and CLIP's tokenizer, from the files in which transformers saves it.

The library `tokenizers` does the work, as it does in transformers, whose import takes twenty times as long.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdp.errors import ModelError, one_line
from sdp.families import TextSpace, of

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from torch import Tensor

_LARGEST = 64 << 20
"""Bytes of a tokenizer's file; the largest published ones have 35 MB."""
_START, _END = "<|startoftext|>", "<|endoftext|>"
_MARKS = {
    "bos_token": _START,
    "eos_token": _END,
    "unk_token": _END,
    "sep_token": None,
    "pad_token": _END,
    "cls_token": None,
    "mask_token": None,
}
"""The special tokens where the files name no others, in the order in which transformers adds them."""
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""CLIP's words: its marks, endings after an apostrophe, runs of letters, single digits, runs of anything else."""


def load_tokenizer(path: Path) -> "Tokenizer":
    """Load the tokenizer of a model's folder. `tokenize` runs it."""

    return _load(path / "tokenizer", lambda folder: of(path).load_tokenizer(folder), path / "text_encoder/config.json")


def load_clip_tokenizer(path: Path) -> "Tokenizer":
    """Load the tokenizer of a CLIP model's folder."""
    return _load(path, open_clip, path / "config.json", "text_config")


def _fitting(tokenizer: "Tokenizer", folder: Path, config: Path, *sections: str) -> "Tokenizer":
    """Return a tokenizer; raise ModelError if a text encoder's configuration says that it lacks some of the ids."""
    try:
        known: Any = _read(config)
        for key in (*sections, "vocab_size"):
            known = known.get(key)
    except (AttributeError, ValueError, RecursionError):  # loading the network says what is wrong
        return tokenizer
    if type(known) is int and (highest := max(tokenizer.get_vocab().values())) >= known:
        raise ModelError(
            f"{folder}: has the id {highest:,}, but the text encoder has {known:,} embeddings; restore the tokenizer "
            "that belongs to it"
        )
    return tokenizer


def refuse_large(folder: Path) -> None:
    """Raise ModelError if a tokenizer's file is too large to be one, since the libraries would read it for minutes."""
    for file in folder.iterdir():
        if file.suffix in (".json", ".txt") and file.exists() and (size := file.stat().st_size) > _LARGEST:
            raise ModelError(f"{file}: has {size:,} bytes, too many for a tokenizer's; restore it")


def _load(folder: Path, load: Callable[[Path], "Tokenizer"], config: Path, *sections: str) -> "Tokenizer":
    """Load a tokenizer that fits a text encoder's configuration; `sections` lead to the part that is about it."""
    try:
        refuse_large(folder)
        return _fitting(load(folder), folder, config, *sections)
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more specific
        line = one_line(error, 200)
        raise ModelError(f"{folder}: not its model's tokenizer ({line}); compare it with the original") from error


def tokens_of(tokenizer: "Tokenizer") -> int:
    """Return the length to which captions are cut and padded."""
    padding = tokenizer.padding
    assert padding is not None
    return int(padding["length"])


def tokenize(tokenizer: "Tokenizer", captions: Sequence[str]) -> NDArray[np.uint32]:
    """Return the token ids of captions, each cut or padded to one length."""
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(list(captions))]
    return np.array(ids, np.uint32).reshape(-1, tokens_of(tokenizer))


def token_ids(tokenizer: "Tokenizer", captions: Sequence[str]) -> "Tensor":
    """Return the token ids of captions as the text encoder takes them."""
    import torch

    return torch.from_numpy(tokenize(tokenizer, captions).astype(np.int64))


def open_clip(folder: Path) -> "Tokenizer":
    """Open CLIP's tokenizer; raise anything if its files do not fit."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    saved, settings = _read(folder / "tokenizer.json"), {**_MARKS, **_read(folder / "tokenizer_config.json")}
    if "added_tokens_decoder" not in settings:
        settings |= _read(folder / "special_tokens_map.json")
    marks = {role: _special(settings[role]) for role in _MARKS if settings[role] is not None}
    start, end, unknown, pad = (str(marks[f"{role}_token"]) for role in ("bos", "eos", "unk", "pad"))
    if saved:
        vocabulary, pairs = saved["model"]["vocab"], saved["model"]["merges"]
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in pairs]
    else:
        vocabulary, merges = models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, end_of_word_suffix="</w>"))
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    words = pre_tokenizers.Split(Regex(_WORDS), "removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.add_tokens(_added(folder, settings, saved, list(marks.values())))
    ids = tokenizer.get_vocab()
    tokenizer.post_processor = processors.RobertaProcessing((end, ids[end]), (start, ids[start]))
    tokenizer.enable_truncation(TextSpace().tokens, direction=settings.get("truncation_side", "right"))
    side = settings.get("padding_side", "right")
    tokenizer.enable_padding(direction=side, pad_id=ids[pad], pad_token=pad, length=TextSpace().tokens)
    return tokenizer


def _added(
    folder: Path, settings: dict[str, Any], saved: dict[str, Any], marks: "list[AddedToken]"
) -> "list[AddedToken]":
    """Return the tokens to add to the vocabulary: those with a number, then the special ones that have none."""
    from tokenizers import AddedToken

    names = {str(mark) for mark in marks}
    numbered = {int(number): token for number, token in settings.get("added_tokens_decoder", {}).items()}
    if "added_tokens_decoder" not in settings:
        for name, number in _read(folder / "added_tokens.json").items():
            numbered[number] = {"content": name, "normalized": name not in names}
        numbered |= {token.pop("id"): token for token in saved.get("added_tokens", ())}
    tokens = [AddedToken(**token) for _, token in sorted(numbered.items())]
    for token in tokens:
        token.special |= str(token) in names
    known = {str(token) for token in tokens}
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    for token in (*marks, *map(_special, more)):
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    return tokens


def _special(token: str | dict[str, Any]) -> "AddedToken":
    from tokenizers import AddedToken

    settings = {"content": token} if isinstance(token, str) else token
    return AddedToken(**{**settings, "special": True})


def _read(file: Path) -> dict[str, Any]:
    """Return a file's content without the marks of transformers' types; nothing if there is no file."""
    return json.loads(file.read_bytes(), object_hook=_untyped) if file.exists() else {}


def _untyped(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "__type"}
