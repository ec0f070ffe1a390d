"""Releases that follow the main one: one whose head keeps its state in Redis, and one that began as version 0.1."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e import jobs, site
from tests.e2e.conftest import CHART, READY_S, ready
from tests.e2e.kube import Failed, Kube, Object
from tests.e2e.settings import Settings
from tests.e2e.test_trouble import LONGER_S, STEPS, at_work, kill, pod_of

STORAGE = "s3://sdp/redis"
WITH_REDIS = (
    f"storage.uri={STORAGE}",
    "faultTolerance.redisAddress=redis:6379",
    "faultTolerance.passwordSecret.name=redis",
    "autoscaling.idleTimeoutSeconds=600",  # so that no worker ends but by the test
    f"jobs.train.max_steps={STEPS}",
)
FIRST_OF_0_2 = "717111b7"
"""The commit that made version 0.2.0."""


@pytest.fixture
def empty(kube: Kube, helm: Callable[..., str]) -> Iterator[Kube]:
    """The namespace without a release, before and after."""
    remove(kube, helm)
    yield kube
    remove(kube, helm)


def remove(kube: Kube, helm: Callable[..., str]) -> None:
    if helm("list", "--short").split():
        kube.run("delete", "rayjobs", "--all", "--wait=true")
        helm("uninstall")
    kube.until(lambda: not kube.find("pods", "ray.io/cluster=sdp"), 300, "the pods of the release are gone")


def test_with_redis_workers_outlive_the_head_and_a_whole_pipeline_continues(
    empty: Kube, helm: Callable[..., str], settings: Settings
) -> None:
    if settings.redis_image is None:
        pytest.skip("SDP_E2E_REDIS_IMAGE is none")
    empty.apply(site.redis(settings.redis_image))
    empty.run("wait", "--for=condition=Ready", "pod/redis", "--timeout=120s", timeout_s=130)
    helm("install", *(word for setting in WITH_REDIS for word in ("--set", setting)))
    empty.until(lambda: ready(empty, 1), READY_S, "the cluster is ready with a pod in a10g")

    manifests = str(jobs.ROOT / "manifests")
    assert empty.run("apply", "-k", manifests).count("created") == 3
    for name in ("sdp-download", "sdp-process"):
        jobs.succeeded(empty, name)
    at_work(empty, "run", folder="redis")
    workers = {group: process_of(empty, pod_of(empty, group)) for group in ("a10g", "a100")}
    gone = jobs.head(empty)
    kill(empty, gone)
    empty.until(lambda: jobs.head(empty) != gone, 120, "another head is made")
    empty.until(lambda: ready(empty, 2), READY_S, "the workers have joined the new head")
    with pytest.raises(AssertionError, match="FAILED"):
        jobs.succeeded(empty, "sdp-train", LONGER_S)  # the driver ended with the head
    assert {group: process_of(empty, pod_of(empty, group)) for group in workers} == workers

    assert "created" not in empty.run("apply", "-k", manifests), "applying a job that has ended does nothing"
    jobs.run(empty, "train", LONGER_S)
    run, latents = jobs.inspect(empty, f"{STORAGE}/run"), jobs.inspect(empty, f"{STORAGE}/latents")
    assert run["step"] == STEPS
    *earlier, _ = run["newest"]["consumed"].values()
    assert set(earlier) == {latents["counts"]["written"]}
    assert {group: process_of(empty, pod_of(empty, group)) for group in workers} == workers


def process_of(kube: Kube, pod: str) -> tuple[str, int]:
    """Return what tells a pod's container from one that was started again."""
    state: Object = kube.get("pod", pod)
    return state["metadata"]["uid"], state["status"]["containerStatuses"][0]["restartCount"]


def test_a_release_of_0_1_is_upgraded_and_runs_jobs(empty: Kube, helm: Callable[..., str], tmp_path: Path) -> None:
    chart = chart_of_0_1(tmp_path)
    helm("install", "--set", "storage.uri=s3://sdp/upgraded", chart=chart)
    empty.until(lambda: ready(empty, 1), READY_S, "the cluster of 0.1 is ready")
    before = {pod["metadata"]["uid"] for pod in empty.find("pods", "ray.io/cluster=sdp")}
    printed = helm("upgrade", "--force-conflicts", "--set", "storage.uri=s3://sdp/upgraded")
    assert "of an older template" in printed
    assert before == {pod["metadata"]["uid"] for pod in empty.find("pods", "ray.io/cluster=sdp")}
    empty.run("delete", "pods", "-l", "ray.io/cluster=sdp", "--wait=true", timeout_s=180)
    empty.until(lambda: ready(empty, 1), READY_S, "the cluster of this version is ready")
    jobs.run(empty, "download")
    counts = jobs.inspect(empty, "s3://sdp/upgraded/images")["counts"]
    assert counts["input"] == site.IMAGES
    assert counts["written"] > 0.9 * site.IMAGES


def chart_of_0_1(folder: Path) -> Path:
    """Return the chart as it was before 0.2.0, from the project's history."""
    path = CHART.relative_to(jobs.ROOT)
    command = ["git", "-C", str(jobs.ROOT), "archive", f"--output={folder}/chart.tar", f"{FIRST_OF_0_2}^", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the project's history: clone it with all commits")
    subprocess.run(["tar", "-xf", f"{folder}/chart.tar", "-C", str(folder)], check=True)
    if "version: 0.1.0" not in (folder / path / "Chart.yaml").read_text():
        raise Failed(f"{FIRST_OF_0_2}^: expected the chart 0.1.0")
    return folder / path
