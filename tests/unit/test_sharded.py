"""Tensors in shards: what is read is what was written, or it is said that it is not."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdp.errors import ModelError
from sdp.model import sharded
from sdp.model.damage import DamagedCheckpoint
from sdp.storage import Storage, open_storage


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {f"w{n}": torch.randn(4, 8, generator=draw) for n in range(3)} | {"none": torch.empty(0)}


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    storage = open_storage(str(tmp_path / "checkpoints/step-000000010"))
    sharded.save(storage, tensors(), alone=True)
    return storage


def load_both_ways(folder: Storage) -> None:
    """Into tensors that are there, as training does, and whole ones, as an export does."""
    there = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    sharded.load(folder, there, alone=True)
    read = sharded.read_tensors(folder, tensors())
    for name, tensor in tensors().items():
        assert torch.equal(there[name], tensor)
        assert torch.equal(read[name], tensor)


def refused(folder: Storage, said: str) -> None:
    there = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    with pytest.raises(DamagedCheckpoint, match=said) as one:
        sharded.load(folder, there, alone=True)
    with pytest.raises(DamagedCheckpoint, match=said) as other:
        sharded.read_tensors(folder, tensors())
    assert str(one.value) == str(other.value)
    assert str(one.value).endswith("; use another checkpoint")


def test_what_was_saved_is_loaded(folder: Storage) -> None:
    load_both_ways(folder)


@pytest.mark.parametrize("at", [0, 127, 128, 383])
def test_a_flipped_bit_is_noticed_wherever_it_is(folder: Storage, at: int) -> None:
    data = bytearray(folder.read("worker-00000.000.bin"))
    assert len(data) == 3 * 4 * 8 * 4
    data[at] ^= 1
    folder.publish("worker-00000.000.bin", data)
    start = at // 128 * 128
    refused(folder, rf"worker-00000\.000\.bin: 128 bytes from {start} are not those that were written")


def test_chunks_that_changed_places_are_noticed(folder: Storage) -> None:
    index = json.loads(folder.read("tensors.json"))
    chunks = index["tensors"]["w0"]["chunks"]
    chunks[0][3] += 4
    folder.publish("tensors.json", json.dumps(index).encode())
    refused(folder, "128 bytes from 4 are not those")


@pytest.mark.parametrize("name", ["worker-00000.000.bin", "worker-00000.json", "tensors.json"])
def test_a_file_that_is_gone_is_named(folder: Storage, name: str) -> None:
    folder.delete(name)
    refused(folder, rf"{folder.uri}/{name}: missing")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"crc32": 3}', b'{"crc32": {"worker-00000.000.bin": [1]}}'])
def test_checksums_that_are_none_are_one_line(folder: Storage, content: bytes) -> None:
    folder.publish("worker-00000.json", content)
    refused(folder, r"worker-00000\.json: not checksums")


def test_a_checkpoint_of_a_version_without_checksums_is_loaded(folder: Storage) -> None:
    folder.delete("worker-00000.json")
    index = json.loads(folder.read("tensors.json"))
    del index["crc32"]
    folder.publish("tensors.json", json.dumps(index).encode())
    load_both_ways(folder)


def test_another_architecture_is_no_damage(folder: Storage) -> None:
    with pytest.raises(ModelError, match="another architecture") as caught:
        sharded.load(folder, {"other": torch.empty(1)}, alone=True)
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_damage_is_told_alike_in_another_process() -> None:
    error = DamagedCheckpoint("f: missing", "delete f to begin anew")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "f: missing; delete f to begin anew"
