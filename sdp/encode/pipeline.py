"""Pieces of work through transform tasks (CPU) and encoder actors (GPU) on Ray Data, in whatever order they finish.

    feed ── ReadPieces ── MapBatches(transform) (tasks) ── MapBatches(Encode) (actors, min … max) ── results

A result is the piece's key, a note and a reference: what was encoded stays where it is until somebody fetches it. Every
block has one row that holds one pickled object, so that Ray Data neither merges nor splits pieces; the note travels in
the block's schema. `process` and online training feed it; what they do with a piece is their `Stages`.

Ray restarts what dies and runs it again, without a limit of its own. The limits are the `Desk`'s: it knows which worker
holds which piece, and so which piece a dead worker was at. A piece that has killed twice is handed out no more.
"""

import asyncio
import contextlib
import itertools
import math
import os
import pickle
import queue
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.annotations import RayDeprecationWarning

from sdp import cluster, telemetry
from sdp.config.process import EncoderConfig, TransformConfig
from sdp.encode.chunk import TransformStats
from sdp.encode.occupancy import Occupancy
from sdp.encode.work import TRIES
from sdp.errors import SdpError, Unavailable, one_line
from sdp.waiting import Place, no_place

_PATIENCE = 3
"""Retries of a storage that does not answer; also how many deaths in a row each encoder may have."""
_TASK_RETRIES = 30
"""Ray's own retries of a call: above those that the desk allows, for workers that die before they reach it."""
_SYSTEMATIC = 100
"""Failed transforms in a row after which the images are not to blame."""
_SLOWEST_S = 900.0
"""Without a finished transform by then, there is no place for any."""
_LOOK_S = 5.0
"""How often to see which nodes the cluster has."""
_CLOSE_S = 10.0
_LARGE = 65_536
"""Bytes from which an array is not copied into the pickle."""
_NOTE = b"sdp.note"


class Stages(Protocol):
    """What is done with a piece: pickled once, and run in workers."""

    def transform(self, item: Any) -> "tuple[Any, TransformStats]":
        """Read and transform an item."""

    def load(self) -> Any:
        """Load an encoder."""

    def encode(self, encoder: Any, value: Any) -> Any:
        """Encode what `transform` returned."""


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of a piece that has gone through the pipeline."""

    number: int
    transformed: TransformStats = field(default_factory=TransformStats)
    transformed_on: str = ""
    encoded_on: str = ""
    busy_s: float = 0.0
    idle_s: float = 0.0
    """The encoder's, since its previous piece."""
    batch_limits: Mapping[int, int] = field(default_factory=dict)
    died: str | None = None
    """Why there is no result, where the piece killed or failed its workers."""
    error: SdpError | None = None
    """An error that no retry mends."""


Result = tuple[Any, Note, "ObjectRef[pa.Table]"]
"""A piece's key, what is known of it, and where its rows are."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the stages run."""

    least: int
    most: int
    accelerator: str | None
    gpus: float
    """Of an encoder."""
    encoder_cpus: float
    transform_cpus: float
    start_timeout_s: float
    labels: Mapping[str, str]
    """Of the nodes for transforms."""
    concurrency: int | None
    """The most transforms at once."""
    output: str
    """What the job writes to: the name of its metrics."""

    @property
    def encoders(self) -> Place:
        """What the least number of encoders reserves."""
        bundle = {name: need for name, need in (("GPU", self.gpus), ("CPU", self.encoder_cpus)) if need}
        labels = {cluster.ACCELERATOR_LABEL: self.accelerator} if self.accelerator else {}
        return Place("encode", bundle, self.least, self.least, labels)

    @property
    def transforms(self) -> Place:
        """What a transform reserves."""
        return Place("encode", {"CPU": self.transform_cpus} if self.transform_cpus else {}, 1, 1, self.labels)

    @property
    def places(self) -> list[Place]:
        """What has to be there before a job begins."""
        return [place for place in (self.encoders, self.transforms) if place.bundle]


def plan_placement(
    encode: EncoderConfig,
    transform: TransformConfig,
    output: str,
    resources: Mapping[str, float],
    *,
    beside: int = 0,
    grows: bool = False,
) -> Placement:
    """Return where the sections `encode` and `transform` place the stages; `beside` CPUs are others'.

    Where there are too few CPUs for everybody to reserve one, encoders and transforms share what there is. But where
    nodes come on demand, what reserves nothing brings none, and would run on the head.
    """
    cpus = int(resources.get("CPU", 0)) - beside
    grows = grows or not resources.get("CPU")
    gpus = encode.gpus_per_worker if cluster.on_gpus("encode", encode) else 0.0
    encoder_cpus = 1.0 if gpus or grows or cpus > encode.least else 0.0
    transform_cpus = 1.0 if grows or not beside or cpus > encode.least * encoder_cpus else 0.0
    return Placement(
        least=encode.least,
        most=encode.most,
        accelerator=encode.accelerator,
        gpus=gpus,
        encoder_cpus=encoder_cpus,
        transform_cpus=transform_cpus,
        start_timeout_s=encode.wait_s,
        labels=transform.node_labels,
        concurrency=transform.concurrency or (None if transform_cpus else max(2, cpus)),
        output=output,
    )


@dataclass(frozen=True, slots=True)
class State:
    """What the desk has seen."""

    encoders: int = 0
    transforms: int = 0
    """Under way."""
    ready: int = 0
    """Transformed pieces that wait for an encoder."""
    transformed_stats: TransformStats = field(default_factory=TransformStats)
    """All transforms so far."""
    deaths: Mapping[str, int] = field(default_factory=lambda: {"transform": 0, "encode": 0})
    """Deaths of workers, by stage."""
    in_a_row: Mapping[str, int] = field(default_factory=lambda: {"transform": 0, "encode": 0})
    """Deaths since something last succeeded, by stage."""
    last: Mapping[str, str] = field(default_factory=lambda: {"transform": "", "encode": ""})
    """What the last worker died of, by stage."""
    started: bool = False
    """Whether any encoder has loaded."""
    transformed: bool = False
    """Whether any transform has ended."""
    error: SdpError | None = None


Worker = tuple[str, str, str]
"""A stage, a node and a process."""


class Desk:
    """An asynchronous actor beside the driver: hands out pieces, and keeps account of who holds which."""

    def __init__(self) -> None:
        self._ahead: asyncio.Queue[pa.Table | None] = asyncio.Queue()
        self._held: dict[Worker, list[int]] = {}
        """Oldest first: only that one can have killed its worker."""
        self._at: dict[int, Worker] = {}
        self._deaths: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._encoders: dict[str, Worker] = {}
        """By actor, which outlives its processes."""
        self._loading: set[Worker] = set()
        self._ready: set[int] = set()
        self._in_a_row, self._died, self._last = dict(State().in_a_row), dict(State().deaths), dict(State().last)
        self._state = State()

    async def feed(self, pieces: list[pa.Table | None]) -> None:
        """Take further pieces; None ends them."""
        for piece in pieces:
            self._ahead.put_nowait(piece)

    async def next(self) -> pa.Table | None:
        """Return the next piece, once there is one."""
        return await self._ahead.get()

    async def begin(self, worker: Worker, number: int) -> str | None:
        """Note that a worker begins a piece; return why it must not, where the piece has killed too often."""
        before = self._at.get(number)
        if before is not None and number in self._held.get(before, ()):
            self._bury(before, self._held[before][0], "its worker died each time")
        self._ready.discard(number)
        if self._deaths.get(number, 0) >= TRIES:
            return self._reasons[number]
        self._at[number] = worker
        self._held.setdefault(worker, []).append(number)
        return None

    async def end(self, worker: Worker, number: int, made: TransformStats | None = None) -> None:
        """Note that a worker has succeeded with a piece."""
        stage, held = worker[0], self._held.get(worker, [])
        if number in held:
            held.remove(number)
        if not held and stage == "transform":
            self._held.pop(worker, None)
        self._in_a_row[stage] = 0
        if stage == "transform":
            self._ready.add(number)
            self._state = replace(
                self._state,
                transformed=True,
                transformed_stats=self._state.transformed_stats + (made or TransformStats()),
            )
        else:
            for account in (self._at, self._deaths, self._reasons):
                account.pop(number, None)

    async def fail(self, worker: Worker, number: int | None, reason: str) -> None:
        """Note that a worker fails, at a piece or as it starts."""
        self._loading.discard(worker)
        self._bury(worker, number, reason)

    async def stranded(self, alive: set[str]) -> list[int]:
        """Note which nodes are alive; if an encoder's is gone, return the pieces that may wait for it for ever.

        Ray starts the encoder again elsewhere, once there is room. Nobody tells which pieces were queued at it.
        """
        held: list[int] = []
        encoders = False
        for worker in [worker for worker in {*self._held, *self._encoders.values()} if worker[1] not in alive]:
            numbers = self._held.get(worker, [])
            encoders |= worker[0] == "encode"
            held += numbers
            self._bury(worker, numbers[0] if numbers else None, "its node is gone")
        return [*held, *self._ready] if encoders else []

    async def load(self, worker: Worker, actor: str) -> None:
        """Note that an encoder begins to load; where the actor had a process before, that one has died."""
        if (before := self._encoders.get(actor)) is not None:
            self._bury(before, next(iter(self._held.get(before, ())), None), "its process ended")
        self._loading.add(worker)

    async def start(self, worker: Worker, actor: str) -> None:
        """Note that an encoder has loaded."""
        self._loading.clear()
        self._encoders[actor] = worker
        self._state = replace(self._state, started=True)

    async def leave(self, actor: str) -> None:
        """Note that an encoder ends in peace."""
        self._encoders.pop(actor, None)

    async def stop(self, error: SdpError) -> None:
        """Note an error that no retry mends."""
        self._state = replace(self._state, error=self._state.error or error)

    async def state(self) -> State:
        """Return what there is to see now."""
        transforms = sum(worker[0] == "transform" for worker in self._held)
        # Encoders whose process dies while it loads tell nobody: they are those that began and are neither.
        rows = {**self._in_a_row, "encode": self._in_a_row["encode"] + len(self._loading)}
        encoders, ready = len(self._encoders), len(self._ready)
        return replace(
            self._state,
            encoders=encoders,
            transforms=transforms,
            ready=ready,
            in_a_row=rows,
            deaths=dict(self._died),
            last=dict(self._last),
        )

    def _bury(self, worker: Worker, number: int | None, reason: str) -> None:
        self._held.pop(worker, None)
        self._encoders = {actor: encoder for actor, encoder in self._encoders.items() if encoder != worker}
        self._in_a_row[worker[0]] += 1
        self._died[worker[0]] += 1
        self._last[worker[0]] = reason
        if number is not None:
            self._deaths[number] = self._deaths.get(number, 0) + 1
            self._reasons[number] = reason


@dataclass(slots=True, eq=False)
class _Sent:
    key: Any
    item: Any
    done: bool = False


class Pipeline:
    """A running pipeline, for one driver thread. Use it as a context manager: it ends with the block."""

    def __init__(self, stages: Stages, placement: Placement, piece_bytes: int) -> None:
        """`piece_bytes` is what a transformed piece takes of an object store."""
        self._placement, self._piece_bytes = placement, piece_bytes
        desk: Any = ray.remote(Desk)
        self._desk = desk.options(num_cpus=0, max_concurrency=1000, scheduling_strategy=cluster.this_node()).remote()
        self._results: queue.SimpleQueue[tuple[Note, ObjectRef[pa.Table]] | BaseException | None] = queue.SimpleQueue()
        self._began, self._fed = time.monotonic(), False
        self._looked = -math.inf
        self._numbers = itertools.count()
        self._sent: dict[int, _Sent] = {}
        self._room = self._most_transforms = 0
        dataset = _dataset(stages, placement, self._desk)
        self._thread = threading.Thread(target=self._run, args=(dataset,), name="sdp-encode", daemon=True)

    def __enter__(self) -> "Pipeline":
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(RayError):
            if kind is None:
                self._desk.feed.remote([None])
                self._thread.join(_CLOSE_S)
            # What is still under way ends with the desk.
            ray.kill(self._desk)
        self._thread.join(_CLOSE_S)

    @property
    def under_way(self) -> list[Any]:
        """The keys of pieces without a result, in the order in which they were fed."""
        return list(dict.fromkeys(sent.key for sent in self._sent.values() if not sent.done))

    @property
    def full(self) -> bool:
        """Whether as many pieces are under way as the object stores have room for."""
        self._look()
        return len(self._sent) >= self._room

    def feed(self, key: Any, item: Any) -> None:
        """Send an item into the pipeline; its result comes with the key, which stays here."""
        if not self._fed:
            self._fed, self._began = True, time.monotonic()
        self._send(_Sent(key, item))

    def results(self, timeout_s: float) -> Iterator[Result]:
        """Wait for results, if need be, and return all that there are."""
        with contextlib.suppress(queue.Empty):
            result = self._results.get(timeout=timeout_s)
            while True:
                if isinstance(result, BaseException):
                    self.state()  # the desk knows the reason, where there is one
                    line = one_line(result)[-300:]
                    raise SdpError(f"encode: Ray Data ended ({line}); run it again: it continues") from result
                if result is not None:
                    note, rows = result
                    sent = self._sent.pop(note.number)
                    if note.error is not None:
                        raise note.error
                    if not sent.done:  # of a piece that was sent twice the first result counts
                        sent.done = True
                        yield sent.key, note, rows
                result = self._results.get_nowait()

    def state(self) -> State:
        """Return what the desk has seen; raise what ends the run."""
        state: State = ray.get(self._desk.state.remote())
        self._most_transforms = max(self._most_transforms, state.transforms)
        refuse(state, self._placement, self._most_transforms, time.monotonic() - self._began)
        return state

    def _send(self, sent: _Sent) -> None:
        number = next(self._numbers)
        self._sent[number] = sent
        self._desk.feed.remote([pack(number, sent.item)])

    def _look(self) -> None:
        """See what the cluster has: how many pieces it has room for, and which have to be sent again."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]  # Ray's
        # What half of the object stores hold, but enough for everybody.
        fits = int(0.5 * resources.get("object_store_memory", 0) / self._piece_bytes)
        wanted = 2 * int(resources.get("CPU", 0)) + 4 * self._placement.most
        self._room = max(min(fits, wanted), 2 * self._placement.most + 1)
        for number in ray.get(self._desk.stranded.remote({node["NodeID"] for node in cluster.nodes_with({})})):
            if number in self._sent and not self._sent[number].done:
                self._send(self._sent[number])

    def _run(self, dataset: Any) -> None:
        try:
            for bundle in dataset.iter_internal_ref_bundles():
                note = pickle.loads(bundle.schema.metadata[_NOTE])
                (entry,) = bundle.blocks
                self._results.put((note, entry.ref))
            self._results.put(None)
        except BaseException as error:  # noqa: BLE001 (raised in the driver's thread)
            self._results.put(error)


def refuse(state: State, placement: Placement, transforms: int, waited_s: float) -> None:
    """Raise what ends the run: an error that no retry mends, deaths without end, or a place that does not come."""
    if state.error is not None:
        raise state.error
    died = state.in_a_row["transform"]
    if died >= max(_SYSTEMATIC, _PATIENCE * transforms):
        raise SdpError(
            f"transform: {died} failed one after another, the last of {state.last['transform']}; see whether the nodes "
            "have the memory and the software that it takes"
        )
    died = state.in_a_row["encode"]
    if died > _PATIENCE * placement.most + 2 * _PATIENCE:
        raise SdpError(
            f"encode: {died} encoders died one after another without encoding anything, the last of "
            f"{state.last['encode']}; see their logs with `ray logs`"
        )
    wait_s = placement.start_timeout_s
    if not state.started and waited_s > wait_s:
        raise no_place("encode", placement.encoders.progress(placement.least), wait_s)
    if not state.transformed and waited_s > max(_SLOWEST_S, wait_s):
        place = f"{placement.transforms.progress(1)} for a transform"
        raise no_place("encode", place, max(_SLOWEST_S, wait_s), key="transform.node_labels")


def pack(head: Any, value: Any, *, note: Note | None = None) -> pa.Table:
    """Return a block of one row that holds both objects; large arrays are not copied into the pickle."""
    buffers: list[memoryview] = []

    def outside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _LARGE:
            buffers.append(raw)
        return raw.nbytes < _LARGE

    pickled = pickle.dumps((head, value), protocol=5, buffer_callback=outside)
    sizes = struct.pack(f"<{len(buffers)}q", *(raw.nbytes for raw in buffers))
    data = buffers[0] if len(buffers) == 1 else b"".join(buffers)
    columns = {"sizes": _cell(sizes), "pickle": _cell(pickled), "data": _cell(data)}
    table = pa.table(columns)
    return table if note is None else table.replace_schema_metadata({_NOTE: pickle.dumps(note)})


def unpack(block: pa.Table) -> tuple[Any, Any]:
    """Return the objects of a block; their arrays lie where the block lies."""
    sizes, pickled, data = (_value(block[name]) for name in ("sizes", "pickle", "data"))
    buffers, at = [], 0
    for (size,) in struct.iter_unpack("<q", sizes):
        buffers.append(data[at : at + size])
        at += size
    head, value = pickle.loads(pickled, buffers=buffers)
    return head, value


def _cell(data: Any) -> pa.Array:
    ends = pa.py_buffer(struct.pack("<2q", 0, memoryview(data).nbytes))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), 1, [None, ends, pa.py_buffer(data)])


def _value(column: pa.ChunkedArray) -> memoryview:
    """Return a cell's bytes where they lie; Arrow's own scalars are copies."""
    (cell,) = (chunk for chunk in column.chunks if len(chunk))
    _, ends, data = cell.buffers()
    first, last = struct.unpack_from("<2q", ends, 8 * cell.offset)
    return memoryview(data or b"")[first:last]


def _dataset(stages: Stages, placement: Placement, desk: Any) -> Any:
    where = cluster.placement(placement.accelerator, placement.gpus)
    # Datasets share a cluster's resources equally, and one whose driver was killed keeps its share for so long. Online,
    # the driver is an actor, which does not have what cluster.connect sets.
    os.environ.setdefault("RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S", "30")
    from ray.data import ActorPoolStrategy, TaskPoolStrategy, read_datasource
    from ray.data.context import AutoscalingConfig

    settings = cluster.data_settings(
        target_max_block_size=1,
        max_consecutive_actor_init_deaths=-1,
        autoscaling_config=AutoscalingConfig(actor_pool_util_upscaling_threshold=1.0),
    )
    with settings, warnings.catch_warnings():
        # That further arguments go away in 2.64.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        return (
            read_datasource(
                _source(desk),
                override_num_blocks=1,
                concurrency=1,
                num_cpus=0,
                ray_remote_args={"scheduling_strategy": cluster.this_node()},
            )
            .map_batches(
                transform,
                fn_args=(ray.put(stages), desk),
                batch_size=None,
                batch_format="pyarrow",
                compute=TaskPoolStrategy(size=placement.concurrency),
                num_cpus=placement.transform_cpus,
                max_retries=_TASK_RETRIES,
                label_selector=dict(placement.labels) or None,
            )
            .map_batches(
                Encode,
                fn_constructor_args=(ray.put(stages), desk, placement.output),
                batch_size=1,  # Ray Data wants a number where there are GPUs
                batch_format="pyarrow",
                # While one piece is encoded the next one is fetched and queued; more would wait there for nothing.
                compute=ActorPoolStrategy(
                    min_size=placement.least,
                    max_size=placement.most,
                    max_tasks_in_flight_per_actor=2,
                    max_concurrent_calls_per_actor=2,
                    enable_true_multi_threading=True,
                ),
                num_cpus=placement.encoder_cpus,
                max_restarts=-1,
                max_task_retries=_TASK_RETRIES,
                **where,
            )
        )


def _source(desk: Any) -> Any:
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Pieces(Datasource):
        """What the desk hands out, as one endless read."""

        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, *_: Any, **__: Any) -> list[ReadTask]:
            metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [ReadTask(partial(_handed_out, desk), metadata)]

    return Pieces()  # type: ignore[no-untyped-call]  # Ray's


# --- on the workers ---------------------------------------------------------------------------------------------------


def _handed_out(desk: Any) -> Iterable[pa.Table]:
    while (piece := ray.get(desk.next.remote())) is not None:
        yield piece


def transform(block: pa.Table, stages: "ObjectRef[Stages]", desk: Any) -> pa.Table:
    """Transform one piece."""
    number, item = unpack(block)
    worker = "transform", _node(), _process()
    note = Note(number, transformed_on=_node())
    while (died := ray.get(desk.begin.remote(worker, number))) is None:
        try:
            value, made = _patiently(partial(ray.get(stages).transform, item))
        except SdpError as error:
            return pack(replace(note, error=error), None)
        except Exception as error:  # noqa: BLE001 (counted, and told where it repeats)
            ray.get(desk.fail.remote(worker, number, _line(error)))
        else:
            ray.get(desk.end.remote(worker, number, made))
            return pack(replace(note, transformed=made), value)
    return pack(replace(note, died=died), None)


class Encode:
    """An encoder in a process of its own, kept warm from piece to piece."""

    def __init__(self, stages: "ObjectRef[Stages]", desk: Any, output: str) -> None:
        cluster.hide_gpus_unless_granted()
        self._stages, self._desk = ray.get(stages), desk
        self._occupancy, self._told, self._lock = Occupancy(), (0.0, 0.0), threading.Lock()
        self._worker = "encode", _node(), _process()
        self._actor = ray.get_runtime_context().get_actor_id() or ""
        ray.get(desk.load.remote(self._worker, self._actor))
        try:
            telemetry.begin(output).process("encoder")
            self._encoder = self._stages.load()
        except Exception as error:
            if isinstance(error, SdpError) and not isinstance(error, Unavailable):
                ray.get(desk.stop.remote(error))
            else:
                ray.get(desk.fail.remote(self._worker, None, _line(error)))
            raise
        ray.get(desk.start.remote(self._worker, self._actor))

    def __call__(self, block: pa.Table) -> pa.Table:
        """Encode one piece."""
        note, value = unpack(block)
        if note.died is None and note.error is None:
            note = replace(note, encoded_on=_node())
            died = ray.get(self._desk.begin.remote(self._worker, note.number))
            if died is not None:
                note, value = replace(note, died=died), None
        if note.died is not None or note.error is not None:
            return pack(None, None, note=note)
        try:
            with self._occupancy:
                rows = self._stages.encode(self._encoder, value)
        except SdpError as error:
            return pack(None, None, note=replace(note, error=error))
        except Exception as error:  # noqa: BLE001 (after a fault of the device nothing works any more in its process)
            ray.get(self._desk.fail.remote(self._worker, note.number, _line(error)))
            os._exit(1)
        ray.get(self._desk.end.remote(self._worker, note.number))
        with self._lock:
            now = self._occupancy.busy_s, self._occupancy.idle_s
            busy_s, idle_s = now[0] - self._told[0], now[1] - self._told[1]
            self._told = now
        limits = getattr(self._encoder, "batch_limits", {})
        return pack(None, rows, note=replace(note, busy_s=busy_s, idle_s=idle_s, batch_limits=limits))

    def __del__(self) -> None:
        """Called as the pool shrinks."""
        with contextlib.suppress(Exception):
            self._desk.leave.remote(self._actor)


def _patiently(call: Callable[[], Any]) -> Any:
    """Call something, again where a storage does not answer."""
    for patience in range(_PATIENCE, -1, -1):
        try:
            return call()
        except Unavailable:
            if not patience:
                raise
    raise AssertionError


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error, 200)}"


def _process() -> str:
    process: str = ray.get_runtime_context().get_worker_id()
    return process


def _node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node
