"""A release that began as version 0.1, after all other tests; then the whole pipeline is applied to it at once."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e import jobs, site
from tests.e2e.conftest import CHART, READY_S, enforce, ready
from tests.e2e.kube import Failed, Kube

STORAGE = "s3://sdp/upgraded"
FIRST_OF_0_2 = "717111b7"
"""The commit that made version 0.2.0."""


@pytest.fixture
def empty(kube: Kube, helm: Callable[..., str]) -> Iterator[Kube]:
    """The namespace without a release, before and after."""
    remove(kube, helm)
    yield kube
    remove(kube, helm)


def remove(kube: Kube, helm: Callable[..., str]) -> None:
    kube.run("delete", "rayjobs", "--all", "--wait=true")
    helm("uninstall", "--ignore-not-found")
    kube.until(lambda: not kube.find("pods", "ray.io/cluster=sdp"), 300, "the pods of the release are gone")


def test_a_release_of_0_1_is_upgraded_and_runs_the_pipeline_applied_whole(
    empty: Kube, helm: Callable[..., str], tmp_path: Path
) -> None:
    def cluster_pods() -> set[str]:
        return {pod["metadata"]["uid"] for pod in empty.find("pods", "ray.io/cluster=sdp")}

    enforce(empty, "baseline")  # 0.1 did not confine its pods
    # The schema of 0.1 does not know all of the values.
    helm("install", "--skip-schema-validation", "--set", f"storage.uri={STORAGE}", chart=chart_of_0_1(tmp_path))
    empty.until(lambda: ready(empty, 1), READY_S, "the cluster of 0.1 is ready")
    enforce(empty, "restricted")
    before = cluster_pods()
    printed = helm("upgrade", "--force-conflicts", "--set", f"storage.uri={STORAGE}")
    assert "Running pods stay as they are" in printed
    assert cluster_pods() >= before
    empty.run("delete", "pods", "-l", "ray.io/cluster=sdp", "--wait=true", timeout_s=180)
    empty.until(lambda: ready(empty, 1), READY_S, "the cluster of this version is ready")
    assert not cluster_pods() & before

    manifests = str(jobs.ROOT / "manifests")
    assert empty.run("apply", "-k", manifests).count("created") == 3
    for name in ("sdp-download", "sdp-process", "sdp-train"):
        jobs.succeeded(empty, name)
    images, latents, run = (jobs.inspect(empty, f"{STORAGE}/{name}") for name in ("images", "latents", "run"))
    assert images["counts"]["input"] == site.IMAGES
    assert latents["counts"]["input"] == images["counts"]["written"]
    assert next(iter(run["newest"]["consumed"].values())) == latents["counts"]["written"]
    assert "created" not in empty.run("apply", "-k", manifests), "applying a job that has ended does nothing"


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
