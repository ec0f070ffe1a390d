"""A step's batch and its text."""

import numpy as np
import pytest
import torch
from torch import nn

from sdp.families import ALL_TOKENS, TextSpace
from sdp.train.data.batch import Batch
from sdp.train.step import Conditioning


def batch_of(rows: int) -> Batch:
    tokens = torch.zeros(rows, 77, dtype=torch.uint16)
    return Batch(torch.arange(rows), torch.ones(rows), torch.zeros(rows, 4, 2, 2), token_ids=tokens)


def test_micro_batches_are_as_equal_as_can_be() -> None:
    lengths = {86: [43, 43], 64: [64], 85: [42, 43], 130: [43, 43, 44], 0: []}
    for rows, expected in lengths.items():
        parts = list(batch_of(rows).split(64))
        assert [len(part) for part in parts] == expected
        assert [row for part in parts for row in part.rows.tolist()] == list(range(rows))


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [([], 64), ([0], 64), ([3, 64, 20], 64), ([65, 3], 128), ([128], 128), ([200], 256), ([3, 256], 256)],
)
def test_a_batch_keeps_its_longest_caption_and_whole_multiples(embedded: bool, lengths: list[int], tokens: int) -> None:
    ids = np.full((len(lengths) + 1, 256), 7, np.uint32)
    for row, length in enumerate(lengths):
        ids[row, :length] = 1
    ids[-1] = 0  # padding of a batch, which the empty caption replaces
    states = (ids != 7)[..., None] * np.ones(4, np.float16)
    counted = np.array([True] * len(lengths) + [False])
    assert TextSpace(256, "uint32", pad=7, step=64).cut(states if embedded else ids, counted) == tokens
    assert ALL_TOKENS.cut(states if embedded else ids, counted) == 256


def test_captions_are_encoded_as_the_empty_one_is_whatever_the_arithmetic_around_them() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 32)).requires_grad_(False)
    conditioning = Conditioning(encoder(torch.zeros(77, dtype=torch.int64)), encoder)
    with torch.autocast("cpu", torch.bfloat16):
        states = conditioning.text_or_empty(batch_of(3), torch.zeros(3, dtype=torch.bool))
    assert torch.equal(states, conditioning.empty.expand(3, -1, -1))
