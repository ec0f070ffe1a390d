"""Listens for XID errors, which the driver tells once, as events, to those who listen at the time."""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pynvml  # type: ignore[import-untyped]  # NVIDIA ships it without types

from sdp.exporter.nvml import UNSUPPORTED, address_of
from sdp.exporter.readings import Xids

LOG = logging.getLogger(__name__)
LISTEN_MS = 1000
"""How long one call listens; the driver hands an event over at once."""
PAUSE_S = 5.0
"""Before listening again when that failed; twice as long each time it fails again."""
MAX_PAUSE_S = 300.0
ATTEMPTS = 5
"""At having the events of a GPU told. One that goes away and comes back gets as many again."""
MAX_XIDS = 256
"""Different XIDs kept for a GPU; there are fewer than 200."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """In vain."""

    times: int = 0
    again_at: float = 0.0
    """On the monotonic clock."""


class XidWatch:
    """A thread that counts XIDs, by UUID: an index may be another GPU's after a reset.

    A GPU that is lost takes along that its events are told. So who comes back is listened to anew.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._here: dict[str, int] = {}
        """UUID -> index, of the GPUs that answer."""
        self._heard: set[str] = set()
        self._tried: dict[str, _Tried] = {}
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._seen: dict[str, Xids] = {}

    def watch(self, gpus: Mapping[str, int]) -> None:
        """These answer now (UUID -> index); costs nothing when they are known."""
        with self._changed:
            for gone in self._here.keys() - gpus.keys():
                self._heard.discard(gone)
                self._tried.pop(gone, None)
            self._here = dict(gpus)
            if self._is_due() and not self._stopped:
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="sdp-xid", daemon=True)
                    self._thread.start()

    def seen(self) -> Mapping[str, Xids]:
        """By UUID, of the GPUs that have been listened to."""
        with self._changed:
            return dict(self._seen)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _is_due(self) -> bool:
        """Whether there is a GPU that is to be listened to and is not."""
        now = time.monotonic()
        return any(
            uuid not in self._heard and tried.times < ATTEMPTS and now >= tried.again_at
            for uuid, tried in ((uuid, self._tried.get(uuid, _Tried())) for uuid in self._here)
        )

    def _run(self) -> None:
        failed = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or bool(self._here))
                if self._stopped:
                    return
            try:
                self._listen()
                failed = 0
            except pynvml.NVMLError as error:
                pause_s = min(PAUSE_S * 2**failed, MAX_PAUSE_S)
                failed = min(failed + 1, 10)
                LOG.warning("listening for XID errors: %s; trying again in %g s", error, pause_s)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, pause_s)

    def _listen(self) -> None:
        """Until another GPU is to be listened to, which takes a new set: in the old one it might be twice."""
        events = pynvml.nvmlEventSetCreate()
        try:
            names = self._register(events)
            while self._goes_on():
                try:
                    event = pynvml.nvmlEventSetWait_v2(events, LISTEN_MS)
                except pynvml.NVMLError as error:
                    if error.value != pynvml.NVML_ERROR_TIMEOUT:
                        raise
                    continue
                if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                    self._count(names.get(address_of(event.device)), int(event.eventData))
        finally:
            pynvml.nvmlEventSetFree(events)

    def _goes_on(self) -> bool:
        with self._changed:
            return not self._stopped and not self._is_due()

    def _register(self, events: Any) -> dict[int, tuple[str, int]]:
        """Address of each handle -> its GPU. One GPU that cannot be listened to is left out."""
        with self._changed:
            self._heard.clear()
            here = dict(self._here)
        names = {}
        for uuid, index in here.items():
            with self._changed:
                tried = self._tried.get(uuid, _Tried())
            if tried.times >= ATTEMPTS:
                continue
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
            except pynvml.NVMLError as error:
                self._failed(uuid, index, tried, error)
                continue
            names[address_of(handle)] = uuid, index
            with self._changed:
                self._tried.pop(uuid, None)
                if uuid in self._here:
                    self._heard.add(uuid)
                self._seen.setdefault(uuid, Xids())
        return names

    def _failed(self, uuid: str, index: int, tried: _Tried, error: Any) -> None:
        times = ATTEMPTS if error.value in UNSUPPORTED else tried.times + 1
        if error.value not in UNSUPPORTED:
            LOG.warning("gpu %d: cannot listen for XID errors (%d of %d): %s", index, times, ATTEMPTS, error)
        with self._changed:
            self._tried[uuid] = _Tried(times, time.monotonic() + PAUSE_S * 2**tried.times)

    def _count(self, gpu: tuple[str, int] | None, xid: int) -> None:
        if gpu is None:
            LOG.warning("XID %d of a GPU that is not listened to", xid)
            return
        uuid, index = gpu
        LOG.warning("gpu %d: XID %d", index, xid)
        with self._changed:
            before = self._seen[uuid]
            known = xid in before.last or len(before.last) < MAX_XIDS
            last = {**before.last, xid: time.time()} if known else before.last
            self._seen[uuid] = Xids(before.total + 1, last)
