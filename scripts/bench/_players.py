"""Stand-ins for the work of trainers and encoders on a real Ray: what control.py sends through the real pool."""

import os
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from sdp.encode.chunk import TransformStats
from sdp.train import online
from sdp.train.data.images import EncodedSlice, Slice
from sdp.train.data.online import Online

ROWS = 254
"""Rows of a slice at 256 px."""


class NoWork:
    """Stages that return at once."""

    def __init__(self, _: Any = None) -> None:
        """Accept the images that real stages need."""

    def transform(self, item: Slice | None) -> tuple[Any, TransformStats]:
        """Return the number of rows."""
        return item and len(item), TransformStats(ROWS, 1.0)

    def load(self) -> None:
        """Load nothing."""

    def encode(self, _: None, rows: int | None) -> EncodedSlice:
        """Return rows without values."""
        empty = np.zeros((rows or 0, 1), np.uint8)
        return EncodedSlice(np.arange(rows or 0), np.ones(rows or 0, np.float32), empty, empty, ())


class Pool(online.EncoderPool):
    """The pool, with stages that do nothing."""

    def _serve(self, encoders: int) -> None:
        online.EncodeSlices = NoWork  # type: ignore[assignment, misc]
        super()._serve(encoders)

    async def scheduler_s(self) -> float:
        """Return the CPU seconds of Ray Data's scheduling thread, which is the busiest one."""
        ids = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("StreamingExecutor")]
        stats = [Path(f"/proc/self/task/{id}/stat").read_text().rpartition(")")[2].split() for id in ids]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


class Trainers:
    """Threads that take slices from the pool as trainers do, and as fast as they come."""

    def __init__(self, pool: Any, trainers: int, ahead: int) -> None:
        self._taken = [0] * trainers
        for rank in range(trainers):
            threading.Thread(target=self._train, args=(pool, rank, ahead), daemon=True).start()

    def _train(self, pool: Any, rank: int, ahead: int) -> None:
        one = Slice.of(f"s3://bucket/parts/{rank:09d}.parquet", 0, ROWS, 0, 0, np.ones(ROWS, np.bool_))
        for encoded in Online(online.submitter(pool), ahead).encoded(cycle([one])):
            assert len(encoded.rows) == ROWS
            self._taken[rank] += 1

    def taken(self) -> int:
        """Return the slices taken."""
        return sum(self._taken)


def wait_until(taken: Any, count: int, timeout_s: float = 600.0) -> None:
    """Wait until a function returns at least a count."""
    until = time.monotonic() + timeout_s
    while taken() < count:
        assert time.monotonic() < until, f"{taken()} of {count} in {timeout_s:.0f} s"
        time.sleep(0.2)
