"""Perceptual hashes, and near-duplicates by them: those within the distance, all of them and no others."""

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from sdp.imaging import decode
from sdp.score import near
from tests import process_kit

Hashes = NDArray[np.uint64]


# --- the hash --------------------------------------------------------------------------------------------------------


def cosines_by_their_definition(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """The lowest 8 × 8 coefficients, summed term by term."""
    side = len(pixels)
    at = 2 * np.arange(side) + 1
    low = np.zeros((8, 8))
    for down in range(8):
        for across in range(8):
            waves = np.cos(np.pi * down * at / (2 * side))[:, None] * np.cos(np.pi * across * at / (2 * side))[None, :]
            low[down, across] = 4 * (pixels * waves).sum()
    return low


def test_the_hash_is_the_lowest_cosines_above_their_median() -> None:
    for row in range(20):
        pixels = decode(process_kit.picture(row)).pixels
        grey = Image.fromarray(pixels).convert("L").resize((32, 32), Image.Resampling.LANCZOS)
        low = cosines_by_their_definition(np.asarray(grey, np.float64))
        bits = "".join("1" if value > np.median(low) else "0" for value in low.flatten())
        assert near.perceptual_hash(pixels) == int(bits, 2)
        assert bits.count("1") == 32, "so two of them differ in an even number of bits"


def test_a_wave_of_one_frequency_sets_the_bits_worked_by_hand() -> None:
    across = np.cos(np.pi * 3 * (2 * np.arange(32) + 1) / 64)
    pixels = np.repeat(np.round(128 + 100 * across)[None, :, None], 32, axis=0).repeat(3, axis=2).astype(np.uint8)
    value = near.perceptual_hash(pixels)
    assert value >> 63 & 1, "the mean"
    assert value >> (63 - 3) & 1, "the third frequency across, in the first row"
    assert value & (2**56 - 1) == 0, "nothing changes downwards"


@pytest.mark.parametrize("shade", [1, 77, 255])
def test_blank_pictures_of_any_shade_and_size_have_one_hash(shade: int) -> None:
    for size in ((64, 64), (40, 90), (300, 30)):
        assert near.perceptual_hash(np.full((*size, 3), shade, np.uint8)) == 1 << 63
        assert near.perceptual_hash(np.zeros((*size, 3), np.uint8)) == 0


def test_a_smaller_copy_of_worse_quality_is_near_and_another_picture_is_far() -> None:
    draw = np.random.default_rng(0)
    coarse = [Image.fromarray(draw.integers(0, 256, (9, 12, 3), np.uint8)) for _ in range(6)]
    pictures = [picture.resize((480, 360), Image.Resampling.BICUBIC) for picture in coarse]
    hashes = [near.perceptual_hash(np.asarray(picture)) for picture in pictures]
    for picture, value in zip(pictures, hashes, strict=True):
        sink = io.BytesIO()
        picture.resize((200, 150), Image.Resampling.LANCZOS).save(sink, "JPEG", quality=60)
        assert (near.perceptual_hash(decode(sink.getvalue()).pixels) ^ value).bit_count() <= 3
    assert min((a ^ b).bit_count() for n, a in enumerate(hashes) for b in hashes[:n]) > 12


# --- near-duplicates -------------------------------------------------------------------------------------------------


def flipped(value: int, bits: NDArray[np.int64]) -> int:
    for bit in bits.tolist():
        value ^= 1 << bit
    return value


def hashes_of(kind: str, rows: int, draw: np.random.Generator) -> Hashes:
    if kind == "random":
        hashes = draw.integers(0, 2**64, rows, dtype=np.uint64)
    elif kind == "crowded":  # so alike that keys are shared by more than are compared with each other
        hashes = draw.integers(0, 2**10, rows, dtype=np.uint64) << np.uint64(draw.integers(0, 54))
    else:  # all within four bits of each other
        ones = np.uint64(1) << draw.integers(0, 64, (2, rows)).astype(np.uint64)
        hashes = np.uint64(12345) ^ ones[0] ^ ones[1]
    for row in range(0, 100, 2):  # planted pairs of every distance from 0 to 4
        hashes[row + 1] = flipped(int(hashes[row]), draw.choice(64, row // 2 % 5, replace=False))
    return hashes


def groups_by_all_pairs(hashes: Hashes, distance: int) -> dict[int, int]:
    """The lowest row of each row's group, for rows in groups of two or more."""
    lowest = list(range(len(hashes)))

    def root(row: int) -> int:
        while lowest[row] != row:
            row = lowest[row]
        return row

    left, right = np.nonzero(np.triu(np.bitwise_count(hashes[:, None] ^ hashes[None, :]) <= distance, 1))
    for a, b in zip(left.tolist(), right.tolist(), strict=True):
        low, high = sorted((root(a), root(b)))
        lowest[high] = low
    roots = [root(row) for row in range(len(hashes))]
    return {row: first for row, first in enumerate(roots) if roots.count(first) > 1}


def search_all(hashes: Hashes, distance: int, partitions: int, rows: NDArray[np.int64]) -> list[near.Pairs]:
    pairs = []
    for number, mask in enumerate(near.masks(len(hashes), distance)):
        partition = near.partition_of(hashes, mask, partitions)
        for one in range(partitions):
            inside = partition == one
            pairs.append(near.search(hashes[inside], rows[inside], mask, distance, equal=number == 0))
    return pairs


@pytest.mark.parametrize("kind", ["random", "crowded", "near"])
@pytest.mark.parametrize("distance", [0, 1, 2, 3])
@pytest.mark.parametrize("partitions", [1, 3])
def test_groups_are_those_of_comparing_all_pairs(kind: str, distance: int, partitions: int) -> None:
    draw = np.random.default_rng(distance)
    hashes = hashes_of(kind, 500, draw)
    rows = np.arange(500)
    table = near.groups(search_all(hashes, distance, partitions, rows))
    expected = groups_by_all_pairs(hashes, distance)
    assert dict(zip(table["row"].to_pylist(), table["duplicate_of"].to_pylist(), strict=True)) == expected
    assert table["row"].to_pylist() == sorted(expected)
    assert table["duplicate"].to_pylist() == [int(expected[row] != row) for row in sorted(expected)]


def test_the_lowest_row_stands_for_its_group_in_whatever_order_rows_come() -> None:
    hashes = np.array([5, 5, 5, 5, 4], np.uint64)
    rows = np.array([40, 10, 30, 20, 5])
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]):
        table = near.groups(search_all(hashes[order], 1, 1, rows[order]))
        assert table["row"].to_pylist() == [5, 10, 20, 30, 40]
        assert set(table["duplicate_of"].to_pylist()) == {5}


def test_millions_of_blank_pictures_take_no_longer_than_others() -> None:
    hashes = np.full(1_000_000, 1 << 63, np.uint64)
    table = near.groups(search_all(hashes, 3, 1, np.arange(len(hashes))))  # of all pairs: 5e11
    assert table.num_rows == 1_000_000
    assert sum(table["duplicate"].to_numpy()[:10]) == 9


def test_nothing_is_a_table_without_rows() -> None:
    assert near.groups(search_all(np.zeros(0, np.uint64), 3, 1, np.zeros(0, np.int64))).num_rows == 0
