"""The stages in this process: threads transform, with decoders in processes of their own, and this device encodes.

A picture or caption that kills the encoder natively kills this process. The lease then tells the next run, which works
on Ray, where the row is isolated.
"""

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

from sdp.datasets.parts import PartInfo, patiently, write_part
from sdp.datasets.units import Work
from sdp.encode.blocks import Note
from sdp.encode.desk import State
from sdp.encode.table import assemble
from sdp.encode.work import TRIES, Occupancy, PieceRows, RowsSpec
from sdp.errors import SdpError, named
from sdp.hardware import usable_cores

_AT_ENCODER = 2
"""As on Ray, one piece is finished while the next is encoded."""
_READY = 1
"""Pieces that wait for the encoder."""
_SYSTEMATIC = 10
"""Failures in a row after which the pictures are not to blame."""
_WRITE_RETRIES = 3


class RowsLost(Exception):
    """The rows of a unit were lost before they were written."""


class Local:
    """The stages in this process, with the methods of `OnRay`."""

    def __init__(self, stages: RowsSpec) -> None:
        cores = usable_cores()
        self._stages, self._state, self._occupancy = stages, State(encoders=1), Occupancy()
        self._cores, self._most = cores, cores + _AT_ENCODER + _READY
        self._threads = ThreadPoolExecutor(self._most + 1, "sdp-local")
        self._transforming, self._encoding = threading.Semaphore(cores), threading.Semaphore(_AT_ENCODER)
        self._encoder = self._threads.submit(stages.load)
        self._results = queue.SimpleQueue[tuple[Any, Note, Any] | BaseException]()
        self._sent = self._failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._threads.shutdown(wait=kind is None, cancel_futures=True)

    @property
    def full(self) -> bool:
        return self._sent >= self._most

    def feed(self, key: Any, item: Any) -> None:
        self._sent += 1
        self._threads.submit(self._run, key, item)

    def results(self, timeout_s: float) -> Iterator[tuple[Any, Note, Any]]:
        with suppress(queue.Empty):
            result = self._results.get(timeout=timeout_s)
            while True:
                if isinstance(result, BaseException):
                    raise result
                self._sent -= 1
                self._state.transformed_stats += result[1].transformed
                yield result
                result = self._results.get_nowait()

    def state(self) -> State:
        error = self._encoder.exception() if self._encoder.done() else None
        if isinstance(error, SdpError):
            raise error
        if error is not None:
            raise SdpError(f"encode: the encoder does not load ({named(error)})")
        return replace(self._state, transforms=min(self._sent, self._cores))

    def keep(self, rows: PieceRows) -> PieceRows:
        return rows

    def write(self, work: Work, retried: Mapping[str, int], pieces: Sequence[PieceRows]) -> Future[PartInfo]:
        return self._threads.submit(write_unit, self._stages, work, retried, pieces)

    def written(self, part: Future[PartInfo]) -> PartInfo:
        return part.result()

    def _run(self, key: Any, item: Any) -> None:
        """Transform and encode an item, again if that fails."""
        reason = ""
        for _ in range(TRIES):
            try:
                self._results.put((key, *self._encoded(item)))
            except SdpError as error:
                self._results.put(error)
            except Exception as error:  # noqa: BLE001 (it has a limit)
                reason = named(error)
                self._failed += 1
                if self._failed < _SYSTEMATIC:
                    continue
                self._results.put(SdpError(f"{self._failed} pieces failed in a row, the last with {reason}"))
            else:
                self._failed = 0
            return
        self._results.put((key, Note(0, died=reason), None))

    def _encoded(self, item: Any) -> tuple[Note, PieceRows]:
        with self._transforming:
            value, stats = self._stages.transform(item)
        with self._encoding:
            began = time.monotonic()
            encoder = self._encoder.result()
            rows = self._stages.encode(encoder, value)
            busy_s, idle_s = self._occupancy.add(began, time.monotonic())
        limits = getattr(encoder, "batch_limits", {})
        return Note(0, transformed=stats, busy_s=busy_s, idle_s=idle_s, batch_limits=limits), rows


def write_unit(stages: RowsSpec, work: Work, retried: Mapping[str, int], pieces: Sequence[PieceRows]) -> PartInfo:
    """Publish the part of a unit."""
    rows, account = assemble(pieces, stages.schema)
    write = partial(write_part, stages.output, stages.kind, work, rows, account, layout=stages.layout, retried=retried)
    return patiently(write, _WRITE_RETRIES)
