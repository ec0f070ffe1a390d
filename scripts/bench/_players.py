"""Stand-ins that control.py and scale.py run on Ray: a pool whose stages do nothing, trainers that only take slices, and
a download worker that fetches nothing."""

import threading
import time
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np

from scripts.bench.scale import NoWork
from sdp.datasets.outcomes import Counts
from sdp.datasets.parts import PartInfo
from sdp.download.figures import DownloadFigures
from sdp.download.unit import UnitTask
from sdp.train import online
from sdp.train.data.images import ImagesDataset, Slice
from sdp.train.data.online import Online

BOARD = SimpleNamespace(announce=SimpleNamespace(remote=print))
"""A board that prints the pool's lines."""
ROWS = 254
"""Rows of a slice at 256 px."""


class Idle(NoWork, ImagesDataset):  # type: ignore[misc]
    """A dataset whose stages do nothing."""


class Pool(online.EncoderPool):
    """The pool, with stages that do nothing."""

    def _serve(self, encoders: int) -> None:
        self._images = Idle(**vars(self._images))
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


class IdleDownload:
    """A download worker that fetches nothing and returns the footers that parts would have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def make(self, task: UnitTask) -> PartInfo:
        """Return the footer of a unit whose rows are all written."""
        rows = len(task.rows)
        return PartInfo(task.work.name, 1, None, "images", task.work.unit, 0, Counts(written=rows), {}, ((rows, 0, 1),))

    def figures(self) -> DownloadFigures:
        return DownloadFigures(workers=1)


def download_nothing() -> None:
    """Replace the download workers of a worker process."""
    from sdp.download import stages  # loads libcurl, which the stand-ins of control.py need not

    stages.DownloadWorker = IdleDownload  # type: ignore[assignment, misc]
