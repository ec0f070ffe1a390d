"""RayJobs: created from manifests/, awaited, and what they left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.kube import Failed, Kube, Object, environment

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = "s3://sdp/e2e"
JOB_S = 600.0
"""The longest that one of these small jobs may take, the start of its pods included, on two cores for all nodes."""
HEAD = "ray.io/node-type=head,ray.io/cluster="
ACTORS = """
import json
from ray.util.state import list_actors, list_nodes
alive = [node for node in list_nodes(limit=1000) if node.state == "ALIVE"]
groups = {node.node_id: node.labels.get("sdp/group", "head") for node in alive}
actors = list_actors(limit=1000, detail=True)
print(json.dumps([[a.class_name, groups.get(a.node_id, "?")] for a in actors if a.node_id]))
"""


def create(kube: Kube, manifest: str) -> str:
    """Create the RayJob as in the README; return its name."""
    kube.run("replace", "--force", "-f", str(ROOT / "manifests" / f"{manifest}.yaml"))
    return f"sdp-{manifest}"


def succeeded(kube: Kube, name: str, seconds: float = JOB_S, cluster: str = "sdp") -> Object:
    """Wait for a job to succeed; raise AssertionError with its log if it fails."""
    try:
        job = kube.until(lambda: ended(kube, name), seconds, f"the job {name} ends")
    except AssertionError as error:
        raise AssertionError(f"{error}\n\n{log(kube, name, cluster)}") from None
    status = job["status"]
    assert status["jobStatus"] == "SUCCEEDED", f"{status.get('message')}\n{log(kube, name, cluster)}\n{kube.report()}"
    return job


def ended(kube: Kube, name: str) -> Object | None:
    """Return a job's RayJob if it has ended."""
    job: Object = kube.get("rayjob", name)
    return job if job.get("status", {}).get("jobDeploymentStatus") in ("Complete", "Failed") else None


def log(kube: Kube, name: str, cluster: str = "sdp") -> str:
    """Return the log of the job's driver."""
    try:
        submission = kube.get("rayjob", name)["status"]["jobId"]
        path = f"/tmp/ray/session_latest/logs/job-driver-{submission}.log"
        return kube.run("exec", head(kube, cluster), "-c", "ray-head", "--", "tail", "-n", "60", path)
    except (Failed, KeyError) as error:
        return f"(no log: {error})"


def run(kube: Kube, manifest: str, seconds: float = JOB_S) -> str:
    """Create a job and wait for it to succeed; return its log."""
    name = create(kube, manifest)
    succeeded(kube, name, seconds)
    return log(kube, name)


def head(kube: Kube, cluster: str = "sdp") -> str:
    """Return the head's pod that is not being deleted."""
    running = [pod for pod in kube.find("pods", f"{HEAD}{cluster}") if not pod["metadata"].get("deletionTimestamp")]
    if len(running) != 1:
        raise Failed(f"expected one head pod, got {len(running)}")
    name: str = running[0]["metadata"]["name"]
    return name


def inspect(kube: Kube, uri: str) -> Any:
    """Return the output of `sdp inspect` in a pod; of a dataset it reads every byte."""
    is_run = uri.rpartition("/")[2].startswith("run")
    words = ["sdp", "inspect", "--json", *([] if is_run else ["--verify"]), uri]
    return json.loads(kube.run("exec", head(kube), "-c", "ray-head", "--", *words))


def groups(kube: Kube, actor: str) -> set[str]:
    """The groups in which actors of a class have run, by Ray's own account; of nodes that are still there."""
    actors = json.loads(kube.python(head(kube), ACTORS, container="ray-head"))
    return {group for name, group in actors if name.endswith(actor)} - {"?"}


def sdp(kube: Kube, *words: str, timeout_s: float = 120, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run sdp on this machine, as a user types it."""
    command = [sys.executable, "-m", "sdp", *words, "--namespace", kube.namespace]
    environ = {name: value for name, value in environment().items() if not name.startswith(("AWS_", "RAY_"))} | env
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environ, cwd=os.fspath(ROOT), check=False
    )


def submit(kube: Kube, job: str, *settings: str, own_cluster: bool = False) -> str:
    """`sdp submit`, without following; returns the RayJob's name."""
    words = [word for setting in settings for word in ("--set", setting)]
    if own_cluster:
        words.append("--own-cluster")
    done = sdp(kube, "submit", job, "--no-follow", *words)
    assert done.returncode == 0, done.stderr
    words = done.stderr.split()
    return words[words.index("submitted") + 1]
