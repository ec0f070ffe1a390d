"""Sharded tensors, saved and loaded by torch.distributed.checkpoint through a storage.

A folder holds a few files of raw little-endian bytes for each worker, and `tensors.json`, the index: each tensor's
dtype, size and the places of its chunks. Each worker also writes the checksums of its chunks, which readers compare.
There is no pickle, so reading a foreign checkpoint runs no code from it. Any number of workers can load what any other
number has saved.
"""

import json
import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple

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
from sdp.errors import ModelError, NotFound, StorageError, named, one_line
from sdp.model.tensor_index import (
    FORMAT,
    INDEX,
    DamagedCheckpoint,
    StoredTensor,
    TensorChunk,
    TensorIndex,
    read_tensor_index,
)
from sdp.storage import Data, Storage

FILE_BYTES = 256_000_000
"""Approximate size of a file. Each is sent whole."""
RUN_BYTES = 32_000_000
"""The most that one request reads of several chunks, which are small: a shard of 2,700 tensors, one of 64 each."""
_THREADS = 4


class Staged:
    """One worker's share of a save: `copy` it to host memory before the tensors change, then `write` the copy.

    Both may run in another thread as long as training only reads the tensors.
    """

    def __init__(
        self,
        storage: Storage,
        tensors: Mapping[str, Tensor],
        plan: "_Writer",
        host: "HostMemory",
        etags: Mapping[str, str | None],
    ) -> None:
        self._storage, self._host, self._index, self._etags = storage, host, plan.index, etags
        self._shards = {file: [_local(tensors[name]) for name in names] for file, names in plan.files}
        self._device = _device_of(shard for shards in self._shards.values() for shard in shards)
        on_gpu = self._device.type == "cuda"
        self._ready = record(torch.cuda.current_stream(self._device)) if on_gpu else None
        self._copies: dict[str, memoryview] | None = None
        """The bytes of each file."""

    @property
    def bytes(self) -> int:
        """Size of this worker's share."""
        return sum(shard.nbytes for shards in self._shards.values() for shard in shards)

    def copy(self) -> None:
        """Copy to host memory. From a GPU this uses its own stream, after all work launched before `stage`."""
        if self._ready is None:
            self._copies = self._copy_files(pin=False)
            return
        stream = self._host.stream(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            self._copies = self._copy_files(pin=True)
        stream.synchronize()

    def _copy_files(self, *, pin: bool) -> dict[str, memoryview]:
        copies = {}
        for file, shards in self._shards.items():
            memory, at = self._host.take(file, sum(shard.nbytes for shard in shards), pin), 0
            for shard in shards:
                flat = _flat(shard)
                memory[at : at + len(flat)].copy_(flat, non_blocking=True)
                at += len(flat)
            copies[file] = memory.numpy().data
        return copies

    def write(self) -> None:
        """Write the files, then their checksums, and on the first worker the index last."""
        if self._copies is None:
            raise RuntimeError("write() was called before copy()")
        with thread_pool(self._device, _THREADS, "sdp-save") as pool:
            checksums = dict(pool.map(self._write_file, self._copies))
        for name in {_checksum_file(file) for file in checksums}:  # a single name, since all files are this worker's
            self._publish(name, json.dumps({"format": FORMAT, "crc32": checksums}).encode())
        if self._index is not None:
            self._publish(INDEX, self._index)

    def _publish(self, name: str, content: Data) -> None:
        self._storage.swap(name, content, self._etags.get(name))

    def _write_file(self, name: str) -> tuple[str, list[tuple[int, int]]]:
        """Write a file; return its name, and the start and checksum of each of its chunks."""
        assert self._copies is not None
        content, checksums, at = self._copies[name], [], 0
        for shard in self._shards[name]:
            checksums.append((at, zlib.crc32(content[at : at + shard.nbytes])))
            at += shard.nbytes
        self._publish(name, content)
        return name, checksums


class HostMemory:
    """The state kept between saves: host memory (allocating takes longer than copying), the stream that copies, and the
    plan, on which the workers need to agree again only when the tensors change."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self.plan: tuple[list[Any], _Writer] | None = None
        """The tensors' names and kinds, and the plan for them. Either all workers have the same or none has one."""

    def take(self, name: str, count: int, pin: bool) -> Tensor:
        """Return memory for a file. Its previous content must have been written."""
        memory = self._memory.get(name)
        if memory is None or len(memory) < count:
            memory = self._memory[name] = torch.empty(count, dtype=torch.uint8, pin_memory=pin)
        return memory[:count]

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream that copies from a GPU."""
        self._stream = self._stream or new_stream(device)
        return self._stream


def stage(
    storage: Storage,
    tensors: dict[str, Tensor],
    *,
    alone: bool = False,
    host: HostMemory | None = None,
    etags: Mapping[str, str | None] | None = None,
) -> Staged:
    """Prepare to save tensors: plain ones, equal on all workers, or DTensors, of which each worker writes its shards.

    Every worker calls it, since they agree on who writes what; `alone` is for one process by itself. Of the files that
    the folder has, only those with these `etags` are written over.
    """
    host = host or HostMemory()
    kinds = [
        (n, t.dtype, t.shape, getattr(t, "placements", None), getattr(t, "device_mesh", None))
        for n, t in tensors.items()
    ]
    if host.plan is None or host.plan[0] != kinds:
        writer = _Writer()
        with _explained(f"{storage.uri}: cannot save"):
            save_state(tensors, storage_writer=writer, no_dist=alone)
        host.plan = kinds, writer
    return Staged(storage, tensors, host.plan[1], host, etags or {})


def load(storage: Storage, tensors: dict[str, Tensor], *, alone: bool = False) -> None:
    """Load into existing tensors, however they are sharded. Every worker calls it, unless one is `alone`."""
    index = read_tensor_index(storage)
    _check(storage, tensors, index.tensors)
    _load(storage, index, tensors, alone=alone)


def read_tensors(storage: Storage, names: Iterable[str]) -> dict[str, Tensor]:
    """Return whole tensors on the CPU, read by this process alone."""
    index = read_tensor_index(storage)
    index = replace(index, tensors={name: index.tensors[name] for name in names})
    sizes = {file.path: file.size for file in storage.list()}
    for file, size in index.file_sizes().items():  # before their tensors get memory
        if sizes.get(file, 0) < size:
            raise DamagedCheckpoint(f"{storage.uri_of(file)}: {'too short' if file in sizes else 'missing'}")
    tensors = {name: torch.empty(tensor.size, dtype=_dtype(tensor.dtype)) for name, tensor in index.tensors.items()}
    _load(storage, index, tensors, alone=True)
    return tensors


def _load(storage: Storage, index: TensorIndex, tensors: dict[str, Tensor], *, alone: bool) -> None:
    reader = _Reader(storage, index, _device_of(tensors.values()))
    with _explained(f"{storage.uri}: cannot load"):
        load_state(tensors, storage_reader=reader, no_dist=alone)


class _Unprepared:
    """The steps of torch's planning that need nothing here."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | PurePosixPath)


class _Writer(_Unprepared, StorageWriter):
    """Plans the files of a worker without writing them: `Staged` does."""

    def __init__(self) -> None:
        self.files: list[tuple[str, list[str]]] = []
        """The worker's files, each with its tensors in order."""
        self.index: bytes | None = None
        """The index of all workers' tensors, on the first worker."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

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
        return _completed(results)

    def finish(self, metadata: md.Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for worker in results for result in worker}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, md.TensorStorageMetadata):
                raise TypeError(f"{name}: only tensors can be saved in shards")
            chunks = [
                (list(c.offsets), list(c.sizes), *places[md.MetadataIndex(name, c.offsets)]) for c in tensor.chunks
            ]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
        self.index = json.dumps({"format": FORMAT, "tensors": tensors}).encode()


class _Reader(_Unprepared, StorageReader):
    """Reads the chunks that a worker needs."""

    def __init__(self, storage: Storage, index: TensorIndex, device: torch.device) -> None:
        self._storage, self._index, self._stored, self._device = storage, index, index.tensors, device

    def read_metadata(self) -> md.Metadata:
        return md.Metadata({name: _as_metadata(tensor) for name, tensor in self._stored.items()})

    def set_up_storage_reader(self, metadata: md.Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = {(name, c.offsets): c for name, tensor in self._stored.items() for c in tensor.chunks}
        items: dict[_Stretch, list[ReadItem]] = {}
        for item in plan.items:
            index = item.storage_index
            chunk, dtype = places[index.fqn, tuple(index.offset or ())], _dtype(self._stored[index.fqn].dtype)
            items.setdefault(_Stretch(chunk.file, chunk.start, chunk, dtype), []).append(item)
        checksums: dict[tuple[str, int], int] = {}

        def read(run: list[_Stretch]) -> None:
            begin = run[0].start
            content = self._read_run(run[0].file, begin, run[-1].end - begin)
            for stretch in run:
                data = content[stretch.start - begin : stretch.end - begin]
                if zlib.crc32(data) != checksums.get((stretch.file, stretch.start)):
                    where = f"{len(data):,} bytes from {stretch.start:,}"
                    raise DamagedCheckpoint(
                        f"{self._storage.uri_of(stretch.file)}: {where} do not match their checksum"
                    )
                # A copy, since a chunk may begin anywhere in a file, and a tensor may not.
                tensor = torch.frombuffer(bytearray(data), dtype=stretch.dtype).view(stretch.chunk.sizes)
                for item in items[stretch]:
                    _fill(planner, item, tensor)

        with thread_pool(self._device, _THREADS, "sdp-load") as pool:
            for part in pool.map(self._read_checksums, {_checksum_file(stretch.file) for stretch in items}):
                checksums |= part
            list(pool.map(read, _runs(items)))
        return _completed(None)

    def _read_run(self, file: str, start: int, length: int) -> memoryview:
        try:
            data = self._storage.read_range(file, start, length)
        except NotFound as error:
            raise DamagedCheckpoint(f"{self._storage.uri_of(file)}: missing") from error
        if len(data) != length:
            raise DamagedCheckpoint(f"{self._storage.uri_of(file)}: too short")
        return memoryview(data)

    def _read_checksums(self, name: str) -> dict[tuple[str, int], int]:
        """Return the checksum of each chunk of a writer, by its file and start."""
        try:
            files = json.loads(self._storage.read(name))["crc32"]
            return {(file, start): crc for file, entries in files.items() for start, crc in entries}
        except NotFound as error:
            raise DamagedCheckpoint(f"{self._storage.uri_of(name)}: missing") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{self._storage.uri_of(name)}: not checksums ({one_line(error, 120)})") from error


class _Stretch(NamedTuple):
    """The bytes of a chunk in a file."""

    file: str
    start: int
    chunk: TensorChunk
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + self.chunk.values * self.dtype.itemsize


def _runs(stretches: Iterable[_Stretch]) -> list[list[_Stretch]]:
    """Return the stretches in runs that lie one after another in a file; each run is read by one request."""
    runs: list[list[_Stretch]] = []
    for stretch in sorted(stretches, key=lambda stretch: (stretch.file, stretch.start)):
        run = runs[-1] if runs else []
        follows = bool(run) and (run[-1].file, run[-1].end) == (stretch.file, stretch.start)
        if follows and stretch.end - run[0].start <= RUN_BYTES:
            run.append(stretch)
        else:
            runs.append([stretch])
    return runs


def _fill(planner: LoadPlanner, item: ReadItem, data: Tensor) -> None:
    """Copy a chunk's values into the tensor that an item names."""
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        data = data.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(data)
    planner.commit_tensor(item, target)


def _completed(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _files(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield the items of each file, which has about FILE_BYTES."""
    file: list[WriteItem] = []
    file_size = 0
    for item in items:
        if item.tensor_data is None:
            raise TypeError(f"{item.index.fqn}: only tensors can be saved in shards")
        size = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if file and file_size + size > FILE_BYTES:
            yield file
            file, file_size = [], 0
        file.append(item)
        file_size += size
    if file:
        yield file


def _device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return the GPU that holds some of these tensors, or the CPU."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


def _local(tensor: Any) -> Tensor:
    """Return a tensor, or this worker's shard of it, without copying."""
    assert isinstance(tensor, Tensor)  # _files has checked
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _flat(tensor: Tensor) -> Tensor:
    """Return a view of a plain tensor's bytes."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8) if len(flat) else flat.new_empty(0, dtype=torch.uint8)


def _checksum_file(file: str) -> str:
    """Return the name of the file with the checksums of a worker's files, of which `file` is one."""
    return f"{file.partition('.')[0]}.json"


def _as_metadata(tensor: StoredTensor) -> md.TensorStorageMetadata:
    chunks = [md.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
    return md.TensorStorageMetadata(md.TensorProperties(dtype=_dtype(tensor.dtype)), torch.Size(tensor.size), chunks)


def _check(storage: Storage, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    missing = [name for name in tensors if name not in stored]
    differing = [name for name in tensors if name in stored and tuple(tensors[name].shape) != stored[name].size]
    if missing:
        difference = f"it has no {missing[0]} ({len(missing)} of {len(tensors)} tensors are missing)"
    elif differing:
        name = differing[0]
        difference = f"{name} is {list(stored[name].size)} there and {list(tensors[name].shape)} here"
    else:
        return
    raise ModelError(
        f"{storage.uri}: saved from a model of another architecture: {difference}; resume with the model that the run "
        "was trained with"
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(f"{INDEX}: unknown dtype {name}")
    return dtype


@contextmanager
def _explained(action: str) -> Iterator[None]:
    """Raise the cause of torch's errors, and leave out its warning for a process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise _cause(error, action) from error


def _cause(error: CheckpointException, action: str) -> BaseException:
    """Return the first worker's error: an interrupt or one of sdp's own unchanged, any other as one line."""
    rank, (first, *_) = min(error.failures.items(), key=lambda failure: failure[0])
    if isinstance(first, StorageError | ModelError):
        return type(first)(*first.args)
    if not isinstance(first, Exception):  # torch catches Ctrl-C, too
        return first
    return StorageError(f"{action}: worker {rank}: {named(first)}")
