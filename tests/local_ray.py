"""Ray on this machine for the tests of a module: one node, or several that look like a cluster's."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from sdp.ray import internals
from sdp.ray.cluster import worker_environment
from tests.waiting import until

Setup = Callable[[], None] | None
_STORE = 150_000_000
"""Bytes of a node's object store."""
_CONFIG = {"idle_worker_killing_time_threshold_ms": 10_000, "health_check_period_ms": 500}
"""Processes outlive a pause between tasks. A lost node is missed after five checks; a busy one has 10 s for each."""


@contextmanager
def one_node(cpus: int, setup: Setup = None) -> Iterator[None]:
    """Start a Ray of one node; `setup` runs in each of its worker processes first."""
    internals.spare_processes()  # as a job does
    ray.init(
        "local",
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2 * _STORE,
        runtime_env=_environment(setup),
    )
    try:
        yield
    finally:
        shut_down()


@contextmanager
def several_nodes(*nodes: dict[str, Any], setup: Setup = None, job: Any = None, **head: Any) -> Iterator[Cluster]:
    """Start a Ray of a head, by default without CPUs, and of these nodes, and connect to it."""
    internals.spare_processes()
    head = {"num_cpus": 0, "object_store_memory": _STORE, **head}
    head["_system_config"] = {**_CONFIG, **head.get("_system_config", {})}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for node in nodes:
            cluster.add_node(**{"object_store_memory": _STORE, **node})
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=_environment(setup), job_config=job)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        shut_down()
        cluster.shutdown()


def shut_down() -> None:
    """End Ray once Ray Data's threads have ended, one of which may crash this process in a Ray that is gone."""
    until(lambda: not any("StreamingExecutor" in thread.name for thread in threading.enumerate()), "datasets end")
    ray.shutdown()


def _environment(setup: Setup) -> dict[str, Any]:
    return {**worker_environment(), **({"worker_process_setup_hook": setup} if setup else {})}
