"""The stages in this process: threads transform, with decoders in processes of their own, and this device encodes.

A picture or caption that kills the encoder natively kills this process. The lease then tells the next run, which works
on Ray, where the row is isolated.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

from sdp.console import say
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
"""Pieces that may wait for the encoder while every core transforms."""
_SYSTEMATIC = 10
"""Failures in a row after which the pictures are not to blame."""
WRITES = 4
"""Parts written at once; also the most that may wait before further units begin."""


class RowsLost(Exception):
    """The rows of a unit were lost before they were written."""


class _Threads:
    """Threads that work one task after another. Unlike a pool's, they do not keep the process from ending."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._closed = count, False
        self._tasks = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        for _ in range(count):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, partial(work, *arguments)))
        return future

    def close(self) -> None:
        """Drop the tasks that wait; each thread ends after its current one."""
        self._closed = True
        for _ in range(self._count):
            self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            future, work = task
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 (a library in Rust panics with one; the future must end)
                future.set_exception(error)
            del task, future, work  # or a waiting thread would keep the last piece's rows


class Local:
    """The stages in this process, with the methods of `OnRay`."""

    def __init__(self, stages: RowsSpec) -> None:
        cores = usable_cores()
        self._stages, self._state, self._occupancy = stages, State(encoders=1), Occupancy()
        self._cores, self._most = cores, cores + _AT_ENCODER + _READY
        self._transforms = _Threads(cores, "sdp-transform")
        self._encoders = _Threads(_AT_ENCODER, "sdp-encode")
        self._writers = _Threads(WRITES, "sdp-write")
        self._encoder = self._encoders.submit(stages.load)
        self._results = queue.SimpleQueue[tuple[Any, Any, int, BaseException | None, Any, Any]]()
        self._sent = self._failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for threads in (self._transforms, self._encoders, self._writers):
            threads.close()

    @property
    def full(self) -> bool:
        return self._sent >= self._most

    def feed(self, key: Any, item: Any) -> None:
        self._sent += 1
        self._transforms.submit(self._attempt, self._transform, key, item, 1)

    def results(self, timeout_s: float) -> Iterator[tuple[Any, Note, Any]]:
        with suppress(queue.Empty):
            while True:
                key, item, tries, error, note, rows = self._results.get(timeout=timeout_s)
                timeout_s = 0
                if error is not None and (note := self._again(key, item, tries, error)) is None:
                    continue
                self._sent -= 1
                self._state.transformed_stats += note.transformed
                yield key, note, rows

    def state(self) -> State:
        if self._encoder.done():
            self._loaded()
        return replace(self._state, transforms=min(self._sent, self._cores))

    def keep(self, rows: PieceRows) -> PieceRows:
        return rows

    def write(self, work: Work, retried: Mapping[str, int], pieces: Sequence[PieceRows]) -> Future[PartInfo]:
        return self._writers.submit(write_unit, self._stages, work, retried, pieces)

    def written(self, part: Future[PartInfo]) -> PartInfo:
        return part.result()

    def _again(self, key: Any, item: Any, tries: int, error: BaseException) -> Note | None:
        """Try a piece again that has failed, or return the note that it fails each time."""
        if isinstance(error, SdpError):
            raise error
        self._failed += 1
        if self._failed >= _SYSTEMATIC:
            raise SdpError(f"{self._failed} pieces failed in a row, the last with {named(error)}")
        if tries >= TRIES:
            return Note(0, died=named(error))
        self._transforms.submit(self._attempt, self._transform, key, item, tries + 1)
        return None

    def _attempt(self, step: Callable[..., None], key: Any, item: Any, tries: int, *values: Any) -> None:
        """Do a step; hand its error to the main thread."""
        try:
            step(key, item, tries, *values)
        except BaseException as error:  # noqa: BLE001 (a library in Rust panics with one, and the main thread waits)
            from sdp.device import out_of_memory  # imports torch, as the encoder does

            lost = "CUDA error" in str(error) and not out_of_memory(error)
            if lost and not isinstance(error, SdpError):
                # This process can no longer use its GPU. The lease stays, so that the next run isolates the row.
                say(f"encode: {named(error)}; run the same command again: it isolates what is to blame", "error")
                os._exit(1)
            self._results.put((key, item, tries, error, None, None))

    def _transform(self, key: Any, item: Any, tries: int) -> None:
        value, stats = self._stages.transform(item)
        self._encoders.submit(self._attempt, self._encode, key, item, tries, value, Note(0, transformed=stats))

    def _encode(self, key: Any, item: Any, tries: int, value: Any, note: Note) -> None:
        encoder, began = self._loaded(), time.monotonic()
        rows = self._stages.encode(encoder, value)
        busy_s, idle_s = self._occupancy.add(began, time.monotonic())
        self._failed = 0
        limits = getattr(encoder, "batch_limits", {})
        note = replace(note, busy_s=busy_s, idle_s=idle_s, batch_limits=limits)
        self._results.put((key, item, tries, None, note, rows))

    def _loaded(self) -> Any:
        """Return the encoder once it has loaded."""
        try:
            return self._encoder.result()
        except SdpError:
            raise
        except BaseException as error:
            raise SdpError(f"encode: the encoder does not load ({named(error)})") from error


def write_unit(stages: RowsSpec, work: Work, retried: Mapping[str, int], pieces: Sequence[PieceRows]) -> PartInfo:
    """Publish the part of a unit."""
    rows, account = assemble(pieces, stages.schema)
    write = partial(write_part, stages.output, stages.kind, work, rows, account, layout=stages.layout, retried=retried)
    return patiently(write)
