"""Tensors in shards: what torch.distributed.checkpoint saves and loads, kept in a storage.

A folder holds raw little-endian bytes in a few files a worker, and `tensors.json`, which says for each tensor its
dtype, its size and where each of its chunks lies. Each worker writes the checksums of its chunks beside its files, and
they are compared as chunks are read. No pickle: a checkpoint from elsewhere can be read without running what is in it.
Any number of workers can load what any other number has saved.
"""

import json
import math
import threading
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from sdp.device import new_stream, record, thread_pool
from sdp.errors import ModelError, NotFound, StorageError, one_line
from sdp.model.damage import DamagedCheckpoint
from sdp.model.tensor_index import FORMAT, INDEX, Chunk, StoredTensor, read_tensor_index
from sdp.storage import Storage

FILE_BYTES = 256_000_000
"""About how large a file becomes: a part of a worker's state that is serialised whole before it is sent."""
_THREADS = 4


class Staged:
    """What one worker has to write: `copy` it to the host before any of it changes, then `write` what was copied.

    Both may be done by another thread, while training goes on, as long as it only reads.
    """

    def __init__(self, storage: Storage, tensors: Mapping[str, Tensor], layout: "_Layout", host: "Host") -> None:
        self._storage, self._host, self._index = storage, host, layout.index
        self._shards = {file: [_local(tensors[name]) for name in names] for file, names in layout.files}
        self._device = _device_of(shard for shards in self._shards.values() for shard in shards)
        on_gpu = self._device.type == "cuda"
        self._ready = record(torch.cuda.current_stream(self._device)) if on_gpu else None
        self._files: list[_File] | None = None

    @property
    def bytes(self) -> int:
        return sum(shard.nbytes for shards in self._shards.values() for shard in shards)

    def copy(self) -> None:
        """To the host; from a GPU on a stream of its own, when what was launched before is done."""
        if self._ready is None:
            self._files = self._copied(pin=False)
            return
        stream = self._host.stream(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            self._files = self._copied(pin=True)
        stream.synchronize()
        # What lies on another GPU is copied by that one's stream.
        for device in {shard.device for shards in self._shards.values() for shard in shards} - {self._device}:
            torch.cuda.current_stream(device).synchronize()

    def _copied(self, *, pin: bool) -> "list[_File]":
        files = []
        for file, shards in self._shards.items():
            memory, at = self._host.take(file, sum(shard.nbytes for shard in shards), pin), 0
            for shard in shards:
                flat = _flat(shard)
                memory[at : at + len(flat)].copy_(flat, non_blocking=True)
                at += len(flat)
            files.append(_File(file, memory.numpy().data))
        return files

    def write(self) -> None:
        """Send it to the storage, then what it sums to; whoever has the index sends that last."""
        if self._files is None:
            raise RuntimeError("nothing has been copied that could be written")
        with thread_pool(self._device, _THREADS, "sdp-save") as pool:
            sums = dict(pool.map(self._write_file, self._files))
        for name in {_sums_name(file) for file in sums}:  # one: all are this worker's
            self._storage.publish(name, json.dumps({"format": FORMAT, "crc32": sums}).encode())
        if self._index is not None:
            self._storage.publish(INDEX, self._index)

    def _write_file(self, file: "_File") -> tuple[str, list[tuple[int, int]]]:
        """Its name; where each of its chunks begins, and its checksum."""
        sums, at = [], 0
        for shard in self._shards[file.name]:
            sums.append((at, zlib.crc32(file.content[at : at + shard.nbytes])))
            at += shard.nbytes
        self._storage.publish(file.name, file.content)
        return file.name, sums


class Host:
    """What is kept from save to save: memory to copy to, as to get it anew takes longer than to copy; the stream that
    copies; and who writes what, which the workers need not agree on again as long as the tensors are the same."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._layout: tuple[_Signature, _Layout] | None = None

    def take(self, name: str, count: int, pin: bool) -> Tensor:
        """So many bytes for a file; what was in them before must have been written."""
        memory = self._memory.get(name)
        if memory is None or len(memory) < count:
            memory = self._memory[name] = torch.empty(count, dtype=torch.uint8, pin_memory=pin)
        return memory[:count]

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream that copies from this GPU."""
        self._stream = self._stream or new_stream(device)
        return self._stream

    def layout_of(self, tensors: Mapping[str, Tensor]) -> "_Layout | None":
        """What was agreed on for tensors like these. They are alike on all workers, or on none."""
        return self._layout[1] if self._layout is not None and self._layout[0] == _signature(tensors) else None

    def keep(self, tensors: Mapping[str, Tensor], layout: "_Layout") -> None:
        self._layout = (_signature(tensors), layout)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which tensors a worker writes to which file, in their order, and on the first worker the index of all."""

    files: Sequence[tuple[str, Sequence[str]]]
    index: bytes | None


_Signature = list[tuple[Any, ...]]


def _signature(tensors: Mapping[str, Tensor]) -> _Signature:
    return [
        (n, t.dtype, t.shape, getattr(t, "placements", None), getattr(t, "device_mesh", None))
        for n, t in tensors.items()
    ]


def save(storage: Storage, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Save tensors (plain ones, the same on all workers, or DTensors); each worker writes its share.

    Every worker calls it, unless one is `alone`. The index is written last, by the first worker.
    """
    staged = stage(storage, tensors, alone=alone)
    staged.copy()
    staged.write()


def stage(storage: Storage, tensors: dict[str, Tensor], *, alone: bool = False, host: Host | None = None) -> Staged:
    """Agree on who writes what; every worker calls it, as above."""
    host = host or Host()
    layout = host.layout_of(tensors)
    if layout is None:
        writer = _Writer()
        try:
            with _without_the_warning_of_being_alone():
                save_state(tensors, storage_writer=writer, no_dist=alone)
        except CheckpointException as error:
            raise _cause(error, f"{storage.uri}: could not be saved") from error
        layout = _Layout(writer.files, writer.index)
        host.keep(tensors, layout)
    return Staged(storage, tensors, layout, host)


def load(storage: Storage, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Load into tensors that are there, however they are sharded now. Every worker calls it."""
    index = read_tensor_index(storage)
    _check(storage, tensors, index.tensors)
    sums = _Sums(storage, told=index.has_checksums)
    try:
        with _without_the_warning_of_being_alone():
            reader = _Reader(storage, index.tensors, sums, _device_of(tensors.values()))
            load_state(tensors, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:
        raise _cause(error, f"{storage.uri}: could not be loaded") from error


def read_tensors(storage: Storage, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors on the CPU, without other workers."""
    index = read_tensor_index(storage)
    stored, sums = index.tensors, _Sums(storage, told=index.has_checksums)
    wanted = list(names)
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ModelError(f"{storage.uri}: {len(missing)} tensors are not in it, such as {missing[0]}")
    tensors = {name: torch.empty(stored[name].size, dtype=_dtype(stored[name].dtype)) for name in wanted}
    work = [(name, chunk) for name in wanted for chunk in stored[name].chunks]

    def fill(item: tuple[str, Chunk]) -> None:
        name, chunk = item
        block = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        tensors[name][block].copy_(_read(storage, chunk, _dtype(stored[name].dtype), sums))

    with thread_pool(torch.device("cpu"), _THREADS, "sdp-load") as pool:
        list(pool.map(fill, work))
    return tensors


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    content: memoryview


class _Writer(StorageWriter):
    """Lays a worker's chunks out in files, and writes none: they are copied by that."""

    def __init__(self) -> None:
        self.files: list[tuple[str, list[str]]] = []
        self.index: bytes | None = None
        """Of all workers, on the first one."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [SavePlan(plan.items, rank, plan.planner_data, plan.usable) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for number, items in enumerate(_files(plan.items)):
            name, at = f"worker-{plan.storage_data:05d}.{number:03d}.bin", 0
            for item in items:
                length = _local(planner.resolve_data(item)).nbytes
                results.append(WriteResult(item.index, length, (name, at)))
                at += length
            self.files.append((name, [item.index.fqn for item in items]))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: md.Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for some in results for result in some}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, md.TensorStorageMetadata):
                raise TypeError(f"{name}: only tensors are kept in shards")
            chunks = [
                (list(c.offsets), list(c.sizes), *places[md.MetadataIndex(name, c.offsets)]) for c in tensor.chunks
            ]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
        self.index = json.dumps({"format": FORMAT, "crc32": True, "tensors": tensors}).encode()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | PurePosixPath)


class _Reader(StorageReader):
    """Reads the chunks that a worker needs."""

    def __init__(
        self, storage: Storage, stored: Mapping[str, StoredTensor], sums: "_Sums", device: torch.device
    ) -> None:
        self._storage = storage
        self._device = device
        self._stored = stored
        self._sums = sums

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self) -> md.Metadata:
        return md.Metadata({name: _as_metadata(tensor) for name, tensor in self._stored.items()})

    def set_up_storage_reader(self, metadata: md.Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = {(name, c.offsets): c for name, tensor in self._stored.items() for c in tensor.chunks}

        def read(item: ReadItem) -> None:
            index = item.storage_index
            chunk = places[index.fqn, tuple(index.offset or ())]
            data = _read(self._storage, chunk, _dtype(self._stored[index.fqn].dtype), self._sums)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                data = data.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(data)
            planner.commit_tensor(item, target)

        with thread_pool(self._device, _THREADS, "sdp-load") as pool:
            list(pool.map(read, plan.items))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | PurePosixPath)


def _files(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Items in files of about FILE_BYTES."""
    file: list[WriteItem] = []
    held = 0
    for item in items:
        if item.tensor_data is None:
            raise TypeError(f"{item.index.fqn}: only tensors are kept in shards")
        size = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if file and held + size > FILE_BYTES:
            yield file
            file, held = [], 0
        file.append(item)
        held += size
    if file:
        yield file


def _device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return the GPU that some of these tensors lie on, or the CPU."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


def _local(tensor: Any) -> Tensor:
    """A tensor, or this worker's shard of it: what is there now, not a copy."""
    assert isinstance(tensor, Tensor)  # _files has looked
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a plain tensor, where they are."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8) if len(flat) else flat.new_empty(0, dtype=torch.uint8)


class _Sums:
    """What chunks sum to, as their writers tell: each is asked when the first of its chunks is read."""

    def __init__(self, storage: Storage, *, told: bool) -> None:
        self._storage = storage
        self._told = told
        """Checkpoints of older versions have none."""
        self._lock = threading.Lock()
        self._of: dict[str, dict[tuple[str, int], int]] = {}

    def check(self, chunk: Chunk, data: bytearray) -> None:
        if not self._told:
            return
        name = _sums_name(chunk.file)
        with self._lock:
            if name not in self._of:
                self._of[name] = self._read(name)
        if zlib.crc32(data) != self._of[name].get((chunk.file, chunk.start)):
            raise DamagedCheckpoint(
                f"{self._storage.uri_of(chunk.file)}: {len(data):,} bytes from {chunk.start:,} are not those that were "
                "written (their checksum differs)"
            )

    def _read(self, name: str) -> dict[tuple[str, int], int]:
        try:
            files = json.loads(self._storage.read(name))["crc32"]
            return {(file, start): crc for file, sums in files.items() for start, crc in sums}
        except NotFound as error:
            raise DamagedCheckpoint(f"{self._storage.uri_of(name)}: missing") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{self._storage.uri_of(name)}: not checksums ({one_line(error, 120)})") from error


def _sums_name(file: str) -> str:
    """Where the checksums of a worker's file are, and those of its others."""
    return f"{file.partition('.')[0]}.json"


def _read(storage: Storage, chunk: Chunk, dtype: torch.dtype, sums: _Sums) -> Tensor:
    length = chunk.count * dtype.itemsize
    if not length:
        return torch.empty(chunk.sizes, dtype=dtype)
    try:
        data = bytearray(storage.read_range(chunk.file, chunk.start, length))
    except NotFound as error:
        raise DamagedCheckpoint(f"{storage.uri_of(chunk.file)}: missing") from error
    if len(data) != length:
        raise DamagedCheckpoint(f"{storage.uri_of(chunk.file)}: too short")
    sums.check(chunk, data)
    return torch.frombuffer(data, dtype=dtype).view(chunk.sizes)


def _as_metadata(tensor: StoredTensor) -> md.TensorStorageMetadata:
    chunks = [md.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
    return md.TensorStorageMetadata(md.TensorProperties(dtype=_dtype(tensor.dtype)), torch.Size(tensor.size), chunks)


def _check(storage: Storage, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    missing = [name for name in tensors if name not in stored]
    if missing:
        raise ModelError(
            f"{storage.uri}: of another architecture: it has no {missing[0]} ({len(missing)} of {len(tensors)} tensors "
            "are missing); resume with the model that it was trained with"
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != stored[name].size:
            raise ModelError(
                f"{storage.uri}: of another architecture: {name} is {list(stored[name].size)} there and "
                f"{list(tensor.shape)} here; resume with the model that it was trained with"
            )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(f"{INDEX}: no such dtype: {name}")
    return dtype


@contextmanager
def _without_the_warning_of_being_alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(error: CheckpointException, what: str) -> Exception:
    """The first worker's error: ours as it is, any other in a line."""
    rank, (first, *_) = min(error.failures.items(), key=lambda failure: failure[0])
    if isinstance(first, StorageError | ModelError):
        return type(first)(*first.args)
    return StorageError(f"{what}: worker {rank}: {type(first).__name__}: {one_line(first, 200)}")
