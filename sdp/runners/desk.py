"""A run's bookkeeping: which worker holds which piece, which piece killed its worker, and when to give up.

Ray Data restarts whatever dies, for ever, so the limits are here. A process that dies before it reaches the desk leaves
no event, which ends the run in time.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa

from sdp.errors import SdpError
from sdp.ray.waiting import no_place
from sdp.runners.blocks import pack
from sdp.runners.placement import Placement
from sdp.runners.stages import TRIES, PrepareStats

SYSTEMATIC = 100
"""Failed preparations in a row after which the items are not to blame."""
_DEATHS_EACH = 3
"""Deaths in a row that each worker of a stage may have."""
_SLOWEST_S = 900.0
"""Time without a finished preparation after which the cluster counts as having no room for one."""
PREPARE, WORK = STAGES = ("prepare", "work")


class WorkerId(NamedTuple):
    """A process of a stage."""

    stage: str
    node: str
    process: str


@dataclass(slots=True)
class State:
    """The state of a run."""

    workers: int = 0
    preparing: int = 0
    """Preparations under way."""
    ready: int = 0
    """Pieces that wait for a worker."""
    working: int = 0
    """Pieces at workers."""
    loading: int = 0
    """Workers that load."""
    events: int = 0
    """Grows with whatever a worker reports."""
    prepared: PrepareStats = field(default_factory=PrepareStats)
    """The sum of all preparations."""
    deaths: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    """Deaths of workers, by stage."""
    in_a_row: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    """Deaths since the stage last succeeded, by stage."""
    last: dict[str, str] = field(default_factory=lambda: dict.fromkeys(STAGES, ""))
    """The reason for the latest death, by stage."""
    started: bool = False
    """True if any worker has loaded."""
    any_prepared: bool = False
    """True if any preparation has ended."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The latest figures of each worker, by process."""
    error: SdpError | None = None


class Desk:
    """An asynchronous actor beside the driver that hands out pieces and records who holds them."""

    def __init__(self, prepares: bool = True, tries: int = TRIES) -> None:
        self._prepares, self._tries = prepares, tries
        self._pieces: dict[int, pa.Table | None] = {}
        """The pieces that no process has begun, by number. After the last one comes None."""
        self._handed_out, self._more = 0, asyncio.Event()
        self._held: dict[WorkerId, list[int]] = {}
        """Pieces of each worker, oldest first: only the oldest can have killed it."""
        self._worker_of: dict[int, WorkerId] = {}
        """The last that began each piece, until the driver has its result."""
        self._first: dict[int, int] = {}
        """The first number of each piece that was sent again under another."""
        self._deaths_of: dict[int, list[str]] = {}
        """The reasons for deaths of workers, by the first number of the piece that they held."""
        self._workers: dict[str, WorkerId] = {}
        """The present worker of each actor, which outlives its processes."""
        self._loading: dict[str, WorkerId] = {}
        self._ready: set[int] = set()
        self._figures: dict[str, Any] = {}
        self._state = State()

    async def feed(self, number: int, piece: pa.Table | None, first: int | None = None) -> None:
        """Accept a piece, in any order; None ends them. One that is sent again names its `first` number."""
        self._pieces[number] = piece
        if first is not None and first != number:
            self._first[number] = first
        self._more.set()
        self._more = asyncio.Event()

    async def piece(self, number: int) -> pa.Table | None:
        """Wait for a piece and return it.

        A repeated reader also asks for pieces that have been begun. It gets those without their content, and Ray
        ignores them.
        """
        while number not in self._pieces and number >= self._handed_out:
            await self._more.wait()
        if number >= self._handed_out:
            self._state.events += 1
            self._handed_out = number + 1
        if not self._prepares and self._pieces.get(number) is not None:
            self._ready.add(number)
        return self._pieces[number] if number in self._pieces else pack(number, None)

    async def begin(self, worker: WorkerId, number: int) -> str | None:
        """Record that a worker begins a piece; return a reason if the piece has killed too often to be tried again."""
        self._state.events += 1
        before = self._worker_of.get(number)
        if before is not None and number in self._held.get(before, ()):
            self._record_death(before, self._held[before][0], "its worker died each time")
        self._ready.discard(number)
        first = self._first.get(number, number)
        if len(reasons := self._deaths_of.get(first, [])) >= self._tries:
            return reasons[-1]
        self._pieces.pop(number, None)
        self._worker_of[number] = worker
        self._held.setdefault(worker, []).append(number)
        return None

    async def end(self, worker: WorkerId, number: int, stats: PrepareStats | None = None) -> None:
        """Record that a worker has succeeded with a piece."""
        self._state.events += 1
        stage, pieces = worker.stage, self._held.get(worker, [])
        if number in pieces:
            pieces.remove(number)
        if not pieces and stage == PREPARE:
            self._held.pop(worker, None)
        self._state.in_a_row[stage] = 0
        if stage == PREPARE:
            self._ready.add(number)
            self._state.any_prepared = True
            self._state.prepared += stats or PrepareStats()
        else:
            self._deaths_of.pop(self._first.pop(number, number), None)

    async def fail(self, worker: WorkerId, number: int | None, reason: str) -> None:
        """Record that a worker fails at a piece, or as it starts."""
        self._state.events += 1
        self._record_death(worker, number, reason)

    async def stranded(self, alive: set[str], unfinished: set[int]) -> list[int]:
        """Record which nodes are alive; return the unfinished pieces that may wait for ever for a lost worker.

        Ray restarts the worker elsewhere only once there is room, and does not say which pieces are queued at it. One
        that it has finished may be lost on its way to the driver.
        """
        workers = {*self._held, *self._workers.values(), *self._loading.values()}
        lost = [worker for worker in workers if worker.node not in alive]
        for worker in lost:
            self._record_death(worker, next(iter(self._held.get(worker, ())), None), "its node is gone")
        begun = {number: worker for number, worker in self._worker_of.items() if number in unfinished}
        self._worker_of = {number: worker for number, worker in begun.items() if worker.node in alive}
        if all(worker.stage != WORK for worker in lost):
            return []
        pieces, self._ready = (begun.keys() - self._worker_of.keys() | self._ready) & unfinished, set()
        return [*pieces]

    async def load(self, worker: WorkerId, actor: str) -> None:
        """Record that a worker begins to load; if its actor had a process before, that process has died."""
        self._state.events += 1
        if (before := self._loading.get(actor) or self._workers.get(actor)) is not None:
            self._record_death(before, next(iter(self._held.get(before, ())), None), "its process ended")
        self._loading[actor] = worker

    async def start(self, worker: WorkerId, actor: str) -> None:
        """Record that a worker has loaded."""
        self._state.events += 1
        self._loading.pop(actor, None)
        self._workers[actor] = worker
        self._state.started = True

    async def leave(self, actor: str) -> None:
        """Record that a worker ends as planned."""
        self._workers.pop(actor, None)
        self._loading.pop(actor, None)

    async def report(self, worker: WorkerId, figures: Any) -> None:
        """Record a worker's figures so far, which outlast its process."""
        if figures != self._figures.get(worker.process):
            self._state.events += 1
        self._figures[worker.process] = figures

    async def stop(self, error: SdpError) -> None:
        """Record an error that no retry would fix."""
        self._state.error = self._state.error or error

    async def state(self) -> State:
        """Return the present state."""
        return replace(
            self._state,
            workers=len(self._workers),
            preparing=sum(worker.stage == PREPARE for worker in self._held),
            ready=len(self._ready),
            working=sum(len(pieces) for worker, pieces in self._held.items() if worker.stage == WORK),
            loading=len(self._loading),
            figures=dict(self._figures),
        )

    async def at_work(self) -> set[str]:
        """Return the processes that hold pieces or load, as far as the desk knows."""
        holding = (worker for worker, pieces in self._held.items() if pieces)
        return {worker.process for worker in (*holding, *self._loading.values())}

    def _record_death(self, worker: WorkerId, number: int | None, reason: str) -> None:
        self._held.pop(worker, None)
        for actors in (self._workers, self._loading):
            for actor in [actor for actor, held in actors.items() if held == worker]:
                del actors[actor]
        self._state.in_a_row[worker.stage] += 1
        self._state.deaths[worker.stage] += 1
        self._state.last[worker.stage] = reason
        if number is not None:
            self._deaths_of.setdefault(self._first.get(number, number), []).append(reason)


def check_state(state: State, placement: Placement, preparing: int, waited_s: float, *, fed: bool = True) -> None:
    """Raise the error that ends the run, if there is one: a final error, endless deaths, or places that never came.

    `preparing` is the most that were prepared at once, `waited_s` the time since the first piece was fed.
    `fed` is False if none was, or nothing is prepared.
    """
    if state.error is not None:
        raise state.error
    deaths = state.in_a_row[PREPARE]
    if deaths >= max(SYSTEMATIC, _DEATHS_EACH * preparing):
        raise SdpError(
            f"transform: {deaths} transforms failed in a row, the last with {state.last[PREPARE]}; check the "
            "nodes' memory and software"
        )
    deaths, workers = state.in_a_row[WORK], f"{placement.role}s"
    if deaths > _DEATHS_EACH * placement.most + 2 * _DEATHS_EACH:
        raise SdpError(
            f"{placement.job}: {deaths} {workers} died in a row without finishing anything, the last with "
            f"{state.last[WORK]}; see their logs with `ray logs`"
        )
    wait_s = placement.wait_s
    if not (state.started or state.loading or state.deaths[WORK]) and waited_s > wait_s:
        raise no_place([placement.workers], placement.workers.progress(placement.least), wait_s)
    if fed and not (state.any_prepared or preparing) and waited_s > max(_SLOWEST_S, wait_s):
        place = f"{placement.preparation.progress(1)} for a transform that lives (see `ray logs`)"
        raise no_place([placement.preparation], place, max(_SLOWEST_S, wait_s), key="transform.node_labels")
