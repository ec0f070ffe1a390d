"""Every use of Ray that is private or for its developers, which any version of Ray may change.

Each function says why no public call does and, after "if removed", what to do when Ray drops what it uses. What is
inside `_comfort` only saves time, memory or noise: where Ray has changed, the job runs without.
`tests/contract/test_ray_private.py` fails on that day, and for any other such use in sdp/.
"""

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from sdp.errors import one_line

log = logging.getLogger(__name__)


@contextlib.contextmanager
def _comfort(what: str) -> Iterator[None]:
    """Log, rather than raise, that Ray no longer has what the block uses."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, KeyError) as error:
        log.info("this version of Ray has changed: %s (%s)", what, one_line(error))


# --- the cluster ------------------------------------------------------------------------------------------------------


def resources() -> dict[str, float]:
    """Return the sums of the cluster's resources. If removed: the nodes' `Resources`, added up."""
    import ray

    return dict(ray.cluster_resources())  # type: ignore[no-untyped-call]  # Ray's


def nodes() -> list[dict[str, Any]]:
    """Return the cluster's nodes. The public `list_nodes` needs the dashboard. If removed: use that."""
    import ray

    return list(ray.nodes())  # type: ignore[no-untyped-call]  # Ray's


def placement_groups() -> dict[str, str]:
    """Return the states of all placement groups by id. The public list needs the dashboard. If removed: use that."""
    from ray.util.placement_group import placement_group_table

    return {number: group["state"] for number, group in placement_group_table().items()}


def actors_and_jobs() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what the dashboard lists of live actors and of jobs; nothing where it does not answer in time."""
    from ray.util.state import list_actors, list_jobs

    with contextlib.suppress(Exception):  # its client's, the HTTP library's and Ray's own
        actors = list_actors(filters=[("state", "=", "ALIVE")], limit=10_000, timeout=10, detail=True)
        return list(map(vars, actors)), list(map(vars, list_jobs(limit=10_000, timeout=10, detail=True)))
    return [], []


def crashed_workers(since: float) -> Iterator[tuple[str, bytes]]:
    """Yield names and logs of the last eight workers that have crashed since then, where their nodes still answer."""
    from ray.util.state import get_log, list_workers

    with contextlib.suppress(Exception):  # its client's, the HTTP library's and Ray's own
        crashed = list_workers(filters=[("exit_type", "=", "SYSTEM_ERROR")], limit=10_000, timeout=10, detail=True)
        late = [worker for worker in crashed if (worker.end_time_ms or 0) >= since * 1000]
        for worker in late[-8:]:
            with contextlib.suppress(Exception):  # its node is gone
                log = get_log(node_id=worker.node_id, pid=worker.pid, suffix="err", errors="replace", timeout=10)
                yield f"worker-{worker.pid}-{worker.node_id[:8]}", "".join(log).encode()


def live_workers() -> set[str]:
    """Return the ids of the living processes; the public `list_workers` needs the dashboard. If removed: use that."""
    from ray._private.state import workers

    return set(workers())  # type: ignore[no-untyped-call]  # Ray's


def job_name() -> str:
    """Return the name of this process's submitted job, or ""; nothing public does. If removed: use a variable.

    KubeRay's names begin with the RayJob's. Every process of the job has it.
    """
    with _comfort("the job's configuration"):
        from ray._private.worker import global_worker

        worker: Any = global_worker
        if hasattr(worker, "core_worker"):  # it is connected
            metadata = worker.core_worker.get_job_config().metadata
            return str(metadata.get("job_name") or metadata.get("job_submission_id") or "")
    return ""


def adopt_token() -> bool:
    """Let this process authenticate by the token that Ray finds; return True if that changed anything.

    `ray.init` does this only where it starts a cluster. If removed: users set RAY_AUTH_MODE=token.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return False
    with _comfort("the token of a cluster"):
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    return "RAY_AUTH_MODE" in os.environ  # so that a second refusal is final


def quieten() -> None:
    """Raise the level of Ray's loggers whose warnings are false alarms here. If removed: see what Ray says."""
    for name in ("ray._private.authentication", "ray.data._internal.progress"):
        logging.getLogger(name).setLevel(logging.ERROR)


# --- a local Ray ------------------------------------------------------------------------------------------------------


def spare_processes() -> None:
    """Have a local Ray start no servers for the dashboard, autoscaler and terminal, nor collect what they would report.

    They take 2.2 CPU seconds and 0.28 GB, and no option leaves the servers out. If removed: drop this.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _comfort("the node's processes"):
        from ray._private import node

        for name in ("start_api_server", "start_monitor", "start_log_monitor"):
            getattr(node.Node, name)
            setattr(node.Node, name, lambda *_, **__: None)


def delete_spilled() -> None:
    """Delete the objects that a local Ray, which is about to be killed, has spilled. If removed: call ray.shutdown."""
    with _comfort("the node's spilled objects"):
        from ray._private import worker

        node: Any = worker._global_node
        if node is not None and node.is_head():
            node.destroy_external_storage()


def hush() -> None:
    """Log the raylets' notices, which Ray prints even where log_to_driver is False. If removed: look for an option."""
    with _comfort("the raylets' notices"):
        from ray._private import worker

        def note(data: dict[str, list[str]], ignore_prefix: bool = False) -> None:  # noqa: ARG001 (Ray's)
            log.info("%s", one_line(" ".join(data["lines"])))

        getattr(worker, "print_to_stdstream")  # noqa: B009 (mypy knows that it is there)
        worker.print_to_stdstream = note


# --- Ray Data ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def data_context(settings: Mapping[str, Any], *, on_cluster: Callable[[], bool]) -> Iterator[None]:
    """Apply settings of Ray Data to the datasets built inside the block. If a setting goes: drop it here."""
    from ray.data import DataContext

    _spare_actors(on_cluster)
    context = DataContext.get_current().copy()
    for name, value in settings.items():
        place: Any = context if hasattr(context, name) else context.autoscaling_config
        getattr(place, name)
        setattr(place, name, value)
    with _comfort("the statistics of blocks"):
        context.custom_execution_callback_classes = [_forget_blocks()]
    with DataContext.current(context):
        yield


def _forget_blocks() -> type:
    """Return a callback that drops the statistics of blocks, 5 kB of the driver's memory each. If removed: drop it."""
    from ray.data._internal.execution.execution_callback import ExecutionCallback

    class ForgetBlocks(ExecutionCallback):
        def on_execution_step(self, executor: Any) -> None:
            for operator in getattr(executor, "_topology", ()):
                getattr(operator, "_output_blocks_stats", []).clear()

    return ForgetBlocks


@cache
def _spare_actors(on_cluster: Callable[[], bool]) -> None:
    """Have Ray Data's actors for statistics and autoscaling started on clusters only.

    They take 1.7 CPU seconds and 0.27 GB, and no option leaves them out. If removed: drop this.
    """
    with _comfort("Ray Data's actors"):
        from ray.data._internal.cluster_autoscaler import ClusterAutoscaler
        from ray.data._internal.execution import streaming_executor
        from ray.data._internal.execution.interfaces import ExecutionResources
        from ray.data._internal.stats import _StatsManager

        class FixedSize(ClusterAutoscaler):
            def try_trigger_scaling(self) -> None: ...

            def on_executor_shutdown(self) -> None: ...

            def get_total_resources(self) -> ExecutionResources:
                total: ExecutionResources = ExecutionResources.from_resource_dict(resources())
                return total

        def spare(where: Any, name: str, otherwise: Callable[..., Any]) -> None:
            original = getattr(where, name)

            def chosen(*args: Any, **more: Any) -> Any:
                return original(*args, **more) if on_cluster() else otherwise(*args, **more)

            setattr(where, name, chosen)

        spare(streaming_executor, "create_cluster_autoscaler", lambda *_, **__: FixedSize())
        spare(_StatsManager, "gen_dataset_id_from_stats_actor", lambda: secrets.token_hex(16))
        for name in ("register_dataset_to_stats_actor", "update_execution_metrics", "update_iteration_metrics"):
            spare(_StatsManager, name, lambda *_, **__: None)


def blocks(dataset: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the schema of each block, and a reference that the driver owns; public calls would fetch the block.

    If removed: put the rows from the encoders and hand references to the desk. Ray then loses them with their encoder,
    also where a pool shrinks, and they are encoded again.
    """
    for bundle in dataset.iter_internal_ref_bundles():
        for entry in bundle.blocks:
            yield bundle.schema, entry.ref


# --- Ray Train --------------------------------------------------------------------------------------------------------


_LEAVE_S = 30.0
"""The longest time that workers have to leave their process group."""


def trainer_class() -> Any:
    """Return Ray Train's trainer class, changed to leave Ctrl-C and the workers' places to the driver.

    Ray's own handler of Ctrl-C aborts without a checkpoint, with exit code 0. Its cleaner looks for the controller in
    any Ray on this machine, and takes the places away if it finds another one. Its callback for datasets, which we do
    not use, takes 0.7 CPU seconds. If removed: use TorchTrainer, and set the driver's handlers after Ray's.
    """
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class CalmTrainer(DataParallelTrainer):
        def _register_sigint_handler(self, controller: Any) -> None: ...

        def _create_default_callbacks(self) -> list[Any]:
            left_out = ("PlacementGroupCleanerCallback", "DatasetsCallback")
            return [each for each in super()._create_default_callbacks() if type(each).__name__ not in left_out]

    return CalmTrainer


def process_group(functions: Any, *, gpu: bool) -> Any:
    """Return Ray Train's configuration of a process group, made by the functions of `sdp.train.group`.

    Ray's controller imports their module. If removed: TorchConfig.
    """
    import ray
    from ray.train.backend import Backend, BackendConfig

    class Group(Backend):
        share_cuda_visible_devices = True  # NCCL's peers on a node need each other's GPUs

        def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:  # noqa: ARG002
            size, cuda = len(worker_group), all(worker_group.execute(functions.sees_gpu, gpu))
            how = size, worker_group.execute_single(0, functions.address), cuda
            ray.get([worker_group.execute_single_async(rank, functions.join, rank, *how) for rank in range(size)])

        def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:  # noqa: ARG002
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                ray.get(worker_group.execute_async(functions.leave), timeout=_LEAVE_S)

    class GroupConfig(BackendConfig):
        @property
        def backend_cls(self) -> type[Backend]:
            return Group

    return GroupConfig()


# --- metrics ----------------------------------------------------------------------------------------------------------


def metric(kind: str, name: str, text: str, tags: tuple[str, ...]) -> Any:
    """Return a metric that Ray's agents expose, by its kind: counter or gauge. If removed: OpenTelemetry."""
    from ray.util import metrics

    of_kind = metrics.Counter if kind == "counter" else metrics.Gauge
    return of_kind(name, text, tags)
