"""Listens for XID errors, which the driver reports only once, as events, to current listeners."""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml  # type: ignore[import-untyped]  # NVIDIA ships it without types

from sdp.backoff import backoff
from sdp.exporter.nvml import UNSUPPORTED, address_of

LOG = logging.getLogger(__name__)
LISTEN_MS = 1000
"""Timeout of one call, which returns earlier if there is an event."""
PAUSE_S = 5.0
"""Pause after a failure; doubles with each further one."""
MAX_PAUSE_S = 300.0
ATTEMPTS = 5
"""Attempts to register for a GPU's events; a lost GPU that returns gets as many again."""
MAX_XIDS = 256
"""Limit on the different XIDs kept for a GPU; fewer than 200 exist."""


@dataclass(frozen=True, slots=True)
class Xids:
    """XID errors of a GPU since the exporter started."""

    total: int = 0
    last: Mapping[int, float] = field(default_factory=dict)
    """XID -> Unix time of the latest."""


@dataclass(slots=True)
class _Registration:
    """The registration for events of a GPU that answers."""

    registered: bool = False
    attempts: int = 0
    """Failed attempts to register."""
    next_at: float = 0.0
    """On the monotonic clock."""

    @property
    def due(self) -> bool:
        return not self.registered and self.attempts < ATTEMPTS and time.monotonic() >= self.next_at


class XidWatch:
    """A thread that counts XIDs by GPU UUID, since a reset may give an index to another GPU.

    A lost GPU loses its registration for events, so a GPU that returns is registered again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gpus: dict[tuple[str, int], _Registration] = {}
        """The GPUs that answer, by UUID and index."""
        self._thread: threading.Thread | None = None
        self._seen: dict[str, Xids] = {}

    def watch(self, gpus: Mapping[str, int]) -> None:
        """Listen to the GPUs that answer now (UUID -> index); cheap if they are known."""
        with self._changed:
            self._gpus = {gpu: self._gpus.get(gpu, _Registration()) for gpu in gpus.items()}
            self._changed.notify_all()
            if self._thread is None and self._gpus:
                self._thread = threading.Thread(target=self._run, name="sdp-xid", daemon=True)
                self._thread.start()

    def seen(self) -> Mapping[str, Xids]:
        """Return the XIDs by UUID, of the GPUs that have been registered."""
        with self._changed:
            return dict(self._seen)

    def _run(self) -> None:
        failed = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._gpus))
            try:
                self._listen()
                failed = 0
            except pynvml.NVMLError as error:
                pause_s = backoff(failed, PAUSE_S, MAX_PAUSE_S)
                failed += 1
                LOG.warning("listening for XID errors: %s; trying again in %g s", error, pause_s)
                time.sleep(pause_s)

    def _listen(self) -> None:
        """Listen until a GPU is due for registration. It needs a new event set: the old one could hold it twice."""
        events = pynvml.nvmlEventSetCreate()
        try:
            registered = self._register(events)
            while not self._registration_due():
                try:
                    event = pynvml.nvmlEventSetWait_v2(events, LISTEN_MS)
                except pynvml.NVMLError as error:
                    if error.value != pynvml.NVML_ERROR_TIMEOUT:
                        raise
                    continue
                if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                    self._count(registered.get(address_of(event.device)), int(event.eventData))
        finally:
            pynvml.nvmlEventSetFree(events)

    def _registration_due(self) -> bool:
        with self._changed:
            return any(gpu.due for gpu in self._gpus.values())

    def _register(self, events: Any) -> dict[int, tuple[str, int]]:
        """Register the GPUs; return UUID and index of those that succeeded, by their handles' addresses."""
        with self._changed:
            gpus = dict(self._gpus)
        registered = {}
        for (uuid, index), gpu in gpus.items():
            gpu.registered = False
            if gpu.attempts >= ATTEMPTS:
                continue
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            except pynvml.NVMLError as error:
                _record_failure(gpu, index, error)
                continue
            registered[address_of(handle)] = uuid, index
            gpu.registered, gpu.attempts = True, 0
            with self._changed:
                self._seen.setdefault(uuid, Xids())
        return registered

    def _count(self, gpu: tuple[str, int] | None, xid: int) -> None:
        if gpu is None:
            LOG.warning("XID %d from an unknown GPU", xid)
            return
        uuid, index = gpu
        LOG.warning("gpu %d: XID %d", index, xid)
        with self._changed:
            before = self._seen[uuid]
            known = xid in before.last or len(before.last) < MAX_XIDS
            last = {**before.last, xid: time.time()} if known else before.last
            self._seen[uuid] = Xids(before.total + 1, last)


def _record_failure(gpu: _Registration, index: int, error: Any) -> None:
    gpu.next_at = time.monotonic() + backoff(gpu.attempts, PAUSE_S, MAX_PAUSE_S)
    gpu.attempts = ATTEMPTS if error.value in UNSUPPORTED else gpu.attempts + 1
    if error.value not in UNSUPPORTED:
        LOG.warning("gpu %d: cannot listen for XID errors (%d of %d): %s", index, gpu.attempts, ATTEMPTS, error)
