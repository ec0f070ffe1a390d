"""Writes a run's metrics in a thread, so that training neither waits nor ends because of the storage."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sdp.errors import SdpError
from sdp.storage import Storage
from sdp.train.run_folder import FILE_LINES, json_line, metrics_file, metrics_files

log = logging.getLogger(__name__)


@dataclass
class _File:
    after: int
    """The step after which its lines begin."""
    lines: list[bytes] = field(default_factory=list)
    written: int = 0
    """Lines that the storage has."""
    name: str | None = None


class MetricsLog:
    """The lines since this process began at a step. Lines that the storage refuses are kept and written next time."""

    def __init__(self, run: Storage, step: int, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises if the job has lost the run's lease."""
        self._run, self._check = run, check
        self._files = [_File(step)]
        """Files that are not full, or not written yet, the oldest first."""
        self._step = step
        self._thread = ThreadPoolExecutor(1, "sdp-metrics")
        self._last: Future[None] | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        if len(self._files[-1].lines) >= FILE_LINES:
            left = [file for file in self._files if file.written < len(file.lines)]
            self._files = [*left, _File(self._step)]
        self._files[-1].lines.append(json_line(line) + b"\n")
        self._step = line["step"]

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
        try:
            for file in self._files:
                if (count := len(file.lines)) == file.written:
                    continue
                content = b"".join(file.lines[:count])
                if file.name is None:
                    name = metrics_file(metrics_files(self._run)[-1][0] + 1, file.after)
                    self._check()
                    self._run.create(name, content)
                    file.name = name
                else:
                    self._run.publish_held(file.name, content, self._check)
                file.written = count
        except SdpError as error:
            log.warning("could not write metrics, will try again: %s", error)
