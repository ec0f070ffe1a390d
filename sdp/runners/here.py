"""The stages in this process: threads prepare, with decoders in processes of their own, and one worker works.

A piece that kills the worker natively kills this process. The lease then tells the next run, which works on Ray, where
the row is isolated.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self

from sdp.console import say
from sdp.errors import SdpError, named
from sdp.hardware import usable_cores
from sdp.runners.blocks import Note
from sdp.runners.desk import State
from sdp.runners.runner import TASKS, Result
from sdp.runners.stages import TRIES, Occupancy, Preparing, Stages

_READY = 1
"""Pieces that may wait for the worker while every core prepares."""
_SYSTEMATIC = 10
"""Failures in a row after which the pieces are not to blame."""


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


class Here:
    """A `Runner` in this process."""

    def __init__(self, stages: Stages, job: str = "encode", role: str = "encoder", *, at_once: int = 2) -> None:
        """Load the worker; it works on `at_once` pieces at a time."""
        self._cores = usable_cores() if isinstance(stages, Preparing) else 0
        self._stages, self._job, self._role = stages, job, role
        self._state, self._occupancy = State(workers=1), Occupancy()
        self._most = self._cores + at_once + _READY
        self._preparing = _Threads(self._cores, "sdp-prepare")
        self._working = _Threads(at_once, "sdp-work")
        self._tasks = _Threads(TASKS, "sdp-task")
        self._worker = self._working.submit(stages.load)
        self._results = queue.SimpleQueue[tuple[Any, Any, int, BaseException | None, Any, Any]]()
        self._sent = self._failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for threads in (self._preparing, self._working, self._tasks):
            threads.close()
        if self._worker.done() and self._worker.exception() is None and hasattr(self._worker.result(), "close"):
            self._worker.result().close()

    @property
    def full(self) -> bool:
        return self._sent >= self._most

    def feed(self, key: Any, item: Any) -> None:
        self._sent += 1
        self._submit(key, item, 1)

    def results(self, timeout_s: float) -> Iterator[Result]:
        with suppress(queue.Empty):
            while True:
                key, item, tries, error, note, rows = self._results.get(timeout=timeout_s)
                timeout_s = 0
                if error is not None and (note := self._again(key, item, tries, error)) is None:
                    continue
                self._sent -= 1
                self._state.prepared += note.prepared
                yield key, note, rows

    def state(self) -> State:
        figures = {}
        if self._worker.done() and hasattr(worker := self._loaded(), "figures"):
            figures = {"": worker.figures()}
        return replace(self._state, preparing=min(self._sent, self._cores), figures=figures)

    def task(self, function: Callable[..., Any], pieces: Sequence[Any], *arguments: Any) -> Future[Any]:
        return self._tasks.submit(function, self._stages, pieces, *arguments)

    def value(self, rows: Any) -> Any:
        return rows

    def _submit(self, key: Any, item: Any, tries: int) -> None:
        if self._cores:
            self._preparing.submit(self._attempt, self._prepare, key, item, tries)
        else:
            self._working.submit(self._attempt, self._work, key, item, tries, item, Note())

    def _again(self, key: Any, item: Any, tries: int, error: BaseException) -> Note | None:
        """Try a piece again that has failed, or return the note that it fails each time."""
        if isinstance(error, SdpError):
            raise error
        self._failed += 1
        if self._failed >= _SYSTEMATIC:
            raise SdpError(f"{self._failed} pieces failed in a row, the last with {named(error)}")
        if tries >= TRIES:
            return Note(died=named(error))
        self._submit(key, item, tries + 1)
        return None

    def _attempt(self, step: Callable[..., None], key: Any, item: Any, tries: int, *values: Any) -> None:
        """Do a step; hand its error to the main thread."""
        try:
            step(key, item, tries, *values)
        except BaseException as error:  # noqa: BLE001 (a library in Rust panics with one, and the main thread waits)
            if not isinstance(error, SdpError) and "CUDA error" in str(error):
                from sdp.device import out_of_memory  # imports torch, as the worker does

                if not out_of_memory(error):
                    # This process can no longer use its GPU. The lease stays, so that the next run isolates the row.
                    advice = "run the same command again: it isolates what is to blame"
                    say(f"{self._job}: {named(error)}; {advice}", "error")
                    os._exit(1)
            self._results.put((key, item, tries, error, None, None))

    def _prepare(self, key: Any, item: Any, tries: int) -> None:
        assert isinstance(self._stages, Preparing)
        value, stats = self._stages.prepare(item)
        self._working.submit(self._attempt, self._work, key, item, tries, value, Note(prepared=stats))

    def _work(self, key: Any, item: Any, tries: int, value: Any, note: Note) -> None:
        worker, began = self._loaded(), time.monotonic()
        rows = self._stages.work(worker, value)
        busy_s, idle_s = self._occupancy.add(began, time.monotonic())
        self._failed = 0
        limits = getattr(worker, "batch_limits", {})
        note = replace(note, busy_s=busy_s, idle_s=idle_s, batch_limits=limits)
        self._results.put((key, item, tries, None, note, rows))

    def _loaded(self) -> Any:
        """Return the worker once it has loaded."""
        try:
            return self._worker.result()
        except SdpError:
            raise
        except BaseException as error:
            raise SdpError(f"{self._job}: the {self._role} does not load ({named(error)})") from error
