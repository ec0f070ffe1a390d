"""The stages on Ray Data: pieces through preparing tasks (CPU) and workers, which are actors (GPU).

    feed ── _read_pieces (one task) ── prepare (tasks) ── Worker (actors, min … max) ── results

A result is the piece's key, a note and a reference: the rows stay on the node of their worker until they are fetched.
Every block has one row (see `blocks`), so Ray Data neither merges nor splits pieces.
"""

import contextlib
import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pyarrow as pa
import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayError, RayTaskError

from sdp import telemetry
from sdp.console import counted, duration, say
from sdp.errors import SdpError, Unavailable, named
from sdp.ray import cluster, internals, lost
from sdp.ray.waiting import Stall
from sdp.runners.blocks import Note, note_of, pack, unpack
from sdp.runners.desk import PREPARE, WORK, Desk, State, WorkerId, check_state
from sdp.runners.placement import Placement
from sdp.runners.runner import Result, RowsLost
from sdp.runners.stages import Occupancy, Preparing, Stages

_CHECK_NODES_S = 5.0
_CLOSE_S = 10.0
_AHEAD_S = 60.0
_AT_WORKER = 4
"""Pieces for each worker: two at it, one ready, and one under way to it."""
_TASK_RETRIES = 3
"""Retries of a task whose process dies."""
_REPORT_S = 1.0
_WAIT_S, _WAITS = 30.0, 10
"""Seconds of a wait for the desk's answer, and waits for one."""


@dataclass(slots=True, eq=False)
class _Sent:
    key: Any
    item: Any
    numbers: list[int] = field(default_factory=list)


class OnRay:
    """A `Runner` on Ray Data; its rows stay on the nodes of their workers."""

    def __init__(
        self, stages: Stages, placement: Placement, piece_bytes: int = 1, notify: Callable[[str], None] = say
    ) -> None:
        """Build the dataset; `piece_bytes` is the size of a prepared piece in an object store."""
        self._placement, self._piece_bytes, self._prepares = placement, piece_bytes, isinstance(stages, Preparing)
        self._stages = ray.put(stages)
        self._desk = cluster.start_beside_driver(Desk, self._prepares, placement.tries, max_concurrency=1000)
        self._results: queue.SimpleQueue[tuple[Note, ObjectRef[pa.Table]] | BaseException | None] = queue.SimpleQueue()
        self._began, self._fed = time.monotonic(), False
        self._checked_nodes = -math.inf
        self._numbers = itertools.count()
        self._sent: dict[int, _Sent] = {}
        """The pieces without a result, by number; one that was sent again has several."""
        self._room = self._most_preparing = self._worked = 0
        self._busy_s = 0.0
        self._stall = Stall(placement.job, placement.places(prepares=self._prepares), notify=notify)
        dataset = _dataset(self._stages, placement, self._desk, prepares=self._prepares)
        self._thread = threading.Thread(target=self._run, args=(dataset,), name="sdp-on-ray", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(RayError):
            if kind is None:
                self._desk.feed.remote(next(self._numbers), None)
                self._thread.join(_CLOSE_S)
            # Pieces still under way fail without the desk.
            ray.kill(self._desk)
        self._thread.join(_CLOSE_S)

    @property
    def full(self) -> bool:
        """True while the object stores have no room for further pieces."""
        self._check_nodes()
        return len(self._sent) >= self._room

    def feed(self, key: Any, item: Any) -> None:
        """Send an item into the pipeline; its result is returned with the key, which is not sent."""
        if not self._fed:
            self._fed, self._began = True, time.monotonic()
        self._send(_Sent(key, item))

    def results(self, timeout_s: float) -> Iterator[Result]:
        """Wait up to `timeout_s` for a result, then yield every result that is ready."""
        with contextlib.suppress(queue.Empty):
            result = self._results.get(timeout=timeout_s)
            while True:
                if isinstance(result, BaseException):
                    self.state()  # raises the desk's reason, if it has one
                    what = f"{self._placement.job}: Ray Data failed ({lost.reason_of(result)})"
                    raise SdpError(f"{what}; run the job again to continue") from result
                if result is not None:
                    note, rows = result
                    if note.died is not None:
                        self.state()  # an error of ours is no crash of the rows
                    if note.number in self._sent:  # otherwise it had a result under another number
                        sent = self._sent[note.number]
                        for number in sent.numbers:
                            del self._sent[number]
                        if note.busy_s > 0:
                            self._worked += 1
                        self._busy_s += note.busy_s
                        yield sent.key, note, rows
                result = self._results.get_nowait()

    def state(self) -> State:
        """Return the desk's state; raise the error that ends the run, if there is one."""
        self._check_nodes()
        state: State = self._ask(self._desk.state.remote())
        self._most_preparing = max(self._most_preparing, state.preparing)
        now, placement = time.monotonic(), self._placement
        check_state(state, placement, self._most_preparing, now - self._began, fed=self._fed and self._prepares)
        has_begun = state.started and (state.any_prepared or not self._prepares)
        self._stall.wait_s = placement.wait_s if has_begun else math.inf
        preparing = f"{counted(state.preparing, 'transform')} under way, " if self._prepares else ""
        ready, workers = counted(state.ready, "piece"), counted(state.workers, placement.role)
        detail = f"{preparing}{ready} ready, {state.working} at {workers}, {state.loading} loading"
        self._stall.check(state.events if self._sent else now, now, detail, busy=self._anyone_works)
        return state

    def task(self, function: Callable[..., Any], pieces: Sequence[Any], *arguments: Any) -> "Future[Any]":
        task: Any = _task
        rows = [piece if isinstance(piece, ObjectRef) else pack(None, piece) for piece in pieces]
        inner: Future[Any] = task.remote(self._stages, function, arguments, *rows).future()
        outer: Future[Any] = Future()
        inner.add_done_callback(lambda done: _hand_over(done, outer))
        return outer

    def value(self, rows: "ObjectRef[pa.Table]") -> Any:
        try:
            return unpack(ray.get(rows))[1]
        except ObjectLostError as error:
            raise RowsLost from error

    def _anyone_works(self) -> bool:
        """Return whether a process that holds a piece or loads is alive.

        The desk hears of a death only when Ray has room for the next process.
        """
        return not internals.live_workers().isdisjoint(self._ask(self._desk.at_work.remote()))

    def _ask(self, answer: "ObjectRef[Any]") -> Any:
        """Return an answer of the desk, which takes milliseconds unless its process is suspended."""
        for _ in range(_WAITS):  # a job that was suspended with its desk misses one
            if ray.wait([answer], timeout=_WAIT_S)[0]:
                return ray.get(answer)
        raise SdpError(
            f"{self._placement.job}: the process that hands out the work (Ray's actor Desk, on the driver's node) has "
            f"not answered for {duration(_WAITS * _WAIT_S)}; run the job again to continue"
        )

    def _send(self, sent: _Sent) -> None:
        number = next(self._numbers)
        sent.numbers.append(number)
        self._sent[number] = sent
        self._desk.feed.remote(number, pack(number, sent.item), sent.numbers[0])

    def _check_nodes(self) -> None:
        """Find out how many pieces the cluster has room for, and send again those that a lost node held."""
        if time.monotonic() - self._checked_nodes < _CHECK_NODES_S:
            return
        self._checked_nodes = time.monotonic()
        piece_s = self._busy_s / self._worked if self._worked else math.inf
        self._room = room(internals.resources(), self._piece_bytes, self._placement.most, piece_s)
        alive = {node["NodeID"] for node in cluster.nodes_with({})}
        stranded = self._ask(self._desk.stranded.remote(alive, {*self._sent}))
        for sent in {self._sent[number] for number in stranded}:
            self._send(sent)

    def _run(self, dataset: Any) -> None:
        try:
            for schema, block in internals.blocks(dataset):
                self._results.put((note_of(schema), block))
            self._results.put(None)
        except BaseException as error:  # noqa: BLE001 (raised in the driver's thread)
            self._results.put(error)


def room(resources: Mapping[str, float], piece_bytes: int, workers: int, piece_s: float) -> int:
    """Return the number of pieces that may be under way on a cluster whose workers take `piece_s` for each.

    More than workers consume in a minute, which is longer than a preparation takes, would only fill memory. Two for
    each worker are always allowed, to keep it busy.
    """
    consumed = workers * max(_AT_WORKER, math.ceil(_AHEAD_S / piece_s))
    prepared = 2 * int(resources.get("CPU", 0)) + workers * _AT_WORKER
    fits = int(0.5 * resources.get("object_store_memory", 0) / piece_bytes)
    return max(min(consumed, prepared, fits), 2 * workers + 1)


def _hand_over(done: "Future[Any]", future: "Future[Any]") -> None:
    """Give a task's result, or its error as it was raised, to another future."""
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    elif isinstance(error, ObjectLostError):
        future.set_exception(RowsLost())
    else:
        cause = error.cause if isinstance(error, RayTaskError) else error
        future.set_exception(lost.unwrapped(error) or cause)


def _dataset(stages: "ObjectRef[Stages]", placement: Placement, desk: Any, *, prepares: bool) -> Any:
    """Return the dataset that takes the desk's pieces through their preparation, if any, and the workers."""
    # A dataset whose driver was killed keeps its share of the cluster for this long. Online, the driver is an actor,
    # which lacks the variables that cluster.connect sets.
    os.environ.setdefault("RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S", "30")
    from ray.data import ActorPoolStrategy, TaskPoolStrategy, from_items

    with cluster.data_settings(
        target_max_block_size=1, max_consecutive_actor_init_deaths=-1, actor_pool_util_upscaling_threshold=1.0
    ):
        start: Any = from_items([{"number": 0}], override_num_blocks=1)
        one, here = TaskPoolStrategy(size=1), {cluster.NODE_LABEL: ray.get_runtime_context().get_node_id()}
        pieces = start.map_batches(
            _read_pieces, fn_args=(desk,), batch_format="pyarrow", compute=one, num_cpus=0, label_selector=here
        )
        if prepares:
            pieces = pieces.map_batches(
                prepare,
                fn_args=(stages, desk),
                batch_size=None,
                batch_format="pyarrow",
                compute=TaskPoolStrategy(size=placement.prepare_concurrency),
                num_cpus=placement.prepare_cpus,
                max_calls=0,  # no limit, as by default; with the options of workers, it would run inside them
                label_selector=dict(placement.prepare_labels) or None,
            )
        return pieces.map_batches(
            type(placement.role.title().replace(" ", ""), (Worker,), {}),  # Ray's dashboard shows this name
            fn_constructor_args=(stages, desk, placement.role, placement.output),
            batch_size=1,  # Ray Data requires a number with GPUs
            batch_format="pyarrow",
            # One piece is worked on while the next is fetched; a third would only wait.
            compute=ActorPoolStrategy(
                min_size=placement.least,
                max_size=placement.most,
                max_tasks_in_flight_per_actor=max(2, placement.at_once),
                max_concurrent_calls_per_actor=placement.at_once,
                enable_true_multi_threading=True,
            ),
            num_cpus=placement.cpus,
            **cluster.worker_options(placement.labels, placement.gpus),
        )


# --- on the workers ---------------------------------------------------------------------------------------------------


def _read_pieces(_: pa.Table, desk: Any) -> Iterator[pa.Table]:
    """Yield all pieces, by number: if this process dies, Ray calls this again, and ignores the results that it has."""
    for number in itertools.count():
        if (piece := ray.get(desk.piece.remote(number))) is None:
            return
        yield piece


def prepare(block: pa.Table, stages: "ObjectRef[Preparing]", desk: Any) -> pa.Table:
    """Prepare one piece."""
    number, item = unpack(block)
    worker = _worker_id(PREPARE)
    note = Note(number, prepared_on=worker.node)
    while (died := ray.get(desk.begin.remote(worker, number))) is None:
        try:
            value, stats = ray.get(stages).prepare(item)
        except SdpError as error:
            ray.get(desk.stop.remote(error))
            return pack(replace(note, died=str(error)), None)
        except Exception as error:  # noqa: BLE001 (the desk counts it, and ends the run if it persists)
            ray.get(desk.fail.remote(worker, number, named(error)))
        else:
            ray.get(desk.end.remote(worker, number, stats))
            return pack(replace(note, prepared=stats), value)
    return pack(replace(note, died=died), None)


class Worker:
    """A worker in its own process, which keeps its model from piece to piece."""

    def __init__(self, stages: "ObjectRef[Stages]", desk: Any, role: str, output: str) -> None:
        cluster.hide_gpus_unless_granted()
        self._stages, self._desk = ray.get(stages), desk
        self._occupancy = Occupancy()
        self._id = _worker_id(WORK)
        self._actor = ray.get_runtime_context().get_actor_id() or ""
        ray.get(desk.load.remote(self._id, self._actor))
        try:
            telemetry.begin(output).process(role)
            self._worker = self._stages.load()
        except Exception as error:
            if isinstance(error, SdpError) and not isinstance(error, Unavailable):
                ray.get(desk.stop.remote(error))
            else:
                ray.get(desk.fail.remote(self._id, None, named(error)))
            raise
        ray.get(desk.start.remote(self._id, self._actor))
        if hasattr(self._worker, "figures"):
            threading.Thread(target=self._report, name="sdp-report", daemon=True).start()

    def __call__(self, block: pa.Table) -> pa.Table:
        """Work on one piece."""
        head, value = unpack(block)
        note = head if isinstance(head, Note) else Note(head)
        if note.died is None:
            died = ray.get(self._desk.begin.remote(self._id, note.number))
            note = replace(note, worked_on=self._id.node, died=died)
        if note.died is not None:
            return pack(None, None, note=note)
        try:
            began = time.monotonic()
            rows = self._stages.work(self._worker, value)
            busy_s, idle_s = self._occupancy.add(began, time.monotonic())
        except SdpError as error:
            ray.get(self._desk.stop.remote(error))
            return pack(None, None, note=replace(note, died=str(error)))
        except Exception as error:  # noqa: BLE001 (a process does not recover from a device fault)
            ray.get(self._desk.fail.remote(self._id, note.number, named(error)))
            os._exit(1)
        ray.get(self._desk.end.remote(self._id, note.number))
        if hasattr(self._worker, "figures"):
            self._desk.report.remote(self._id, self._worker.figures())
        limits = getattr(self._worker, "batch_limits", {})
        return pack(None, rows, note=replace(note, busy_s=busy_s, idle_s=idle_s, batch_limits=limits))

    def _report(self) -> None:
        pause = threading.Event()
        while not pause.wait(_REPORT_S):
            self._desk.report.remote(self._id, self._worker.figures())

    def __del__(self) -> None:
        """Tell the desk that the pool shrinks."""
        with contextlib.suppress(Exception):
            self._desk.leave.remote(self._actor)


@ray.remote(num_cpus=0.1, max_retries=_TASK_RETRIES)
def _task(stages: Stages, function: Callable[..., Any], arguments: Sequence[Any], *pieces: pa.Table) -> Any:
    return function(stages, [unpack(piece)[1] for piece in pieces], *arguments)


def _worker_id(stage: str) -> WorkerId:
    context = ray.get_runtime_context()
    return WorkerId(stage, context.get_node_id(), context.get_worker_id())
