"""`sdp submit`, `status`, `logs`, `stop` and `doctor` from outside, against a real API server, operator and Ray."""

import json

import pytest
import yaml

from tests.e2e import jobs
from tests.e2e.kube import Kube


def test_submit_follows_a_job_to_its_end_and_prints_its_log(cluster: Kube, images: str) -> None:
    done = jobs.sdp(cluster, "submit", "download", timeout_s=jobs.JOB_S)
    assert done.returncode == 0, done.stderr
    assert "submitted sdp-download-" in done.stderr
    assert f"{images}: " in done.stdout
    assert "this run" not in done.stdout, "all was done before"


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize(
    ("changes", "env", "expected"),
    [
        (["source.uri=s3://sdp/no-dataset"], {}, "sdp: s3://sdp/no-dataset: no such file"),
        (["source.uri=s3://no-bucket/images"], {}, "no bucket 'no-bucket'"),
        (["model.source=s3://sdp/no-model"], {}, "sdp: model source s3://sdp/no-model: "),
        ([], {"AWS_SECRET_ACCESS_KEY": "wrong"}, "check credentials"),
        ([], {"SSL_CERT_FILE": "/nowhere", "SSL_CERT_DIR": "/nowhere"}, "install the package ca-certificates"),
    ],
)
def test_a_job_without_its_input_or_access_says_so_within_seconds(
    cluster: Kube, changes: list[str], env: dict[str, str], expected: str
) -> None:
    words = [word for setting in [*changes, "output.uri=s3://sdp/e2e/nothing"] for word in ("--set", setting)]
    rayjob = yaml.safe_load(jobs.sdp(cluster, "submit", "process", *words, "--dry-run").stdout)
    runtime = yaml.safe_load(rayjob["spec"]["runtimeEnvYAML"])
    rayjob["spec"]["runtimeEnvYAML"] = json.dumps({"env_vars": runtime["env_vars"] | env})
    cluster.apply([rayjob])
    followed = jobs.sdp(cluster, "logs", rayjob["metadata"]["name"], "--follow", timeout_s=60)
    assert followed.returncode == 2, followed.stderr
    assert expected in next(line for line in followed.stdout.splitlines() if line.startswith("sdp: "))


@pytest.mark.usefixtures("latents")
def test_a_training_without_gpus_says_which_job_holds_them(cluster: Kube) -> None:
    long = ("max_steps=100000", "checkpoint.every_steps=50000")
    first = jobs.submit(cluster, "train", f"output.uri={jobs.OUTPUT}/run-first", *long)
    cluster.until(lambda: "train: step" in jobs.log(cluster, first), jobs.JOB_S, "the first training makes steps")
    eight = ("scaling.num_workers=8", "data.global_batch_size=128")
    second = jobs.submit(cluster, "train", f"output.uri={jobs.OUTPUT}/run-second", *eight)
    holds = f"{first} holds 2 a100 gpus (job begun 20"
    cluster.until(lambda: holds in jobs.log(cluster, second).lower(), jobs.JOB_S, "the second one names the first")
    assert holds in jobs.sdp(cluster, "status").stdout.lower()


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
    assert f"\n{job}: train: step " in jobs.sdp(cluster, "status", job).stdout
    stopped = jobs.sdp(cluster, "stop", job, timeout_s=150)  # half of what the driver would have
    assert stopped.returncode == 0, stopped.stderr
    run = jobs.inspect(cluster, output)
    assert 0 < run["step"] < 50000
    assert cluster.get("rayjob", job)["status"]["jobStatus"] == "STOPPED"


@pytest.mark.usefixtures("latents")
def test_a_job_that_kuberay_gives_up_runs_on_until_stop_ends_it(cluster: Kube) -> None:
    words = [
        word
        for setting in (f"output.uri={jobs.OUTPUT}/run-late", "max_steps=100000", "checkpoint.every_steps=50000")
        for word in ("--set", setting)
    ]
    rayjob = yaml.safe_load(jobs.sdp(cluster, "submit", "train", *words, "--dry-run").stdout)
    rayjob["spec"]["activeDeadlineSeconds"] = 30
    cluster.apply([rayjob])
    job = rayjob["metadata"]["name"]
    cluster.until(lambda: jobs.ended(cluster, job), jobs.JOB_S, "its deadline has passed")
    advice = f"Ray still runs it: sdp stop {job} ends it"
    assert advice in jobs.sdp(cluster, "status", job).stdout
    stopped = jobs.sdp(cluster, "stop", job, timeout_s=150)
    assert stopped.returncode == 0, stopped.stderr
    assert f"{job}: stopped" in stopped.stderr
    assert advice not in jobs.sdp(cluster, "status", job).stdout


def test_doctor_finds_no_problem_in_a_working_cluster(cluster: Kube) -> None:
    lines = jobs.sdp(cluster, "doctor", timeout_s=300).stdout.splitlines()
    checks = {line[8:].partition(":")[0]: line for line in lines}
    failed = {check for check, line in checks.items() if line.startswith("failed ")}
    assert failed == set(), lines
    assert {"server", "cluster", "placement"} <= checks.keys()
