"""`sdp submit train --own-cluster`: a cluster comes with the job, and goes when it is done."""

import pytest

from tests.e2e import jobs, site
from tests.e2e.conftest import READY_S
from tests.e2e.kube import Kube


def test_a_job_brings_its_own_cluster_and_takes_it_along(cluster: Kube, latents: str) -> None:
    cluster.until(
        lambda: not cluster.find("pods", "sdp/group=a100"), READY_S, "the idle a100 group has shrunk to nothing"
    )
    output = f"{jobs.OUTPUT}/run-own"
    name = jobs.submit(cluster, "train", f"output.uri={output}", own_cluster=True)
    own = cluster.until(
        lambda: cluster.get("rayjob", name).get("status", {}).get("rayClusterName"), 60, "it has a cluster"
    )
    assert own != "sdp"

    jobs.succeeded(cluster, name, cluster=own)
    run = jobs.inspect(cluster, output)
    rows = jobs.inspect(cluster, latents)["counts"]["written"]
    assert run["step"] == 40
    assert next(iter(run["newest"]["consumed"].values())) == rows
    cluster.until(lambda: cluster.lookup("raycluster", own) is None, 120, "its cluster is gone")
    assert cluster.lookup("raycluster", "sdp") is not None
    with site.reached(cluster) as env:
        logs = jobs.sdp(cluster, "logs", name, **env)
    assert (logs.returncode, logs.stderr) == (0, "")
    assert "train: step 40" in logs.stdout, "its log is in storage"


@pytest.mark.usefixtures("latents", "queue")
def test_jobs_with_own_clusters_take_turns_in_a_queue_of_kueue(cluster: Kube) -> None:
    cluster.until(lambda: not cluster.find("pods", "sdp/group=a100"), READY_S, "the idle a100 group has shrunk")
    first, second = (
        jobs.submit(cluster, "train", f"output.uri={jobs.OUTPUT}/run-{name}", own_cluster=True)
        for name in ("first-in-queue", "second-in-queue")
    )
    cluster.until(lambda: not cluster.get("rayjob", first)["spec"].get("suspend"), 60, "the queue admits the first job")
    assert cluster.get("rayjob", second)["spec"].get("suspend")
    done, waited = (jobs.succeeded(cluster, name)["status"] for name in (first, second))
    assert waited["startTime"] >= done["endTime"]
