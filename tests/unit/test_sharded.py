"""Sharded tensors: reading returns what was written, or reports the damage."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdp.errors import ModelError
from sdp.model import sharded
from sdp.model.tensor_index import DamagedCheckpoint
from sdp.storage import Storage, open_storage

FILE = "worker-00000.000.bin"


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {f"w{n}": torch.randn(4, 8, generator=draw) for n in range(3)} | {"none": torch.empty(0)}


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    return saved(tmp_path / "checkpoints/step-000000010", tensors())


def saved(path: Path, tensors: dict[str, Tensor]) -> Storage:
    storage = open_storage(str(path))
    staged = sharded.stage(storage, tensors, alone=True)
    staged.copy()
    staged.write()
    return storage


def check_refused(folder: Storage, message: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=message) as one:
        sharded.load(folder, tensors())
    with pytest.raises(DamagedCheckpoint, match=message) as other:
        sharded.read_tensors(folder, tensors())
    assert str(one.value) == str(other.value)
    assert str(one.value).endswith("; use another checkpoint")


@pytest.mark.parametrize("at", [0, 383])
def test_a_flipped_bit_is_noticed_in_any_place(folder: Storage, at: int) -> None:
    data = bytearray(folder.read(FILE))
    assert len(data) == 3 * 4 * 8 * 4
    data[at] ^= 1
    folder.publish(FILE, data)
    start = at // 128 * 128
    check_refused(folder, rf"worker-00000\.000\.bin: 128 bytes from {start} do not match their checksum")


def test_neighbours_in_a_file_are_read_by_one_request(folder: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    read_range = type(folder).read_range

    def counted(self: Storage, path: str, start: int, length: int | None) -> bytes:
        if length is not None:
            read.append((start, length))
        return read_range(self, path, start, length)

    monkeypatch.setattr(type(folder), "read_range", counted)
    each = tensors()["w0"].nbytes
    sharded.read_tensors(folder, tensors())
    assert read == [(0, 3 * each)]
    read.clear()
    sharded.read_tensors(folder, ["w0", "w2"])
    assert sorted(read) == [(0, each), (2 * each, each)]
    read.clear()
    monkeypatch.setattr(sharded, "RUN_BYTES", 2 * each)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    sharded.load(folder, target)  # as training does
    for values in (target, sharded.read_tensors(folder, tensors())):  # as an export does
        assert all(torch.equal(values[name], tensor) for name, tensor in tensors().items())
    assert sorted(set(read)) == [(0, 2 * each), (2 * each, each)]


def test_a_chunk_may_begin_anywhere_in_a_file(tmp_path: Path) -> None:
    """A float that lies behind three bytes."""
    mixed = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(5), "c": torch.randn(2, 2).bfloat16()}
    read = sharded.read_tensors(saved(tmp_path, mixed), mixed)
    assert all(torch.equal(read[name], tensor) for name, tensor in mixed.items())


@pytest.mark.parametrize("name", [FILE, "worker-00000.json", "tensors.json"])
def test_a_missing_file_is_named(folder: Storage, name: str) -> None:
    folder.delete(name)
    check_refused(folder, rf"{folder.uri}/{name}: missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunks": []}, "w0: 4 of 4 rows are missing"),
        ({"chunks": [[[0, 0], [2, 8], FILE, 0]]}, "w0: 2 of 4 rows are missing"),
        ({"chunks": [[[2, 0], [2, 8], FILE, 0]]}, r"w0: expected a chunk at row 0, got \[2, 8\] at \[2, 0\]"),
        ({"chunks": [[[0, 0], [4, 8], FILE, 0]] * 2}, r"w0: expected a chunk at row 4, got \[4, 8\] at \[0, 0\]"),
        (
            {"chunks": [[[0, 0], [4, 4], FILE, 0], [[0, 4], [4, 4], FILE, 0]]},
            r"w0: expected a chunk at row 0, got \[4, 4\]",
        ),
        ({"chunks": [[[0, 0], [4, 8], FILE, -4]]}, r"w0\.chunks\.0\.3: expected .*, got -4"),
        ({"size": [-4, 8]}, r"w0\.size\.0: expected .*, got -4"),
        ({"size": [2**40, 2**40]}, r"w0: 4,835,703,278,458,516,698,824,704 bytes are too many"),
        ({"size": [1] * 40}, r"w0\.size: expected "),
        ({"dtype": "float3"}, "w0: unknown dtype float3"),
    ],
)
def test_an_index_that_does_not_cover_a_tensor_is_refused(
    folder: Storage, change: dict[str, object], message: str
) -> None:
    index = json.loads(folder.read("tensors.json"))
    index["tensors"]["w0"].update(change)
    folder.publish("tensors.json", json.dumps(index).encode())
    check_refused(folder, message)


def test_an_index_with_an_unknown_dtype_is_named_by_its_whole_path(folder: Storage) -> None:
    folder.publish("tensors.json", folder.read("tensors.json").replace(b"float32", b"float32_x"))
    check_refused(folder, f"^{folder.uri}/tensors.json: unknown dtype float32_x; ")


def test_a_tensor_larger_than_its_file_gets_no_memory(folder: Storage) -> None:
    index = json.loads(folder.read("tensors.json"))
    size = [2**46]
    index["tensors"]["w0"].update(size=size, chunks=[[[0], size, FILE, 0]])
    folder.publish("tensors.json", json.dumps(index).encode())
    with pytest.raises(DamagedCheckpoint, match=r"worker-00000\.000\.bin: too short"):
        sharded.read_tensors(folder, ["w0"])
    assert sharded.read_tensors(folder, ["w1"])["w1"].shape == (4, 8)


def test_tensors_that_share_a_chunk_get_no_memory(folder: Storage) -> None:
    index = json.loads(folder.read("tensors.json"))
    index["tensors"] |= {f"copy{number}": index["tensors"]["w0"] for number in range(100)}
    folder.publish("tensors.json", json.dumps(index).encode())
    with pytest.raises(DamagedCheckpoint, match=r"worker-00000\.000\.bin: too short"):
        sharded.read_tensors(folder, index["tensors"])


def test_empty_chunks_and_scalars_are_read(tmp_path: Path) -> None:
    """As more workers than a tensor has rows save it."""
    expected = {"scalar": torch.tensor(3.0), "one": torch.tensor([5.0])}
    storage = saved(tmp_path, expected)
    index = json.loads(storage.read("tensors.json"))
    (chunk,) = index["tensors"]["one"]["chunks"]
    index["tensors"]["one"]["chunks"] = [[[0], [0], *chunk[2:]], chunk, [[1], [0], *chunk[2:]]]
    storage.publish("tensors.json", json.dumps(index).encode())
    assert sharded.read_tensors(storage, expected) == expected


@pytest.mark.parametrize("content", [b"", b'{"crc32": {"worker-00000.000.bin": [1]}}'])
def test_malformed_checksums_are_reported_in_one_line(folder: Storage, content: bytes) -> None:
    folder.publish("worker-00000.json", content)
    check_refused(folder, r"worker-00000\.json: not checksums")


def test_another_architecture_is_not_reported_as_damage(folder: Storage) -> None:
    with pytest.raises(ModelError, match="another architecture") as caught:
        sharded.load(folder, {"other": torch.empty(1)})
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_an_interrupt_while_loading_stays_an_interrupt(folder: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    monkeypatch.setattr(sharded, "_bytes_of", interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"^SIGTERM$"):
        sharded.read_tensors(folder, tensors())
