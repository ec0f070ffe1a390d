"""One process of a download: takes units, fetches and checks their images, and writes their parts.

    fetcher (a thread) ── bytes ──> decoders (a process each) ── checked images ──> unit ── whole ──> part

Several units may be under way: the next one begins when the connections have nothing left to do for those before it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from sdp.config.download import DownloadConfig, FetchConfig
from sdp.datasets.outcomes import FILTERED, WRITTEN, Outcome
from sdp.datasets.parts import PartInfo, read_info, write_part
from sdp.download.courier import Courier
from sdp.download.fetch import Fetched, Fetcher
from sdp.download.figures import DownloadFigures, Host
from sdp.download.image import ImageRules, examine, examined
from sdp.download.memory import Buffer
from sdp.download.plan import Rules, Wanted, plan
from sdp.download.politeness import Answer, Ask, HostLimits, LocalGate, SharedGate
from sdp.download.unit import Stored, Unit, UnitTask
from sdp.errors import SdpError, Unavailable
from sdp.sandbox.child import DecoderSettings, Reply
from sdp.sandbox.decoders import Decoders, Piece
from sdp.storage import Storage

KIND = "images"

_LOOK_S = 1.0
_WRITE_TRIES = 5
_WRITE_PAUSE_S = 15.0


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of one worker; picklable."""

    output: Storage
    rules: Rules
    fetch: FetchConfig
    give_up_host_after: int
    limits: HostLimits
    images: ImageRules
    decoders: int
    buffer_bytes: int
    decoder_memory_bytes: int


class _Token(NamedTuple):
    unit: Unit
    wanted: Wanted
    attempts: int = 0


class DownloadWorker:
    """A maker of parts; `make` may be called from several threads at once."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        name: str = "alone",
        exchange: Callable[[Ask], Answer] | None = None,
        exchange_every_s: float = 0.05,
    ) -> None:
        """With `exchange`, all workers share the hosts' budgets, which are kept elsewhere."""
        self._settings = settings
        self._lock = threading.Lock()
        self._figures = DownloadFigures()
        self._closing = threading.Event()
        self._turn = threading.Lock()
        decoder_settings = DecoderSettings(partial(examine, settings.images), settings.decoder_memory_bytes)
        self._decoders: Decoders[_Token] = Decoders(decoder_settings, settings.decoders, self._decoded)
        self._buffer = Buffer(settings.buffer_bytes)
        self._courier = None
        gate: LocalGate | SharedGate = LocalGate(settings.limits)
        if exchange is not None:
            gate = SharedGate(name, 2 * settings.fetch.connections)
            self._courier = Courier(exchange, exchange_every_s)
        self._fetcher: Fetcher[_Token] = Fetcher(
            settings.fetch, settings.give_up_host_after, gate, self._buffer, self._fetched, self._courier
        )

    def make(self, task: UnitTask) -> PartInfo:
        """Fetch, check and write one unit, unless its part exists."""
        output = self._settings.output
        if output.exists(task.work.name):
            return read_info(output, output.stat(task.work.name))
        planned = plan(task.table, task.rows, self._settings.rules, task.duplicates)
        unit = Unit(task, planned, self._settings.rules.source)
        with self._lock:
            for outcome in planned.refused:
                self._figures.note(outcome)
        with self._turn:  # the next unit's requests come after this one's
            self._fetcher.wait_until_hungry(self._is_broken)
            self._fetcher.submit((_Token(unit, wanted), wanted.url) for wanted in planned.wanted)
        while not unit.wait(_LOOK_S):
            self._check()
        info = self._write(unit)
        with self._lock:
            self._figures.stored_bytes += info.size
        return info

    def figures(self) -> DownloadFigures:
        """Return the figures so far, without the hosts."""
        with self._lock:
            total = DownloadFigures()
            hosts, self._figures.hosts = self._figures.hosts, {}
            total.merge(self._figures)
            self._figures.hosts = hosts
            return total

    def take_hosts(self) -> dict[str, Host]:
        """Return the hosts' figures since the last call."""
        with self._lock:
            hosts, self._figures.hosts = self._figures.hosts, {}
            return hosts

    def close(self) -> None:
        self._closing.set()
        self._fetcher.close()
        self._decoders.close()
        if self._courier is not None:
            self._courier.close()

    def _fetched(self, fetched: Fetched[_Token]) -> None:
        unit, wanted = fetched.token[:2]
        with self._lock:
            self._figures.note_fetch(
                fetched.host,
                size=fetched.size,
                seconds=fetched.seconds,
                attempts=fetched.attempts,
                came=fetched.failure is None,
            )
        if fetched.body is not None:
            token = _Token(unit, wanted, fetched.attempts)
            self._decoders.put(token, fetched.body)
            return
        failure = fetched.failure
        assert failure is not None
        self._settle(unit, Outcome(wanted.row, failure.outcome, failure.reason, failure.detail, fetched.attempts))

    def _decoded(self, token: _Token, data: Sequence[Piece], reply: Reply, image: memoryview) -> None:
        unit, wanted, attempts = token
        checked = examined(reply, image)
        self._buffer.release(sum(map(len, data)))
        outcome = Outcome(wanted.row, checked.outcome, checked.reason, checked.detail, attempts)
        if checked.outcome != WRITTEN:
            self._settle(unit, outcome)
            return
        assert checked.sha256 is not None
        rules = self._settings.rules
        if rules.taken_down.has_content(checked.sha256):
            self._settle(unit, Outcome(wanted.row, FILTERED, "tombstone", checked.sha256, attempts))
        elif rules.blocklists.has_content(checked.sha256):
            self._settle(unit, Outcome(wanted.row, FILTERED, "blocked_content", checked.sha256, attempts))
        else:
            stored = Stored(
                b"".join(data) if checked.data is None else checked.data,
                checked.width,
                checked.height,
                checked.original_width,
                checked.original_height,
                checked.sha256,
            )
            self._settle(unit, outcome, stored)

    def _settle(self, unit: Unit, outcome: Outcome, stored: Stored | None = None) -> None:
        with self._lock:
            self._figures.note(outcome)
        unit.settle(outcome, stored)

    def _write(self, unit: Unit) -> PartInfo:
        """Publish the part; retry for minutes while the store is away, rather than lose the unit."""
        task = unit.task
        for attempt in range(_WRITE_TRIES):
            try:
                return write_part(
                    self._settings.output,
                    KIND,
                    task.work,
                    unit.rows(),
                    unit.account(),
                    layout=unit.layout(),
                    retried=task.retried,
                )
            except Unavailable:
                if attempt == _WRITE_TRIES - 1 or self._closing.wait(_WRITE_PAUSE_S * (attempt + 1)):
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def _is_broken(self) -> bool:
        return bool(self._fetcher.error or self._decoders.error or self._closing.is_set())

    def _check(self) -> None:
        """Raise the error that has stopped the fetcher or the decoders."""
        for error in (self._fetcher.error, self._decoders.error):
            if error is not None:
                raise SdpError(f"a download worker broke down ({type(error).__name__}: {error})") from error
        if self._closing.is_set():
            raise SdpError("the download worker is closing")


def worker_settings(config: DownloadConfig, output: Storage, rules: Rules, cpus: int) -> WorkerSettings:
    """Return a worker's settings from the configuration."""
    fetch, image, hosts = config.fetch, config.image, config.hosts
    return WorkerSettings(
        output=output,
        rules=rules,
        fetch=fetch,
        give_up_host_after=hosts.give_up_after,
        limits=HostLimits(hosts.at_once, hosts.per_second),
        images=ImageRules(
            size=image.size,
            crop=image.crop == "center",
            enlarge=image.enlarge,
            format=image.format,
            quality=image.quality,
            max_bytes=fetch.max_bytes,
            max_pixels=image.max_pixels,
            tiff=image.tiff,
            least_side=image.least_side,
            min_side=config.filters.min_side,
            max_aspect=config.filters.max_aspect,
        ),
        decoders=cpus,
        buffer_bytes=fetch.buffer_mb * 1_000_000,
        decoder_memory_bytes=config.workers.decoder_memory_mb * 1_000_000,
    )
