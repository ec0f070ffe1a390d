"""Stand-ins for the work of trainers and encoders on a real Ray: what control.py sends through the real pool."""

import os
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.scale import NoWork
from sdp.train import online
from sdp.train.data.images import Slice
from sdp.train.data.online import Online

ROWS = 254
"""Rows of a slice at 256 px."""


class Pool(online.EncoderPool):
    """The pool, with stages that do nothing."""

    def _serve(self, encoders: int) -> None:
        online.EncodeSlices = lambda _: NoWork()  # type: ignore[assignment, misc]
        super()._serve(encoders)

    async def usage(self) -> tuple[float, float]:
        """Return the CPU seconds of Ray Data's scheduling thread, which is the busiest one, and the resident MB."""
        ids = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("StreamingExecutor")]
        stats = [Path(f"/proc/self/task/{id}/stat").read_text().rpartition(")")[2].split() for id in ids]
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        ticks = sum(int(fields[11]) + int(fields[12]) for fields in stats)
        return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Trainers:
    """Threads that take slices from the pool as trainers do, and as fast as they come."""

    def __init__(self, pool: Any, trainers: int, ahead: int) -> None:
        self._taken = [0] * trainers
        for rank in range(trainers):
            threading.Thread(target=self._train, args=(pool, rank, ahead), daemon=True).start()

    def _train(self, pool: Any, rank: int, ahead: int) -> None:
        one = Slice.of(f"s3://bucket/parts/{rank:09d}.parquet", 0, ROWS, 0, 0, np.ones(ROWS, np.bool_))
        for encoded in Online(online.submitter(pool), ahead).encoded(cycle([one])):
            assert len(encoded) == ROWS
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
