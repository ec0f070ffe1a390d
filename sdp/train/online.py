"""Online mode on Ray: one encode pipeline between the images and the trainers.

    trainers ── slices ──> Pool ── sdp.encode.pipeline ──> references ──> trainers

Trainers ask the pool for slices of the epoch's order, a bounded number each, and get references to what came out: the
bytes go from the encoder's node to the trainer's. Nothing begins that no trainer has asked for, which is the back-
pressure; what trainers get does not depend on the order in which slices are finished. The pool lives beside the driver,
so that its encoders stay warm when trainers are started again; when it dies, what it was asked for is asked for again.
"""

import asyncio
import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from sdp import cluster
from sdp.encode.blocks import Note, pack, unpack
from sdp.encode.chunk import TransformStats
from sdp.encode.desk import State
from sdp.encode.pipeline import Pipeline
from sdp.encode.placement import Placement
from sdp.encode.work import embed_empty
from sdp.errors import SdpError, one_line
from sdp.train.callbacks.base import Callback, StepReport
from sdp.train.data.images import (
    EncodedSlice,
    ImagesDataset,
    Slice,
    Transformed,
    crashed_slice,
    encode_slice,
    load_encoder,
    transform_slice,
)
from sdp.train.data.online import Submit
from sdp.train.data.order import RowGroups
from sdp.train.data.pacing import encoders_needed

if TYPE_CHECKING:
    from sdp.encode.encoder import Encoder
    from sdp.train.trainer import Trainer

_PATIENCE = 3
"""How often something that was lost with its node is asked for again."""
_CALIBRATE_S = 10.0
"""How long the trainers' pace is measured before the number of encoders is chosen."""
_WAIT_S = 0.1
_TELL_S = 1.0
_WARM = 2
"""Steps of a trainer, and slices of each encoder, that are slower than all later ones."""
_LATELY_S = 60.0
"""The time over which encoders_busy is taken."""


@dataclass(frozen=True)
class EncodeSlices:
    """The pipeline's stages for slices. An item is a slice, or None for the empty caption's embedding."""

    images: ImagesDataset

    def transform(self, item: Slice | None) -> tuple[Transformed | None, TransformStats]:
        """Read a slice and make crops and tokens of it."""
        return (None, TransformStats()) if item is None else transform_slice(self.images, item)

    def load(self) -> "Encoder":
        """Load the encoder."""
        return load_encoder(self.images)

    def encode(self, encoder: "Encoder", value: Transformed | None) -> EncodedSlice | NDArray[np.float16]:
        """Encode what came out of `transform`."""
        if value is None:
            return embed_empty(self.images.spec, encoder)
        return encode_slice(self.images, encoder, value)


def start_pool(images: ImagesDataset, placement: Placement) -> Any:
    """A pool on this node: it lives and dies with the driver's."""
    # What a row group is comes with each slice; the list of all of them may be large.
    bare = replace(images, paths=(), row_groups=RowGroups.of([]))
    pool: Any = ray.remote(Pool)
    return pool.options(
        num_cpus=0, max_restarts=_PATIENCE, max_task_retries=_PATIENCE, scheduling_strategy=cluster.this_node()
    ).remote(bare, placement)


def submitter(pool: Any) -> Submit:
    """A trainer's way to ask the pool.

    Trainers wait for each other at every step, so a slice's turn is how many this one has asked for before it: each
    trainer's n-th comes before anybody's (n + 1)-th.
    """
    asked = itertools.count()

    def ask(some: Slice | None) -> Callable[[], Any]:
        turn = next(asked)
        request = pool.encode.remote(some, turn)

        def get() -> Any:
            nonlocal request
            for _ in range(_PATIENCE):
                answer = ray.get(request)
                if isinstance(answer, SdpError):
                    raise answer
                try:
                    parts = [unpack(block)[1] for block in ray.get(answer)]
                    return parts[0] if some is None else EncodedSlice.joined(parts)
                except ObjectLostError:  # it was encoded, and its node is gone
                    request = pool.encode.remote(some, turn)
            raise SdpError(f"encode: a result was lost {_PATIENCE} times; look at the encoders' nodes")

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
        if self._steps <= _WARM:
            return
        self._samples += trainer.batch_size
        # Of all workers the one that waited longest for data is the one that waited for no other worker.
        self._busy_s += report.seconds - report.parts.get("data", 0.0)
        now = time.monotonic()
        if now - self._told_at > _TELL_S:
            self.pool.pace.remote(trainer.world.size, trainer.world.rank, self._samples, self._busy_s)
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


@dataclass(order=True, slots=True)
class _Asked:
    turn: int
    number: int
    some: Slice | None = field(compare=False)
    answer: "Future[tuple[str | None, ObjectRef[pa.Table]]]" = field(compare=False, default_factory=Future)
    """Why its workers died, or a reference to what came out."""


class Lately:
    """The share of their time that encoders have been busy of late, rather than since they began."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._notes: deque[tuple[float, float, float]] = deque()

    def add(self, now: float, busy_s: float, idle_s: float) -> None:
        """Note an encoder's time since its previous slice."""
        self._notes.append((now, busy_s, idle_s))

    def share(self, now: float) -> float:
        """Return the share by the notes of this time, or by the latest one."""
        while len(self._notes) > 1 and self._notes[0][0] <= now - self._seconds:
            self._notes.popleft()
        busy, idle = (sum(note[column] for note in self._notes) for column in (1, 2))
        return busy / (busy + idle) if busy else 0.0


class Pool:
    """An asynchronous actor: feeds slices to a pipeline by turn, and answers with references.

    The number of encoders is chosen once for a number of trainers, when the pace of both is known. A pipeline has a
    fixed number of encoders, so that another one takes over, as soon as its first encoder is ready.
    """

    def __init__(self, images: ImagesDataset, placement: Placement) -> None:
        self._images, self._placement = images, placement
        self._numbers = itertools.count()
        self._waiting: queue.PriorityQueue[_Asked] = queue.PriorityQueue()
        self._open: dict[int, _Asked] = {}
        self._error: SdpError | None = None
        self._serving = self._aim = 0
        """Encoders of the pipeline that is fed, and of the one that is to be."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._trainers = 0
        self._pace: dict[int, tuple[int, float]] = {}
        self._paced_at: float | None = None
        self._chosen = placement.least == placement.most
        self._encoders = self._deaths = self._slices = self._rows = self._warm_rows = 0
        self._warm_busy_s = 0.0
        self._lately = Lately(_LATELY_S)
        self._changes: list[str] = []

    # --- for trainers ------------------------------------------------------------------------------------------------

    async def encode(self, some: Slice | None, turn: int) -> "list[ObjectRef[pa.Table]] | SdpError":
        """Return references to what comes out for a slice, in order; or why nothing does."""
        if not self._aim:
            self._aim = self._serving = self._placement.least
            self._go(asyncio.to_thread(self._serve, self._aim))
        try:
            return await self._made(some, turn)
        except SdpError as error:
            return error

    async def pace(self, trainers: int, rank: int, samples: int, busy_s: float) -> None:
        """Note what all trainers have taken, in a time in which this one did not wait for data."""
        if trainers != self._trainers:
            self._trainers, self._pace, self._paced_at = trainers, {}, time.monotonic()
            self._chosen = self._placement.least == self._placement.most
        before, seconds = self._pace.get(rank, (0, 0.0))
        self._pace[rank] = before + samples, seconds + busy_s
        self._choose()

    async def news(self) -> tuple[dict[str, Any], list[str]]:
        """Return figures as of now, and what has changed since the last time."""
        changes, self._changes = self._changes, []
        figures = {
            "encoders": self._encoders,
            "encoders_busy": round(self._lately.share(time.monotonic()), 4) if self._open else 0.0,
            "encoded": self._rows,
            "encoder_deaths": self._deaths,
        }
        return figures, changes

    async def _made(self, some: Slice | None, turn: int) -> "list[ObjectRef[pa.Table]]":
        asked = _Asked(turn, next(self._numbers), some)
        self._open[asked.number] = asked
        self._waiting.put(asked)
        if self._error is not None:
            raise self._error
        died, rows = await asyncio.wrap_future(asked.answer)
        if died is None:
            return [rows]
        if some is None:
            raise SdpError(f"encode: the empty caption cannot be encoded ({died})")
        if len(some) == 1:
            return [ray.put(pack(None, await asyncio.to_thread(crashed_slice, self._images, some, died)))]
        made = await asyncio.gather(*(self._made(part, turn) for part in some.narrow()))
        return [ref for refs in made for ref in refs]

    # --- the number of encoders --------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose how many encoders there are to be, once their pace and the trainers' are known."""
        paces = [samples / seconds for samples, seconds in self._pace.values() if samples and seconds > 0]
        measured = self._paced_at is not None and time.monotonic() - self._paced_at > _CALIBRATE_S
        if self._chosen or not measured or not paces or not self._warm_rows:
            return
        self._chosen = True
        encoder = self._warm_rows / self._warm_busy_s
        self._aim, reason = encoders_needed(max(paces), encoder, self._placement.least, self._placement.most)
        self._changes.append(reason)
        if self._aim != self._serving:
            self._go(asyncio.to_thread(self._serve, self._aim))
            if self._aim < self._serving:  # there may be no place for both
                self._serving = self._aim

    # --- in a thread for each pipeline -------------------------------------------------------------------------------

    def _serve(self, encoders: int) -> None:
        """Run a pipeline until another one has taken over; it takes over itself as soon as an encoder is ready."""
        placement = replace(self._placement, least=encoders, most=encoders)
        piece_bytes = self._images.slice_rows * 3 * self._images.resolution**2
        fed: dict[int, _Asked] = {}
        try:
            with Pipeline(EncodeSlices(self._images), placement, piece_bytes) as pipeline:
                state = State()
                while fed or encoders in (self._serving, self._aim):
                    while encoders == self._serving and not pipeline.full and (asked := self._next()) is not None:
                        pipeline.feed(asked, asked.some)
                        fed[asked.number] = asked
                    for asked, note, rows in pipeline.results(_WAIT_S):
                        if asked.some is not None:
                            self._count(note, encoders)
                        del fed[asked.number]
                        self._open.pop(asked.number).answer.set_result((note.died, rows))
                    before, state = state, pipeline.state()
                    if state.started and encoders == self._aim:
                        self._serving = encoders
                    self._look(before, state, encoders)
        except Exception as error:  # noqa: BLE001 (told to those who wait)
            for asked in fed.values():
                self._waiting.put(asked)
            self._fail(error if isinstance(error, SdpError) else SdpError(f"encode: {one_line(error)}"), encoders)

    def _next(self) -> _Asked | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _count(self, note: Note, encoders: int) -> None:
        self._lately.add(time.monotonic(), note.busy_s, note.idle_s)
        self._rows += note.transformed.items
        self._slices += 1
        if self._slices > _WARM * encoders:
            self._warm_rows += note.transformed.items
            self._warm_busy_s += note.busy_s

    def _look(self, before: State, state: State, encoders: int) -> None:
        self._deaths += sum(state.deaths.values()) - sum(before.deaths.values())
        if state.deaths["encode"] > before.deaths["encode"]:
            self._changes.append(f"an encoder died and is replaced: {state.last['encode']}")
        if encoders == self._serving:
            self._encoders = state.encoders

    def _fail(self, error: SdpError, encoders: int) -> None:
        """Stay with the encoders that there are, where more have found no place; else tell everybody who waits."""
        if encoders != self._serving:
            self._aim = self._serving
            self._changes.append(f"the number of encoders stays {self._serving}: {error}")
            return
        self._error = error
        for asked in list(self._open.values()):
            asked.answer.set_exception(error)

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds it but weakly
        task.add_done_callback(self._tasks.discard)
