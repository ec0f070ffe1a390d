"""The pipeline's bookkeeping: which worker holds which piece, which piece killed its worker, and when to give up.

Ray restarts what dies and runs it again without limit, so the limits are here.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyarrow as pa

from sdp.console import duration, say
from sdp.encode.chunk import TransformStats
from sdp.encode.placement import Placement
from sdp.encode.work import TRIES
from sdp.errors import SdpError
from sdp.waiting import no_place

_SYSTEMATIC = 100
"""Failed transforms in a row after which the images are not to blame."""
_DEATHS_EACH = 3
"""Deaths in a row that each worker of a stage may have."""
_SLOWEST_S = 900.0
"""Time without a finished transform after which the cluster counts as having no room for one."""
_STALLED_S, _LINES_S = 60.0, 30.0
"""Time without a worker after which a line says so, and the time between such lines."""
_STAGES = ("transform", "encode")


class WorkerId(NamedTuple):
    """A process of a stage."""

    stage: str
    node: str
    process: str


@dataclass(frozen=True, slots=True)
class State:
    """The state of the pipeline, as the desk knows it."""

    encoders: int = 0
    transforms: int = 0
    """Transforms under way."""
    ready: int = 0
    """Transformed pieces that wait for an encoder."""
    busy: bool = False
    """True while a worker has a piece or an encoder loads."""
    transformed_stats: TransformStats = field(default_factory=TransformStats)
    """The sum of all transforms."""
    deaths: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0))
    """Deaths of workers, by stage."""
    in_a_row: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(_STAGES, 0))
    """Deaths since the stage last succeeded, by stage."""
    last: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(_STAGES, ""))
    """The reason for the latest death, by stage."""
    started: bool = False
    """True if any encoder has loaded."""
    transformed: bool = False
    """True if any transform has ended."""
    error: SdpError | None = None


class Desk:
    """An asynchronous actor beside the driver that hands out pieces and records who holds them."""

    def __init__(self) -> None:
        self._ahead: asyncio.Queue[pa.Table | None] = asyncio.Queue()
        self._held: dict[WorkerId, list[int]] = {}
        """Pieces of each worker, oldest first: only the oldest can have killed it."""
        self._worker_of: dict[int, WorkerId] = {}
        self._deaths_of: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._encoders: dict[str, WorkerId] = {}
        """By actor, which outlives its processes."""
        self._loading: set[WorkerId] = set()
        self._ready: set[int] = set()
        self._in_a_row, self._deaths, self._last = dict(State().in_a_row), dict(State().deaths), dict(State().last)
        self._state = State()

    async def feed(self, pieces: list[pa.Table | None]) -> None:
        """Accept further pieces; None ends them."""
        for piece in pieces:
            self._ahead.put_nowait(piece)

    async def next(self) -> pa.Table | None:
        """Wait for the next piece and return it."""
        return await self._ahead.get()

    async def begin(self, worker: WorkerId, number: int) -> str | None:
        """Record that a worker begins a piece; return a reason if the piece has killed too often to be tried again."""
        before = self._worker_of.get(number)
        if before is not None and number in self._held.get(before, ()):
            self._record_death(before, self._held[before][0], "its worker died each time")
        self._ready.discard(number)
        if self._deaths_of.get(number, 0) >= TRIES:
            return self._reasons[number]
        self._worker_of[number] = worker
        self._held.setdefault(worker, []).append(number)
        return None

    async def end(self, worker: WorkerId, number: int, stats: TransformStats | None = None) -> None:
        """Record that a worker has succeeded with a piece."""
        stage, pieces = worker.stage, self._held.get(worker, [])
        if number in pieces:
            pieces.remove(number)
        if not pieces and stage == "transform":
            self._held.pop(worker, None)
        self._in_a_row[stage] = 0
        if stage == "transform":
            self._ready.add(number)
            total = self._state.transformed_stats + (stats or TransformStats())
            self._state = replace(self._state, transformed=True, transformed_stats=total)
        else:
            for account in (self._worker_of, self._deaths_of, self._reasons):
                account.pop(number, None)

    async def fail(self, worker: WorkerId, number: int | None, reason: str) -> None:
        """Record that a worker fails at a piece, or as it starts."""
        self._loading.discard(worker)
        self._record_death(worker, number, reason)

    async def stranded(self, alive: set[str]) -> list[int]:
        """Record which nodes are alive; return the pieces that may wait for ever for a lost encoder.

        Ray restarts the encoder elsewhere only once there is room, and does not say which pieces are queued at it.
        """
        pieces: list[int] = []
        lost_encoder = False
        self._loading = {worker for worker in self._loading if worker.node in alive}
        for worker in [worker for worker in {*self._held, *self._encoders.values()} if worker.node not in alive]:
            numbers = self._held.get(worker, [])
            lost_encoder |= worker.stage == "encode"
            pieces += numbers
            self._record_death(worker, numbers[0] if numbers else None, "its node is gone")
        return [*pieces, *self._ready] if lost_encoder else []

    async def load(self, worker: WorkerId, actor: str) -> None:
        """Record that an encoder begins to load; if its actor had a process before, that process has died."""
        if (before := self._encoders.get(actor)) is not None:
            self._record_death(before, next(iter(self._held.get(before, ())), None), "its process ended")
        self._loading.add(worker)

    async def start(self, worker: WorkerId, actor: str) -> None:
        """Record that an encoder has loaded."""
        self._loading.clear()
        self._encoders[actor] = worker
        self._state = replace(self._state, started=True)

    async def leave(self, actor: str) -> None:
        """Record that an encoder ends as planned."""
        self._encoders.pop(actor, None)

    async def stop(self, error: SdpError) -> None:
        """Record an error that no retry would fix."""
        self._state = replace(self._state, error=self._state.error or error)

    async def state(self) -> State:
        """Return the present state."""
        # An encoder whose process dies while it loads reports nothing: it stays in `_loading`.
        in_a_row = {**self._in_a_row, "encode": self._in_a_row["encode"] + len(self._loading)}
        return replace(
            self._state,
            encoders=len(self._encoders),
            transforms=sum(worker.stage == "transform" for worker in self._held),
            ready=len(self._ready),
            busy=bool(self._loading) or any(self._held.values()),
            in_a_row=in_a_row,
            deaths=dict(self._deaths),
            last=dict(self._last),
        )

    def _record_death(self, worker: WorkerId, number: int | None, reason: str) -> None:
        self._held.pop(worker, None)
        self._encoders = {actor: encoder for actor, encoder in self._encoders.items() if encoder != worker}
        self._in_a_row[worker.stage] += 1
        self._deaths[worker.stage] += 1
        self._last[worker.stage] = reason
        if number is not None:
            self._deaths_of[number] = self._deaths_of.get(number, 0) + 1
            self._reasons[number] = reason


def check_state(state: State, placement: Placement, transforms: int, waited_s: float) -> None:
    """Raise the error that ends the run, if there is one: a final error, endless deaths, or places that never came."""
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
    if not state.started and waited_s > wait_s:
        raise no_place("encode", placement.encoders.progress(placement.least), wait_s)
    if not state.transformed and waited_s > max(_SLOWEST_S, wait_s):
        place = f"{placement.transforms.progress(1)} for a transform"
        raise no_place("encode", place, max(_SLOWEST_S, wait_s), key="transform.node_labels")


@dataclass(slots=True)
class Stall:
    """The time for which pieces have waited although no worker has one: the nodes of a stage are gone, or in use."""

    notify: Callable[[str], None] = say
    _since: float | None = None
    _line_at: float = 0.0

    def check(self, state: State, placement: Placement, now: float, *, waiting: bool) -> None:
        """Name the missing place every half minute; raise an error once it has been missing for too long."""
        if state.busy or not (waiting and state.started and state.transformed):
            self._since = None
            return
        if self._since is None:
            self._since, self._line_at = now, now + _STALLED_S
        waited_s, wait_s = now - self._since, max(_STALLED_S, placement.start_timeout_s)
        if now < self._line_at and waited_s <= wait_s:
            return
        self._line_at = now + _LINES_S
        place, stage = (placement.encoders, "encoder") if state.ready else (placement.transforms, "transform")
        if waited_s > wait_s:
            key = None if state.ready else "transform.node_labels"
            raise no_place("encode", f"{place.progress(1)} for {stage}s", wait_s, key=key)
        self.notify(f"encode: no {stage} runs; waiting for {place.progress(1, duration(waited_s))}")
