"""tensors.json, the index of a checkpoint's tensors. Reading it needs no torch."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import Field

from sdp.datasets.records import LARGEST, BadRecord, Whole, parse
from sdp.errors import DatasetError, ModelError, NotFound, one_line
from sdp.storage import Storage

INDEX = "tensors.json"
FORMAT = 1
Sizes = Annotated[tuple[Whole, ...], Field(max_length=8)]
_DTYPE = re.compile(r"bool|(?:float|bfloat|complex|u?int)(8|16|32|64|128)(?:_\w+)?", re.ASCII)


class DamagedCheckpoint(ModelError, DatasetError):
    """A file of a checkpoint is missing, truncated, changed or malformed."""

    def __init__(self, what: str, hint: str = "use another checkpoint") -> None:
        super().__init__(what, hint)  # both are in args, from which unpickling makes it
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}"


class TensorChunk(NamedTuple):
    """Some rows of a tensor, and the place of their bytes."""

    offsets: Sizes
    sizes: Sizes
    file: str
    start: Whole

    @property
    def values(self) -> int:
        return math.prod(self.sizes)

    @property
    def first(self) -> int:
        """The number of its first row; a scalar is one row."""
        return sum(self.offsets[:1])

    @property
    def rows(self) -> int:
        return math.prod(self.sizes[:1])


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's entry in the index."""

    dtype: str
    """Name without torch's prefix, such as `float32`."""
    size: Sizes
    chunks: tuple[TensorChunk, ...]

    @property
    def itemsize(self) -> int:
        if not (match := _DTYPE.fullmatch(self.dtype)):
            raise ValueError(f"unknown dtype {self.dtype}")
        return int(match[1] or 8) // 8

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.itemsize

    def checked(self) -> "StoredTensor":
        """Return the tensor without empty chunks; raise ValueError unless the others hold each row once."""
        if self.bytes > LARGEST:
            raise ValueError(f"{self.bytes:,} bytes are too many")
        rank, rows, row = len(self.size), math.prod(self.size[:1]), self.size[1:]  # a scalar is one row
        at, zeros = 0, (0,) * len(row)
        chunks = sorted(chunk for chunk in self.chunks if chunk.values)
        for chunk in chunks:
            is_rows = len(chunk.sizes) == rank and chunk.sizes[1:] == row
            if not is_rows or chunk.offsets != (at, *zeros)[:rank]:
                sizes, offsets = list(chunk.sizes), list(chunk.offsets)
                raise ValueError(f"expected a chunk at row {at:,}, got {sizes} at {offsets}")
            at += chunk.rows
        if at != rows and self.bytes:
            raise ValueError(f"{rows - at:,} of {rows:,} rows are missing")
        return replace(self, chunks=tuple(chunks))


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """All tensors of a checkpoint."""

    tensors: Mapping[str, StoredTensor]

    def file_sizes(self) -> dict[str, int]:
        """Return the smallest valid size of each file, where no chunks share bytes."""
        ends, sizes = dict[str, int](), Counter[str]()
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                size = chunk.values * tensor.itemsize
                sizes[chunk.file] += size
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + size)
        return {file: max(end, sizes[file]) for file, end in ends.items()}


@dataclass(frozen=True, slots=True)
class _Head:
    format: int


def read_tensor_index(folder: Storage) -> TensorIndex:
    """Read the index; raise DamagedCheckpoint if it is missing, malformed or leaves out a part of a tensor."""
    where = folder.uri_of(INDEX)
    try:
        data = folder.read(INDEX)
        if (number := parse(_Head, data).format) > FORMAT:
            raise ModelError(f"{where}: format {number}, this sdp reads {FORMAT}; use a newer sdp")
        index = parse(TensorIndex, data)
    except NotFound as error:
        raise DamagedCheckpoint(f"{where}: missing") from error
    except BadRecord as error:
        raise DamagedCheckpoint(f"{where}: not a tensor index ({one_line(error, 120)})") from error
    tensors = {}
    for name, tensor in index.tensors.items():
        try:
            tensors[name] = tensor.checked()
        except ValueError as error:
            raise DamagedCheckpoint(f"{where}: {one_line(f'{name}: {error}', 200)}") from error
    return replace(index, tensors=tensors)
