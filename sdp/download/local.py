"""The download in this process, with one worker."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sdp import telemetry
from sdp.console import Progress
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Work
from sdp.download import messages
from sdp.download.figures import DownloadFigures
from sdp.download.spans import read_span, spans
from sdp.download.worker import DownloadWorker, WorkerSettings
from sdp.lease import Lease
from sdp.telemetry import Telemetry
from sdp.waiting import repeating

UNITS_AT_ONCE = 2
"""Parts that a worker fills at a time, so that slow images do not delay it; it holds as many in memory."""
_PROGRESS_S = 0.5


def write_parts(
    settings: WorkerSettings, output: Output, pending: list[Work], rows: int, lease: Lease
) -> tuple[list[PartInfo], DownloadFigures]:
    """Write all pending parts, of `rows` rows in total; return their footers and the figures."""
    worker, columns, options = DownloadWorker(settings), settings.rules.columns(), settings.config.storage.options()
    tasks = (task for s in spans(output.index, pending, 1) for task in read_span(s, columns, output.storage, options))
    infos: list[PartInfo] = []
    with shown(lambda _: worker.figures(), rows, telemetry.begin(settings.config.output.uri)):
        for info in ordered_map(worker.make, tasks, UNITS_AT_ONCE):
            lease.check()
            infos.append(info)
    return infos, worker.figures()


@contextmanager
def shown(total: Callable[[float], DownloadFigures | None], rows: int, emit: Telemetry) -> Iterator[None]:
    """Update the progress line and the metrics while the block runs, and once more at its end.

    `total` returns the figures so far, if it can within some seconds.
    """
    began = time.monotonic()

    def show(timeout_s: float = 10.0) -> None:
        if (figures := total(timeout_s)) is not None:
            progress.update(messages.progress_line(figures, rows, time.monotonic() - began))
            messages.emit(emit, figures, rows)

    with Progress("download") as progress:
        try:
            with repeating(show, _PROGRESS_S):
                yield
        finally:
            show(2.0)
