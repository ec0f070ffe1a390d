"""A cluster that starts from nothing: what workers get is in the configuration, not in what is alive."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from sdp import cluster
from sdp.config import WorkersConfig
from sdp.errors import UserError
from sdp.train.job import TrainSummary, run
from tests.local_ray import several_nodes
from tests.training import config
from tests.waiting import until

DEADLINE_S = 240
A100 = {"ray.io/accelerator-type": "A100"}


@pytest.fixture(scope="module")
def idle() -> Iterator[Cluster]:
    """A head without work and a node of CPUs: the groups with GPUs are at no pod."""
    with several_nodes({"num_cpus": 2}) as nodes:
        yield nodes


def bundles() -> list[dict[str, float]]:
    """What placement groups that wait for a place ask for."""
    groups = placement_group_table().values()
    return [bundle for group in groups if group["state"] == "PENDING" for bundle in group["bundles"].values()]


def test_trainers_ask_for_a_gpu_each_though_no_node_has_one_yet(idle: Cluster, root: Path) -> None:
    how = config(root, max_steps=2, scaling__accelerator="A100", scaling__num_workers=2, scaling__can_grow=True)
    summaries: list[TrainSummary] = []
    job = threading.Thread(target=lambda: summaries.append(run(how)), daemon=True)
    job.start()
    assert [bundle.get("GPU") for bundle in until(bundles, "bundles are asked for")] == [1.0, 1.0]
    idle.add_node(num_cpus=2, num_gpus=2, labels=A100)
    job.join(DEADLINE_S)
    assert [summary.state.step for summary in summaries] == [2]


@pytest.mark.usefixtures("idle")
def test_on_a_cluster_nobody_guesses_whether_workers_get_gpus(root: Path) -> None:
    says = r"^scaling\.use_gpu: expected true or false on a cluster where scaling\.accelerator is null, got null; "
    with pytest.raises(UserError, match=says):
        run(config(root))
    assert not (root / "run").exists()
    with pytest.raises(UserError, match=r"^encode\.use_gpu: "):
        cluster.on_gpus("encode", WorkersConfig())
    assert not cluster.on_gpus("encode", WorkersConfig(use_gpu=False))
    assert cluster.on_gpus("encode", WorkersConfig(use_gpu=True))
    assert cluster.on_gpus("encode", WorkersConfig(accelerator="A10G"))
