"""A lease on an output: of all jobs that would write it, one does.

Whoever holds the lease has created `_lease/<generation>.json` (a create-only write, so one wins) and rewrites it every
third of its time to live. Nobody trusts wall clocks: a newcomer watches the newest generation by its own clock, and if
that does not change for as long as its holder said it lives, takes the next one. A holder counts its life from before
its last successful heartbeat, so it knows that it has lost no later than anybody else may take over.
"""

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Annotated, Self

from pydantic import Field

from sdp.console import duration, say
from sdp.datasets.records import LARGEST, Whole, parse
from sdp.errors import AlreadyExists, LeaseHeld, LeaseLost, NotFound, SdpError
from sdp.storage import Storage

FOLDER = "_lease"
_LONGEST_TTL_S = 3600.0
"""Nobody promises more; a record that does is damaged, and is watched for as long as we would promise."""
_NAME = re.compile(r"_lease/(\d{1,10})\.json", re.ASCII)
_ROUNDS = 5  # newcomers that lose the race for a generation this often give up

log = logging.getLogger(__name__)


def monotonic() -> float:
    """Seconds that go on while the machine is suspended, where there is such a clock: others' time goes on too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, as others can recognise it."""

    host: str
    pid: Annotated[int, Field(ge=1, lt=2**31)]
    started: str
    """When the process began, as its kernel counts: a pid is used again."""
    kernel: str
    """The kernel's boot and the pid namespace: only where both agree does a pid name the same process."""

    @classmethod
    def this_process(cls) -> "Owner":
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()) or "", _kernel())

    def is_known_dead(self) -> bool:
        """Whether this process can tell that the other one has ended; False where it cannot tell."""
        if not self.kernel or self.kernel != _kernel():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it runs, as another user
        started = _started(self.pid)
        return started is not None and started != self.started


@dataclass(frozen=True, slots=True)
class Record:
    """What a lease's file says."""

    generation: Annotated[int, Field(ge=1, le=LARGEST)]
    holder: str
    owner: Owner
    since: str
    """Wall-clock time, for people; nothing is decided by it."""
    ttl_s: Annotated[float, Field(gt=0, le=_LONGEST_TTL_S)]
    token: str
    """Makes every record its own, so that a holder recognises it."""
    beat: Whole = 0
    released: bool = False

    def dump(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def load(cls, data: bytes) -> "Record | None":
        """None for what is not a record: it is then watched like one whose holder is unknown."""
        try:
            return parse(cls, data)
        except ValueError:
            return None

    @property
    def who(self) -> str:
        return f"{self.holder} on {self.owner.host}, pid {self.owner.pid}"


class Lease:
    """Held until released, lost, or the process ends. A context manager; `check()` before each thing that writes."""

    def __init__(self, storage: Storage, record: Record, clock: Callable[[], float], born: float) -> None:
        """Made by `acquire`."""
        self.generation = record.generation
        self._storage = storage
        self._record = record
        self._clock = clock
        self._alive_at = born
        self._lost: str | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{record.generation}", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        storage: Storage,
        holder: str = "sdp",
        ttl_s: float = 30.0,
        clock: Callable[[], float] = monotonic,
    ) -> "Lease":
        """The lease of this output, after watching for at most the time to live of whoever holds it.

        LeaseHeld where its holder is alive; who that is stands in the message.
        """
        # An operation that outlives the lease helps nobody.
        storage = storage.with_options(timeout_s=min(storage.options.timeout_s, ttl_s))
        for _ in range(_ROUNDS):
            newest = _newest(storage)
            if newest and not _is_free(storage, newest, ttl_s, clock):
                raise LeaseHeld(_held(storage, newest))
            born = clock()
            record = Record(
                generation=newest + 1,
                holder=holder,
                owner=Owner.this_process(),
                since=datetime.now(UTC).isoformat(timespec="seconds"),
                ttl_s=ttl_s,
                token=token_hex(16),
            )
            try:
                storage.create(_path(record.generation), record.dump())
            except AlreadyExists:
                continue  # another newcomer was first: look at that one
            return cls(storage, record, clock, born)
        raise LeaseHeld(_held(storage, _newest(storage)))

    def check(self) -> None:
        """LeaseLost where another job may be writing by now. Costs nothing: no request is made."""
        reason = self._lost or self._expired()
        if reason:
            self._lost = reason  # once lost is lost: somebody may have taken over a moment ago
            raise LeaseLost(
                f"{self._storage.uri}: generation {self.generation} of the lease is lost: {reason}; "
                "this job stops writing, run it again to continue"
            )

    def release(self) -> None:
        """Let the next job begin at once. Safe to call again."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join(self._storage.options.timeout_s + 1)
        if self._lost or self._expired() or self._thread.is_alive():
            return
        try:
            self._write(replace(self._record, released=True))
        except SdpError as error:
            # The work is done; the next job only has to wait until the lease is stale.
            log.warning("the lease could not be released, it expires in %g s: %s", self._record.ttl_s, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _expired(self) -> str | None:
        silent = self._clock() - self._alive_at
        if silent < self._record.ttl_s:
            return None
        return f"no heartbeat could be written for {silent:.1f} s"

    def _keep(self) -> None:
        """The heartbeat: it ends with the lease, or when the lease is lost."""
        ttl = self._record.ttl_s
        pause = ttl / 3
        while not self._end.wait(pause) and not self._lost:
            begun = self._clock()
            try:
                if self._storage.exists(_path(self.generation + 1)):
                    self._lost = f"generation {self.generation + 1} has taken over"
                    return
                self._record = replace(self._record, beat=self._record.beat + 1)
                if not self._write(self._record):
                    self._lost = f"the output was deleted, and another job has begun generation {self.generation} anew"
                    return
            except SdpError as error:
                log.warning("a heartbeat of the lease failed: %s", error)
                self._lost = self._lost or self._expired()
                pause = ttl / 10  # the storage may be back before the lease is lost
            else:
                # Lost in the meantime is lost, even if this write came through at last.
                self._lost = self._lost or self._expired()
                self._alive_at = begun
                pause = ttl / 3

    def _write(self, record: Record) -> bool:
        """Write our record; False where another job's is in its place, as the output was deleted under us."""
        path = _path(self.generation)
        content = _read(self._storage, self.generation)
        if not content:
            with suppress(AlreadyExists):
                self._storage.create(path, record.dump())
                return True
            content = _read(self._storage, self.generation)
        there = Record.load(content)
        if there is not None and there.token != record.token:
            return False
        self._storage.publish(path, record.dump())
        return True


def describe(storage: Storage) -> str:
    """Say for people who writes an output. The store's clock and ours may differ, so nothing may be decided by this."""
    files = storage.list(FOLDER)
    if not files:
        return "nobody holds its lease"
    record = Record.load(storage.read(files[-1].path))
    age = (datetime.now(UTC) - files[-1].modified).total_seconds()
    if record is None or record.released:
        return "its lease is free: run its job again to go on"
    who = f"{record.owner.host} pid {record.owner.pid}"
    if age <= 2 * record.ttl_s:
        return f"under way: {who} holds its lease since {record.since}"
    return f"left off: {who} held its lease, last seen {duration(age)} ago; run its job again to go on"


def _newest(storage: Storage) -> int:
    """The highest generation there is; 0 where there is none."""
    found = (_NAME.fullmatch(name) for name in storage.names(FOLDER))
    return max((int(name[1]) for name in found if name), default=0)


def _is_free(storage: Storage, generation: int, ttl_s: float, clock: Callable[[], float]) -> bool:
    """Watch a generation until it is known to be free, or seen to be alive; no longer than it claims to live."""
    first = _read(storage, generation)
    record = Record.load(first)
    if record and (record.released or record.owner.is_known_dead()):
        return True
    ttl = record.ttl_s if record else ttl_s
    holder = f"{record.who}, since {record.since}" if record else "another job"
    say(f"{storage.uri}: {holder} is writing this output, or was; waiting until it is known which, {ttl:g} s at most")
    since = clock()
    idle = threading.Event()
    while True:
        waited = clock() - since
        # Looked at once more after the time is over: it is we who may have been asleep.
        seen = _read(storage, generation)
        if seen != first:
            now = Record.load(seen)
            return bool(now and now.released)
        if waited > ttl:
            return True
        idle.wait(min(ttl / 10, 1.0))


def _read(storage: Storage, generation: int) -> bytes:
    try:
        return storage.read(_path(generation))
    except NotFound:
        return b""  # deleted by hand: nothing is there that could beat


def _held(storage: Storage, generation: int) -> str:
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


def _started(pid: int) -> str | None:
    """The start time of a process; "ended" for a zombie, None where it cannot be read."""
    try:
        # The name in parentheses may hold anything, so the fields are counted from its end.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "ended" if fields[0] in "ZX" else fields[19]
