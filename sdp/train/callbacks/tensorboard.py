"""Writes what TensorBoard reads, without its library: files of events, each a protocol buffer in a TFRecord.

A file is published whole and never touched again, as object stores want it; TensorBoard reads a folder's files in the
order of their names. A run that goes on from a checkpoint says so, and TensorBoard forgets what came after that.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sdp.train.callbacks.base import Callback, Saved

if TYPE_CHECKING:
    from sdp.train.trainer import Trainer

FOLDER = "tensorboard"
_WRITE_S = 300.0


@dataclass
class WriteEvents(Callback):
    """Collects the lines of the metrics on the main worker; writes them every five minutes, at checkpoints and at the
    end."""

    clock: Callable[[], float] = time.time
    _trainer: "Trainer | None" = None
    _events: list[bytes] = field(default_factory=list)
    _written_at: float = 0.0
    _files: int = 0

    def line(self, line: Mapping[str, Any]) -> None:
        """Take a line of the metrics."""
        self._events.append(event(self.clock(), int(line["step"]), scalars=numbers(line)))
        if self.clock() - self._written_at > _WRITE_S:
            self._write()

    def on_start(self, trainer: "Trainer") -> None:
        if trainer.world.is_main:
            self._trainer, self._written_at = trainer, self.clock()
            self._events.append(event(self.clock(), trainer.state.step + 1, start=True))

    def on_checkpoint(self, trainer: "Trainer", saved: Saved) -> None:  # noqa: ARG002 (which one does not matter)
        self._write()

    def on_end(self, trainer: "Trainer") -> None:  # noqa: ARG002 (the same as at the start)
        self._write()

    def _write(self) -> None:
        if self._trainer is None or not self._events:
            return
        now = self.clock()
        events, self._events, self._written_at = self._events, [], now
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{self._files:06d}"
        self._files += 1
        content = b"".join(map(record, [event(now, 0, version="brain.Event:2"), *events]))
        self._trainer.checkpointer.run.storage.publish(f"{FOLDER}/{name}", content)


def numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line of the metrics but its step, those in groups as `group/name`."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if name == "step":
            continue
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = float(value)
    return found


# --- the format ------------------------------------------------------------------------------------------------------


def event(
    wall_time: float,
    step: int,
    *,
    scalars: Mapping[str, float] | None = None,
    version: str | None = None,
    start: bool = False,
) -> bytes:
    """tensorflow.Event: wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7."""
    out = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step)
    if version is not None:
        out += _bytes(3, version.encode())
    if scalars is not None:
        # Summary.value = 1: tag = 1, simple_value = 2
        out += _bytes(
            5,
            b"".join(_bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", v)) for tag, v in scalars.items()),
        )
    if start:
        out += _bytes(7, b"\x08\x01")  # SessionLog.status = 1: START
    return out


def record(data: bytes) -> bytes:
    """A TFRecord: length, its checksum, the data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _bytes(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_TABLE = _table()
