"""Writes a run's metrics in a thread, so that training neither waits nor ends because of the storage."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from sdp.errors import SdpError
from sdp.storage import Storage
from sdp.train.run_folder import FILE_LINES, json_line, metrics_file, metrics_files

log = logging.getLogger(__name__)


class MetricsLog:
    """The lines since this process began at a step. Lines that the storage refuses are kept and written next time."""

    def __init__(self, run: Storage, step: int, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises if the job has lost the run's lease."""
        self._run, self._check = run, check
        self._after = step
        """The step after which the newest file begins."""
        self._name: str | None = None
        """Its name, once it exists."""
        self._lines: list[tuple[int, bytes]] = []
        """Its lines, and those of later files, each with its step."""
        self._written = 0
        """Its lines that the storage has."""
        self._thread = ThreadPoolExecutor(1, "sdp-metrics")
        self._last: Future[None] | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        self._lines.append((line["step"], json_line(line) + b"\n"))

    def publish(self) -> None:
        """Begin to write all lines."""
        if self._last is not None:
            if self._last.done():
                self._last.result()  # raises programming errors; the storage's are logged
            elif not self._last.running():
                return  # it waits, and will write the new lines too
        self._last = self._thread.submit(self._write)

    def finish(self) -> None:
        """Write all lines, and wait until they are written."""
        self.publish()
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait for the write in progress, and write no more."""
        self._thread.shutdown()

    def _write(self) -> None:
        """Write the newest file with all its lines; begin another one when it is full."""
        try:
            while len(lines := self._lines[:FILE_LINES]) > self._written:
                content = b"".join(line for _, line in lines)
                if self._name is None:
                    number = 1 + max((number for number, *_ in metrics_files(self._run)), default=0)
                    name = metrics_file(number, self._after)
                    self._check()
                    self._run.create(name, content)
                    self._name = name
                else:
                    self._run.publish_held(self._name, content, self._check)
                self._written = len(lines)
                if len(lines) == FILE_LINES:
                    self._after = lines[-1][0]
                    self._name, self._written = None, 0
                    del self._lines[:FILE_LINES]
        except SdpError as error:
            log.warning("could not write metrics, will try again: %s", error)
