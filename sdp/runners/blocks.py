"""Blocks of Ray Data: one row of pickled objects, and a note in the schema that a driver reads without the row."""

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from sdp.runners.stages import PrepareStats

_LARGE = 65_536
"""Bytes from which an array is not copied into the pickle."""
_NOTE = b"sdp.note"


@dataclass(frozen=True, slots=True)
class Note:
    """The report on one piece that has passed through the stages."""

    number: int = 0
    prepared: PrepareStats = field(default_factory=PrepareStats)
    prepared_on: str = ""
    """Node id."""
    worked_on: str = ""
    """Node id."""
    busy_s: float = 0.0
    idle_s: float = 0.0
    """Time that the worker waited for this piece after its previous one."""
    batch_limits: Mapping[int, int] = field(default_factory=dict)
    died: str | None = None
    """Reason for a missing result: the piece killed or failed its workers."""


def pack(head: Any, value: Any, *, note: Note | None = None) -> pa.Table:
    """Return a block of one row that holds both objects; large arrays are not copied into the pickle."""
    buffers: list[memoryview] = []

    def is_inline(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _LARGE:
            buffers.append(raw)
        return raw.nbytes < _LARGE

    pickled = pickle.dumps((head, value), protocol=5, buffer_callback=is_inline)
    sizes = struct.pack(f"<{len(buffers)}q", *(raw.nbytes for raw in buffers))
    data = buffers[0] if len(buffers) == 1 else b"".join(buffers)
    block = pa.table({"sizes": _cell(sizes), "pickle": _cell(pickled), "data": _cell(data)})
    return block if note is None else block.replace_schema_metadata({_NOTE: pickle.dumps(note)})


def unpack(block: pa.Table) -> tuple[Any, Any]:
    """Return a block's two objects; their arrays are views of the block."""
    sizes, pickled, data = (_value(block[name]) for name in ("sizes", "pickle", "data"))
    buffers, at = [], 0
    for (size,) in struct.iter_unpack("<q", sizes):
        buffers.append(data[at : at + size])
        at += size
    head, value = pickle.loads(pickled, buffers=buffers)
    return head, value


def note_of(schema: pa.Schema) -> Note:
    """Return the note in a block's schema."""
    note: Note = pickle.loads(schema.metadata[_NOTE])
    return note


def _cell(data: Any) -> pa.Array:
    ends = pa.py_buffer(struct.pack("<2q", 0, memoryview(data).nbytes))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, ends, pa.py_buffer(data)])


def _value(column: pa.ChunkedArray) -> memoryview:
    """Return a view of a cell's bytes; Arrow's own scalars are copies."""
    (cell,) = (chunk for chunk in column.chunks if len(chunk))
    _, ends, data = cell.buffers()
    first, last = struct.unpack_from("<2q", ends, 8 * cell.offset)
    return memoryview(data or b"")[first:last]
