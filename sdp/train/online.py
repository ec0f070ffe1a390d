"""Online mode on Ray: a pool of encoders between the images and the trainers.

    trainer ── slice ──> Pool ── transform (tasks, CPU nodes) ── encode (actors, GPU nodes) ──> trainer

Trainers ask the pool for slices of the epoch's order, a bounded number each, and get references to what came out: the
bytes go from the encoder's node to the trainer's. Nothing begins that no trainer has asked for, which is the back-
pressure. The pool lives beside the driver, so that its encoders stay warm when trainers are started again; it remembers
nothing that matters: when it dies, what it was asked for is asked for again.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import ray
from ray import ObjectRef
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from sdp import cluster, telemetry
from sdp.config import TrainConfig
from sdp.encode.occupancy import Occupancy
from sdp.errors import SdpError, Unavailable, UserError, one_line
from sdp.train.callbacks.base import Callback, StepReport
from sdp.train.data.images import (
    EncodedSlice,
    ImagesDataset,
    Slice,
    Transformed,
    encode_slice,
    given_up,
    load_encoder,
    transform_slice,
)
from sdp.train.data.online import Ask
from sdp.train.data.order import Blocks
from sdp.train.data.pacing import Pacer, Tuner
from sdp.train.data.turns import T, Turns

if TYPE_CHECKING:
    from sdp.train.trainer import Trainer

_AT_ONCE = 2
"""Slices that an encoder holds: while one is encoded the next one is fetched to its node."""
_TRIES = 2
"""Deaths of a slice after which it is cut, or given up if it is a single row."""
_PATIENCE = 3
"""How often storage that does not answer, or something lost with its node, is tried again."""
_LOOK_S = 5.0
"""How often the number of encoders is considered."""
_TELL_S = 1.0
_WARM_STEPS = 2
_LATELY_S = 60.0
"""Of what time it is told how busy encoders are."""
_SLOWEST_S = 900.0
"""By then one transform has ended, or there is no place for any."""
_DIED = (WorkerCrashedError, NodeDiedError, OutOfMemoryError)


@dataclass(frozen=True, slots=True)
class Staff:
    """What the pool may use."""

    least: int
    most: int
    accelerator: str | None
    gpus: float
    """Of an encoder."""
    encoder_cpus: float
    transform_cpus: float
    transforms: int
    """The most at once."""
    first_transforms: int
    chunks: int
    """Slices between the begin of their transform and the end of their encoding: what memory has room for."""
    labels: dict[str, str]
    """Of the nodes for transforms."""
    start_timeout_s: float
    run: str
    """Where the run is written, for the metrics."""


def plan_staff(config: TrainConfig, images: ImagesDataset, resources: dict[str, float], trainers: int) -> Staff:
    """Encoders and transforms beside so many trainers, by what the cluster has."""
    encode, transform = config.encode, config.transform
    cluster.require_accelerator("encode.accelerator", encode.accelerator, can_grow=config.scaling.can_grow)
    least, most = encode.least, encode.most
    cpus = int(resources.get("CPU", 1))
    gpus = encode.gpus_per_worker if cluster.on_gpus("encode", encode) else 0.0
    beside = cpus - trainers
    # Where there are too few CPUs for everybody to reserve one, encoders and transforms share what there is. But where
    # nodes come on demand, what reserves nothing brings none, and would run on the head.
    encoder_cpus = 1.0 if gpus or config.scaling.can_grow or beside > most else 0.0
    free = int(beside - most * encoder_cpus)
    pixels = images.slice_rows * 3 * images.resolution**2
    fits = int(0.5 * resources.get("object_store_memory", 0) / pixels)
    return Staff(
        least=least,
        most=most,
        accelerator=encode.accelerator,
        gpus=gpus,
        encoder_cpus=encoder_cpus,
        transform_cpus=1.0 if free > 0 or config.scaling.can_grow else 0.0,
        transforms=transform.concurrency or max(2, 4 * cpus),
        first_transforms=transform.concurrency or max(1, free),
        chunks=max(fits, 2 * most + 1),
        labels=dict(transform.node_labels),
        start_timeout_s=encode.wait_s,
        run=config.output.uri,
    )


def start_pool(images: ImagesDataset, staff: Staff) -> Any:
    """A pool on this node: it lives and dies with the driver's."""
    # What a row group is comes with each slice; the list of all of them may be large.
    bare = replace(images, paths=(), blocks=Blocks.of([]))
    pool: Any = ray.remote(Pool)
    return pool.options(
        num_cpus=0, max_restarts=_PATIENCE, max_task_retries=_PATIENCE, scheduling_strategy=cluster.this_node()
    ).remote(bare, staff)


def asker(pool: Any) -> Ask:
    """A trainer's way to ask the pool.

    Trainers wait for each other at every step, so a slice's turn is how many this one has asked for before it: each
    trainer's n-th comes before anybody's (n + 1)-th.
    """
    asked = itertools.count()

    def ask(some: Slice) -> Callable[[], EncodedSlice]:
        turn = next(asked)
        request = pool.encode.remote(some, turn)

        def get() -> EncodedSlice:
            nonlocal request
            for _ in range(_PATIENCE):
                answer = ray.get(request)
                if isinstance(answer, SdpError):
                    raise answer
                try:
                    return EncodedSlice.joined(ray.get(answer))
                except ObjectLostError:  # it was encoded, and its node is gone
                    request = pool.encode.remote(some, turn)
            raise SdpError(
                f"{some.uri}: what was encoded of it was lost {_PATIENCE} times; look at the encoders' nodes"
            )

        return get

    return ask


@dataclass
class FollowPool(Callback):
    """Tells the pool the trainers' pace, and the run what the pool does."""

    pool: Any
    announce: Callable[[str], Any]
    _steps: int = 0
    _samples: int = 0
    _busy_s: float = 0.0
    _told_at: float = 0.0
    _asked: Any = None

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:
        self._steps += 1
        if self._steps <= _WARM_STEPS:  # the first ones are slower than all others
            return
        self._samples += trainer.batch_size
        # Of all workers the one that waited longest for data is the one that waited for no other worker.
        self._busy_s += report.seconds - report.parts.get("data", 0.0)
        now = time.monotonic()
        if now - self._told_at > _TELL_S:
            self.pool.pace.remote(trainer.world.rank, self._samples, self._busy_s)
            self._told_at, self._samples, self._busy_s = now, 0, 0.0
            if trainer.world.is_main and self._asked is None:
                self._asked = self.pool.news.remote()
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            self._hear(trainer)

    def on_end(self, trainer: "Trainer") -> None:
        if trainer.world.is_main:
            self._asked = self._asked or self.pool.news.remote()
            self._hear(trainer)

    def _hear(self, trainer: "Trainer") -> None:
        figures, changes = ray.get(self._asked)
        self._asked = None
        trainer.gauges.update(figures)
        for reason in changes:
            trainer.checkpointer.run.record("encoders", count=figures["encoders"], reason=reason)
            self.announce(reason)


@dataclass(slots=True, eq=False)
class _Encoder:
    actor: Any
    ready: bool = False
    leaving: bool = False
    holds: list[object] = field(default_factory=list)
    """Oldest first."""
    latest: int = 0
    """When it was given a slice, counted in slices of all."""
    busy_s: float = 0.0
    idle_s: float = 0.0


def next_encoder(encoders: Iterable[_Encoder]) -> _Encoder | None:
    """Who encodes the next slice, if anybody has room: of those with the least to do, who has had none for longest.

    So where there are more than it takes, all have some: who never has any would not tell that it stands idle.
    """
    free = (e for e in encoders if e.ready and not e.leaving and len(e.holds) < _AT_ONCE)
    return min(free, key=lambda e: (len(e.holds), e.latest), default=None)


@dataclass(frozen=True, slots=True)
class _Note:
    """What the pool hears of an encoding."""

    rows: int
    busy_s: float
    idle_s: float
    """Of the encoder, since its first slice."""


class _Died(Exception):
    """A worker died with a slice in its hands; whether it was that slice's doing."""

    def __init__(self, blamed: bool) -> None:
        self.blamed = blamed


class Lately:
    """The share of their time that encoders have been busy of late, rather than since they began."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._then: deque[tuple[float, float, float]] = deque([(-math.inf, 0.0, 0.0)])
        self._share = 0.0

    def share(self, now: float, busy_s: float, idle_s: float, resting: bool) -> float:
        """By what has been told up to now. They tell when they have encoded something: those that rest tell nothing."""
        while len(self._then) > 1 and self._then[1][0] <= now - self._seconds:
            self._then.popleft()
        _, busy_then, idle_then = self._then[0]
        busy, idle = busy_s - busy_then, idle_s - idle_then
        self._then.append((now, busy_s, idle_s))
        if busy + idle > 0:
            self._share = busy / (busy + idle)
        elif resting:
            self._share = 0.0
        return self._share


class Pool:
    """An asynchronous actor: who encodes what, and how many there are."""

    def __init__(self, images: ImagesDataset, staff: Staff) -> None:
        self._images, self._staff = images, staff
        self._told = ray.put(images)
        self._pacer = Pacer(staff.least, staff.most)
        self._tuner = Tuner(staff.transforms, staff.first_transforms)
        self._encoders: list[_Encoder] = []
        self._given = itertools.count(1)
        self._for_transform, self._for_encoder = Turns(self._take_transform), Turns(self._take_encoder)
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: float | None = None
        self._ever_ready = self._ever_transformed = False
        self._error: Exception | None = None
        self._transforming = self._chunks = 0
        self._deaths = self._deaths_in_a_row = 0
        self._rows = self._rows_then = 0
        self._busy_s = self._idle_s = self._busy_then = 0.0
        self._lately = Lately(_LATELY_S)
        self._pace: dict[int, tuple[int, float]] = {}
        self._changes: list[str] = []

    # --- for trainers ------------------------------------------------------------------------------------------------

    async def encode(self, some: Slice, turn: int) -> "list[ObjectRef[EncodedSlice]] | SdpError":
        """References to what comes out for a slice, in order; or why nothing does."""
        self._begin()
        try:
            return await self._made(some, turn)
        except Exception as error:
            cause = error if isinstance(error, SdpError) else getattr(error, "cause", None)
            if isinstance(cause, SdpError):
                return cause
            raise

    async def pace(self, rank: int, samples: int, busy_s: float) -> None:
        """What the trainers have taken, all together, in a time in which this one did not wait for data."""
        before, seconds = self._pace.get(rank, (0, 0.0))
        self._pace[rank] = before + samples, seconds + busy_s

    async def news(self) -> tuple[dict[str, Any], list[str]]:
        """Figures as of now, and what has been changed since the last time."""
        changes, self._changes = self._changes, []
        ready = [encoder for encoder in self._encoders if encoder.ready]
        resting = all(not encoder.holds for encoder in ready)
        figures = {
            "encoders": len(ready),
            "encoders_busy": round(self._lately.share(time.monotonic(), self._busy_s, self._idle_s, resting), 4),
            "encoded": self._rows,
            "encoder_deaths": self._deaths,
        }
        return figures, changes

    # --- a slice -----------------------------------------------------------------------------------------------------

    async def _made(self, some: Slice, turn: int) -> "list[ObjectRef[EncodedSlice]]":
        deaths = lost = 0
        while deaths < _TRIES:
            try:
                return [await self._once(some, turn)]
            except _Died as death:
                deaths += death.blamed
                lost += not death.blamed
            except ObjectLostError:
                lost += 1
            if lost > _PATIENCE * self._staff.most + _PATIENCE:
                raise SdpError(f"{some.uri}: its pixels were lost {lost} times; look at the nodes that transform")
        if len(some) == 1:
            return [ray.put(await asyncio.to_thread(given_up, self._images, some))]
        made = await asyncio.gather(*(self._made(part, turn) for part in some.cut()))
        return [ref for refs in made for ref in refs]

    async def _once(self, some: Slice, turn: int) -> "ObjectRef[EncodedSlice]":
        await self._its_turn(self._for_transform, turn)
        try:
            try:
                chunk = await self._transformed(some)
            finally:
                self._transforming -= 1
            return await self._encoded(chunk, turn)
        finally:
            self._chunks -= 1
            self._admit()

    def _take_transform(self) -> Literal[True] | None:
        ready = sum(encoder.ready for encoder in self._encoders)
        starved = any(encoder.ready and not encoder.holds for encoder in self._encoders) and not self._for_encoder
        at_once = self._tuner.transforms(max(ready, self._pacer.aim), starved=starved)
        most = min(self._staff.chunks, at_once + 2 * _AT_ONCE * max(ready, 1))
        if self._transforming >= at_once or self._chunks >= most:
            return None
        self._transforming += 1
        self._chunks += 1
        return True

    async def _transformed(self, some: Slice) -> "ObjectRef[Transformed]":
        staff = self._staff
        for patience in range(_PATIENCE, -1, -1):
            task: Any = _transform.options(num_cpus=staff.transform_cpus, label_selector=staff.labels or None)
            chunk, seconds = task.remote(self._told, some)
            try:
                self._tuner.transformed(await seconds)
                self._ever_transformed = True
                return chunk  # type: ignore[no-any-return]  # Ray's tasks come without types
            except _DIED as error:
                self._deaths += 1
                raise _Died(blamed=True) from error
            except RayTaskError as error:
                if not patience or not isinstance(getattr(error, "cause", None), Unavailable):
                    raise
        raise AssertionError

    def _take_encoder(self) -> tuple[_Encoder, object] | None:
        encoder = next_encoder(self._encoders)
        if encoder is None:
            return None
        token = object()
        encoder.holds.append(token)
        encoder.latest = next(self._given)
        return encoder, token

    async def _encoded(self, chunk: "ObjectRef[Transformed]", turn: int) -> "ObjectRef[EncodedSlice]":
        encoder, token = await self._its_turn(self._for_encoder, turn)
        rows, note = encoder.actor.encode.remote(chunk)
        try:
            told: _Note = await note
        except RayActorError as error:
            # Of what it held, the oldest was being encoded: only that can have killed it.
            blamed = encoder.holds[0] is token and not encoder.leaving
            self._bury(encoder, error)
            raise _Died(blamed) from error
        except BaseException:
            encoder.holds.remove(token)
            raise
        encoder.holds.remove(token)
        self._deaths_in_a_row = 0
        self._rows += told.rows
        self._busy_s += told.busy_s - encoder.busy_s
        self._idle_s += told.idle_s - encoder.idle_s
        if told.rows:
            self._tuner.encoded(told.busy_s - encoder.busy_s)
        encoder.busy_s, encoder.idle_s = told.busy_s, told.idle_s
        return rows  # type: ignore[no-any-return]  # Ray's actors come without types

    # --- encoders ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._begun is None:
            self._begun = time.monotonic()
            for _ in range(self._pacer.aim):
                self._add_encoder()
            self._go(self._tend())

    async def _tend(self) -> None:
        """Look after the number of encoders, for as long as the pool lives."""
        while self._error is None:
            await asyncio.sleep(_LOOK_S if self._ever_ready else 0.5)
            self._look()
            for encoder in [e for e in self._encoders if e.leaving and not e.holds]:
                self._encoders.remove(encoder)
                ray.kill(encoder.actor)
            waited_s = time.monotonic() - (self._begun or 0)
            if not self._ever_ready and waited_s > self._staff.start_timeout_s:
                self._error = self._no_place()
            if not self._ever_transformed and waited_s > self._patience_s:
                self._error = self._no_place_for_transforms()
            self._admit()

    def _look(self) -> None:
        rows, busy = self._rows - self._rows_then, self._busy_s - self._busy_then
        paces = [samples / seconds for samples, seconds in self._pace.values() if samples and seconds > 0]
        if not rows or not paces:
            return
        self._rows_then, self._busy_then, self._pace = self._rows, self._busy_s, {}
        reason = self._pacer.look(max(paces), rows / max(busy, 1e-9))
        if reason is None:
            return
        self._changes.append(reason)
        staying = [encoder for encoder in self._encoders if not encoder.leaving]
        for _ in range(self._pacer.aim - len(staying)):
            self._add_encoder()
        for encoder in staying[self._pacer.aim :]:
            encoder.leaving = True

    def _add_encoder(self) -> None:
        staff = self._staff
        placed = cluster.placement(staff.accelerator, staff.gpus)
        actor: Any = _ENCODER.options(num_cpus=staff.encoder_cpus, max_concurrency=_AT_ONCE, **placed)
        encoder = _Encoder(actor.remote(self._told, staff.run))
        self._encoders.append(encoder)
        self._go(self._started(encoder))

    async def _started(self, encoder: _Encoder) -> None:
        try:
            await encoder.actor.start.remote()
            encoder.ready = self._ever_ready = True
        except RayActorError as error:
            self._bury(encoder, error)
        except RayTaskError as error:
            self._error = getattr(error, "cause", None) or error
        self._admit()

    def _bury(self, encoder: _Encoder, error: Exception) -> None:
        """Put another one in its place, once."""
        if encoder not in self._encoders:
            return
        self._encoders.remove(encoder)
        if encoder.leaving:
            return
        self._deaths += 1
        self._deaths_in_a_row += 1
        self._changes.append(f"an encoder died and is replaced: {one_line(error, 200)}")
        if self._deaths_in_a_row > _PATIENCE * self._staff.most + 2 * _PATIENCE:
            self._error = SdpError(
                f"encode: {self._deaths_in_a_row} encoders died one after another without encoding anything, the last "
                f"of {one_line(error, 200)}; see their logs with `ray logs`"
            )
            return
        self._add_encoder()

    def _no_place(self) -> SdpError:
        staff = self._staff
        what = f"{staff.accelerator or 'a GPU'} with {staff.gpus:g} GPUs free" if staff.gpus else "a free CPU"
        there = ", ".join(sorted(cluster.accelerators())) or "no accelerators"
        return UserError(
            f"encode.accelerator: no node offered {what} within {staff.start_timeout_s:g} s; the cluster has {there}; "
            "let the cluster grow, ask for another type, or raise encode.wait_s"
        )

    @property
    def _patience_s(self) -> float:
        return max(_SLOWEST_S, self._staff.start_timeout_s)

    def _no_place_for_transforms(self) -> SdpError:
        labels = self._staff.labels
        where = f" with the labels {cluster.told_labels(labels)}" if labels else ""
        return UserError(
            f"transform.node_labels: no transform ended within {self._patience_s:g} s: no node{where} has a CPU free "
            "beside trainers and encoders; let the cluster grow, or ask for other nodes"
        )

    # --- waiting -----------------------------------------------------------------------------------------------------

    async def _its_turn(self, queue: Turns[T], turn: int) -> T:
        place = queue.join(turn)
        self._admit()
        return await place

    def _admit(self) -> None:
        """Whatever may have become free."""
        for queue in (self._for_encoder, self._for_transform):
            if self._error is not None:
                queue.fail(self._error)
            else:
                queue.admit()

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds it but weakly
        task.add_done_callback(self._tasks.discard)


@ray.remote(num_returns=2, max_retries=0)
def _transform(images: ImagesDataset, some: Slice) -> tuple[Transformed, float]:
    began = time.perf_counter()
    made = transform_slice(images, some)
    return made, time.perf_counter() - began


class EncoderActor:
    """An encoder in a process of its own, kept warm from slice to slice."""

    def __init__(self, images: ImagesDataset, run: str) -> None:
        self._images, self._run = images, run
        self._occupancy = Occupancy()

    def start(self) -> None:
        """Load the models."""
        telemetry.begin(self._run).process("encoder")
        self._encoder = load_encoder(self._images)

    @ray.method(num_returns=2)
    def encode(self, made: Transformed) -> tuple[EncodedSlice, _Note]:
        with self._occupancy:
            encoded = encode_slice(self._images, self._encoder, made)
        used = self._occupancy
        return encoded, _Note(int(np.count_nonzero(encoded.weights)), used.busy_s, used.idle_s)


_ENCODER: Any = ray.remote(max_restarts=0, max_task_retries=0)(EncoderActor)
