"""`data.reader: ray`: latents by Ray Data, a segment of the epoch at a time, split evenly among the trainers.

    Feeder ── segment ──> Ray Data: read tasks (nodes with CPUs to spare) ── streaming_split ──> trainers

The feeder lives beside the driver. It knows what the epoch has left and makes a dataset of each segment when a trainer
first asks for it, so that the driver never holds more than a segment's tasks. It remembers nothing that matters:
trainers that are started again ask it anew, and what is left is read from the checkpoint's ledger.

Tasks that read load this module, and so it loads no more than they need at its top.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray
from pyroaring import BitMap64
from ray.data import DataContext, Datasource, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata

from sdp import cluster
from sdp.config import TrainConfig, parse
from sdp.errors import SdpError, UserError
from sdp.storage import Storage, open_storage
from sdp.train.data.latents import Column
from sdp.train.data.order import EpochOrder, OrderShape
from sdp.train.data.rows import Rows
from sdp.train.data.segments import EpochLeft, WindowOfGroups, left_of, windows
from sdp.train.data.weights import Weigh

_RESTARTS = 3
_TASK_TRIES = 3
"""How often a read task is tried again whose worker died; Ray's own default is without end."""
_PREFETCHED = 2
"""Blocks on their way to a trainer."""
_BLOCK_BYTES = 64_000_000
"""Of which there is room for some more than are under way."""


@dataclass(frozen=True)
class RayFeed:
    """A trainer's side; see streamed.Feed."""

    feeder: Any
    start: str
    """Of the trainers: another one whenever they are started again."""
    rank: int
    world: int

    def segments(self, epoch: int, position: int) -> list[int]:
        found: list[int] = _answer(self.feeder.begin.remote(self.start, self.world, epoch, position))
        return found

    def blocks(self, epoch: int, nth: int) -> Iterator[Rows]:
        share = _answer(self.feeder.share.remote(self.start, epoch, nth, self.rank))
        batches = share.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=_PREFETCHED)
        try:
            for table in batches:
                for batch in table.to_batches():
                    yield _rows_of(batch)
        except Exception as error:
            raise _told_by(error) from error


def start_feeder(config: TrainConfig, resources: dict[str, float], trainers: int, *, on_gpus: bool) -> Any:
    """A feeder on this node."""
    free = resources.get("CPU", 0) - (0 if on_gpus else trainers)
    if free < 1 and not config.scaling.can_grow:
        raise UserError(
            f"data.reader: expected direct, got 'ray': the trainers take all {resources.get('CPU', 0):g} CPUs of the "
            "cluster, and read tasks need one; take fewer trainers or add a node"
        )
    from sdp.train.online import here

    actor: Any = ray.remote(Feeder)
    return actor.options(num_cpus=0, max_restarts=_RESTARTS, scheduling_strategy=here()).remote(
        config.model_dump(mode="json"), trainers
    )


class Feeder:
    """An actor: what the epoch has left, and a dataset of each segment."""

    def __init__(self, config: dict[str, Any], trainers: int) -> None:
        from sdp.train.data.sources import open_sources

        self._config: TrainConfig = parse("train", config)
        (self._source,) = open_sources(self._config, write=True).all
        self._dataset = self._source.ingredient.dataset
        shuffle = self._config.data.shuffle
        self._shape = OrderShape(shuffle.lanes, shuffle.units, shuffle.row_groups)
        self._readers = self._config.data.readers * trainers
        self._begun: tuple[str, int] | None = None
        self._world = 1
        self._left: EpochLeft
        self._weigh: Any = None
        self._shares: dict[int, list[Any]] = {}

    def begin(self, start: str, world: int, epoch: int, position: int) -> "list[int] | SdpError":
        """How many rows each segment has that is left; the first trainer's question settles it for all."""
        try:
            if self._begun != (start, epoch):
                self._begin(start, world, epoch, position)
        except SdpError as error:
            return error
        return [-(-count // self._world) * self._world for count in self._left.counts]

    def share(self, start: str, epoch: int, nth: int, rank: int) -> Any:
        """A trainer's share of the n-th of these segments."""
        if self._begun != (start, epoch):
            return SdpError("the feeder was started again meanwhile; so are the trainers")
        if nth not in self._shares:
            # Nobody asks for one that lies two behind: all have taken the end of the one before the last.
            self._shares = {number: shares for number, shares in self._shares.items() if number >= nth - 1}
            self._shares[nth] = self._split(nth)
        return self._shares[nth][rank]

    def _begin(self, start: str, world: int, epoch: int, position: int) -> None:
        order = EpochOrder(self._config.seed, epoch, self._dataset.blocks, self._shape)
        weigh = self._source.ingredient.weighing()
        run = open_storage(self._config.output.uri, self._config.storage.options())
        consumed = consumed_at(run, epoch, position) if position else BitMap64()
        self._left = left_of(order, self._config.data.segment_rows, self._dataset, consumed, weigh)
        self._weigh = ray.put(weigh)
        self._begun, self._world, self._shares = (start, epoch), world, {}

    def _split(self, nth: int) -> list[Any]:
        segment = self._left.segment(nth)
        tasks = list(windows(self._dataset, segment, self._left.order, self._shape, self._world))
        room = _BLOCK_BYTES * (self._readers + (2 + _PREFETCHED) * self._world)
        with cluster.data_settings(target_max_block_size=max(task.bytes for task in tasks) + 1):
            limits = ExecutionResources.for_limits(object_store_memory=room)
            DataContext.get_current().execution_options.resource_limits = limits
            read = ray.data.read_datasource(
                _Windows(tasks, self._weigh, self._dataset.columns),
                override_num_blocks=len(tasks),
                concurrency=self._readers,
                num_cpus=1,
            )
            shares: list[Any] = read.streaming_split(self._world, equal=True)
            return shares


def consumed_at(run: Storage, epoch: int, position: int) -> BitMap64:
    """What a run has consumed of an epoch, by the checkpoint that stands at a position."""
    from sdp.datasets.ledger import NAME, Ledger
    from sdp.train.checkpoint import read_state
    from sdp.train.run_folder import RunFolder

    folder = RunFolder(run)
    for step in reversed([step for step, whole in folder.steps().items() if whole]):
        checkpoint = folder.checkpoint(step)
        state = read_state(checkpoint)
        if (state.epoch, state.position) == (epoch, position):
            return Ledger.from_bytes(checkpoint.read(NAME), checkpoint.uri_of(NAME)).rows(epoch)
    raise SdpError(f"{run.uri}: no checkpoint at position {position} of epoch {epoch}, where training goes on")


class _Windows(Datasource):
    """A segment's windows, a read task each."""

    def __init__(
        self, tasks: list[WindowOfGroups], weigh: "ray.ObjectRef[Weigh]", columns: tuple[Column, Column]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Ray's
        self._tasks, self._weigh, self._columns = tasks, weigh, columns

    def get_name(self) -> str:
        return "Latents"

    def estimate_inmemory_data_size(self) -> int:
        return sum(task.bytes for task in self._tasks)

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:  # noqa: ARG002 (one a window)
        return [
            ReadTask(
                _reading(task, self._weigh, self._columns),
                BlockMetadata(
                    num_rows=task.rows + task.padding, size_bytes=task.bytes, input_files=None, exec_stats=None
                ),
            )
            for task in self._tasks
        ]


def _reading(
    task: WindowOfGroups, weigh: "ray.ObjectRef[Weigh]", columns: tuple[Column, Column]
) -> Callable[[], Iterable[pa.Table]]:
    return lambda: [_table_of(task.load(ray.get(weigh)), columns)]


def _table_of(rows: Rows, columns: tuple[Column, Column]) -> pa.Table:
    """Rows as Arrow, without a copy."""
    arrays = [pa.array(rows.rows), pa.array(rows.weights)]
    for column, values in zip(columns, (rows.latents, rows.text), strict=True):
        kind = pa.binary(column.width)
        arrays.append(pa.FixedSizeBinaryArray.from_buffers(kind, len(values), [None, pa.py_buffer(values)]))
    return pa.table(arrays, names=["row", "weight", "latents", "text"])


def _rows_of(batch: pa.RecordBatch) -> Rows:
    """Arrow as rows, where they lie."""
    latents, text = (_items(batch.column(name)) for name in ("latents", "text"))
    return Rows(batch.column("row").to_numpy(), batch.column("weight").to_numpy(), latents, text)


def _items(array: pa.Array) -> NDArray[np.void]:
    values = np.frombuffer(array.buffers()[1], dtype=np.dtype((np.void, array.type.byte_width)))
    return values[array.offset : array.offset + len(array)]


def _answer(asked: Any) -> Any:
    answer = ray.get(asked)
    if isinstance(answer, SdpError):
        raise answer
    return answer


def _told_by(error: BaseException) -> BaseException:
    """What of ours is behind an error of Ray's; else that."""
    seen: BaseException | None = error
    while seen is not None:
        cause = getattr(seen, "cause", None)  # of a task's error the error itself: Ray's own only looks like it
        if isinstance(cause, BaseException):
            seen = cause
        elif isinstance(seen, SdpError):
            seen.args = (str(seen).partition("\n")[0],)  # behind it Ray has put advice of its own
            return seen
        else:
            seen = seen.__cause__
    return error
