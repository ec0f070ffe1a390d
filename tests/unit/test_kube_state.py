"""The states of RayJobs and RayClusters, from their status as KubeRay 1.7 writes it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sdp.kube.state import cluster_state, job_state
from sdp.kube.status import clusters_table, jobs_table

FAILED = (
    "Job entrypoint command failed with exit code 2, last available logs (truncated to 20,000 chars):\n"
    "sdp: strategy.kind: expected ddp or fsdp, got 'zero'\n"
)


def rayjob(**status: Any) -> dict[str, Any]:
    about = {"name": "sdp-train-x7k2p", "labels": {"sdp/job": "train"}}
    return {"metadata": about, "spec": {"clusterSelector": {"ray.io/cluster": "sdp"}}, "status": status}


@pytest.mark.parametrize(
    ("status", "state", "finished", "code"),
    [
        ({}, "new", False, 1),
        ({"jobDeploymentStatus": None, "jobStatus": None}, "new", False, 1),
        ({"jobDeploymentStatus": "Initializing"}, "waiting", False, 1),
        ({"jobDeploymentStatus": "Running"}, "pending", False, 1),
        ({"jobDeploymentStatus": "Running", "jobStatus": "PENDING"}, "pending", False, 1),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, "running", False, 1),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "succeeded", True, 0),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, "stopped", True, 1),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": FAILED}, "failed", True, 2),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": "exit code 20"}, "failed", True, 1),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "RUNNING", "reason": "DeadlineExceeded"}, "failed", True, 1),
        ({"jobDeploymentStatus": "ValidationFailed", "message": "spec is invalid"}, "refused", True, 1),
        ({"jobDeploymentStatus": "Suspended"}, "suspended", False, 1),
    ],
)
def test_a_job_s_state_is_one_word_and_its_end_an_exit_code(
    status: dict[str, Any], state: str, finished: bool, code: int
) -> None:
    actual = job_state(rayjob(**status))
    assert (actual.state, actual.finished, actual.exit_code) == (state, finished, code)


def test_a_job_that_failed_says_why_in_one_line() -> None:
    state = job_state(rayjob(jobDeploymentStatus="Failed", jobStatus="FAILED", reason="AppFailed", message=FAILED))
    assert state.message == "sdp: strategy.kind: expected ddp or fsdp, got 'zero'", "its own last error"
    killed = "Job entrypoint command failed with exit code 137, last available logs (truncated to 20,000 chars):\n5"
    state = job_state(rayjob(jobDeploymentStatus="Failed", jobStatus="FAILED", reason="AppFailed", message=killed))
    assert state.message == "Job entrypoint command failed with exit code 137"
    late = job_state(rayjob(jobDeploymentStatus="Failed", reason="DeadlineExceeded", message="too long"))
    assert late.message == "DeadlineExceeded: too long"


def test_a_runtime_environment_that_cannot_be_made_is_explained_by_its_last_error() -> None:
    message = (
        "runtime_env setup failed: Failed to set up runtime environment.\nTraceback (most recent call last):\n"
        "utils.SubprocessCalledProcessError: Run cmd[9] failed with the following details.\n"
        "Last 50 lines of stdout:\n    python: No module named pip\n\n    [notice] a new pip\n"
    )
    state = job_state(rayjob(jobDeploymentStatus="Failed", jobStatus="FAILED", reason="AppFailed", message=message))
    assert state.message.endswith(": python: No module named pip")
    short = message.partition("\n")[0]
    state = job_state(rayjob(jobDeploymentStatus="Failed", jobStatus="FAILED", reason="AppFailed", message=short))
    assert state.message.endswith(": runtime_env setup failed: Failed to set up runtime environment.")


def test_a_waiting_job_reports_its_clusters_problem() -> None:
    condition = {"type": "HeadPodReady", "status": "False", "reason": "ContainersNotReady", "message": "unready"}
    waiting = rayjob(jobDeploymentStatus="Initializing", rayClusterStatus={"conditions": [condition]})
    assert job_state(waiting).message == "ContainersNotReady: unready"
    assert job_state(rayjob(jobDeploymentStatus="Initializing")).message == "the cluster is not ready yet"
    assert job_state(rayjob(jobDeploymentStatus="Running", jobStatus="RUNNING", message="Job is running")).message == ""


def test_a_job_that_is_tried_again_says_how_often() -> None:
    tried = rayjob(jobDeploymentStatus="Initializing", failed=1)
    tried["spec"]["backoffLimit"] = 3
    assert job_state(tried).message == "attempt 2 of 4; the cluster is not ready yet"
    ended = {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "failed": 4, "message": "exit code 2"}
    assert job_state(tried | {"status": ended}).message == "exit code 2"


def test_a_job_that_is_being_deleted_says_since_when_and_what_holds_it() -> None:
    job = rayjob(jobDeploymentStatus="Running", jobStatus="RUNNING")
    job["metadata"] |= {"deletionTimestamp": "2026-11-21T07:30:00Z", "finalizers": ["ray.io/rayjob-finalizer"]}
    state = job_state(job)
    assert state.state == "deleting"
    assert state.message == "being deleted since 2026-11-21 07:30Z, held by ray.io/rayjob-finalizer"


def test_a_job_that_the_operator_has_not_picked_up_says_so() -> None:
    job = rayjob()
    for age_s, message in ((10, ""), (70, "KubeRay's operator does not answer; sdp doctor checks it")):
        job["metadata"]["creationTimestamp"] = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat()
        assert job_state(job).message == message
    assert job_state(job | {"status": {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}}).message == ""


def test_a_job_has_rays_times_once_it_has_started() -> None:
    times = {"startTime": "2026-11-21T07:30:00Z"}
    running = rayjob(jobDeploymentStatus="Running", jobStatus="RUNNING", rayJobInfo=times, startTime="2026-01-01")
    assert job_state(running).started == datetime(2026, 11, 21, 7, 30, tzinfo=UTC)
    times["endTime"] = "2026-11-21T08:30:00Z"
    done = job_state(rayjob(jobDeploymentStatus="Complete", jobStatus="SUCCEEDED", rayJobInfo=times))
    assert done.ended == datetime(2026, 11, 21, 8, 30, tzinfo=UTC)
    assert job_state(rayjob(jobDeploymentStatus="Initializing", startTime="2026-11-21T07:00:00Z")).started is None


def test_a_cluster_reports_its_progress_and_its_problem() -> None:
    about = {"name": "sdp"}
    ready = {"state": "ready", "readyWorkerReplicas": 3, "desiredWorkerReplicas": 4, "head": {"podName": "h"}}
    state = cluster_state({"metadata": about, "status": ready})
    assert (state.state, state.workers, state.wanted, state.head, state.message) == ("ready", 3, 4, "h", "")
    repeated = "FailedCreate exceeded quota"
    failing = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": repeated}
    fine = {"type": "HeadPodReady", "status": "True", "reason": "Running", "message": ""}
    stuck = cluster_state({"metadata": about, "status": {"conditions": [fine, failing]}})
    assert (stuck.state, stuck.message) == ("starting", "FailedCreate: exceeded quota")
    full = cluster_state({"metadata": about, "status": {**ready, "conditions": [fine, failing]}})
    assert (full.state, full.message, full.refused) == ("ready", "FailedCreate: exceeded quota", True)
    headless = {"type": "HeadPodReady", "status": "False", "reason": "HeadPodNotFound", "message": "Head Pod not found"}
    lost = cluster_state({"metadata": about, "status": {**ready, "conditions": [headless]}})
    assert (lost.state, lost.message) == ("starting", "HeadPodNotFound: Head Pod not found")
    assert cluster_state({"metadata": about}).state == "starting"


def test_tables_have_a_line_each_and_cut_long_messages() -> None:
    now = datetime(2026, 11, 21, 8, tzinfo=UTC)
    job = rayjob(jobDeploymentStatus="Failed", jobStatus="FAILED", message="no " * 60, startTime="2026-11-21T07:00:00Z")
    lines = jobs_table([job_state(job)], now).splitlines()
    assert lines[0].split() == ["JOB", "STATE", "STARTED", "TOOK", "CLUSTER", "BY", "MESSAGE"]
    assert lines[1].split()[:5] == ["sdp-train-x7k2p", "failed", "2026-11-21", "07:00Z", "1:00:00"]
    assert lines[1].endswith("…")
    assert jobs_table([], now) == clusters_table([]) == ""
