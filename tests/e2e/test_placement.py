"""Jobs on a cluster without workers request their places from Ray, as its placement groups show."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import jobs
from tests.e2e.conftest import READY_S
from tests.e2e.kube import Kube

ASKED = """
import json
from ray.util.state import list_placement_groups
for group in list_placement_groups(filters=[("state", "!=", "REMOVED")], limit=1000, detail=True):
    kinds = set()
    for bundle in group.bundles:
        labels = bundle.get("label_selector") or {}
        kinds.add((int(bundle["unit_resources"].get("GPU", 0)), labels.get("ray.io/accelerator-type")))
    print(json.dumps([len(group.bundles), sorted(kinds)]))
"""
A100, A10G, CPU = [1, "A100"], [1, "A10G"], [0, None]


@pytest.fixture
def empty(cluster: Kube) -> Iterator[Kube]:
    """The cluster without any worker."""
    names = [group["groupName"] for group in cluster.get("raycluster", "sdp")["spec"]["workerGroupSpecs"]]
    path = f"/spec/workerGroupSpecs/{names.index('a10g')}/minReplicas"

    def keep(count: int) -> None:
        patch = [{"op": "replace", "path": path, "value": count}]
        cluster.run("patch", "raycluster", "sdp", "--type=json", "-p", json.dumps(patch))

    keep(0)
    idle = "the autoscaler has taken all workers away"
    cluster.until(lambda: not cluster.find("pods", "ray.io/node-type=worker"), READY_S, idle)
    yield cluster
    keep(1)


def asked(kube: Kube, job: str, kinds: int, *settings: str) -> list[list[Any]]:
    """Return the workers and their requests once there are this many kinds at the same time; then stop the job."""
    name = jobs.submit(kube, job, *settings)

    def pending() -> list[list[Any]] | None:
        groups = [json.loads(line) for line in kube.python(jobs.head(kube), ASKED, container="ray-head").splitlines()]
        return sorted(groups) if len(groups) >= kinds else None

    result = kube.until(pending, jobs.JOB_S, f"{job} asks for {kinds} kinds of places")
    jobs.sdp(kube, "stop", name, timeout_s=150)
    return result


@pytest.mark.usefixtures("latents")
def test_each_trainer_asks_for_a_gpu_of_the_accelerator_before_any_node_is_there(empty: Kube) -> None:
    more = ("output.uri=s3://sdp/e2e/run-asked", "scaling.num_workers=8")
    assert asked(empty, "train", 1, *more) == [[8, [A100]]]


@pytest.mark.usefixtures("images")
def test_train_online_asks_for_trainers_and_encoders_at_once(empty: Kube) -> None:
    more = ("output.uri=s3://sdp/e2e/run-asked-online", "scaling.num_workers=8")
    assert asked(empty, "train-online", 3, *more) == [[1, [CPU]], [1, [A10G]], [8, [A100]]]


@pytest.mark.usefixtures("trained")
def test_generators_ask_for_the_gpu_of_their_accelerator(empty: Kube) -> None:
    assert asked(empty, "generate", 1, "output.uri=s3://sdp/e2e/pictures-asked") == [[1, [A10G]]]
