"""Tensors in shards: what torch.distributed.checkpoint saves and loads, kept in a storage.

A folder holds raw little-endian bytes in a few files a worker, and `tensors.json`, which says for each tensor its
dtype, its size and where each of its chunks lies. No pickle: a checkpoint from elsewhere can be read without running
what is in it. Any number of workers can load what any other number has saved.
"""

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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

from sdp.errors import ModelError, StorageError
from sdp.storage import Storage

INDEX = "tensors.json"
FORMAT = 1
FILE_BYTES = 256_000_000
"""About how large a file becomes: a part of a worker's state that is serialised whole before it is sent."""
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor, and where its bytes lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What is known of a tensor without reading it."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


class Staged:
    """What one worker has to write, copied to the host: training may go on and change what it was copied from."""

    def __init__(self, storage: Storage, files: "Sequence[_File]", index: bytes | None) -> None:
        self._storage, self._files, self._index = storage, files, index

    @property
    def bytes(self) -> int:
        return sum(len(file.content) for file in self._files)

    def write(self) -> None:
        """Send it to the storage; whoever has the index sends that last."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="sdp-save") as pool:
            list(pool.map(lambda file: self._storage.publish(file.name, file.content), self._files))
        if self._index is not None:
            self._storage.publish(INDEX, self._index)


class Host:
    """What is kept from save to save: memory to copy to, as to get it anew takes longer than to copy; and who writes
    what, which the workers need not agree on again as long as the tensors are the same."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._layout: tuple[_Signature, _Layout] | None = None

    def take(self, name: str, count: int, pin: bool) -> Tensor:
        """So many bytes for a file; what was in them before must have been written."""
        memory = self._memory.get(name)
        if memory is None or len(memory) < count:
            memory = self._memory[name] = torch.empty(count, dtype=torch.uint8, pin_memory=pin)
        return memory[:count]

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
    stage(storage, tensors, alone=alone).write()


def stage(storage: Storage, tensors: dict[str, Tensor], *, alone: bool = False, host: Host | None = None) -> Staged:
    """Agree on who writes what, and copy it; every worker calls it, as above."""
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
    return Staged(storage, _copied(tensors, layout, host), layout.index)


def _copied(tensors: Mapping[str, Tensor], layout: _Layout, host: Host) -> list["_File"]:
    """A worker's share on the host, in files of raw bytes."""
    files, on_gpu = [], False
    for file, names in layout.files:
        flat = [_flat(tensors[name]) for name in names]
        pin = any(tensor.is_cuda for tensor in flat)
        on_gpu |= pin
        memory, at = host.take(file, sum(map(len, flat)), pin), 0
        for tensor in flat:
            memory[at : at + len(tensor)].copy_(tensor, non_blocking=True)
            at += len(tensor)
        files.append(_File(file, memory.numpy().data))
    if on_gpu:
        torch.cuda.synchronize()
    return files


def load(storage: Storage, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Load into tensors that are there, however they are sharded now. Every worker calls it."""
    stored = read_index(storage)
    _check(storage, tensors, stored)
    try:
        with _without_the_warning_of_being_alone():
            load_state(tensors, storage_reader=_Reader(storage, stored), no_dist=alone)
    except CheckpointException as error:
        raise _cause(error, f"{storage.uri}: could not be loaded") from error


def read_index(storage: Storage) -> dict[str, StoredTensor]:
    """The tensors of a folder, by name."""
    try:
        data = json.loads(storage.read(INDEX))
        if data["format"] != FORMAT:
            raise ModelError(
                f"{storage.uri_of(INDEX)}: format {data['format']}, this sdp reads {FORMAT}; use a newer sdp"
            )
        return {
            name: StoredTensor(
                _dtype(tensor["dtype"]),
                tuple(tensor["size"]),
                tuple(Chunk(tuple(o), tuple(s), file, start) for o, s, file, start in tensor["chunks"]),
            )
            for name, tensor in data["tensors"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{storage.uri_of(INDEX)}: not an index of tensors ({error}); use another checkpoint"
        ) from error


def read_tensors(storage: Storage, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors on the CPU, without other workers."""
    stored = read_index(storage)
    wanted = list(names)
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ModelError(f"{storage.uri}: {len(missing)} tensors are not in it, such as {missing[0]}")
    tensors = {name: torch.empty(stored[name].size, dtype=stored[name].dtype) for name in wanted}
    work = [(name, chunk) for name in wanted for chunk in stored[name].chunks]

    def fill(item: tuple[str, Chunk]) -> None:
        name, chunk = item
        block = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        tensors[name][block].copy_(_read(storage, chunk, stored[name].dtype))

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="sdp-load") as pool:
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
                length = len(_flat(planner.resolve_data(item)))
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
        self.index = json.dumps({"format": FORMAT, "tensors": tensors}).encode()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | PurePosixPath)


class _Reader(StorageReader):
    """Reads the chunks that a worker needs."""

    def __init__(self, storage: Storage, stored: Mapping[str, StoredTensor]) -> None:
        self._storage = storage
        self._stored = stored

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
            data = _read(self._storage, chunk, self._stored[index.fqn].dtype)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                data = data.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(data)
            planner.commit_tensor(item, target)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="sdp-load") as pool:
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


def _flat(tensor: Any) -> Tensor:
    """The bytes of a tensor, or of this worker's shard of it, where they are."""
    assert isinstance(tensor, Tensor)  # _files has looked
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().contiguous().view(-1)
    return flat.view(torch.uint8) if len(flat) else flat.new_empty(0, dtype=torch.uint8)


def _read(storage: Storage, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    length = chunk.count * dtype.itemsize
    if not length:
        return torch.empty(chunk.sizes, dtype=dtype)
    data = bytearray(storage.read_range(chunk.file, chunk.start, length))
    if len(data) != length:
        raise ModelError(f"{storage.uri_of(chunk.file)}: too short; the checkpoint is damaged, use another one")
    return torch.frombuffer(data, dtype=dtype).view(chunk.sizes)


def _as_metadata(tensor: StoredTensor) -> md.TensorStorageMetadata:
    chunks = [md.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
    return md.TensorStorageMetadata(md.TensorProperties(dtype=tensor.dtype), torch.Size(tensor.size), chunks)


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
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"no such dtype: {name}")
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
    return StorageError(f"{what}: worker {rank}: {type(first).__name__}: {' '.join(str(first).split())[:200]}")
