"""Sharded tensors, saved and loaded through a storage.

A folder holds a few files of raw little-endian bytes for each worker, and `tensors.json`, the index: each tensor's
dtype, size and the places of its chunks. Each worker also writes the checksums of its chunks, which readers compare.
There is no pickle, so reading a foreign checkpoint runs no code from it. Any number of workers can load what any other
number has saved: each reads the rows that it holds.
"""

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sdp.device import new_stream, record, thread_pool
from sdp.errors import ModelError, NotFound, one_line
from sdp.model.tensor_index import FORMAT, INDEX, DamagedCheckpoint, TensorChunk, TensorIndex, read_tensor_index
from sdp.storage import Data, Storage

FILE_BYTES = 256_000_000
"""Approximate size of a file. Each is sent whole."""
RUN_BYTES = 32_000_000
"""The most that one request reads of several chunks, which are small: a shard of 2,700 tensors, one of 64 each."""
_THREADS = 4

Etags = Mapping[str, str | None]
"""The tags of files that a save writes over."""


class Staged:
    """One worker's share of a save: `copy` it to host memory before the tensors change, then `write` the copy.

    Both may run in another thread as long as training only reads the tensors.
    """

    def __init__(
        self, storage: Storage, tensors: Mapping[str, Tensor], layout: "_Layout", host: "HostMemory", etags: Etags
    ) -> None:
        self._storage, self._host, self._index, self._etags = storage, host, layout.index, etags
        self._shards = {file: [_share(tensors[name])[1] for name in names] for file, names in layout.files.items()}
        self._device = _device_of(shard for shards in self._shards.values() for shard in shards)
        self._ready = record(torch.cuda.current_stream(self._device)) if self._device.type == "cuda" else None
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
    layout, on which the workers need to agree again only when the tensors change."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self.layout: tuple[list[Any], _Layout] | None = None
        """The tensors' names and kinds, and the layout for them. Either all workers have the same or none has one."""

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
    etags: Etags | None = None,
) -> Staged:
    """Prepare to save tensors: plain ones, equal on all workers, or DTensors, of which each worker writes its shards.

    Every worker calls it, since they agree on who writes what; `alone` is for one process by itself. Files
    that the folder has are written over only if they have these `etags`.
    """
    host = host or HostMemory()
    kinds = [
        (n, t.dtype, t.shape, getattr(t, "placements", None), getattr(t, "device_mesh", None))
        for n, t in tensors.items()
    ]
    if host.layout is None or host.layout[0] != kinds:
        host.layout = kinds, _layout(tensors, alone=alone)
    return Staged(storage, tensors, host.layout[1], host, etags or {})


def load(storage: Storage, tensors: Mapping[str, Tensor]) -> None:
    """Load into existing tensors, however they are sharded; each worker reads its own rows."""
    index = read_tensor_index(storage)
    _check(storage, tensors, index)
    _read(storage, index, tensors)


def read_tensors(storage: Storage, names: Iterable[str]) -> dict[str, Tensor]:
    """Return whole tensors on the CPU, read by this process alone."""
    index = read_tensor_index(storage)
    index = replace(index, tensors={name: index.tensors[name] for name in names})
    sizes = {file.path: file.size for file in storage.list()}
    for file, size in index.file_sizes().items():  # before their tensors get memory
        if sizes.get(file, 0) < size:
            raise DamagedCheckpoint(f"{storage.uri_of(file)}: {'too short' if file in sizes else 'missing'}")
    tensors = {
        name: torch.empty(tensor.size, dtype=_dtype(storage, tensor.dtype)) for name, tensor in index.tensors.items()
    }
    _read(storage, index, tensors)
    return tensors


@dataclass(frozen=True, slots=True)
class _Layout:
    """The files of a save."""

    files: dict[str, list[str]]
    """This worker's files, each with its tensors in order."""
    index: bytes | None
    """The index of all workers' tensors, on the first worker."""


class _Item(NamedTuple):
    """A chunk of a tensor that some workers hold."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int


def _layout(tensors: Mapping[str, Tensor], *, alone: bool) -> _Layout:
    """Agree with the other workers on who writes which chunk: of its holders, the one with the fewest bytes so far."""
    placed = ((name, *_share(tensor)) for name, tensor in tensors.items())
    own = [_Item(name, offsets, tuple(shard.shape), shard.nbytes) for name, offsets, shard in placed]
    shares, rank = [own], 0
    if not alone:
        shares, rank = [own] * dist.get_world_size(), dist.get_rank()
        dist.all_gather_object(shares, own)
    holders: dict[_Item, list[int]] = {}
    for worker, items in enumerate(shares):
        for item in items:
            holders.setdefault(item, []).append(worker)
    sizes, writers = [0] * len(shares), dict[_Item, int]()
    for item, workers in holders.items():
        writers[item] = min(workers, key=sizes.__getitem__)
        sizes[writers[item]] += item.nbytes or 1
    files, chunks = dict[str, list[str]](), dict[str, list[Any]]()
    for worker, items in enumerate(shares):
        number = at = 0
        for item in items:
            if writers[item] != worker:
                continue
            if at and at + item.nbytes > FILE_BYTES:
                number, at = number + 1, 0
            file = f"worker-{worker:05d}.{number:03d}.bin"
            chunks.setdefault(item.name, []).append((item.offsets, item.sizes, file, at))
            if worker == rank:
                files.setdefault(file, []).append(item.name)
            at += item.nbytes
    if rank:
        return _Layout(files, None)
    entries = {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "size": list(tensor.shape), "chunks": chunks[name]}
        for name, tensor in ((name, tensors[name]) for name in chunks)
    }
    return _Layout(files, json.dumps({"format": FORMAT, "tensors": entries}).encode())


class _Stretch(NamedTuple):
    """The bytes of a chunk in a file, and the rows that are copied from it."""

    chunk: TensorChunk
    end: int
    name: str
    low: int
    """The first of the chunk's rows."""
    target: Tensor
    """The rows of this worker's shard that get them."""


def _read(storage: Storage, index: TensorIndex, tensors: Mapping[str, Tensor]) -> None:
    """Read the rows that these tensors hold here."""
    shards = {name: _share(tensor) for name, tensor in tensors.items()}
    stretches = []
    for name, (offsets, shard) in shards.items():
        first = sum(offsets[:1])
        for chunk in index.tensors[name].chunks:
            low, high = max(first, chunk.first), min(first + math.prod(shard.shape[:1]), chunk.first + chunk.rows)
            if low < high:
                end = chunk.start + chunk.values * index.tensors[name].itemsize
                target = _rows_in(shard, low - first, high - first)
                stretches.append(_Stretch(chunk, end, name, low - chunk.first, target))
    checksums: dict[tuple[str, int], int] = {}

    def read(run: list[_Stretch]) -> None:
        begin = run[0].chunk.start
        content = _bytes_of(storage, run[0].chunk.file, begin, run[-1].end - begin)
        for chunk, end, name, low, target in run:
            data = content[chunk.start - begin : end - begin]
            if zlib.crc32(data) != checksums.get((chunk.file, chunk.start)):
                where = f"{len(data):,} bytes from {chunk.start:,}"
                raise DamagedCheckpoint(f"{storage.uri_of(chunk.file)}: {where} do not match their checksum")
            kind = _dtype(storage, index.tensors[name].dtype)
            # A copy, since a chunk may begin anywhere in a file, and a tensor may not.
            values = torch.frombuffer(bytearray(data), dtype=kind).view(chunk.sizes)
            target.copy_(_rows_in(values, low, low + math.prod(target.shape[:1])))

    with thread_pool(_device_of(tensors.values()), _THREADS, "sdp-load") as pool:
        names = {_checksum_file(stretch.chunk.file) for stretch in stretches}
        for part in pool.map(partial(_read_checksums, storage), names):
            checksums |= part
        list(pool.map(read, _runs(stretches)))


def _bytes_of(storage: Storage, file: str, start: int = 0, length: int | None = None) -> memoryview:
    try:
        data = storage.read_range(file, start, length)
    except NotFound as error:
        raise DamagedCheckpoint(f"{storage.uri_of(file)}: missing") from error
    if length not in (None, len(data)):
        raise DamagedCheckpoint(f"{storage.uri_of(file)}: too short")
    return memoryview(data)


def _read_checksums(storage: Storage, name: str) -> dict[tuple[str, int], int]:
    """Return the checksum of each chunk of a writer, by its file and start."""
    content = bytes(_bytes_of(storage, name))
    try:
        return {(file, start): crc for file, of in json.loads(content)["crc32"].items() for start, crc in of}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{storage.uri_of(name)}: not checksums ({one_line(error, 120)})") from error


def _runs(stretches: Iterable[_Stretch]) -> list[list[_Stretch]]:
    """Group stretches that follow one another in a file, so that one request of at most RUN_BYTES reads a group."""
    runs: list[list[_Stretch]] = []
    for stretch in sorted(stretches, key=lambda stretch: (stretch.chunk.file, stretch.chunk.start)):
        run, chunk = runs[-1] if runs else [], stretch.chunk
        follows = bool(run) and (run[-1].chunk.file, run[-1].end) == (chunk.file, chunk.start)
        if follows and stretch.end - run[0].chunk.start <= RUN_BYTES:
            run.append(stretch)
        else:
            runs.append([stretch])
    return runs


def _device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return the GPU that holds some of these tensors, or the CPU."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


def _share(tensor: Any) -> tuple[tuple[int, ...], Tensor]:
    """Return (offsets, values) of this worker's shard of a tensor, or of the whole tensor; nothing is copied."""
    if not hasattr(tensor, "to_local"):
        return (0,) * tensor.dim(), tensor.detach()
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tensor.to_local().detach()


def _rows_in(tensor: Tensor, low: int, high: int) -> Tensor:
    """Return a view of some rows; a scalar is one row."""
    return tensor[low:high] if tensor.dim() else tensor


def _flat(tensor: Tensor) -> Tensor:
    """Return a view of a plain tensor's bytes."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8) if len(flat) else flat.new_empty(0, dtype=torch.uint8)


def _checksum_file(file: str) -> str:
    """Return the name of the file with the checksums of `file`, and of the same worker's others."""
    return f"{file.partition('.')[0]}.json"


def _check(storage: Storage, tensors: Mapping[str, Tensor], index: TensorIndex) -> None:
    stored = index.tensors
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


def _dtype(storage: Storage, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(f"{storage.uri_of(INDEX)}: unknown dtype {name}")
    return dtype
