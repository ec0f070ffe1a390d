"""Listens for XID errors, which the driver tells once, as events, to those who listen at the time."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import pynvml  # type: ignore[import-untyped]  # NVIDIA ships it without types

from sdp.exporter.nvml import UNSUPPORTED, address_of
from sdp.exporter.readings import Xids

LOG = logging.getLogger(__name__)
LISTEN_MS = 1000
"""How long one call listens; the driver hands an event over at once."""
PAUSE_S = 5.0
"""Before listening again when that failed."""
MAX_XIDS = 256
"""Different XIDs kept for a GPU; there are fewer than 200."""


class XidWatch:
    """A thread that counts XIDs. It starts listening when it is told that there are GPUs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gpus = 0
        self._listening_to = 0
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._seen: dict[int, Xids] = {}

    def watch(self, gpus: int) -> None:
        """There are so many GPUs now; costs nothing when that is known."""
        with self._changed:
            if gpus == self._gpus:
                return
            self._gpus = gpus
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sdp-xid", daemon=True)
                self._thread.start()

    def seen(self) -> Mapping[int, Xids]:
        """By index, of the GPUs that are listened to."""
        with self._changed:
            return dict(self._seen)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        listened = False
        while True:
            with self._changed:
                if listened:
                    # It ended because listening failed, or because the number of GPUs changed.
                    self._changed.wait_for(lambda: self._stopped or self._gpus != self._listening_to, PAUSE_S)
                self._changed.wait_for(lambda: self._stopped or self._gpus > 0)
                if self._stopped:
                    return
                self._listening_to, listened = self._gpus, True
            try:
                self._listen(self._listening_to)
            except pynvml.NVMLError as error:
                LOG.warning("listening for XID errors: %s; trying again in %g s", error, PAUSE_S)

    def _listen(self, gpus: int) -> None:
        """Until the number of GPUs changes."""
        events = pynvml.nvmlEventSetCreate()
        try:
            indexes = self._register(gpus, events)
            while self._goes_on(gpus):
                try:
                    event = pynvml.nvmlEventSetWait_v2(events, LISTEN_MS)
                except pynvml.NVMLError as error:
                    if error.value != pynvml.NVML_ERROR_TIMEOUT:
                        raise
                    continue
                if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                    self._count(indexes.get(address_of(event.device)), int(event.eventData))
        finally:
            pynvml.nvmlEventSetFree(events)

    def _goes_on(self, gpus: int) -> bool:
        with self._changed:
            return not self._stopped and self._gpus == gpus

    def _register(self, gpus: int, events: Any) -> dict[int, int]:
        """Address of each handle -> index of its GPU. One GPU that cannot be listened to is left out."""
        indexes = {}
        for index in range(gpus):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            except pynvml.NVMLError as error:
                if error.value not in UNSUPPORTED:
                    LOG.warning("gpu %d: cannot listen for XID errors: %s", index, error)
                continue
            indexes[address_of(handle)] = index
            with self._changed:
                self._seen.setdefault(index, Xids())
        return indexes

    def _count(self, index: int | None, xid: int) -> None:
        if index is None:
            LOG.warning("XID %d of a GPU that is not listened to", xid)
            return
        LOG.warning("gpu %d: XID %d", index, xid)
        with self._changed:
            before = self._seen[index]
            known = xid in before.last or len(before.last) < MAX_XIDS
            last = {**before.last, xid: time.time()} if known else before.last
            self._seen[index] = Xids(before.total + 1, last)
