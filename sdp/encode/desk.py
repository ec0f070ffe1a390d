"""The pipeline's bookkeeping: which worker holds which piece, which piece killed its worker, and when to give up.

Ray Data restarts whatever dies, for ever, so the limits are here. A process that dies before it reaches the desk leaves
no event, which ends the run in time.
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyarrow as pa

from sdp.encode.blocks import pack
from sdp.encode.chunk import TransformStats
from sdp.encode.placement import Placement
from sdp.encode.work import TRIES
from sdp.errors import SdpError
from sdp.ray.waiting import no_place

_SYSTEMATIC = 100
"""Failed transforms in a row after which the images are not to blame."""
_DEATHS_EACH = 3
"""Deaths in a row that each worker of a stage may have."""
_SLOWEST_S = 900.0
"""Time without a finished transform after which the cluster counts as having no room for one."""
_STAGES = ("transform", "encode")


class WorkerId(NamedTuple):
    """A process of a stage."""

    stage: str
    node: str
    process: str


@dataclass(slots=True)
class State:
    """The state of the pipeline, as the desk knows it."""

    encoders: int = 0
    transforms: int = 0
    """Transforms under way."""
    ready: int = 0
    """Transformed pieces that wait for an encoder."""
    encoding: int = 0
    """Pieces at encoders."""
    loading: int = 0
    """Encoders that load."""
    events: int = 0
    """Grows with whatever a worker reports."""
    transformed_stats: TransformStats = field(default_factory=TransformStats)
    """The sum of all transforms."""
    deaths: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0))
    """Deaths of workers, by stage."""
    in_a_row: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0))
    """Deaths since the stage last succeeded, by stage."""
    last: dict[str, str] = field(default_factory=lambda: dict.fromkeys(_STAGES, ""))
    """The reason for the latest death, by stage."""
    started: bool = False
    """True if any encoder has loaded."""
    transformed: bool = False
    """True if any transform has ended."""
    error: SdpError | None = None


class Desk:
    """An asynchronous actor beside the driver that hands out pieces and records who holds them."""

    def __init__(self) -> None:
        self._pieces: dict[int, pa.Table | None] = {}
        """The pieces that no transform has begun, by number. After the last one comes None."""
        self._handed_out, self._more = 0, asyncio.Event()
        self._held: dict[WorkerId, list[int]] = {}
        """Pieces of each worker, oldest first: only the oldest can have killed it."""
        self._worker_of: dict[int, WorkerId] = {}
        """The last that began each piece, until the driver has its result."""
        self._first: dict[int, int] = {}
        """The first number of each piece that was sent again under another."""
        self._deaths_of: dict[int, list[str]] = {}
        """The reasons for deaths of workers, by the first number of the piece that they held."""
        self._encoders: dict[str, WorkerId] = {}
        """By actor, which outlives its processes."""
        self._loading: dict[str, WorkerId] = {}
        self._ready: set[int] = set()
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

        A repeated reader also asks for pieces that transforms have begun. It gets those without their content, and Ray
        ignores them.
        """
        while number not in self._pieces and number >= self._handed_out:
            await self._more.wait()
        self._state.events += number >= self._handed_out
        self._handed_out = max(self._handed_out, number + 1)
        return self._pieces[number] if number in self._pieces else pack(number, None)

    async def begin(self, worker: WorkerId, number: int) -> str | None:
        """Record that a worker begins a piece; return a reason if the piece has killed too often to be tried again."""
        self._state.events += 1
        before = self._worker_of.get(number)
        if before is not None and number in self._held.get(before, ()):
            self._record_death(before, self._held[before][0], "its worker died each time")
        self._ready.discard(number)
        first = self._first.get(number, number)
        if len(reasons := self._deaths_of.get(first, [])) >= TRIES:
            return reasons[-1]
        self._pieces.pop(number, None)
        self._worker_of[number] = worker
        self._held.setdefault(worker, []).append(number)
        return None

    async def end(self, worker: WorkerId, number: int, stats: TransformStats | None = None) -> None:
        """Record that a worker has succeeded with a piece."""
        self._state.events += 1
        stage, pieces = worker.stage, self._held.get(worker, [])
        if number in pieces:
            pieces.remove(number)
        if not pieces and stage == "transform":
            self._held.pop(worker, None)
        self._state.in_a_row[stage] = 0
        if stage == "transform":
            self._ready.add(number)
            self._state.transformed = True
            self._state.transformed_stats += stats or TransformStats()
        else:
            self._deaths_of.pop(self._first.pop(number, number), None)

    async def fail(self, worker: WorkerId, number: int | None, reason: str) -> None:
        """Record that a worker fails at a piece, or as it starts."""
        self._state.events += 1
        self._record_death(worker, number, reason)

    async def stranded(self, alive: set[str], unfinished: set[int]) -> list[int]:
        """Record which nodes are alive; return the unfinished pieces that may wait for ever for a lost encoder.

        Ray restarts the encoder elsewhere only once there is room, and does not say which pieces are queued at it. One
        that it has encoded may be lost on its way to the driver.
        """
        workers = {*self._held, *self._encoders.values(), *self._loading.values()}
        lost = [worker for worker in workers if worker.node not in alive]
        for worker in lost:
            self._record_death(worker, next(iter(self._held.get(worker, ())), None), "its node is gone")
        begun = {number: worker for number, worker in self._worker_of.items() if number in unfinished}
        self._worker_of = {number: worker for number, worker in begun.items() if worker.node in alive}
        if all(worker.stage != "encode" for worker in lost):
            return []
        pieces, self._ready = (begun.keys() - self._worker_of.keys() | self._ready) & unfinished, set()
        return [*pieces]

    async def load(self, worker: WorkerId, actor: str) -> None:
        """Record that an encoder begins to load; if its actor had a process before, that process has died."""
        self._state.events += 1
        if (before := self._loading.get(actor) or self._encoders.get(actor)) is not None:
            self._record_death(before, next(iter(self._held.get(before, ())), None), "its process ended")
        self._loading[actor] = worker

    async def start(self, worker: WorkerId, actor: str) -> None:
        """Record that an encoder has loaded."""
        self._state.events += 1
        self._loading.pop(actor, None)
        self._encoders[actor] = worker
        self._state.started = True

    async def leave(self, actor: str) -> None:
        """Record that an encoder ends as planned."""
        self._encoders.pop(actor, None)
        self._loading.pop(actor, None)

    async def stop(self, error: SdpError) -> None:
        """Record an error that no retry would fix."""
        self._state.error = self._state.error or error

    async def state(self) -> State:
        """Return the present state."""
        return replace(
            self._state,
            encoders=len(self._encoders),
            transforms=sum(worker.stage == "transform" for worker in self._held),
            ready=len(self._ready),
            encoding=sum(len(pieces) for worker, pieces in self._held.items() if worker.stage == "encode"),
            loading=len(self._loading),
        )

    async def at_work(self) -> set[str]:
        """Return the processes that hold pieces or load, as far as the desk knows."""
        holding = (worker for worker, pieces in self._held.items() if pieces)
        return {worker.process for worker in (*holding, *self._loading.values())}

    def _record_death(self, worker: WorkerId, number: int | None, reason: str) -> None:
        self._held.pop(worker, None)
        for actors in (self._encoders, self._loading):
            for actor in [actor for actor, encoder in actors.items() if encoder == worker]:
                del actors[actor]
        self._state.in_a_row[worker.stage] += 1
        self._state.deaths[worker.stage] += 1
        self._state.last[worker.stage] = reason
        if number is not None:
            self._deaths_of.setdefault(self._first.get(number, number), []).append(reason)


def check_state(state: State, placement: Placement, transforms: int, waited_s: float, *, fed: bool = True) -> None:
    """Raise the error that ends the run, if there is one: a final error, endless deaths, or places that never came.

    `transforms` is the most that have run at once, `waited_s` the time since the first piece was fed, if one was.
    """
    if state.error is not None:
        raise state.error
    deaths = state.in_a_row["transform"]
    if deaths >= max(_SYSTEMATIC, _DEATHS_EACH * transforms):
        raise SdpError(
            f"transform: {deaths} transforms failed in a row, the last with {state.last['transform']}; check the "
            "nodes' memory and software"
        )
    deaths = state.in_a_row["encode"]
    if deaths > _DEATHS_EACH * placement.most + 2 * _DEATHS_EACH:
        raise SdpError(
            f"encode: {deaths} encoders died in a row without encoding anything, the last with {state.last['encode']}; "
            "see their logs with `ray logs`"
        )
    wait_s = placement.start_timeout_s
    if not (state.started or state.loading or state.deaths["encode"]) and waited_s > wait_s:
        raise no_place("encode", placement.encoders.progress(placement.least), wait_s)
    if fed and not (state.transformed or transforms) and waited_s > max(_SLOWEST_S, wait_s):
        place = f"{placement.transforms.progress(1)} for a transform that lives (see `ray logs`)"
        raise no_place("encode", place, max(_SLOWEST_S, wait_s), key="transform.node_labels")
