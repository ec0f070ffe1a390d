"""A release that is upgraded, after all other tests; then the whole pipeline is applied to it at once."""

from collections.abc import Callable, Iterator

import pytest

from tests.e2e import jobs, site
from tests.e2e.conftest import READY_S, ready
from tests.e2e.kube import Kube

STORAGE = "s3://sdp/upgraded"


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


def test_a_release_is_upgraded_and_runs_the_pipeline_applied_whole(empty: Kube, helm: Callable[..., str]) -> None:
    def cluster_pods() -> set[str]:
        return {pod["metadata"]["uid"] for pod in empty.find("pods", "ray.io/cluster=sdp")}

    helm("install", "--set", f"storage.uri={STORAGE}")
    empty.until(lambda: ready(empty, 1), READY_S, "the cluster is ready")
    before = cluster_pods()
    new = "head.env.NEW=yes,groupDefaults.env.NEW=yes"
    printed = helm("upgrade", "--force-conflicts", "--set", f"storage.uri={STORAGE},{new}")
    assert "Running pods stay as they are" in printed
    assert cluster_pods() >= before
    empty.run("delete", "pods", "-l", "ray.io/cluster=sdp", "--wait=true", timeout_s=180)
    empty.until(lambda: ready(empty, 1), READY_S, "the cluster of the new template is ready")
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
