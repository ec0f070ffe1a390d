"""Listens for XID errors, which the driver reports only once, as events, to current listeners."""

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml  # type: ignore[import-untyped]  # NVIDIA ships it without types

from sdp.exporter.nvml import UNSUPPORTED, address_of

LOG = logging.getLogger(__name__)
LISTEN_MS = 1000
"""Timeout of one call, which returns earlier if there is an event."""
PAUSE_S = 60.0
"""Pause after a failure, and before GPUs that refused to be listened to are asked again."""
MAX_XIDS = 256
"""Limit on the different XIDs kept for a GPU; fewer than 200 exist."""


@dataclass(frozen=True, slots=True)
class Xids:
    """XID errors of a GPU since the exporter started."""

    total: int = 0
    last: Mapping[int, float] = field(default_factory=dict)
    """XID -> Unix time of the latest."""


class XidWatch:
    """A thread that counts XIDs by GPU UUID, since a reset may give an index to another GPU.

    A lost GPU loses its registration for events, so a GPU that returns is registered again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gpus: frozenset[tuple[str, int]] = frozenset()
        """UUID and index of the GPUs that answer."""
        self._asked: frozenset[tuple[str, int]] = frozenset()
        """Those whose registration has been tried since they last did not answer."""
        self._thread: threading.Thread | None = None
        self._seen: dict[str, Xids] = {}

    def watch(self, gpus: Mapping[str, int]) -> None:
        """Listen to the GPUs that answer now (UUID -> index); cheap if they are known."""
        with self._changed:
            self._gpus = frozenset(gpus.items())
            self._asked &= self._gpus
            self._changed.notify_all()
            if self._thread is None and self._gpus:
                self._thread = threading.Thread(target=self._run, name="sdp-xid", daemon=True)
                self._thread.start()

    def seen(self) -> Mapping[str, Xids]:
        """Return the XIDs by UUID, of the GPUs that have been registered."""
        with self._changed:
            return dict(self._seen)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._gpus))
            try:
                self._listen()
            except pynvml.NVMLError as error:
                LOG.warning("listening for XID errors: %s; trying again in %g s", error, PAUSE_S)
                time.sleep(PAUSE_S)

    def _listen(self) -> None:
        """Listen until a GPU is due for registration. It needs a new event set: the old one could hold it twice."""
        events = pynvml.nvmlEventSetCreate()
        try:
            with self._changed:
                gpus = self._asked = self._gpus
            registered = self._register(events, gpus)
            until = time.monotonic() + (math.inf if len(registered) == len(gpus) else PAUSE_S)
            while not self._registration_due() and time.monotonic() < until:
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
            return not self._gpus <= self._asked

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
