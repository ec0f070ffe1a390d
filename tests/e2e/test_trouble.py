"""Pods, a driver, the head and a node are taken away in the middle of a job: it ends right all the same."""

import json
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.e2e import jobs, site
from tests.e2e.conftest import READY_S, fake_gpus, ready
from tests.e2e.kube import Kube
from tests.e2e.settings import Settings

LONG = ("max_steps=160", "checkpoint.every_steps=20", "checkpoint.keep_last=20")
STEPS, DUE = 160, 150
RARE = (f"max_steps={STEPS}", f"checkpoint.every_steps={DUE}", "checkpoint.keep_last=20")
LONGER_S = 900.0


def pod_of(kube: Kube, group: str) -> str:
    """Return the pod of a group that has only one."""
    pods = [pod for pod in kube.find("pods", f"sdp/group={group}") if not pod["metadata"].get("deletionTimestamp")]
    assert len(pods) == 1, f"{group}: {[pod['metadata']['name'] for pod in pods]}"
    name: str = pods[0]["metadata"]["name"]
    return name


def at_work(kube: Kube, run: str) -> None:
    """Wait for a training's first checkpoint, and return while it is training."""
    prefix = f"e2e/{run}/checkpoints/"
    kube.until(lambda: len(site.keys(kube, prefix)) > 0, jobs.JOB_S, f"{run} has a checkpoint")


def exact(kube: Kube, run: str, latents: str) -> dict[str, int]:
    """Check that a run has trained on every row of each epoch once; return its history."""
    rows = jobs.inspect(kube, latents)["counts"]["written"]
    description = jobs.inspect(kube, f"{jobs.OUTPUT}/{run}")
    assert description["step"] == STEPS
    *earlier, rest = description["newest"]["consumed"].values()
    assert len(earlier) > 1
    assert set(earlier) == {rows}
    assert 0 < rest <= rows
    history: dict[str, int] = description["history"]
    return history


def saved_early(kube: Kube, run: str) -> bool:
    """Return true if a run has a checkpoint that was not due yet."""
    return any(step < DUE for step in jobs.inspect(kube, f"{jobs.OUTPUT}/{run}")["checkpoints"])


def kill(kube: Kube, pod: str) -> None:
    kube.run("delete", "pod", pod, "--grace-period=0", "--force", "--wait=false")


def test_a_trainer_s_pod_killed_in_mid_run_loses_and_repeats_no_row(cluster: Kube, latents: str) -> None:
    job = jobs.submit(cluster, "train", f"output.uri={jobs.OUTPUT}/run-killed", *LONG)
    at_work(cluster, "run-killed")
    gone = pod_of(cluster, "a100")
    kill(cluster, gone)
    jobs.succeeded(cluster, job, LONGER_S)
    assert exact(cluster, "run-killed", latents)["recovered"] >= 1
    assert cluster.lookup("pod", gone) is None


def test_a_job_deleted_in_mid_run_and_submitted_again_continues(cluster: Kube, latents: str) -> None:
    settings = (f"output.uri={jobs.OUTPUT}/run-deleted", *LONG)
    job = jobs.submit(cluster, "train", *settings)
    at_work(cluster, "run-deleted")
    cluster.run("delete", "rayjob", job, "--wait=true")
    successor = jobs.submit(cluster, "train", *settings)
    jobs.succeeded(cluster, successor, LONGER_S)
    assert "from the beginning" not in jobs.log(cluster, successor)
    exact(cluster, "run-deleted", latents)


def test_an_evicted_trainers_pod_writes_a_checkpoint_first(cluster: Kube, latents: str) -> None:
    job = jobs.submit(cluster, "train", f"output.uri={jobs.OUTPUT}/run-told", *RARE)
    cluster.until(lambda: "train: step" in jobs.log(cluster, job), jobs.JOB_S, "the training makes steps")
    cluster.run("delete", "pod", pod_of(cluster, "a100"), "--wait=false")
    jobs.succeeded(cluster, job, LONGER_S)
    history = exact(cluster, "run-told", latents)
    assert history["preemption"] == 1
    assert saved_early(cluster, "run-told")


def test_online_training_goes_on_when_the_encoders_node_is_drained(cluster: Kube, images: str) -> None:
    job = jobs.submit(cluster, "train-online", f"output.uri={jobs.OUTPUT}/run-drained", *LONG)
    at_work(cluster, "run-drained")
    node = cluster.get("pod", pod_of(cluster, "a10g"))["spec"]["nodeName"]
    cluster.run("drain", node, "--pod-selector=sdp/group=a10g", "--delete-emptydir-data", "--timeout=110s")
    cluster.run("uncordon", node)
    jobs.succeeded(cluster, job, LONGER_S)
    run = jobs.inspect(cluster, f"{jobs.OUTPUT}/run-drained")
    assert run["step"] == STEPS
    assert not {"recovered", "gave_up"} & run["history"].keys(), "the trainers waited for another encoder"
    rows = jobs.inspect(cluster, images)["counts"]["written"]
    assert next(iter(run["newest"]["consumed"].values())) in range(int(0.8 * rows), rows + 1)


def test_a_changed_value_or_rayjob_reaches_a_job_only_when_it_is_submitted_again(
    cluster: Kube, latents: str, helm: Callable[..., str]
) -> None:
    def upgrade(steps: int) -> None:
        helm("upgrade", "--force-conflicts", "--set", f"jobs.train.max_steps={steps}")

    def change(entrypoint: str) -> None:
        cluster.run("patch", "rayjob", job, "--type=merge", "-p", json.dumps({"spec": {"entrypoint": entrypoint}}))

    uri = f"output.uri={jobs.OUTPUT}/run-changed"
    upgrade(120)
    job = jobs.submit(cluster, "train", uri)
    at_work(cluster, "run-changed")
    upgrade(STEPS)
    change("false")
    ended = jobs.succeeded(cluster, job)
    assert jobs.inspect(cluster, f"{jobs.OUTPUT}/run-changed")["step"] == 120
    change("true")
    jobs.succeeded(cluster, jobs.submit(cluster, "train", uri))
    exact(cluster, "run-changed", latents)
    assert cluster.get("rayjob", job)["status"] == ended["status"], "a changed RayJob is not run again"
    upgrade(40)


def test_a_rayjob_applied_right_after_an_upgrade_runs_with_the_new_configuration(
    cluster: Kube, images: str, helm: Callable[..., str]
) -> None:
    output = f"{images}-upgraded"
    helm("upgrade", "--force-conflicts", "--set", f"jobs.download.output.uri={output}")
    jobs.run(cluster, "download")
    assert jobs.inspect(cluster, output)["counts"]["input"] == site.IMAGES
    helm("upgrade", "--force-conflicts")


@pytest.fixture
def static(cluster: Kube, helm: Callable[..., str]) -> Iterator[None]:
    """Take the autoscaler, which runs in the head's pod, away; a pod with A100s is always there instead."""

    def renew(workers: int, *words: str) -> None:
        helm("upgrade", "--force-conflicts", *words)
        gone = jobs.head(cluster)
        kill(cluster, gone)
        cluster.until(lambda: jobs.head(cluster) != gone, 120, "another head is made")
        cluster.until(lambda: ready(cluster, workers), READY_S, f"it is ready with {workers} pods")

    renew(2, "--set", "autoscaling.enabled=false", "--set", "groups.a100.replicas=1")
    yield
    renew(1)


@pytest.mark.parametrize("kind", ["shared", "static", "own", "queue"])
def test_a_killed_head_is_replaced_and_the_job_continues_from_storage(
    cluster: Kube, latents: str, kind: str, request: pytest.FixtureRequest
) -> None:
    """Even if it is submitted again before a worker has joined the new head of a cluster that does not grow."""
    own, run = kind in ("own", "queue"), f"run-head-{kind}"
    if kind in ("static", "queue"):
        request.getfixturevalue(kind)
    if own:
        idle = "the idle a100 group has shrunk to nothing"
        cluster.until(lambda: not cluster.find("pods", "sdp/group=a100"), READY_S, idle)
    settings = [f"output.uri={jobs.OUTPUT}/{run}", *LONG]
    if kind == "static":
        settings.append("scaling.can_grow=false")
    job = jobs.submit(cluster, "train", *settings, own_cluster=own)
    at_work(cluster, run)
    name = cluster.get("rayjob", job)["status"]["rayClusterName"]
    gone = jobs.head(cluster, name)
    kill(cluster, gone)
    cluster.until(lambda: jobs.head(cluster, name) != gone, 120, "another head is made")
    ended = jobs.succeeded(cluster, job, LONGER_S, name)
    assert (ended["status"]["rayClusterName"], ended["status"].get("failed", 0)) == (name, 0), "it took one try"
    exact(cluster, run, latents)


def test_an_evicted_head_writes_a_checkpoint_first(cluster: Kube, latents: str) -> None:
    job = jobs.submit(cluster, "train", f"output.uri={jobs.OUTPUT}/run-head-told", *RARE)
    cluster.until(lambda: "train: step" in jobs.log(cluster, job), jobs.JOB_S, "the training makes steps")
    gone = jobs.head(cluster)
    cluster.run("delete", "pod", gone, "--wait=false")
    cluster.until(lambda: jobs.head(cluster) != gone, LONGER_S, "another head is made")
    jobs.succeeded(cluster, job, LONGER_S)
    exact(cluster, "run-head-told", latents)
    assert saved_early(cluster, "run-head-told")


def test_a_node_that_is_lost_and_comes_back_costs_time_and_no_rows(
    cluster: Kube, images: str, settings: Settings
) -> None:
    if not settings.lose_node:
        pytest.skip("SDP_E2E_LOSE_NODE and SDP_E2E_BRING_BACK do not say how a node is lost")
    small = ("output.rows_per_file=10", "seed=2", f"output.uri={jobs.OUTPUT}/latents-node")
    job = jobs.submit(cluster, "process", *small)
    prefix = "e2e/latents-node/parts/"
    cluster.until(lambda: len(site.keys(cluster, prefix)) > 2, jobs.JOB_S, "some parts are there")
    node = cluster.get("pod", pod_of(cluster, "a10g"))["spec"]["nodeName"]
    subprocess.run(["sh", "-c", settings.lose_node, "sh", node], check=True, timeout=120)
    try:
        cluster.until(lambda: not _is_ready(cluster, node), 180, f"{node} is not ready any more")
    finally:
        subprocess.run(["sh", "-c", settings.bring_back, "sh", node], check=True, timeout=300)
    cluster.until(lambda: _is_ready(cluster, node), 180, f"{node} is ready again")
    if settings.fake_gpus:
        fake_gpus(cluster, settings)
    jobs.succeeded(cluster, job, LONGER_S)
    description = jobs.inspect(cluster, f"{jobs.OUTPUT}/latents-node")  # which reads every byte
    rows = jobs.inspect(cluster, images)["counts"]["written"]
    assert (description["complete"], description["problems"], description["counts"]["input"]) == (True, [], rows)
    assert description["counts"]["written"] > 0.9 * rows


def _is_ready(kube: Kube, node: str) -> bool:
    conditions = json.loads(kube.run("get", "node", node, "-o", "jsonpath={.status.conditions}"))
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
