"""manifests/train-own-cluster.yaml, made small: its cluster comes with it, and goes when it is done."""

import json
from typing import Any

import yaml

from tests.e2e import jobs, site
from tests.e2e.conftest import READY_S
from tests.e2e.kube import Kube
from tests.e2e.settings import Settings


def test_a_job_brings_its_own_cluster_and_takes_it_along(cluster: Kube, latents: str, settings: Settings) -> None:
    cluster.until(
        lambda: not cluster.find("pods", "sdp/group=a100"), READY_S, "the idle a100 group has shrunk to nothing"
    )
    output = f"{jobs.OUTPUT}/run-own"
    made = cluster.run("create", "-f", "-", "-o", "name", stdin=json.dumps(small(settings, output)))
    name = made.strip().partition("/")[2]
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


def small(settings: Settings, output: str) -> Any:
    """Return the manifest with the tests' sizes, storage and image, otherwise unchanged."""
    job = yaml.safe_load((jobs.ROOT / "manifests" / "train-own-cluster.yaml").read_text())
    spec = job["spec"]
    spec["ttlSecondsAfterFinished"] = 5
    spec["entrypoint"] += f" --set output.uri={output}"
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    group.update(replicas=1, minReplicas=1, maxReplicas=1)
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    for pod, cpu, gpus in ((head, "500m", {}), (group["template"]["spec"], "1500m", {"nvidia.com/gpu": 8})):
        (container,) = pod["containers"]
        resources = {"cpu": cpu, "memory": "3Gi", **gpus}
        container.update(image=settings.image, resources={"requests": resources, "limits": resources})
        container["env"] = [
            *container["env"],
            {"name": "AWS_ENDPOINT_URL", "value": "http://storage:7070"},
            {"name": "AWS_REGION", "value": "us-east-1"},
            *({"name": key, "value": str(value)} for key, value in settings.values.get("env", {}).items()),
        ]
        container["envFrom"] = [{"secretRef": {"name": "storage"}}]
        container["volumeMounts"] = [*container["volumeMounts"], *settings.values.get("volumeMounts", [])]
        pod["volumes"] = [*pod["volumes"], *site.volumes(settings)]
    return job
