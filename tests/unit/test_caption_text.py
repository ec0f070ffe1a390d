"""Answers of a model as captions."""

import time
from contextlib import suppress

import pytest

from sdp.caption.text import caption_of, loop_in, tidy
from sdp.config.caption import CaptionsConfig
from sdp.imaging import RowError

TRIM = CaptionsConfig.model_fields["trim"].default


@pytest.mark.parametrize(
    ("answer", "caption"),
    [
        ("A dog on a beach.", "A dog on a beach."),
        ("  The image shows a dog\non a\tbeach. ", "A dog on a beach."),
        ("In this image, we see rain.", "We see rain."),
        ('"A dog"', "A dog"),
        ("<think>The user wants…</think>\nA dog", "A dog"),
        ("a \x1b[31mred\x1b[0m dog\u202egnp.exe", "a [31mred [0m doggnp.exe"),
        ("I can see a dog", "I can see a dog"),
        ("very very very big", "very very very big"),
        ("cafe\u0301", "café"),
    ],
)
def test_a_caption_is_one_tidy_line(answer: str, caption: str) -> None:
    assert caption_of(answer, TRIM) == caption


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "empty_answer"),
        (" \u200b\n", "empty_answer"),
        ("The image shows", "empty_answer"),
        ("I'm sorry, but I can't help with that.", "refused"),
        ("I cannot describe this image", "refused"),
        ("As an AI language model", "refused"),
        ("a red red red red", "repetitive"),
        ("a dog on a mat, a dog on a mat, a dog on a mat, a dog on a mat, a", "repetitive"),
    ],
)
def test_an_answer_that_is_no_caption_has_a_reason(answer: str, reason: str) -> None:
    with pytest.raises(RowError) as error:
        caption_of(answer, TRIM)
    assert error.value.reason == reason


def test_the_words_of_a_loop_are_told() -> None:
    assert loop_in(["so", "it", "goes", *["on", "and"] * 4]) == "on and"
    assert not loop_in(["one", "two", "three", "four"])


@pytest.mark.parametrize("answer", ["a " * 500_000, "\u202e" * 1_000_000, "<think>" * 150_000, "ab " * 300_000 + "!"])
def test_a_megabyte_of_answer_takes_seconds_at_most(answer: str) -> None:
    began = time.process_time()
    with suppress(RowError):
        caption_of(answer, TRIM)
    assert time.process_time() - began < 5


def test_tidy_text_has_no_character_that_a_terminal_obeys() -> None:
    text = tidy("".join(map(chr, range(0x3000))))
    assert text.isprintable()
