"""Online mode on Ray: one pipeline between the images and the trainers.

    trainers ── slices ──> EncoderPool ── sdp.runners.on_ray ──> references ──> trainers

Each trainer requests a bounded number of slices of the epoch's order ahead, and gets references to the results: the
bytes go straight from the encoder's node to the trainer's. Only requested slices are encoded, which is the back-
pressure, and batches do not depend on the order in which slices finish. The pool runs on the driver's node, so that
encoders stay warm when trainers are restarted. If the pool dies, Ray restarts it and repeats the open requests.
"""

import asyncio
import itertools
import queue
import threading
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
from sdp.runners.blocks import pack, unpack
from sdp.runners.desk import WORK
from sdp.runners.on_ray import OnRay
from sdp.runners.placement import Placement
from sdp.train.data.images import ImagesDataset, Slice, crashed_slice
from sdp.train.data.order import RowGroups
from sdp.train.data.rows import joined

if TYPE_CHECKING:
    from sdp.train.data.encoded import Submit

_RETRIES = 3
"""Retries of what was lost with its node."""
_WAIT_S = 0.1
_RECENT = 64
"""Slices of encoders_busy."""


def start_pool(images: ImagesDataset, placement: Placement, board: Any, requests: int) -> Any:
    """Start a pool on this node, for a number of open requests: it lives and dies with the driver's."""
    # Slices bring their row groups along; the list of all of them may be large.
    bare = replace(images, paths=(), row_groups=RowGroups.of([]))
    # Ray starts 1,000 calls of an asynchronous actor at once, unless told otherwise. Requests beyond that would not be
    # encoded, and status would wait behind them. Twice, as those of restarted trainers may still be open.
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
    """An asynchronous actor that feeds slices to a pipeline by turn and returns references to the results."""

    def __init__(self, images: ImagesDataset, placement: Placement, board: Any) -> None:
        """`board` shows lines about encoders that do not come."""
        self._images, self._placement, self._board = images, placement, board
        self._numbers = itertools.count()
        self._waiting: queue.PriorityQueue[_Request] = queue.PriorityQueue()
        self._open: dict[int, _Request] = {}
        self._error: SdpError | None = None
        self._serves = False
        """True once a pipeline is started."""
        self._encoders = self._rows = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        """The seconds for which encoders were busy and idle for the last slices."""
        self._deaths: list[str] = []
        """Deaths of encoders since the last call for the status."""

    # --- calls from trainers -----------------------------------------------------------------------------------------

    async def encode(self, data_slice: Slice | None, turn: int) -> "list[ObjectRef[pa.Table]] | SdpError":
        """Return references to the encoded rows of a slice, in order, or the error that prevents it."""
        if not self._serves:
            self._serves = True
            threading.Thread(target=self._serve, name="sdp-encode", daemon=True).start()
        try:
            return await self._encoded(data_slice, turn)
        except SdpError as error:
            return error

    async def status(self) -> tuple[dict[str, Any], list[str]]:
        """Return the present figures, and the encoders' deaths since the last call."""
        deaths = [self._deaths.pop(0) for _ in range(len(self._deaths))]  # the pipeline may append some meanwhile
        busy, idle = (sum(times) for times in zip((0.0, 0.0), *self._recent, strict=True))
        figures = {
            "encoders": self._encoders,
            "encoders_busy": round(busy / (busy + idle or 1.0), 4) if self._open else 0.0,
            "encoded": self._rows,
        }
        return figures, deaths

    async def has_failed(self) -> bool:
        """Return whether this pool answers every request with an error."""
        return self._error is not None

    async def _encoded(self, data_slice: Slice | None, turn: int) -> "list[ObjectRef[pa.Table]]":
        """Return references to a slice's rows; one that kills encoders is divided until its row is alone."""
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

    # --- the pipeline's thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Feed the pipeline, as long as this process lives."""
        piece_bytes = self._images.slice_rows * 3 * self._images.resolution**2
        try:
            with OnRay(self._images, self._placement, piece_bytes, self._board.announce.remote) as pipeline:
                deaths = 0
                while self._serves:
                    while not pipeline.full and not self._waiting.empty():
                        request = self._waiting.get_nowait()  # no other thread takes any
                        pipeline.feed(request, request.data_slice)
                    for request, note, rows in pipeline.results(_WAIT_S):
                        if request.data_slice is not None:
                            self._recent.append((note.busy_s, note.idle_s))
                            self._rows += note.prepared.items
                        if self._open.pop(request.number, None) is not None:
                            request.result.set_result((note.died, rows))
                    state = pipeline.state()
                    self._encoders = state.workers
                    if state.deaths[WORK] > deaths:
                        self._deaths.append(f"an encoder died and is being replaced: {state.last[WORK]}")
                    deaths = state.deaths[WORK]
        except Exception as error:  # noqa: BLE001 (raised in the trainers)
            self._fail(error if isinstance(error, SdpError) else SdpError(f"encode: {lost.reason_of(error)}"))

    def _fail(self, error: SdpError) -> None:
        """Answer all open requests with an error, and those that follow."""
        self._error = error
        for number in list(self._open):
            if (request := self._open.pop(number, None)) is not None:
                request.result.set_exception(error)
