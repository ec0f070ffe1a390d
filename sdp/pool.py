"""Units of work over a pool of equal workers: actors of Ray Data, one GPU each; or one worker in this process.

    crew = Crew("generate", "generators", config.scaling)
    crew.join()
    for made in crew.work_off(partial(Worker, orders), tasks): ...

A worker is made once in each actor, by a call that travels there, and then makes one thing of each task. A single
worker that may run anywhere needs no cluster, and none is started for it.
"""

import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sdp import cluster, telemetry
from sdp.config import WorkersConfig
from sdp.errors import SdpError, UserError, one_line

if TYPE_CHECKING:
    import pyarrow as pa

Task = TypeVar("Task")
Made = TypeVar("Made")
_Task = TypeVar("_Task", contravariant=True)
_Made = TypeVar("_Made", covariant=True)

_MORE = "join a larger cluster (RAY_ADDRESS)"
_TASK_RETRIES = 30
"""Against a task that kills its worker for ever. Of a node that has gone Ray hears after seconds, and each try
meanwhile to reach its actors counts as one."""


class Worker(Protocol[_Task, _Made]):
    """What is hired."""

    def make(self, task: _Task, seen: "Callable[[int], None]", /) -> _Made:
        """Do a task; `seen` is called with the number of rows done, now and then."""


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers that there shall be."""

    job: str
    what: str
    """What they are called, as in `generators`."""
    scaling: WorkersConfig
    output: str = ""
    """What the job writes to: the name of its metrics."""

    @property
    def alone(self) -> bool:
        """Whether one worker, which may run anywhere, is all that is asked for, and no cluster has been joined."""
        ray, scaling = sys.modules.get("ray"), self.scaling
        joined = "RAY_ADDRESS" in os.environ or (ray is not None and ray.is_initialized())
        return not joined and scaling.most == 1 and scaling.gpu_each is None

    def require_reachable(self) -> None:
        """Refuse a cluster that does not answer, or that nobody says how to use: before anything is written."""
        if not self.alone:
            cluster.require_gpu_setting("scaling", self.scaling)
            cluster.require_reachable()

    def join(self) -> None:
        """Join the cluster, refuse what could never start there, and wait until there are places for the fewest."""
        if self.alone:
            return
        from sdp.waiting import place_of, wait_for

        cluster.connect()
        grows = "RAY_ADDRESS" in os.environ
        fewest = replace(place_of("scaling", self.scaling, grows=grows, more=_MORE), most=self.scaling.least)
        wait_for(self.job, [fewest], self.scaling.wait_s, grows=grows)

    def work_off(
        self,
        hire: Callable[[], Worker[Task, Made]],
        tasks: Sequence[Task],
        seen: Callable[[int], None] = lambda _: None,
    ) -> Iterator[Made]:
        """What is made of each task, as it comes: here, or by actors on the cluster that was joined.

        Of what is done here `seen` hears within a task, too.
        """
        if self.alone:
            worker = hire()
            for task in tasks:
                yield worker.make(task, seen)
            return
        from ray.exceptions import RayError

        try:
            for row in self._pipeline(hire, tasks).iter_rows():
                made: Made | SdpError = pickle.loads(row["made"])
                if isinstance(made, SdpError):
                    raise made
                yield made
        except RayError as error:
            raise self._in_our_words(error) from error

    def _pipeline(self, hire: Callable[[], Worker[Task, Made]], tasks: Sequence[Task]) -> Any:
        import ray
        from ray.data import ActorPoolStrategy
        from ray.util.annotations import RayDeprecationWarning

        gpus = float(cluster.on_gpus("scaling", self.scaling))
        items = [{"task": pickle.dumps(task)} for task in tasks]
        patience = cluster.data_settings(wait_for_min_actors_s=round(self.scaling.wait_s))
        with patience, warnings.catch_warnings():
            # That further arguments go away in 2.64. By default Ray tries again without end what kills its process.
            warnings.simplefilter("ignore", RayDeprecationWarning)
            return ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
                _Hired,
                fn_constructor_args=(pickle.dumps(hire), self.what.removesuffix("s"), self.output),
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=None if gpus else 1,  # Ray Data warns of asking for both
                compute=ActorPoolStrategy(
                    min_size=min(self.scaling.least, len(items)),
                    max_size=min(self.scaling.most, len(items)),
                    max_tasks_in_flight_per_actor=2,
                ),
                max_restarts=_TASK_RETRIES,
                max_task_retries=_TASK_RETRIES,
                **cluster.placement(self.scaling.accelerator, gpus),
            )

    def _in_our_words(self, error: BaseException) -> SdpError:
        """One line about what Ray says."""
        from ray.exceptions import GetTimeoutError

        if isinstance(error, GetTimeoutError):
            return UserError(
                f"scaling.num_workers: {self.scaling.least} {self.what} have not started within "
                f"{self.scaling.wait_s:g} s, though there was room; see their logs with `ray logs`"
            )
        line = one_line(error)[-300:]
        return SdpError(f"the work of the {self.what} was broken off ({line}); run it again: it goes on where it was")


class _Hired:
    """An actor of the pool."""

    def __init__(self, hire: bytes, role: str, output: str) -> None:
        cluster.hide_gpus_unless_granted()
        self._worker: Worker[Any, Any] = pickle.loads(hire)()
        telemetry.begin(output).process(role)

    def __call__(self, batch: "pa.Table") -> "pa.Table":
        import pyarrow as pa

        made = [pickle.dumps(self._make(pickle.loads(data))) for data in batch["task"].to_pylist()]
        return pa.table({"made": pa.array(made, pa.binary())})

    def _make(self, task: Any) -> Any:
        """An error of ours is handed over as it is: raised here, it would reach the driver as a text of Ray Data's."""
        try:
            return self._worker.make(task, lambda _: None)
        except SdpError as error:
            return error
