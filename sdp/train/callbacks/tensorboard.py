"""TensorBoard event files: each event is a protocol buffer in a TFRecord.

tensorboardX's own writer appends to one open file, which object stores cannot do. So each file is published whole
under a new name; TensorBoard reads a folder's files in the order of their names. A run that resumes from a checkpoint
writes a START event, and TensorBoard drops the later steps of the previous attempt.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sdp.train.checkpoint import SavedCheckpoint
from sdp.train.trainer import Callback, Trainer

FOLDER = "tensorboard"
_WRITE_S = 300.0


@dataclass
class WriteEvents(Callback):
    """Collects metrics on the main worker and writes them every five minutes, at checkpoints and at the end."""

    _events: list[bytes] = field(default_factory=list)
    _written_at: float = 0.0
    _files: int = 0

    def on_metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:
        values = [{"tag": tag, "simple_value": value} for tag, value in numbers(line).items()]
        self._events.append(_record(time.time(), int(line["step"]), summary={"value": values}))
        if time.time() - self._written_at > _WRITE_S:
            self._write(trainer)

    def on_start(self, trainer: Trainer) -> None:
        if trainer.world.is_main:
            self._written_at = time.time()
            self._events.append(_record(time.time(), trainer.state.step + 1, session_log={"status": "START"}))

    def on_checkpoint(self, trainer: Trainer, saved: SavedCheckpoint) -> None:  # noqa: ARG002
        self._write(trainer)

    def on_end(self, trainer: Trainer) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not self._events:  # on other workers than the main one
            return
        now = time.time()
        events, self._events, self._written_at = self._events, [], now
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{self._files:06d}"
        self._files += 1
        content = b"".join([_record(now, 0, file_version="brain.Event:2"), *events])
        trainer.checkpointer.run.storage.publish(f"{FOLDER}/{name}", content)


def numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a metrics line, except its step; nested ones are named `group/name`."""
    result: dict[str, float] = {}
    for name, value in line.items():
        if name == "step":
            continue
        if isinstance(value, Mapping):
            result |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            result[prefix + name] = float(value)
    return result


def _record(wall_time: float, step: int, **content: Any) -> bytes:
    """Return an Event as a TFRecord: its length, that length's checksum, the event, its checksum."""
    # Imported late: tensorboardX imports boto3 wherever that is installed.
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    event: bytes = Event(wall_time=wall_time, step=step, **content).SerializeToString()
    length = struct.pack("<Q", len(event))
    return b"".join((length, struct.pack("<I", masked_crc32c(length)), event, struct.pack("<I", masked_crc32c(event))))
