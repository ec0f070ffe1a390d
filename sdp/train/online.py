"""Online mode on Ray: one pipeline between the images and the trainers.

    trainers ── slices ──> EncoderPool ── sdp.runners.on_ray ──> references ──> trainers

Each trainer requests a bounded number of slices of the epoch's order ahead, and gets references to the results: the
bytes go straight from the encoder's node to the trainer's. Only requested slices are encoded, which is the back-
pressure, and batches do not depend on the order in which slices finish. The pool runs on the driver's node, so that
encoders stay warm when trainers are restarted. If the pool dies, Ray restarts it and repeats the open requests.
"""

import asyncio
import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from sdp.errors import SdpError
from sdp.ray import cluster, lost
from sdp.runners.blocks import Note, pack, unpack
from sdp.runners.desk import WORK, State
from sdp.runners.on_ray import OnRay
from sdp.runners.placement import Placement
from sdp.train.data.images import ImagesDataset, Slice, crashed_slice
from sdp.train.data.order import RowGroups
from sdp.train.data.rows import joined

if TYPE_CHECKING:
    from sdp.train.data.encoded import Submit

_RETRIES = 3
"""Retries of what was lost with its node."""
_CALIBRATE_S = 10.0
"""Time for which the trainers' pace is measured before the number of encoders is chosen."""
_WAIT_S = 0.1
_TOLERANCE = 0.02
"""Share of an encoder that may be missing before another one is started."""
WARM_UP = 2
"""Steps of a trainer, and slices of each encoder, that are not measured since they are slower than later ones."""
_RECENT = 64
"""Slices of encoders_busy."""


def start_pool(images: ImagesDataset, placement: Placement, board: Any, requests: int) -> Any:
    """Start a pool on this node, for a number of open requests: it lives and dies with the driver's."""
    # Slices bring their row groups along; the list of all of them may be large.
    bare = replace(images, paths=(), row_groups=RowGroups.of([]))
    # Ray starts 1,000 calls of an asynchronous actor at once, unless told otherwise. Requests beyond that would not be
    # encoded, and status and pace would wait behind them. Twice, as those of restarted trainers may still be open.
    return cluster.start_beside_driver(
        EncoderPool,
        bare,
        placement,
        board,
        max_concurrency=max(1000, 2 * requests),
        max_restarts=_RETRIES,
        max_task_retries=_RETRIES,
        watched=False,  # the board is, and a pool that fails is replaced
    )


def submitter(pool: Any) -> "Submit":
    """Return a trainer's function that submits slices to the pool.

    A slice's turn is its number among this trainer's slices, and the pool encodes by turn: trainers wait for each other
    at every step, so every trainer's n-th slice comes before any trainer's next.
    """
    turns = itertools.count()

    def submit(data_slice: Slice | None) -> Callable[[], Any]:
        turn = next(turns)
        request = pool.encode.remote(data_slice, turn)

        def result() -> Any:
            nonlocal request
            for _ in range(_RETRIES):
                references = ray.get(request)
                if isinstance(references, SdpError):
                    raise references
                try:
                    parts = [unpack(block)[1] for block in ray.get(references)]
                    return joined(parts) if len(parts) > 1 else parts[0]
                except ObjectLostError:  # its node is gone
                    request = pool.encode.remote(data_slice, turn)
            raise SdpError(f"encode: a result was lost {_RETRIES} times; check the encoders' nodes")

        return result

    return submit


@dataclass(order=True, slots=True)
class _Request:
    turn: int
    number: int
    data_slice: Slice | None = field(compare=False)
    result: "Future[tuple[str | None, ObjectRef[pa.Table]]]" = field(compare=False, default_factory=Future)
    """The reason why its workers died, if they did, and a reference to the rows."""


class EncoderPool:
    """An asynchronous actor that feeds slices to a pipeline by turn and returns references to the results.

    The number of encoders is chosen once for each number of trainers, when the pace of both is known. It is fixed for a
    pipeline, so another pipeline of the chosen size takes over as soon as its first encoder is ready.
    """

    def __init__(self, images: ImagesDataset, placement: Placement, board: Any) -> None:
        """`board` shows lines about encoders that do not come."""
        self._images, self._placement, self._board = images, placement, board
        self._numbers = itertools.count()
        self._waiting: queue.PriorityQueue[_Request] = queue.PriorityQueue()
        self._open: dict[int, _Request] = {}
        self._error: SdpError | None = None
        self._serving = self._target = 0
        """The number of encoders of the pipeline that is fed, and of the one that takes over."""
        self._trainers = 0
        self._pace: dict[int, tuple[int, float]] = {}
        self._paced_at: float | None = None
        self._chosen = placement.least == placement.most
        self._encoders = self._slices = self._rows = self._warm_rows = 0
        self._warm_busy_s = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        """The seconds for which encoders were busy and idle for the last slices."""
        self._changes: list[str] = []

    # --- calls from trainers -----------------------------------------------------------------------------------------

    async def encode(self, data_slice: Slice | None, turn: int) -> "list[ObjectRef[pa.Table]] | SdpError":
        """Return references to the encoded rows of a slice, in order, or the error that prevents it."""
        if not self._target:
            self._target = self._serving = self._placement.least
            self._start(self._target)
        try:
            return await self._encoded(data_slice, turn)
        except SdpError as error:
            return error

    async def pace(self, trainers: int, rank: int, samples: int, busy_s: float) -> None:
        """Record the samples that all trainers have consumed in `busy_s`, this trainer's time without data waits."""
        if trainers != self._trainers:
            self._trainers, self._pace, self._paced_at = trainers, {}, time.monotonic()
            self._chosen = self._placement.least == self._placement.most
        before, seconds = self._pace.get(rank, (0, 0.0))
        self._pace[rank] = before + samples, seconds + busy_s
        self._choose()

    async def status(self) -> tuple[dict[str, Any], list[str]]:
        """Return the present figures, and the changes since the last call."""
        changes = [self._changes.pop(0) for _ in range(len(self._changes))]  # a pipeline may append some meanwhile
        busy, idle = (sum(times) for times in zip((0.0, 0.0), *self._recent, strict=True))
        figures = {
            "encoders": self._encoders,
            "encoders_busy": round(busy / (busy + idle or 1.0), 4) if self._open else 0.0,
            "encoded": self._rows,
        }
        return figures, changes

    async def has_failed(self) -> bool:
        """Return whether this pool answers every request with an error."""
        return self._error is not None

    async def _encoded(self, data_slice: Slice | None, turn: int) -> "list[ObjectRef[pa.Table]]":
        request = _Request(turn, next(self._numbers), data_slice)
        request.result.set_running_or_notify_cancel()  # so that a trainer that is gone does not cancel it
        self._open[request.number] = request
        self._waiting.put(request)
        if self._error is not None:
            raise self._error
        died, rows = await asyncio.wrap_future(request.result)
        if died is None:
            return [rows]
        if data_slice is None:
            raise SdpError(f"encode: the empty caption cannot be encoded ({died})")
        if len(data_slice) == 1:
            return [ray.put(pack(None, await asyncio.to_thread(crashed_slice, self._images, data_slice, died)))]
        parts = await asyncio.gather(*(self._encoded(part, turn) for part in data_slice.narrow()))
        return [reference for part in parts for reference in part]

    # --- the number of encoders --------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose the number of encoders, once their pace and the trainers' are known."""
        paces = [samples / seconds for samples, seconds in self._pace.values() if samples and seconds > 0]
        measured = self._paced_at is not None and time.monotonic() - self._paced_at > _CALIBRATE_S
        if self._chosen or not measured or not paces or not self._warm_rows:
            return
        self._chosen = True
        encoder = self._warm_rows / self._warm_busy_s
        self._target, reason = encoders_needed(max(paces), encoder, self._placement.least, self._placement.most)
        self._changes.append(reason)
        if self._target != self._serving:
            self._start(self._target)
            if self._target < self._serving:  # the cluster may have no room for both
                self._serving = self._target

    # --- a thread for each pipeline ----------------------------------------------------------------------------------

    def _start(self, encoders: int) -> None:
        threading.Thread(target=self._serve, args=(encoders,), name="sdp-encode", daemon=True).start()

    def _serve(self, encoders: int) -> None:
        """Run a pipeline of some encoders, from when the first is ready until another pipeline takes over."""
        placement = replace(self._placement, least=encoders, most=encoders)
        piece_bytes = self._images.slice_rows * 3 * self._images.resolution**2
        fed: dict[int, _Request] = {}
        try:
            with OnRay(self._images, placement, piece_bytes, self._board.announce.remote) as pipeline:
                state = State()
                while fed or encoders in (self._serving, self._target):
                    while encoders == self._serving and not pipeline.full and (request := self._next()) is not None:
                        pipeline.feed(request, request.data_slice)
                        fed[request.number] = request
                    for request, note, rows in pipeline.results(_WAIT_S):
                        if request.data_slice is not None:
                            self._count(note, encoders)
                        del fed[request.number]
                        if self._open.pop(request.number, None) is not None:
                            request.result.set_result((note.died, rows))
                    before, state = state, pipeline.state()
                    if state.started and encoders == self._target:
                        self._serving = encoders
                    self._note_deaths(before, state, encoders)
        except Exception as error:  # noqa: BLE001 (raised in the trainers)
            for request in fed.values():
                self._waiting.put(request)
            self._fail(error if isinstance(error, SdpError) else SdpError(f"encode: {lost.reason_of(error)}"), encoders)

    def _next(self) -> _Request | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _count(self, note: Note, encoders: int) -> None:
        self._recent.append((note.busy_s, note.idle_s))
        self._rows += note.prepared.items
        self._slices += 1
        if self._slices > WARM_UP * encoders:
            self._warm_rows += note.prepared.items
            self._warm_busy_s += note.busy_s

    def _note_deaths(self, before: State, state: State, encoders: int) -> None:
        if state.deaths[WORK] > before.deaths[WORK]:
            self._changes.append(f"an encoder died and is being replaced: {state.last[WORK]}")
        if encoders == self._serving:
            self._encoders = state.workers

    def _fail(self, error: SdpError, encoders: int) -> None:
        """Keep the present encoders if the failed pipeline was to replace them; otherwise fail all open requests."""
        if encoders != self._serving:
            self._target = self._serving
            self._changes.append(f"the number of encoders stays {self._serving}: {error}")
            return
        self._error = error
        for number in list(self._open):
            if (request := self._open.pop(number, None)) is not None:  # a pipeline may have its result meanwhile
                request.result.set_exception(error)


def encoders_needed(trainers: float, encoder: float, least: int, most: int) -> tuple[int, str]:
    """Return the number of encoders to run, and the reason, from both sides' images per second.

    Both paces leave out waiting, so the number of encoders during the measurement does not matter.
    """
    needed = math.ceil(trainers / encoder - _TOLERANCE)
    count = max(least, min(most, needed))
    text = (
        f"{count} encoder{'s' * (count != 1)}: the trainers take {trainers:,.1f} img/s, one encoder makes "
        f"{encoder:,.1f}, which is {trainers / encoder:.2f} encoders"
    )
    if needed > most:
        text += f" (encode.num_workers.max is {most})"
    elif needed < least:
        text += f" (encode.num_workers.min is {least})"
    return count, text
