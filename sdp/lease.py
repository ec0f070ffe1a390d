"""A lease that lets one job write an output.

The holder has created `_lease/<generation>.json` (a create-only write, so one job wins) and rewrites it several times
in its time to live. Wall clocks are not trusted: a newcomer watches the newest generation by its own clock, and creates
the next one if the record does not change during its time to live. A store that is away is so for both, and takes the
lease from nobody: a newcomer does not count that time. A holder is told by its next heartbeat whether another job has
taken over, and looks for a later generation before it replaces a file, since it may have been suspended or cut off.
"""

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Self

from pydantic import Field

from sdp.console import duration, say
from sdp.datasets.records import LARGEST, Whole, dump, parse
from sdp.errors import AlreadyExists, Conflict, LeaseHeld, LeaseLost, NotFound, SdpError, UserError
from sdp.leaving import cleanups
from sdp.storage import Storage

FOLDER = "_lease"
TTL_S = 120.0
"""A newcomer on another node waits for so long."""
_BEAT_S = 10.0
"""The longest time between heartbeats, and so until a holder notices that another job has taken over."""
_LONGEST_TTL_S = 3600.0
"""The longest valid time to live. A record with a longer one is damaged, and watched for the newcomer's own time."""
_NAME = re.compile(r"_lease/(\d{1,10})\.json", re.ASCII)
_TRIES = 5
"""Races for a generation that a newcomer may lose before it gives up."""
_RELEASE_S = 5.0
"""The longest wait for a heartbeat under way, and for the write of a release: a job that is stopped ends soon."""

log = logging.getLogger(__name__)


def monotonic() -> float:
    """Return seconds that include suspension, where there is such a clock: other jobs' time goes on meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that other jobs can recognise."""

    host: str
    pid: Annotated[int, Field(ge=1, lt=2**31)]
    kernel: str
    """The kernel's boot and the pid namespace; where both agree, no process with the pid means that it has ended."""

    @classmethod
    def this_process(cls) -> "Owner":
        return cls(socket.gethostname(), os.getpid(), _kernel())

    def is_known_dead(self) -> bool:
        """Return whether the process has certainly ended; False where that cannot be known here."""
        if not self.kernel or self.kernel != _kernel():
            return False
        try:
            os.kill(self.pid, 0)
        except OSError as error:  # or it runs as another user
            return isinstance(error, ProcessLookupError)
        return False


@dataclass(frozen=True, slots=True)
class Record:
    """The content of a lease's file."""

    generation: Annotated[int, Field(ge=1, le=LARGEST)]
    holder: str
    owner: Owner
    since: str
    """Wall-clock time, for display only."""
    ttl_s: Annotated[float, Field(gt=0, le=_LONGEST_TTL_S)]
    token: str
    """Random text by which a holder recognises its own record."""
    beat: Whole = 0
    released: bool = False

    @classmethod
    def load(cls, data: bytes) -> "Record | None":
        """Read a record; None for anything else, which is watched as the record of an unknown holder."""
        try:
            return parse(cls, data)
        except ValueError:
            return None

    @property
    def who(self) -> str:
        return f"{self.holder} on {self.owner.host}, pid {self.owner.pid}"


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation of a lease, for a job's other processes, which keep no heartbeat."""

    storage: Storage
    number: int

    def check(self) -> None:
        """Raise LeaseLost if another job has taken over. Makes a request."""
        if self.storage.exists(_path(self.number + 1)):
            raise self.lost(f"generation {self.number + 1} has taken over")

    def lost(self, reason: str) -> LeaseLost:
        return LeaseLost(
            f"{self.storage.uri}: generation {self.number} of the lease is lost: {reason}; this job stops writing, run "
            "it again to continue"
        )


class Lease:
    """A lease that is held until it is released or lost, or the process ends.

    Call `check()` now and then, and `confirm()` before a write over a file.
    """

    follows_a_crash = False
    """True if the holder before ended without releasing it."""

    def __init__(self, storage: Storage, record: Record, etag: str | None) -> None:
        """Start the heartbeat of a record that `acquire` has created."""
        self.generation = record.generation
        self._storage, self._etag = storage, etag
        self._record, self._held = record, Generation(storage, record.generation)
        self._lost: LeaseLost | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{record.generation}", daemon=True)
        self._thread.start()
        cleanups.append(self.release)

    @classmethod
    def acquire(
        cls, storage: Storage, holder: str = "sdp", ttl_s: float = TTL_S, clock: Callable[[], float] = monotonic
    ) -> "Lease":
        """Acquire the lease of an output; if it has a holder, watch that for at most its time to live.

        Raise LeaseHeld, with the holder's name, where the holder is alive.
        """
        for _ in range(_TRIES):
            newest = _newest(storage)
            if newest and not _is_free(storage, newest, ttl_s, clock):
                raise LeaseHeld(_held_message(storage, newest))
            owner, since = Owner.this_process(), datetime.now(UTC).isoformat(timespec="seconds")
            record = Record(newest + 1, holder, owner, since, ttl_s, token_hex(16))
            try:
                etag = storage.create(_path(record.generation), dump(record)).etag
            except AlreadyExists:
                continue  # another newcomer won this generation
            _require_conditions(storage, record)
            lease = cls(storage, record, etag)
            if newest:
                before = Record.load(_read(storage, newest))
                lease.follows_a_crash = before is not None and not before.released
            return lease
        raise LeaseHeld(_held_message(storage, _newest(storage)))

    def check(self) -> None:
        """Raise LeaseLost if a heartbeat has found that another job has taken over. Makes no request."""
        if self._lost is not None:
            raise self._lost

    def confirm(self) -> None:
        """Do the same, and ask the storage, before a write over another job's file."""
        self.check()
        self._held.check()

    def release(self) -> None:
        """Let the next job begin at once. May be called more than once."""
        if self._end.is_set():
            return
        cleanups.remove(self.release)
        self._end.set()
        self._thread.join(_RELEASE_S)
        if self._thread.is_alive():
            return
        self._storage = self._storage.with_options(timeout_s=min(_RELEASE_S, self._storage.options.timeout_s))
        try:
            self.check()
            self._write(replace(self._record, released=True))
        except LeaseLost:
            pass  # another job may hold it
        except SdpError as error:
            # The work is done, and the next job only has to wait until the lease expires.
            log.warning("the lease could not be released and expires in %g s: %s", self._record.ttl_s, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _keep(self) -> None:
        """Write heartbeats until the lease is released or lost."""
        pause = min(self._record.ttl_s / 3, _BEAT_S)
        while not self._end.wait(pause):
            try:
                self.confirm()
                self._record = replace(self._record, beat=self._record.beat + 1)
                self._write(self._record)
            except LeaseLost as error:
                self._lost = error
                return
            except SdpError as error:
                log.warning("a heartbeat of the lease failed: %s", error)

    def _write(self, record: Record) -> None:
        """Write our record; raise LeaseLost if the output was deleted and another job's record has taken its place."""
        path, content = _path(self.generation), dump(record)
        try:
            self._etag = self._storage.swap(path, content, self._etag).etag
        except Conflict:  # or an earlier heartbeat was written, and its response lost
            etag, stored = self._storage.etag(path), Record.load(_read(self._storage, self.generation))
            if stored is not None and stored.token != record.token:
                reason = f"the output was deleted, and another job has created generation {self.generation}"
                raise self._held.lost(reason) from None
            self._etag = self._storage.swap(path, content, etag).etag


def describe(storage: Storage) -> str:
    """Describe for people who writes an output. Decide nothing by it, since the store's clock and ours may differ."""
    files = storage.list(FOLDER)
    if not files:
        return "no job holds its lease"
    record = Record.load(storage.read(files[-1].path))
    age = (datetime.now(UTC) - files[-1].modified).total_seconds()
    if record is None or record.released:
        return "its lease is free: run its job again to continue"
    who = f"{record.owner.host} pid {record.owner.pid}"
    if age <= 2 * record.ttl_s:
        return f"under way: {who} has held its lease since {record.since}"
    return f"interrupted: {who} held its lease, last seen {duration(age)} ago; run its job again to continue"


def _require_conditions(storage: Storage, record: Record) -> None:
    """Refuse a store that ignores conditions: two jobs could own this generation, or one overwrite another's."""
    other = replace(record, token=token_hex(16))  # with the same content, a repeated attempt would count as ours
    for condition, etag in (("If-None-Match", None), ("If-Match", f'"{"0" * 32}"')):
        try:
            storage.swap(_path(record.generation), dump(other), etag)
        except Conflict:
            continue
        raise UserError(
            f"{storage.uri}: the store ignores {condition}, so two jobs could write this output at once; choose a "
            "store with conditional writes"
        )


def _newest(storage: Storage) -> int:
    """Return the highest generation; 0 where there is none."""
    matches = (_NAME.fullmatch(name) for name in storage.names(FOLDER))
    return max((int(match[1]) for match in matches if match), default=0)


def _is_free(storage: Storage, generation: int, ttl_s: float, clock: Callable[[], float]) -> bool:
    """Watch a generation until it is certainly free or alive, for no longer than its time to live."""
    first = _read(storage, generation)
    record = Record.load(first)
    if record and (record.released or record.owner.is_known_dead()):
        return True
    ttl = record.ttl_s if record else ttl_s
    holder = f"{record.who} (since {record.since})" if record else "another job"
    say(f"{storage.uri}: {holder} may still be writing this output; waiting up to {ttl:g} s to find out")
    since = clock()
    idle = threading.Event()
    while True:
        asked = clock()
        # Read once more after the time is over, since this process may have been suspended.
        content = _read(storage, generation)
        if content != first:
            changed = Record.load(content)
            return bool(changed and changed.released)
        if asked - since > ttl or (record and record.owner.is_known_dead()):
            return True
        since += clock() - asked  # the storage may have been away, for the holder too
        idle.wait(min(ttl / 10, 1.0))


def _read(storage: Storage, generation: int) -> bytes:
    try:
        return storage.read(_path(generation))
    except NotFound:
        return b""  # deleted by hand, so no holder writes it


def _held_message(storage: Storage, generation: int) -> str:
    record = Record.load(_read(storage, generation))
    if record is None:
        return f"{storage.uri}: another job is writing this output; wait until it ends, or choose another output.uri"
    return (
        f"{storage.uri}: {record.who}, has been writing this output since {record.since} (generation {generation}); "
        "wait until it ends, stop it, or choose another output.uri"
    )


def _path(generation: int) -> str:
    return f"{FOLDER}/{generation:010d}.json"


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
