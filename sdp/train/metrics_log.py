"""Writes a run's metrics, in a thread of its own: training waits for no storage on their account, and ends for none."""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sdp.errors import SdpError
from sdp.model.metric_files import FILE_LINES, file_name, files_in
from sdp.storage import Storage
from sdp.train.run_folder import json_line

log = logging.getLogger(__name__)


@dataclass
class _File:
    after: int
    """Its lines are of later steps."""
    lines: list[bytes] = field(default_factory=list)
    written: int = 0
    """Of its lines, how many the storage has."""
    name: str | None = None


class MetricsLog:
    """The lines since this process went on from a step. What the storage refuses is kept, and written next time."""

    def __init__(self, run: Storage, step: int) -> None:
        self._run = run
        self._files = [_File(step)]
        """Those that are not full and written yet, from the oldest."""
        self._step = step
        self._number: int | None = None
        """Of the newest file; the thread looks for it when it writes the first one."""
        self._thread = ThreadPoolExecutor(1, "sdp-metrics")
        self._last: Future[None] | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        if len(self._files[-1].lines) >= FILE_LINES:
            left = [file for file in self._files if file.written < len(file.lines)]
            self._files = [*left, _File(self._step)]
        self._files[-1].lines.append(json_line(line) + b"\n")
        self._step = line["step"]

    def publish(self) -> None:
        """Begin to write what there is by now."""
        if self._last is not None:
            if self._last.done():
                self._last.result()  # a mistake of ours; the storage's have been logged
            elif not self._last.running():
                return  # it is waiting, and takes what has come since
        self._last = self._thread.submit(self._write)

    def finish(self) -> None:
        """Write what there is, and wait for it."""
        self.publish()
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait for what is being written, and write no more."""
        self._thread.shutdown()

    def _write(self) -> None:
        try:
            for file in self._files:
                if (count := len(file.lines)) == file.written:
                    continue
                if file.name is None:
                    self._number = (files_in(self._run)[-1][0] if self._number is None else self._number) + 1
                    file.name = file_name(self._number, file.after)
                self._run.publish(file.name, b"".join(file.lines[:count]))
                file.written = count
        except SdpError as error:
            log.warning("metrics cannot be written now, they are kept and tried again: %s", error)
