"""`sdp process`: the pipeline on Ray.

    units ── pieces ── transform (tasks, CPU nodes) ── encode (actors, GPU nodes) ── a unit's rows ── write (tasks)

It is scheduled here rather than by Ray Data, whose order holds up whoever is ahead, whose pools follow nobody's pace,
and which cannot tell the row that kills its worker: `flow` decides what comes next, this file lays it on the cluster.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
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
from sdp.config import ProcessConfig
from sdp.console import Progress, say, table
from sdp.datasets import manifest, runs
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.manifest import Dataset
from sdp.datasets.outcomes import FAILED, Outcome
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Work
from sdp.encode import work as worker
from sdp.encode.chunk import Chunk
from sdp.encode.occupancy import Occupancy
from sdp.encode.reading import Piece, Planner, addresses
from sdp.encode.table import EMPTY_TEXT, npy_bytes
from sdp.encode.work import Orders, Rows, TransformNote
from sdp.errors import SdpError, Unavailable, UserError, one_line
from sdp.lease import Lease
from sdp.process.figures import Figures
from sdp.process.flow import TRIES, Flow, Room, Tuner
from sdp.process.prepare import KIND, Prepared, Retry, begin, prepare, retry_of, with_tombstones
from sdp.process.report import emit, forecast, progress_line, spent, summary

_AT_ONCE = 2
"""Pieces that an encoder holds: while one is encoded the next one is fetched to its node."""
_PATIENCE = 3
"""How often a storage that does not answer, or an encoder that does not start, is tried again."""
_WINDOW_S = 30.0
"""Over which the progress line's rates are taken."""
_EMIT_S = 1.0
_LOOK_S = 10.0
"""How often to see what the cluster has."""
_IDLE_S = 60.0
"""An encoder beyond the least that has had nothing to do for so long is let go."""
_SYSTEMATIC = 100
"""Transforms that fail one after another, with none that succeeds between them: then it is not the images."""
_SLOWEST_S = 900.0
"""By then one transform has ended, or there is no place for any."""
_DIED = (WorkerCrashedError, NodeDiedError, OutOfMemoryError)
_ENCODER_DIED = (RayActorError, *_DIED)
"""That Ray killed one for the memory that it took is not told as an actor's death."""

_Held = tuple[Piece, "ObjectRef[Chunk]"]
_TransformNote = tuple[TransformNote, str]
"""And the node."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run has come to."""

    dataset: Dataset | None
    """None after a dry run."""
    figures: Figures
    """Of this run."""


def run(config: ProcessConfig, *, dry_run: bool = False, only_failed: bool = False) -> Summary:
    """Encode what is not encoded yet; with `only_failed` try again what failed."""
    prepared = prepare(config)
    if dry_run:
        say(table(forecast(prepared, begin(prepared, only_failed=only_failed, write=False))))
        return Summary(None, Figures())
    cluster.require_gpu_setting("encode", config.encode)
    cluster.require_reachable()
    with Lease.acquire(prepared.orders.output, "sdp process") as lease:
        output = begin(prepared, only_failed=only_failed)
        figures, infos, noted = Figures(), list[PartInfo](), runs.begin("process")
        pending = output.pending()
        if pending:
            say(f"process: {len(pending)} of {len(output.index.works())} parts to make")
            with Progress("process") as progress:
                infos = _Run(prepared, output, pending, lease, figures, progress).work_off()
        dataset = manifest.finish(
            output,
            infos=infos,
            config=config.model_dump(mode="json"),
            models={"encoder": f"{config.model.source} sha256:{prepared.digest}"},
            input=prepared.input,
        )
        runs.keep(output.storage, noted.ended(infos, **spent(figures)))
    say(table(summary(config, dataset, figures)))
    return Summary(dataset, figures)


@dataclass(slots=True, eq=False)
class _Encoder:
    """One encoder of the pool."""

    actor: Any
    ready: bool = False
    holds: list[_Held] = field(default_factory=list)
    """Oldest first."""
    busy_s: float = 0.0
    idle_s: float = 0.0
    empty_since: float = 0.0


@dataclass(frozen=True, slots=True)
class _EncodeNote:
    """What the driver hears of an encoding."""

    node: str
    items: int
    busy_s: float
    idle_s: float
    """Of the encoder, since its first piece."""
    batch_sizes: dict[int, int]


class _Run:
    """One run's pipeline, from its units to their parts."""

    def __init__(
        self,
        prepared: Prepared,
        output: Output,
        pending: list[Work],
        lease: Lease,
        figures: Figures,
        progress: Progress,
    ) -> None:
        config = prepared.config
        resources = cluster.connect()
        cluster.require_accelerator(
            "encode.accelerator", config.encode.accelerator, can_grow="RAY_ADDRESS" in os.environ
        )
        cluster.require_labels(
            "transform.node_labels", config.transform.node_labels, can_grow="RAY_ADDRESS" in os.environ
        )
        self._config, self._prepared, self._output = config, prepared, output
        self._lease, self._figures, self._progress = lease, figures, progress
        self._orders: Orders = with_tombstones(prepared)
        self._told = ray.put(self._orders)
        self._retries: dict[Work, Retry] = {}
        self._done_before = output.done()

        self._least, self._most = config.encode.least, config.encode.most
        cpus = max(1, int(resources.get("CPU", 1)))
        self._gpus = config.encode.gpus_per_worker if cluster.on_gpus("encode", config.encode) else 0.0
        # What reserves nothing would run on the head of a cluster whose nodes have not come yet, and bring none.
        self._encoder_cpus = 1 if self._gpus or cpus > self._least or not resources.get("CPU") else 0
        free = max(1, cpus - self._encoder_cpus * self._least)
        self._tuner = Tuner(most=config.transform.concurrency, first=config.transform.concurrency or free)
        self._flow: Flow[ObjectRef[Chunk], ObjectRef[Rows]] = Flow(
            self._planned(pending), Room(transforms=free, ready=2, chunks=self._room_for(resources), writes=4)
        )
        figures.rows_total = sum(len(work.unit) for work in pending)
        figures.images_total = prepared.images_of(figures.rows_total)

        self._encoders: list[_Encoder] = []
        self._transforming: dict[ObjectRef[_TransformNote], _Held] = {}
        self._encoding: dict[ObjectRef[_EncodeNote], tuple[Piece, ObjectRef[Chunk], ObjectRef[Rows], _Encoder]] = {}
        self._writing: dict[ObjectRef[PartInfo], Work] = {}
        self._starting: dict[ObjectRef[Any], _Encoder] = {}
        self._infos: list[PartInfo] = []
        self._impatience: dict[Any, int] = {}
        self._batch_sizes = dict(self._orders.settings.batch_sizes)
        self._recent: deque[tuple[float, int, int]] = deque()
        self._began = self._looked = time.monotonic()
        self._deaths_in_a_row = self._transforms_lost = 0
        self._ever_ready = self._ever_transformed = False
        self._telemetry, self._emitted = telemetry.begin(config.output.uri), 0.0

    def work_off(self) -> list[PartInfo]:
        """Until every part is there."""
        try:
            for _ in range(self._least):
                self._add_encoder()
            while not self._flow.finished:
                self._lease.check()
                self._start_all()
                self._wait()
                self._show()
        finally:
            for encoder in self._encoders:
                ray.kill(encoder.actor)
        return self._infos

    # --- what is started ---------------------------------------------------------------------------------------------

    def _planned(self, pending: list[Work]) -> Iterator[tuple[Work, list[Piece]]]:
        planner = Planner(
            self._output.index, self._prepared.upstream, self._prepared.piece_rows, self._prepared.options
        )

        def plan(work: Work) -> tuple[Work, list[Piece], Retry | None]:
            return work, planner(work), retry_of(self._output, work, self._done_before)

        for work, pieces, retry in ordered_map(plan, pending, workers=2):
            if retry is not None:
                self._retries[work] = retry
            yield work, pieces

    def _room_for(self, resources: dict[str, float]) -> int:
        """Pieces that half of the object stores can hold, and no fewer than keep the pipeline moving."""
        recipe = self._orders.recipe
        piece_bytes = self._prepared.piece_rows * sum(3 * side * side for side in recipe.resolutions)
        fits = int(0.5 * resources.get("object_store_memory", 0) / piece_bytes)
        return max(fits, 2 * self._most + 1)

    def _start_all(self) -> None:
        ready = [encoder for encoder in self._encoders if encoder.ready]
        room = self._flow.room
        if time.monotonic() - self._looked > _LOOK_S:  # a cluster may have grown
            self._looked = time.monotonic()
            room.chunks = self._room_for(ray.cluster_resources())  # type: ignore[no-untyped-call]  # Ray's
        room.transforms = self._tuner.transforms(max(len(ready), self._least), starved=self._starved(ready))
        room.ready = 2 * max(len(ready), self._least)
        while (started := self._flow.start_transform()) is not None:
            self._transform(started)
        for _ in range(_AT_ONCE):
            for encoder in ready:
                if len(encoder.holds) < _AT_ONCE and (next_one := self._flow.start_encode()) is not None:
                    self._encode(encoder, *next_one)
        while (complete := self._flow.start_write()) is not None:
            self._write(*complete)
        self._resize(ready)

    def _starved(self, ready: list[_Encoder]) -> bool:
        return any(not encoder.holds for encoder in ready) and not self._flow.waiting

    def _resize(self, ready: list[_Encoder]) -> None:
        """Another encoder while pieces wait for one, one fewer while it waits for pieces; one step at a time."""
        if len(ready) < len(self._encoders):
            return
        if len(ready) < self._most and self._flow.waiting >= self._flow.room.ready:
            self._add_encoder()
        idle = [e for e in ready if not e.holds and time.monotonic() - e.empty_since > _IDLE_S]
        if len(ready) > self._least and idle:
            self._encoders.remove(idle[0])
            ray.kill(idle[0].actor)

    def _transform(self, piece: Piece) -> None:
        retry = self._retries.get(piece.work)
        labels = dict(self._config.transform.node_labels)
        task: Any = _transform.options(num_cpus=1, label_selector=labels or None)
        chunk, note = task.remote(self._told, piece, None if retry is None else retry.rows)
        self._transforming[note] = (piece, chunk)

    def _encode(self, encoder: _Encoder, piece: Piece, chunk: "ObjectRef[Chunk]") -> None:
        rows, note = encoder.actor.encode.remote(chunk)
        encoder.holds.append((piece, chunk))
        self._encoding[note] = (piece, chunk, rows, encoder)

    def _write(self, work: Work, pieces: "list[ObjectRef[Rows]]") -> None:
        self._lease.check()
        retry = self._retries.get(work)
        info = _write.remote(self._told, work, dict(retry.reasons) if retry else {}, *pieces)
        self._writing[info] = work

    def _add_encoder(self) -> None:
        encode = self._config.encode
        placed = cluster.placement(encode.accelerator, self._gpus)
        actor = _ENCODER.options(num_cpus=self._encoder_cpus, max_concurrency=_AT_ONCE, **placed).remote(self._told)
        encoder = _Encoder(actor)
        self._encoders.append(encoder)
        self._starting[actor.start.remote()] = encoder

    # --- what has ended ----------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        under_way = [*self._transforming, *self._encoding, *self._writing, *self._starting]
        ended, rest = ray.wait(under_way, num_returns=1, timeout=1.0)
        if rest:
            ended += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        for ref in ended:
            if ref in self._transforming:
                self._transform_ended(ref)
            elif ref in self._encoding:
                self._encode_ended(ref)
            elif ref in self._writing:
                self._write_ended(ref)
            elif ref in self._starting:
                self._start_ended(ref)
        if not self._ever_ready and time.monotonic() - self._began > self._config.encode.wait_s:
            raise self._no_place()
        if not self._ever_transformed and self._transforming and time.monotonic() - self._began > self._slowest_s:
            raise self._no_place_for_transforms()

    def _transform_ended(self, ref: "ObjectRef[_TransformNote]") -> None:
        piece, chunk = self._transforming.pop(ref)
        self._ever_transformed = True
        try:
            note, node = ray.get(ref)
        except _DIED as error:
            self._transform_died(piece, error, "its worker died each time")
        except RayTaskError as error:
            if isinstance(_cause(error), SdpError):
                self._again_or_raise(piece, error)
                self._flow.not_transformed(piece)
            else:
                self._transform_died(piece, error, _line(error))
        else:
            self._transforms_lost = 0
            self._impatience.pop(piece, None)
            self._tuner.transformed(note.seconds + note.reading_s)
            self._figures.images_transformed += note.items
            self._figures.transformed_on[node] += note.items
            self._figures.transform_s += note.seconds
            self._figures.reading_s += note.reading_s
            self._flow.transformed(piece, chunk)

    def _transform_died(self, piece: Piece, error: Exception, detail: str) -> None:
        """Try it again, or what it is cut into; but when nothing succeeds any more it is not the piece."""
        self._figures.deaths += 1
        self._transforms_lost += 1
        if self._transforms_lost >= max(_SYSTEMATIC, _PATIENCE * self._figures.transforms_most):
            raise SdpError(
                f"transform: {self._transforms_lost} failed one after another, the last of {_line(error)}; see whether "
                "the nodes have the memory and the software that it takes"
            ) from error
        self._give_up(self._flow.transform_died(piece), detail)

    def _encode_ended(self, ref: "ObjectRef[_EncodeNote]") -> None:
        piece, chunk, rows, encoder = self._encoding[ref]
        try:
            note = ray.get(ref)
        except _ENCODER_DIED as error:
            self._bury(encoder, error)
            return
        except ObjectLostError:  # the chunk vanished with its node
            self._flow.lost(piece)
        except RayTaskError as error:
            cause = _cause(error)
            if isinstance(cause, SdpError):
                raise cause from error
            # After a fault of the device nothing works any more in its process: it dies of that.
            self._bury(encoder, error, piece)
            return
        else:
            self._figures.images_encoded += note.items
            self._figures.encoded_on[note.node] += note.items
            self._figures.busy_s += note.busy_s - encoder.busy_s
            self._figures.idle_s += note.idle_s - encoder.idle_s
            self._tuner.encoded(note.busy_s - encoder.busy_s)
            encoder.busy_s, encoder.idle_s = note.busy_s, note.idle_s
            self._smaller(note.batch_sizes)
            self._deaths_in_a_row = 0
            self._flow.encoded(piece, rows)
        del self._encoding[ref]
        encoder.holds.remove((piece, chunk))
        encoder.empty_since = time.monotonic()

    def _bury(self, encoder: _Encoder, error: Exception, deadly: Piece | None = None) -> None:
        """Put another one in its place. Of what it held, the oldest was being encoded: else only that has killed it."""
        ray.kill(encoder.actor)
        self._encoders.remove(encoder)
        self._figures.deaths += 1
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > _PATIENCE * self._most + 2 * _PATIENCE:
            cause = _cause(error)
            told = (
                f"encode: {self._deaths_in_a_row} encoders died one after another without encoding anything, the last "
                f"of {_line(error)}; see their logs with `ray logs`"
            )
            raise (cause if isinstance(cause, SdpError) else SdpError(told)) from error
        self._encoding = {ref: held for ref, held in self._encoding.items() if held[3] is not encoder}
        self._starting = {ref: other for ref, other in self._starting.items() if other is not encoder}
        deadly = encoder.holds[0][0] if encoder.holds and deadly is None else deadly
        detail = _line(error) if isinstance(error, RayTaskError) else "its worker died each time"
        for piece, chunk in encoder.holds:
            if piece == deadly:
                self._give_up(self._flow.encode_died(piece), detail)
            else:
                self._flow.not_encoded(piece, chunk)
        self._add_encoder()

    def _start_ended(self, ref: "ObjectRef[NDArray[np.float16] | None]") -> None:
        encoder = self._starting[ref]
        try:
            empty = ray.get(ref)
        except _ENCODER_DIED as error:
            self._bury(encoder, error)
            return
        except RayTaskError as error:
            cause = _cause(error)
            if isinstance(cause, SdpError) and not isinstance(cause, Unavailable):
                raise cause from error
            self._bury(encoder, error)
            return
        del self._starting[ref]
        encoder.ready = self._ever_ready = True
        encoder.empty_since = time.monotonic()
        if empty is not None and not self._output.storage.exists(EMPTY_TEXT):
            self._output.storage.publish(EMPTY_TEXT, npy_bytes(empty))

    def _write_ended(self, ref: "ObjectRef[PartInfo]") -> None:
        work = self._writing.pop(ref)
        try:
            info = ray.get(ref)
        except ObjectLostError:  # rows vanished with their node
            self._flow.rows_lost(work)
            return
        except (*_DIED, RayTaskError) as error:
            self._again_or_raise(work, error)
            self._flow.not_written(work)
            return
        self._flow.written(work)
        self._infos.append(info)
        figures, counts = self._figures, info.counts
        figures.rows_done += len(work.unit)
        figures.written += counts.written
        figures.filtered += counts.filtered
        figures.failed += counts.failed
        figures.bytes_written += info.size
        figures.parts_written += 1

    def _again_or_raise(self, what: Piece | Work, error: Exception) -> None:
        """A store that does not answer may later; a worker may have died of something else. But not for ever."""
        cause = _cause(error)
        times = self._impatience[what] = self._impatience.get(what, 0) + 1
        if times > _PATIENCE or not isinstance(cause, (Unavailable, *_DIED)):
            step = "write" if isinstance(what, Work) else "transform"
            told = f"{step}: {_line(error)}, after {times} attempts; see the workers' logs with `ray logs`"
            raise (cause if isinstance(cause, SdpError) else SdpError(told)) from error

    def _give_up(self, piece: Piece | None, detail: str) -> None:
        if piece is None:
            return
        rows = addresses(piece, self._prepared.options)
        retry = self._retries.get(piece.work)
        rows = rows if retry is None else rows[np.isin(rows, retry.rows)]
        outcomes = [Outcome(row, FAILED, "crashed", detail, attempts=TRIES) for row in rows.tolist()]
        self._flow.given_up(piece, ray.put(worker.nothing(self._orders, outcomes)))

    def _smaller(self, batch_sizes: dict[int, int]) -> None:
        """Remember that memory had no room for a batch, for the summary to say."""
        for what, count in batch_sizes.items():
            if count < self._batch_sizes[what]:
                self._batch_sizes[what] = self._figures.fitting[what] = count

    def _no_place(self) -> SdpError:
        encode = self._config.encode
        what = f"{encode.accelerator or 'a GPU'} with {self._gpus:g} GPUs free" if self._gpus else "a free CPU"
        there = ", ".join(sorted(cluster.accelerators())) or "no accelerators"
        return UserError(
            f"encode.accelerator: no node offered {what} within {encode.wait_s:g} s; the cluster has {there}; "
            "let the cluster grow, ask for another type, or raise encode.wait_s"
        )

    @property
    def _slowest_s(self) -> float:
        return max(_SLOWEST_S, self._config.encode.wait_s)

    def _no_place_for_transforms(self) -> SdpError:
        labels = self._config.transform.node_labels
        where = f" with the labels {cluster.told_labels(labels)}" if labels else ""
        return UserError(
            f"transform.node_labels: no transform has ended within {self._slowest_s:g} s: no node{where} has a CPU "
            "free; let the cluster grow, or ask for other nodes"
        )

    # --- what a person sees ------------------------------------------------------------------------------------------

    def _show(self) -> None:
        figures, now = self._figures, time.monotonic()
        figures.elapsed_s = now - self._began
        figures.encoders = sum(encoder.ready for encoder in self._encoders)
        figures.encoders_most = max(figures.encoders_most, figures.encoders)
        figures.transforms = len(self._transforming)
        figures.transforms_most = max(figures.transforms_most, figures.transforms)
        figures.ready = self._flow.waiting
        self._recent.append((now, figures.images_transformed, figures.images_encoded))
        while self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()
        self._progress.update(progress_line(figures, self._recent))
        if now - self._emitted > _EMIT_S or self._flow.finished:
            self._emitted = now
            emit(self._telemetry, figures)


def _cause(error: Exception) -> Exception:
    """What a worker raised, where it is ours to report in one line."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SdpError) else error


def _line(error: Exception) -> str:
    cause = getattr(error, "cause", None)  # without which the text of a task's error is a whole stack
    cause = cause if isinstance(cause, BaseException) else error
    return f"{type(cause).__name__}: {one_line(cause, 200)}"


# --- on the workers ---------------------------------------------------------------------------------------------------


@ray.remote(num_returns=2, max_retries=0)
def _transform(orders: Orders, piece: Piece, only: NDArray[np.int64] | None) -> tuple[Chunk, _TransformNote]:
    chunk, note = worker.transform_piece(orders, piece, only)
    return chunk, (note, _here())


@ray.remote(num_cpus=0.1, max_retries=0)
def _write(orders: Orders, work: Work, retried: dict[str, int], *pieces: Rows) -> PartInfo:
    return worker.write_unit(orders, KIND, work, pieces, retried)


def _here() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


class _EncoderActor:
    """An encoder in a process of its own, kept warm from piece to piece."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._occupancy = Occupancy()

    def start(self) -> NDArray[np.float16] | None:
        """Load the models; the empty caption's embedding, where captions are embedded."""
        telemetry.begin(self._orders.output.uri).process("encoder")
        self._encoder = worker.load_encoder(self._orders)
        return worker.embed_empty(self._orders, self._encoder) if self._orders.shape.text_width is not None else None

    @ray.method(num_returns=2)
    def encode(self, chunk: Chunk) -> tuple[Rows, _EncodeNote]:
        with self._occupancy:
            rows = worker.encode_chunk(self._orders, self._encoder, chunk)
        used = self._occupancy
        return rows, _EncodeNote(_here(), len(chunk), used.busy_s, used.idle_s, self._encoder.batch_limits)


_ENCODER: Any = ray.remote(max_restarts=0, max_task_retries=0)(_EncoderActor)
