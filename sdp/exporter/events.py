"""Listens for XID errors, which the driver reports only once, as events, to current listeners."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pynvml  # type: ignore[import-untyped]  # NVIDIA ships it without types

from sdp.exporter.nvml import UNSUPPORTED, address_of

LOG = logging.getLogger(__name__)
LISTEN_MS = 1000
"""Timeout of one call, which returns earlier if there is an event."""
PAUSE_S = 60.0
"""Pause after a failure."""


class XidWatch:
    """A thread that notes XIDs by GPU UUID, since a reset may give an index to another GPU.

    A lost GPU loses its registration for events, so a GPU that returns is registered again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gpus: frozenset[tuple[str, int]] = frozenset()
        """UUID and index of the GPUs that answer."""
        self._due = False
        """True if one of them is new or has come back, so that all must be registered again."""
        self._thread: threading.Thread | None = None
        self._seen: dict[str, dict[int, float]] = {}

    def watch(self, gpus: Mapping[str, int]) -> None:
        """Listen to these GPUs (UUID -> index), which answer now; cheap if all of them did before."""
        with self._lock:
            before, self._gpus = self._gpus, frozenset(gpus.items())
            self._due |= bool(self._gpus - before)
            if self._due and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sdp-xid", daemon=True)
                self._thread.start()

    def seen(self) -> Mapping[str, Mapping[int, float]]:
        """Return the Unix time of each XID's latest report, by UUID."""
        with self._lock:
            return {uuid: dict(xids) for uuid, xids in self._seen.items()}

    def _run(self) -> None:
        while True:
            try:
                self._listen()
            except pynvml.NVMLError as error:
                LOG.warning("listening for XID errors: %s; trying again in %g s", error, PAUSE_S)
                time.sleep(PAUSE_S)

    def _listen(self) -> None:
        """Listen until a GPU is due for registration. It needs a new event set: the old one could hold it twice."""
        events = pynvml.nvmlEventSetCreate()
        try:
            with self._lock:
                gpus, self._due = self._gpus, False
            registered = self._register(events, gpus)
            while not self._due:
                try:
                    event = pynvml.nvmlEventSetWait_v2(events, LISTEN_MS)
                except pynvml.NVMLError as error:
                    if error.value != pynvml.NVML_ERROR_TIMEOUT:
                        raise
                    continue
                if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                    self._note(registered.get(address_of(event.device)), int(event.eventData))
        finally:
            pynvml.nvmlEventSetFree(events)

    def _register(self, events: Any, gpus: Iterable[tuple[str, int]]) -> dict[int, tuple[str, int]]:
        """Register the GPUs; return UUID and index of those that succeeded, by their handles' addresses."""
        registered = {}
        for uuid, index in gpus:
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            except pynvml.NVMLError as error:
                if error.value not in UNSUPPORTED:
                    LOG.warning("gpu %d: cannot listen for XID errors: %s", index, error)
                continue
            registered[address_of(handle)] = uuid, index
        return registered

    def _note(self, gpu: tuple[str, int] | None, xid: int) -> None:
        if gpu is None:
            LOG.warning("XID %d from an unknown GPU", xid)
            return
        uuid, index = gpu
        LOG.warning("gpu %d: XID %d", index, xid)
        with self._lock:
            self._seen.setdefault(uuid, {})[xid] = time.time()
