"""A pool of equal workers for a list of tasks: actors of Ray Data, one GPU each; or one worker in this process.

    pool = WorkerPool("generate", "generators", config.scaling, config.output.uri)
    pool.join()
    for result in pool.run(partial(GenerateWorker, spec), tasks): ...

Each actor makes its worker once, and the worker returns one result per task. A single worker that may run anywhere
needs no cluster, and none is started for it.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sdp import telemetry
from sdp.config import WorkersConfig
from sdp.console import Progress, counted, duration
from sdp.errors import SdpError, UserError
from sdp.lease import Lease
from sdp.ray import cluster, lost

if TYPE_CHECKING:
    from sdp.ray.waiting import Place

Task = TypeVar("Task")
Made = TypeVar("Made")
_Task = TypeVar("_Task", contravariant=True)
_Made = TypeVar("_Made", covariant=True)


class PoolWorker(Protocol[_Task, _Made]):
    """A worker of the pool."""

    def make(self, task: _Task, on_rows: "Callable[[int], None]", /) -> _Made:
        """Do a task; call `on_rows` now and then with the number of rows done since the last call."""


@dataclass(slots=True)
class PoolFigures:
    """Pictures and seconds of one run."""

    total: int = 0
    """Pictures that this run has to do."""
    done: int = 0
    elapsed_s: float = 0.0

    @property
    def rate(self) -> float:
        """Pictures per second."""
        return self.done / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def summary(self) -> str:
        """Return a summary of this run: 200 pictures in 3:05, 1.08/s."""
        return f"{counted(self.done, 'picture')} in {duration(self.elapsed_s)}, {self.rate:,.3g}/s"

    def __str__(self) -> str:
        line = f"{self.done:,} of {counted(self.total, 'picture')} · {self.rate:,.3g}/s"
        if 0 < self.done < self.total:
            line += f" · ETA {duration((self.total - self.done) / self.rate)}"
        return line


class Tracker:
    """Counts a run's pictures, shows and emits the progress, and stops a run that has lost its lease."""

    def __init__(self, pool: "WorkerPool", lease: Lease, total: int, counter: str | None = None) -> None:
        """`counter` is a metric that also counts the pictures."""
        self.figures = PoolFigures(total)
        self._pool, self._lease, self._counter = pool, lease, counter
        self._telemetry, self._progress = telemetry.begin(pool.output), Progress(pool.job)
        self._began = time.monotonic()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.__exit__()

    def add(self, pictures: int) -> None:
        """Count further pictures as done."""
        self._lease.check()
        if pictures:  # otherwise a thread only shows the progress, and could undo an addition
            self.figures.done += pictures
            if self._counter is not None:
                self._telemetry.reach(self._counter, self.figures.done)
        self.figures.elapsed_s = time.monotonic() - self._began
        self._progress.update(str(self.figures))
        self._telemetry.progress(self._pool.job, self.figures.done, self.figures.total)


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """The workers of a job."""

    job: str
    workers: str
    """The workers' name in messages, such as `generators`."""
    scaling: WorkersConfig
    output: str = ""
    """URI of the job's output: the `run` label of its metrics."""

    @property
    def is_local(self) -> bool:
        """True if one worker in this process does the job."""
        return cluster.is_needless(self.scaling)

    def require_reachable(self) -> None:
        """Refuse a cluster that does not answer, or for which no accelerator is named: before anything is written."""
        if not self.is_local:
            cluster.require_gpu_setting("scaling", self.scaling)
            cluster.require_reachable()

    def join(self) -> None:
        """Join the cluster, refuse what could never start there, and wait for the places of the fewest workers."""
        if self.is_local:
            return
        from sdp.ray.waiting import wait_for

        cluster.connect()
        fewest = replace(self._place(), most=self.scaling.least)
        wait_for(self.job, [fewest], self.scaling.wait_s)

    def _place(self) -> "Place":
        from sdp.ray.waiting import place_of

        return place_of("scaling", self.scaling)

    def run(
        self,
        make_worker: Callable[[], PoolWorker[Task, Made]],
        tasks: Sequence[Task],
        on_rows: Callable[[int], None] = lambda _: None,
    ) -> Iterator[Made]:
        """Yield each task's result as it comes, from this process or from actors on the cluster.

        A worker in this process calls `on_rows` during a task. For actors, a thread calls it with 0 every few seconds.
        """
        if self.is_local:
            worker = make_worker()
            for task in tasks:
                yield worker.make(task, on_rows)
            return
        from ray.exceptions import RayError

        from sdp.ray.waiting import Stall, watched

        made, starts = 0, cluster.start_beside_driver(cluster.Starts, cluster.STARTS)

        def progress() -> int:
            on_rows(0)
            return made

        try:
            with watched(Stall(self.job, [self._place()], self.scaling.wait_s), progress):
                for row in self._dataset(make_worker, tasks, starts).iter_rows():
                    result: Made | SdpError
                    result = pickle.loads(row["made"])
                    made += 1
                    if isinstance(result, SdpError):
                        raise result
                    yield result
        except RayError as error:
            raise self._explain(error) from error

    def _dataset(self, make_worker: Callable[[], PoolWorker[Task, Made]], tasks: Sequence[Task], starts: Any) -> Any:
        import ray
        from ray.data import ActorPoolStrategy

        gpus = float(cluster.on_gpus("scaling", self.scaling))
        items = [{"task": pickle.dumps(task), "name": f"task {number}"} for number, task in enumerate(tasks)]
        role = self.workers.removesuffix("s")
        actor: Any = type(role.capitalize(), (_PoolActor,), {})  # Ray's dashboard shows this name
        with cluster.data_settings(wait_for_min_actors_s=round(self.scaling.wait_s)):
            return ray.data.from_items(items, override_num_blocks=len(items)).map(
                actor,
                fn_constructor_args=(pickle.dumps(make_worker), role, self.output, starts),
                num_cpus=None if gpus else 1,  # Ray Data warns if both are set
                compute=ActorPoolStrategy(
                    min_size=min(self.scaling.least, len(items)),
                    max_size=min(self.scaling.most, len(items)),
                    max_tasks_in_flight_per_actor=2,
                ),
                **cluster.worker_options(cluster.accelerator_labels(self.scaling.gpu_type), gpus),
            )

    def _explain(self, error: BaseException) -> SdpError:
        """Return an error of Ray in one line."""
        from ray.exceptions import GetTimeoutError

        if isinstance(error, GetTimeoutError):
            return UserError(
                f"scaling.num_workers: {self.scaling.least} {self.workers} did not start within "
                f"{self.scaling.wait_s:g} s, though there was room; see their logs with `ray logs`"
            )
        reason = lost.reason_of(error)
        return SdpError(f"{self.job}: the {self.workers} failed ({reason}); run the job again to continue")


class _PoolActor:
    """An actor of the pool."""

    def __init__(self, make_worker: bytes, role: str, output: str, starts: Any) -> None:
        cluster.hide_gpus_unless_granted()
        name = cluster.count_worker(starts, role)
        self._worker: PoolWorker[Any, Any] = pickle.loads(make_worker)()
        starts.end.remote(name)
        self._starts = starts
        telemetry.begin(output).process(role)

    def __call__(self, row: dict[str, Any]) -> dict[str, bytes]:
        """Do a task; return an SdpError as a value, since Ray Data would turn a raised one into text."""
        try:
            cluster.count_start(self._starts, row["name"])
            result: Any = self._worker.make(pickle.loads(row["task"]), lambda _: None)
            self._starts.end.remote(row["name"])
        except SdpError as error:
            result = error
        return {"made": pickle.dumps(result)}
