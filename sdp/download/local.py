"""The download in this process, with one worker."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

from sdp import telemetry
from sdp.console import Progress
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Work
from sdp.download import messages
from sdp.download.figures import DownloadFigures
from sdp.download.spans import read_span, spans
from sdp.download.worker import DownloadWorker, WorkerSettings
from sdp.errors import SdpError
from sdp.lease import Lease
from sdp.ray.waiting import repeating
from sdp.telemetry import Telemetry

UNITS_AT_ONCE = 2
"""Parts that a worker fills at a time, so that slow images do not delay it; it holds as many in memory."""
_PROGRESS_S = 0.5


def write_parts(
    settings: WorkerSettings, output: Output, pending: list[Work], rows: int, lease: Lease
) -> tuple[list[PartInfo], DownloadFigures]:
    """Write all pending parts, of `rows` rows in total; return their footers and the figures."""
    ended = threading.Event()

    def check() -> None:
        lease.check()
        if ended.is_set():
            raise SdpError("download: it has ended")

    worker, columns, options = DownloadWorker(settings, check=check), settings.rules.columns(), output.storage.options
    tasks = (task for s in spans(output.index, pending, 1) for task in read_span(s, columns, output.storage, options))
    infos, under_way = list[PartInfo](), deque[Future[PartInfo]]()
    progress = shown(lambda _: worker.figures(), rows, telemetry.begin(settings.config.output.uri))
    with progress, closing(worker), ThreadPoolExecutor(UNITS_AT_ONCE, "sdp-units") as pool, ExitStack() as stack:
        stack.callback(ended.set)  # whatever ends the block, its threads follow within a second
        for task in tasks:
            under_way.append(pool.submit(worker.make, task))
            if len(under_way) > UNITS_AT_ONCE:
                infos.append(under_way.popleft().result())
        infos += [part.result() for part in under_way]
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
