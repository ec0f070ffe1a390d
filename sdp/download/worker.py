"""One process of a download, which fetches and checks the images of units and writes their parts.

    fetcher (a thread) ── bytes ──> decoders (a process each) ── checked images ──> unit ── whole ──> part

Several units may be under way: the next one begins when connections would be idle otherwise.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from sdp.config.download import DownloadConfig
from sdp.datasets.outcomes import FILTERED, WRITTEN, Outcome
from sdp.datasets.parts import PartInfo, read_info
from sdp.download.fetch import Fetcher, Request
from sdp.download.figures import DownloadFigures
from sdp.download.image import Checked, ImageRules, examine, examined
from sdp.download.plan import RowToFetch, Rules
from sdp.download.slot import Buffer
from sdp.download.turnstile import SharedGate
from sdp.download.unit import UnitRun, UnitTask
from sdp.errors import SdpError
from sdp.sandbox.child import DecoderSettings, Reply
from sdp.sandbox.decoders import Decoders
from sdp.storage import Storage

DECODER_MEMORY_BYTES = 4_096_000_000
"""Memory for decoding one image: enough for a progressive JPEG of as many pixels as are allowed."""
_BUFFER_BYTES = 256_000_000
"""Fetched images that one worker holds before they are decoded: five of the largest that fetch.max_bytes allows."""
_CHECK_S = 1.0
"""Time between checks whether the threads still work."""


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of one worker; picklable."""

    config: DownloadConfig
    output: Storage
    rules: Rules
    cpus: int


_Token = tuple[UnitRun, RowToFetch]


class DownloadWorker:
    """A writer of parts; `make` may be called from several threads at once."""

    def __init__(self, settings: WorkerSettings, gates: Sequence[SharedGate] = ()) -> None:
        """Start the threads and decoders; `gates` lead to the budgets of hosts that several workers share."""
        self._closed = False
        self._settings, config = settings, settings.config
        self._lock = threading.Lock()
        self._figures = DownloadFigures()
        self._turn = threading.Lock()
        handler = partial(examine, ImageRules(config.image, config.filters))
        decoder_settings = DecoderSettings(handler, DECODER_MEMORY_BYTES)
        self._decoders = Decoders(decoder_settings, settings.cpus)
        self._buffer = Buffer(_BUFFER_BYTES)
        self._fetcher: Fetcher[_Token] = Fetcher(
            config.fetch, config.hosts, self._buffer, self._on_fetched, gates, settings.rules.block_reason
        )

    def make(self, task: UnitTask) -> PartInfo:
        """Fetch, check and write one unit, unless its part exists."""
        output = self._settings.output
        if output.exists(task.work.name):
            return read_info(output, output.stat(task.work.name))
        unit = UnitRun(task, self._settings.rules)
        with self._lock:
            self._figures.outcomes.update((outcome.outcome, outcome.reason or "") for outcome in unit.refused)
        with self._turn:  # the next unit's requests come after this one's
            while not self._fetcher.wait_for_room(_CHECK_S):
                self._check()
            self._fetcher.submit(((unit, wanted), wanted.url) for wanted in unit.to_fetch)
        while not unit.wait(_CHECK_S):
            self._check()
        self._check()
        info = unit.write(self._settings.output)
        with self._lock:
            self._figures.stored_bytes += info.size
        return info

    def close(self) -> None:
        """End the threads and decoders, and within a second those who wait in `make`."""
        self._closed = True
        self._fetcher.close()
        self._decoders.close()

    def figures(self) -> DownloadFigures:
        """Return the figures so far."""
        with self._lock:
            return DownloadFigures(workers=1) + self._figures

    def _on_fetched(self, request: Request[_Token]) -> None:
        with self._lock:
            self._figures.note_fetch(request)
        if request.body is not None:
            self._decoders.put(request.body, partial(self._on_decoded, request, request.body))
            return
        unit, wanted = request.token
        failure = request.failure
        assert failure is not None
        self._settle(unit, Outcome(wanted.row, failure.outcome, failure.reason, failure.detail, request.attempts))

    def _on_decoded(self, request: Request[_Token], body: Sequence[bytearray], reply: Reply, image: memoryview) -> None:
        (unit, wanted), attempts = request.token, request.attempts
        checked = examined(reply, image)
        self._buffer.release(request.size)
        outcome = Outcome(wanted.row, checked.outcome, checked.reason, checked.detail or wanted.note, attempts)
        if checked.outcome != WRITTEN:
            self._settle(unit, outcome)
            return
        assert checked.sha256 is not None
        rules = self._settings.rules
        if rules.taken_down.has_content(checked.sha256):
            self._settle(unit, Outcome(wanted.row, FILTERED, "tombstone", checked.sha256, attempts))
        elif rules.blocklists.has_content(checked.sha256):
            self._settle(unit, Outcome(wanted.row, FILTERED, "blocked_content", checked.sha256, attempts))
        else:  # an image without data is kept as it was fetched
            self._settle(unit, outcome, checked if checked.data else replace(checked, data=b"".join(body)))

    def _settle(self, unit: UnitRun, outcome: Outcome, image: Checked | None = None) -> None:
        with self._lock:
            self._figures.outcomes[outcome.outcome, outcome.reason or ""] += 1
        unit.settle(outcome, image)

    def _check(self) -> None:
        """Raise the error that has stopped the fetcher or the decoders, or that this worker is closed."""
        if self._closed:
            raise SdpError("download: it has ended")
        for error in (self._fetcher.error, self._decoders.error):
            if error is not None:
                raise SdpError(f"a download worker failed ({type(error).__name__}: {error})") from error
