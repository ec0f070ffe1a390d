"""`sdp submit`, `status`, `logs`, `stop` and `doctor` from outside, against a real API server, operator and Ray."""

import json

from tests.e2e import jobs
from tests.e2e.kube import Kube


def test_submit_follows_a_job_to_its_end_and_prints_its_log(cluster: Kube, images: str) -> None:
    done = jobs.sdp(cluster, "submit", "download", timeout_s=jobs.JOB_S)
    assert done.returncode == 0, done.stderr
    assert "submitted sdp-download-" in done.stderr
    assert f"{images}: " in done.stdout
    assert "this run" not in done.stdout, "all was done before"


def test_submit_reports_errors_that_the_user_must_fix_with_exit_code_2(cluster: Kube) -> None:
    refused = jobs.sdp(cluster, "submit", "process", "--set", "resolution=[64]")
    assert refused.returncode == 2
    assert len(refused.stderr.strip().splitlines()) == 1
    done = jobs.sdp(cluster, "submit", "process", "--set", "source.uri=s3://sdp/nowhere", timeout_s=jobs.JOB_S)
    assert done.returncode == 2, done.stderr
    assert "s3://sdp/nowhere" in done.stdout


def test_status_and_logs_show_existing_jobs(cluster: Kube, images: str) -> None:  # noqa: ARG001 (a job has run)
    report = json.loads(jobs.sdp(cluster, "status", "--json").stdout)
    (release,) = [one for one in report["clusters"] if one["name"] == "sdp"]
    assert release["state"] == "ready"
    done = [one for one in report["jobs"] if one["job"] == "download" and one["state"] == "succeeded"]
    logs = jobs.sdp(cluster, "logs", done[0]["name"])
    assert logs.returncode == 0, logs.stderr
    assert "images" in logs.stdout


def test_stop_ends_a_job_with_a_last_checkpoint(cluster: Kube, latents: str) -> None:  # noqa: ARG001 (it trains on these)
    output = f"{jobs.OUTPUT}/run-stopped"
    job = jobs.submit(cluster, "train", f"output.uri={output}", "max_steps=100000", "checkpoint.every_steps=50000")
    cluster.until(lambda: "train: step" in jobs.log(cluster, job), jobs.JOB_S, "the training makes steps")
    stopped = jobs.sdp(cluster, "stop", job, timeout_s=150)  # half of what the driver would have
    assert stopped.returncode == 0, stopped.stderr
    run = jobs.inspect(cluster, output)
    assert 0 < run["step"] < 50000
    assert cluster.get("rayjob", job)["status"]["jobStatus"] == "STOPPED"


def test_doctor_finds_no_problem_in_a_working_cluster(cluster: Kube) -> None:
    lines = jobs.sdp(cluster, "doctor", timeout_s=300).stdout.splitlines()
    checks = {line[8:].partition(":")[0]: line for line in lines}
    failed = {check for check, line in checks.items() if line.startswith("failed ")}
    assert failed <= {"operator"}, lines  # which may run outside of the cluster
    assert {"server", "cluster", "placement"} <= checks.keys()
