"""Stand-ins that control.py runs on Ray: a pool whose stages do nothing, and trainers that only take slices."""

import threading
import time
from itertools import cycle
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

    async def scheduling_s(self) -> float:
        """Return the CPU seconds of Ray Data's thread, which is the busiest one."""
        idents = [thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith("StreamingExecutor")]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


class Trainers:
    """Threads that take slices from the pool as trainers do, and as fast as they come."""

    def __init__(self, pool: Any, trainers: int, ahead: int) -> None:
        self._taken = [0] * trainers
        for rank in range(trainers):
            threading.Thread(target=self._train, args=(pool, rank, ahead), daemon=True).start()

    def _train(self, pool: Any, rank: int, ahead: int) -> None:
        one = Slice.of(f"s3://bucket/parts/{rank:09d}.parquet", 0, ROWS, 0, 0, np.ones(ROWS, np.bool_))
        for _ in Online(online.submitter(pool), ahead).encoded(cycle([one])):
            self._taken[rank] += 1

    def taken(self) -> int:
        return sum(self._taken)
