"""tensors.json, the index of a checkpoint's tensors. Reading it needs no torch."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sdp.errors import DatasetError, ModelError, NotFound, one_line
from sdp.storage import Storage

INDEX = "tensors.json"
FORMAT = 1
_DTYPE = re.compile(r"bool|(?:float|bfloat|complex|u?int)(8|16|32|64|128)(?:_\w+)?", re.ASCII)


class DamagedCheckpoint(ModelError, DatasetError):
    """A file of a checkpoint is missing, truncated, changed or malformed."""

    def __init__(self, what: str, hint: str = "use another checkpoint") -> None:
        super().__init__(what, hint)  # both are in args, from which unpickling makes it
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return f"{self.what}; {self.hint}"


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A block of a tensor, and the place of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's entry in the index."""

    dtype: str
    """Name without torch's prefix, such as `float32`."""
    size: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]

    @property
    def itemsize(self) -> int:
        if not (match := _DTYPE.fullmatch(self.dtype)):
            raise ValueError(f"unknown dtype {self.dtype}")
        return int(match[1] or 8) // 8

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.itemsize


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """All tensors of a checkpoint."""

    tensors: Mapping[str, StoredTensor]
    has_checksums: bool
    """False for checkpoints of older versions."""

    def file_sizes(self) -> dict[str, int]:
        """Return the smallest valid size of each file."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                end = chunk.start + chunk.count * tensor.itemsize
                sizes[chunk.file] = max(sizes.get(chunk.file, 0), end)
        return sizes


def read_tensor_index(folder: Storage) -> TensorIndex:
    """Read the index; raise DamagedCheckpoint if it is missing or malformed."""
    where = folder.uri_of(INDEX)
    try:
        data = json.loads(folder.read(INDEX))
        if isinstance(data["format"], int) and data["format"] > FORMAT:
            raise ModelError(f"{where}: format {data['format']}, this sdp reads {FORMAT}; use a newer sdp")
        tensors = {
            name: StoredTensor(
                tensor["dtype"],
                tuple(tensor["size"]),
                tuple(TensorChunk(tuple(o), tuple(s), file, start) for o, s, file, start in tensor["chunks"]),
            )
            for name, tensor in data["tensors"].items()
        }
        index = TensorIndex(tensors, bool(data.get("crc32", False)))
        index.file_sizes()  # raises if a dtype or a size is malformed
        return index
    except NotFound as error:
        raise DamagedCheckpoint(f"{where}: missing") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}: not a tensor index ({one_line(error, 120)})") from error
