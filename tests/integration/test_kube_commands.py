"""The commands for a cluster, against a fake API server and dashboard with configurable faults."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from sdp.cli import main
from sdp.console import SUBMITTED_ENV
from sdp.errors import AccessDenied
from sdp.kube import head as kube_head
from sdp.kube import logs as kube_logs
from sdp.kube import stop as kube_stop
from sdp.kube import submit as kube_submit
from sdp.kube.access import connect
from sdp.kube.api import Unreachable
from sdp.kube.check_cluster import FIELDS
from sdp.kube.doctor import examine_pod, mounted_texts
from sdp.kube.rayjob import make_rayjob
from sdp.kube.submit import Submission
from sdp.storage.local import LocalStorage
from tests.kube_server import (
    CORE,
    CRD,
    KUEUE,
    OPERATOR,
    RAY,
    KubeServer,
    RayJob,
    RayServer,
    group,
    node,
    raycluster,
    running,
)
from tests.programs import ROOT, ended
from tests.waiting import until

CHART = ROOT / "charts" / "sdp-cluster"
TRAIN = "source: {uri: s3://b/latents}\noutput: {uri: s3://b/run}\nmodel: {source: 'builtin:tiny'}\n"


@dataclass
class Lab:
    """A cluster, its operator played by the test, and a terminal in front of it."""

    kube: KubeServer
    ray: RayServer
    terminal: pytest.CaptureFixture[str]

    def run(self, *words: str, code: int = 0) -> Any:
        """Run a command of sdp, which must end with a code; return what it prints."""
        assert main(list(words)) == code
        return self.terminal.readouterr()

    def job(self, name: str) -> None:
        """A RayJob that is there already."""
        self.kube.put(f"{RAY}/rayjobs/{name}", make_rayjob(Submission(job="train", name=name)))

    def begin(self, name: str) -> str:
        """The operator has submitted a RayJob, and Ray runs it."""
        submission = f"{name}-zz9zz"
        self.ray.jobs[submission] = RayJob()
        status = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "startTime": "2026-11-21T07:30:00Z"}
        self.kube.update_status(f"{RAY}/rayjobs/{name}", jobId=submission, rayClusterName="sdp", **status)
        return submission

    def begun(self, name: str, log: bytes = b"") -> None:
        """A RayJob that runs already."""
        self.job(name)
        self.ray.write(self.begin(name), log)

    def end(self, name: str, how: str = "SUCCEEDED", message: str = "") -> None:
        if (submission := f"{name}-zz9zz") in self.ray.jobs:
            self.ray.end(submission)
        state = "Failed" if how == "FAILED" else "Complete"
        self.kube.update_status(f"{RAY}/rayjobs/{name}", jobDeploymentStatus=state, jobStatus=how, message=message)

    def jobs(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.kube.objects if path.startswith(f"{RAY}/rayjobs/")]

    def plays(self, story: Callable[[str, str], None]) -> None:
        """Play the operator, in a thread of its own: each RayJob that is made begins, and then goes by the story."""

        def on_create(_: str, item: Any) -> None:
            name = item["metadata"]["name"]
            threading.Thread(target=lambda: story(name, self.begin(name)), daemon=True).start()

        self.kube.on_create = on_create


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Lab]:
    monkeypatch.setattr(kube_logs, "POLL_S", 0.1)
    for name in ("RAY_AUTH_TOKEN", *(f"{kind}_PROXY" for kind in ("HTTPS", "HTTP", "ALL"))):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with running() as (kube, ray):
        monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig(tmp_path / "kubeconfig")))
        kube.put(f"{CORE}/configmaps/sdp-jobs", {"data": {"train.yaml": TRAIN}})
        yield Lab(kube, ray, capfd)


# --- submit and follow -----------------------------------------------------------------------------------------------


def test_a_job_is_submitted_and_followed_to_its_end(lab: Lab) -> None:
    def story(name: str, submission: str) -> None:
        for number in range(50):
            lab.ray.write(submission, f"step {number}: größer\n".encode())
        until(lambda: lab.ray.streams, "the log is read")
        lab.end(name)

    lab.plays(story)
    out, err = lab.run("submit", "train", "--set", "limit=5")
    assert out == "".join(f"step {number}: größer\n" for number in range(50))
    (name,) = lab.jobs()
    assert re.fullmatch(r"sdp-train-[a-z0-9]{5}", name)
    assert f"sdp: submitted {name} to cluster 'sdp' in namespace 'lab'\n" in err
    assert f"sdp: {name}: running\n" in err
    assert err.endswith(f"sdp: {name}: succeeded\n")
    made = lab.kube.objects[f"{RAY}/rayjobs/{name}"]
    spec = make_rayjob(Submission(job="train", overrides=["limit=5"]), TRAIN)["spec"]
    assert made["spec"] == spec, "with the configuration of this moment, which pods may not have yet"
    assert made["metadata"]["labels"]["sdp/job"] == "train"


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (137, 1)])
def test_a_failed_job_reports_its_reason_and_whether_the_user_must_fix_it(lab: Lab, code: int, expected: int) -> None:
    reason = f"Job entrypoint command failed with exit code {code}"
    lab.plays(lambda name, _: lab.end(name, "FAILED", f"{reason}, last available logs (truncated to 20,000 chars):\nx"))
    assert f"failed ({reason})" in lab.run("submit", "train", code=expected).err


def test_each_byte_of_a_log_is_printed_once_however_often_the_connection_breaks(lab: Lab) -> None:
    lines = [f"line {number} {'é' * 50}\n".encode() for number in range(200)]

    def story(name: str, submission: str) -> None:
        for number, line in enumerate(lines):
            lab.ray.write(submission, line)
            if number % 50 == 25:
                before = lab.ray.streams
                until(lambda before=before: lab.ray.streams > before or before > 0, "the log is read")  # type: ignore[misc]
                lab.kube.cut_forwards()
                lab.kube.fault("GET", "rayjobs", "drop", 2)
                lab.kube.fault("GET", "pods", 503, 1)
                until(lambda before=before: lab.ray.streams > before, "the log is read again")  # type: ignore[misc]
        lab.end(name)

    lab.plays(story)
    assert lab.run("submit", "train").out.encode() == b"".join(lines)
    assert lab.ray.streams >= 4


@pytest.mark.parametrize("ends", [False, True], ids=["a head that is killed", "a head that ends the job first"])
def test_after_a_new_head_the_jobs_new_log_is_printed_from_the_beginning(lab: Lab, ends: bool) -> None:
    shown: list[str] = []

    def first_head_shown() -> bool:
        shown.append(lab.terminal.readouterr().out)
        return "of the first head\n" in "".join(shown)

    def story(name: str, submission: str) -> None:
        lab.ray.write(submission, b"of the first head\n")
        until(first_head_shown, "the log is shown")
        if ends:
            lab.ray.end(submission)
            asked = lab.kube.asked("GET", "rayjobs")
            until(lambda: lab.kube.asked("GET", "rayjobs") > asked + 1, "the end of the log is taken for its end")
        lab.ray.jobs[submission] = RayJob(bytearray(b"of the second\n"))
        pod = lab.kube.objects.pop(f"{CORE}/pods/sdp-head-abcde")
        lab.kube.put(f"{CORE}/pods/sdp-head-fghij", {**pod, "metadata": {"labels": pod["metadata"]["labels"]}})
        lab.kube.cut_forwards()
        until(lambda: lab.ray.streams > 1, "the log is read again")
        lab.end(name)

    lab.plays(story)
    rest = lab.run("submit", "train").out
    assert "".join(shown) + rest == "of the first head\nof the second\n"


@pytest.mark.parametrize("times", [1, 2])
def test_a_lost_response_does_not_create_two_jobs(lab: Lab, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_submit, "PAUSE_S", 0.01)
    lab.kube.fault("POST", "rayjobs", "lose", 1)
    lab.kube.fault("POST", "rayjobs", "drop", times - 1)
    err = lab.run("submit", "train", "--no-follow").err
    (name,) = lab.jobs()
    assert name in err
    assert lab.kube.asked("POST", "rayjobs$") == times + 1


def test_a_configuration_travels_with_the_job_and_is_checked_before(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TRAIN + "limit: 5 # a few\n")
    del lab.kube.objects[f"{CORE}/configmaps/sdp-jobs"]
    lab.run("submit", "train", "--config", str(file), "--no-follow", "--name", "mine")
    spec = lab.kube.objects[f"{RAY}/rayjobs/mine"]["spec"]
    assert yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["SDP_JOB_CONFIG"] == TRAIN + "limit: 5 # a few\n"
    err = lab.run("submit", "train", "--config", str(file), "--set", "strategy.kind=zero", "--no-follow", code=2).err
    assert "sdp: --set strategy.kind: expected ddp or fsdp, got 'zero'" in err
    assert "limt" in lab.run("submit", "train", "--set", "limt=5", "--no-follow", code=2).err
    file.write_text("source: {uri: s3://bucket/latents}\noutput: {uri: ./run}\nmodel: {source: builtin:tiny}\n")
    err = lab.run("submit", "train", "--config", str(file), "--dry-run", code=2).err
    assert "sdp: output.uri: ./run is on this machine" in err
    assert lab.jobs() == ["mine"]


@pytest.mark.parametrize(
    ("line", "setup", "says"),
    [
        ("--set output.uri=/data/run", lambda _: None, "output.uri: /data/run is a local path"),
        (
            "--set limit=5",
            lambda lab: lab.kube.denied.add(("get", "configmaps")),
            "no right to read ConfigMap 'sdp-jobs': before the job starts, only --set is checked",
        ),
    ],
)
def test_what_may_surprise_is_mentioned_and_the_job_is_submitted(
    lab: Lab, line: str, setup: Callable[[Lab], Any], says: str
) -> None:
    setup(lab)
    assert says in lab.run("submit", "train", "--no-follow", *line.split()).err
    assert len(lab.jobs()) == 1


def test_a_name_is_used_again_once_its_job_has_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_submit, "PAUSE_S", 0.01)
    lab.begun("nightly")
    err = lab.run("submit", "train", "--name", "nightly", "--no-follow", code=2).err
    assert "RayJob 'nightly' has not ended; sdp logs nightly --follow shows it" in err
    lab.end("nightly", "FAILED")
    assert "continues from storage" in lab.run("submit", "train", "--name", "nightly", "--no-follow").err
    assert "status" not in lab.kube.objects[f"{RAY}/rayjobs/nightly"]


def test_a_second_configuration_of_a_kind_is_submitted_by_its_name(lab: Lab) -> None:
    lab.kube.put(f"{CORE}/configmaps/sdp-jobs", {"data": {"train.yaml": "limt: 5\n", "train-online.yaml": TRAIN}})
    lab.run("submit", "train-online", "--no-follow", "--set", "limit=5")
    (name,) = lab.jobs()
    assert re.fullmatch(r"sdp-train-online-[a-z0-9]{5}", name)
    made = lab.kube.objects[f"{RAY}/rayjobs/{name}"]
    assert made["spec"] == make_rayjob(Submission(job="train-online", overrides=["limit=5"]), TRAIN)["spec"]
    lab.run("submit", "train-online", "--no-follow", "--set", "limt=5", code=2)


def test_failed_rows_are_retried_by_a_job_whose_hints_name_its_own_command(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "my download.yaml"
    file.write_text("{source: {uri: 's3://b/urls'}, output: {uri: 's3://b/images'}}")
    line = ["submit", "download", "--config", str(file), "--set", "limit=5"]
    lab.run(*line, "--only-failed", "--no-follow")
    (name,) = lab.jobs()
    made = lab.kube.objects[f"{RAY}/rayjobs/{name}"]
    assert made["spec"]["entrypoint"].endswith(" download --config env:SDP_JOB_CONFIG --set limit=5 --only-failed")
    env = yaml.safe_load(made["spec"]["runtimeEnvYAML"])["env_vars"]
    assert shlex.split(env[SUBMITTED_ENV]) == ["sdp", *line]
    err = lab.run("submit", "train", "--only-failed", "--no-follow", code=2).err
    assert "--only-failed: expected download, score, caption, process, which" in err


def test_a_dry_run_prints_what_kubectl_would_create_and_needs_no_cluster(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/no/such/file")
    line = ["submit", "train", "--dry-run", "--name", "x", "--cluster", "big"]
    shown = yaml.safe_load(lab.run(*line, "--set", "model.source=b c").out)
    assert shown == make_rayjob(Submission(job="train", name="x", overrides=["model.source=b c"]), cluster="big")
    out, err = lab.run(*line, "--set", "max_stepz=1000", "--set", "data.batch_size=many", code=2)
    assert out == ""
    assert err.splitlines() == [
        "sdp: --set data.batch_size: expected a whole number of 1 or more, got 'many'",
        "sdp: --set max_stepz: expected a known key, got an unknown key; did you mean max_steps?",
    ]
    # The cluster's file may change the defaults that these contradict.
    settings = ["scaling.accelerator=cpu", "scaling.accelerator=A100", "source.also.0.weight=2"]
    out = lab.run(*line, *(word for setting in settings for word in ("--set", setting))).out
    assert "scaling.accelerator=A100" in out


def test_a_job_is_submitted_with_a_cluster_of_its_own(lab: Lab) -> None:
    lab.kube.put(f"{RAY}/rayclusters/sdp", raycluster(group("cpu"), group("a100", 8, "A100", 4)))
    settings = ["--set", "scaling.accelerator=A100", "--set", "scaling.num_workers=9", "--name", "own"]
    err = lab.run("submit", "train", "--own-cluster", "--no-follow", *settings).err
    assert "submitted own to its own cluster in namespace 'lab'" in err
    spec = lab.kube.objects[f"{RAY}/rayjobs/own"]["spec"]
    assert "clusterSelector" not in spec
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["groupName"], workers["replicas"]) == ("a100", 2)
    env = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert env["SDP_JOB_CONFIG"] == TRAIN
    assert spec["entrypoint"].endswith("--set scaling.num_workers=9 --set scaling.can_grow=false")
    assert env[SUBMITTED_ENV] == f"sdp submit train --own-cluster {shlex.join(settings[:4])}"


# --- what is refused -------------------------------------------------------------------------------------------------


def no_crd(lab: Lab) -> None:
    lab.kube.kinds -= {"rayclusters", "rayjobs"}
    lab.kube.objects.pop(CRD, None)


def no_cluster(lab: Lab) -> None:
    del lab.kube.objects[f"{RAY}/rayclusters/sdp"]


def two_clusters(lab: Lab) -> None:
    no_cluster(lab)
    for name in ("blue", "green"):
        lab.kube.put(f"{RAY}/rayclusters/{name}", raycluster())
    owned = {"metadata": {"ownerReferences": [{"kind": "RayJob"}]}}
    lab.kube.put(f"{RAY}/rayclusters/of-a-job", {**raycluster(), **owned})


def no_map(lab: Lab) -> None:
    lab.kube.put(f"{RAY}/rayclusters/sdp", raycluster(jobs_map=False))


def may_not(*right: str) -> Callable[[Lab], None]:
    return lambda lab: lab.kube.denied.add(right)  # type: ignore[arg-type]


def begun_and(then: Callable[[Lab], Any]) -> Callable[[Lab], None]:
    def setup(lab: Lab) -> None:
        lab.begun("x")
        then(lab)

    return setup


def nothing(lab: Lab) -> None:
    assert lab


@pytest.mark.parametrize(
    ("line", "setup", "says"),
    [
        ("submit train", no_crd, "does not serve /apis/ray.io/v1/namespaces/lab/rayclusters; install the KubeRay oper"),
        ("status", no_crd, "install the KubeRay operator, 1.7 or later, and its CRDs"),
        ("submit train", no_cluster, "--cluster: there is no RayCluster 'sdp' in namespace 'lab'; helm install sdp"),
        ("submit train --cluster big", nothing, "no RayCluster 'big' in namespace 'lab'; there are sdp"),
        ("submit train", two_clusters, "no RayCluster 'sdp' in namespace 'lab'; there are blue, green"),
        ("submit train --namespace other", nothing, "there is no RayCluster 'sdp' in namespace 'other'"),
        ("submit train", no_map, "--config: required, since the cluster has no /etc/sdp/jobs/train.yaml (it has none)"),
        ("submit process", nothing, "has no /etc/sdp/jobs/process.yaml (it has train)"),
        ("submit trian-online", nothing, "or one of these and -NAME, got 'trian-online'; did you mean train-online?"),
        ("submit train --config /no.yaml", nothing, "/no.yaml: expected a configuration file, got nothing there"),
        ("status x", nothing, "status: no RayJob or RayCluster 'x' in namespace 'lab'"),
        ("logs x", nothing, 'kubernetes: rayjobs "x" not found'),
        ("logs x", lambda lab: lab.job("x"), "logs: x has not started: it is new; --follow waits for it"),
        (
            "logs x",
            begun_and(lambda lab: setattr(lab.ray, "token", "another")),
            "ray: the head of 'sdp' refuses the token of its secret",
        ),
        (
            "logs x",
            begun_and(lambda lab: lab.kube.objects.pop(f"{CORE}/secrets/sdp")),
            "ray: the cluster's token is in secret 'sdp', which cannot be read",
        ),
        (
            "logs x",
            begun_and(may_not("create", "pods/portforward")),
            'cannot create resource "pods/portforward"; ask for that right',
        ),
        ("logs x", begun_and(no_cluster), 'rayclusters "sdp" not found'),
        ("logs x", begun_and(lambda lab: lab.ray.jobs.clear()), "has no record of the job; it may have been replaced"),
        ("submit train --own-cluster --dry-run", nothing, "--own-cluster: expected --manifest FILE with --dry-run"),
        ("submit train --own-cluster", may_not("get", "configmaps"), 'cannot get resource "configmaps"'),
        ("doctor --manifest /no/such", nothing, "--manifest: /no/such: expected a file of YAML"),
    ],
)
def test_an_error_that_the_user_must_fix_is_one_line_and_exit_code_2(
    lab: Lab, line: str, setup: Callable[[Lab], Any], says: str
) -> None:
    setup(lab)
    out, err = lab.run(*line.split(), code=2)
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1
    assert len(err) < 700


def test_an_unreachable_server_is_one_line_and_can_be_retried(lab: Lab) -> None:
    err = lab.run("status", "--context", "elsewhere", code=1).err
    assert "sdp: kubernetes: 127.0.0.1:1 does not answer (" in err
    assert len(err.splitlines()) == 1
    out = lab.run("doctor", "--context", "elsewhere", code=1).out
    assert re.fullmatch(r"failed  server: .* does not answer .*\n0 ok, 0 warnings, 1 failed\n", out)


def test_a_server_with_another_certificate_is_not_spoken_to(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as (other, _):
        config = yaml.safe_load(other.kubeconfig(tmp_path / "other").read_text())
        cluster = config["clusters"][0]["cluster"]
        cluster["server"] = f"https://127.0.0.1:{lab.kube.port}"
        (tmp_path / "mixed").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "mixed"))
        assert "certificate verify failed" in lab.run("status", code=1).err
        with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
            connect().forward("sdp-head-abcde", 8265)
        assert lab.kube.requests == []
        cluster["insecure-skip-tls-verify"] = True
        del cluster["certificate-authority-data"]
        (tmp_path / "mixed").write_text(yaml.safe_dump(config))
        lab.run("status", code=2)  # spoken to, with the other's token


# --- status and logs -------------------------------------------------------------------------------------------------


def test_status_shows_clusters_and_jobs(lab: Lab) -> None:
    for name in ("first", "second"):
        lab.job(name)
    lab.begin("second")
    text = lab.run("status").out
    assert re.search(r"^sdp +ready +1 of 1 +sdp-head-abcde$", text, re.MULTILINE)
    assert re.search(r"^second +running +2026-11-21 07:30Z .* sdp$", text, re.MULTILINE)
    assert re.search(r"^first +new +- +- +sdp$", text, re.MULTILINE)
    data = json.loads(lab.run("status", "--json").out)
    assert [each["name"] for each in data["clusters"]] == ["sdp"]
    assert {each["name"]: each["state"] for each in data["jobs"]} == {"second": "running", "first": "new"}


def test_status_shows_the_last_days_jobs_unless_asked_for_all_or_one(lab: Lab) -> None:
    now = datetime.now(UTC)
    for name, hours in (("fresh", 23), ("old", 25)):
        lab.begun(name)
        lab.end(name, "FAILED")
        lab.kube.update_status(f"{RAY}/rayjobs/{name}", endTime=(now - timedelta(hours=hours)).isoformat())
    lab.begun("long")  # it began in another year
    for words, shown in ((["--json"], {"fresh", "long"}), (["--json", "--all"], {"fresh", "long", "old"})):
        assert {job["name"] for job in json.loads(lab.run("status", *words).out)["jobs"]} == shown
    assert "1 older job: sdp status --all\n" in lab.run("status").out
    assert re.search("^old +failed", lab.run("status", "old").out, re.MULTILINE)


def test_status_shows_all_namespaces_and_asks_each_ones_head(lab: Lab) -> None:
    lab.begun("x", b"train: step 1 of 2 \xc2\xb7 ETA 0:01\n")
    other = RAY.replace("/lab", "/other")
    lab.kube.put(f"{other}/rayjobs/theirs", make_rayjob(Submission(job="train", name="theirs")))
    out = lab.run("status", "-A", "--namespace", "third").out
    lab_part, other_part = out.split("namespace other:")
    assert lab_part.startswith("namespace lab:\n")
    assert "x: train: step 1 of 2" in lab_part
    assert re.search("^theirs +new", other_part, re.MULTILINE)
    assert {job["namespace"] for job in json.loads(lab.run("status", "-A", "--json").out)["jobs"]} == {"lab", "other"}
    assert "no RayJob or RayCluster 'nothing' in any namespace" in lab.run("status", "-A", "nothing", code=2).err


def test_status_says_who_submitted_a_job(lab: Lab) -> None:
    lab.kube.user = f"arn:aws:iam::1:user/{'x' * 60}/anna@lab.org"
    lab.run("submit", "train", "--no-follow", "--name", "x")
    by = lab.kube.objects[f"{RAY}/rayjobs/x"]["metadata"]["labels"]["sdp/submitted-by"]
    assert re.fullmatch(r"x{50}-anna-lab.org", by), "a label's value has at most 63 characters, and these alone"
    assert re.search(rf"^x +new .* {by}$", lab.run("status").out, re.MULTILINE)


def test_status_says_who_holds_gpus_and_why_a_job_failed(lab: Lab) -> None:
    lab.begun("sdp-train-x7k2p")
    lab.kube.objects[f"{RAY}/rayjobs/sdp-train-x7k2p"]["metadata"]["labels"]["sdp/submitted-by"] = "anna"
    actor = {"state": "ALIVE", "job_id": "02", "node_id": "n1"}
    trainer = {**actor, "required_resources": {"GPU_group_0_ab01": 1.0, "GPU_group_ab01": 1.0}}
    lab.ray.lists = {
        "/api/v0/actors": [trainer, trainer, {**actor, "required_resources": {"CPU": 1.0}}],
        "/api/jobs/": [{"job_id": "02", "submission_id": "sdp-train-x7k2p-zz9zz", "start_time": 1_795_000_000_000}],
        "/api/v0/nodes": [{"node_id": "n1", "labels": {"sdp/group": "a100"}}],
    }
    lab.job("broken")
    cause = f"sdp: s3://b/none: no such bucket{'; see the log' * 9}"
    lab.end("broken", "FAILED", f"Job entrypoint command failed with exit code 2, last\n{cause}\nsupervisor: ends")
    text = lab.run("status").out
    assert "sdp: sdp-train-x7k2p holds 2 a100 GPUs (job begun 2026-11-18 11:06Z), submitted by anna\n" in text
    assert f"broken: {cause}\n" in text
    lab.ray.lists = {}
    lab.run("status")  # a head that does not say so is no error


@pytest.mark.parametrize(
    "newest",
    [
        "train: step 20 of 90 · ETA 1:00",
        "train: waiting for 2 GPUs (0 of 2 ready, 9:07)",
        "train: no progress for 40:00; waiting for 2 A100 GPUs",
        "train is waiting: for s3://b/latents to be complete",
    ],
)
def test_status_of_a_running_job_has_its_newest_progress_line(lab: Lab, newest: str) -> None:
    lines = ["train: step 10 of 90 · ETA 2:00", newest, "saved" if "is waiting" in newest else "train: saved"]
    lab.begun("x", "\n".join([*lines, "somebody: else · ETA 0:01", ""]).encode())
    out = lab.run("status", "x").out
    assert f"x: {newest}\n" in out
    assert "ETA 2:00" not in out
    lab.kube.denied.add(("create", "pods/portforward"))
    assert newest not in lab.run("status", "x").out


def lacking(lab: Lab, *pods: Any, uid: str = "c1", **status: Any) -> None:
    """The cluster has pods like these, and an own one of the job x none at all."""
    path = f"{RAY}/rayclusters/sdp"
    cluster = lab.kube.objects[path]
    lab.kube.put(path, {**cluster, "metadata": {"uid": uid}, "status": {**cluster["status"], **status}})
    for number, each in enumerate(pods):
        labels = {"metadata": {"labels": {"ray.io/cluster": "sdp"}}}
        lab.kube.put(f"{CORE}/pods/worker-{number}", {**labels, "status": each})


def event(lab: Lab, name: str, message: str, at: str, uid: str = "c1") -> None:
    item = {"type": "Warning", "message": message, "eventTime": at, "involvedObject": {"uid": uid}}
    lab.kube.put(f"{CORE}/events/{name}", item)


def unplaced(lab: Lab) -> None:
    reason = "0/4 nodes are available: 1 Insufficient nvidia.com/gpu"
    conditions = [{"type": "PodScheduled", "status": "False", "message": reason}]
    lacking(lab, {"conditions": conditions}, readyWorkerReplicas=0)


def headless(lab: Lab) -> None:
    """A worker's check for the head crashes while the head's pod cannot be placed."""
    check = {"name": "wait-gcs-ready", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}}
    conditions = [{"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}]
    lacking(lab, {"initContainerStatuses": [check]}, {"conditions": conditions}, state="", readyWorkerReplicas=0)


def no_account(lab: Lab) -> None:
    head = {"type": "HeadPodReady", "status": "False", "reason": "HeadPodNotFound", "message": "Head Pod not found"}
    lab.kube.objects.pop(f"{CORE}/pods/sdp-head-abcde")
    lacking(lab, state="", conditions=[head])
    event(lab, "a", "an earlier one", "2026-11-21T07:00:00Z")
    event(lab, "b", "service account 'sdp-head' not found", "2026-11-21T07:01:00Z")
    event(lab, "c", "of another cluster", "2026-11-21T07:02:00Z", uid="c2")


def suspended_by_kueue(lab: Lab) -> None:
    lacking(lab, state="suspended")
    refusal = "couldn't assign flavors: request (8) > maximum capacity (4)"
    status = {"conditions": [{"type": "QuotaReserved", "status": "False", "message": refusal}]}
    owner = {"ownerReferences": [{"name": "sdp", "kind": "RayCluster"}]}
    lab.kube.put(f"{KUEUE}/workloads/raycluster-sdp", {"metadata": owner, "status": status})


REASONS = pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (unplaced, "worker-0 is not scheduled: 0/4 nodes are available: 1 Insufficient nvidia.com/gpu"),
        (headless, "worker-1 is not scheduled: 0/4 nodes are available"),
        (no_account, "service account 'sdp-head' not found"),
        (suspended_by_kueue, "queued by Kueue: couldn't assign flavors: request (8) > maximum capacity (4)"),
    ],
)


@REASONS
def test_status_says_why_a_cluster_lacks_pods_and_a_job_waits(
    lab: Lab, setup: Callable[[Lab], None], reason: str
) -> None:
    setup(lab)
    lab.job("x")
    lab.kube.objects[f"{RAY}/rayjobs/x"]["spec"]["backoffLimit"] = 3
    lab.kube.update_status(f"{RAY}/rayjobs/x", jobDeploymentStatus="Initializing", failed=1)
    data = json.loads(lab.run("status", "--json").out)
    messages = [each["message"] for kind in ("clusters", "jobs") for each in data[kind]]
    assert messages == [reason, f"attempt 2 of 4; {reason}"]
    lab.kube.denied |= {("list", kind) for kind in ("pods", "events", "workloads")}
    lab.run("status")  # without these rights it shows what it may


def test_status_lists_a_queue_once_for_all_that_wait_in_it(lab: Lab) -> None:
    suspended_by_kueue(lab)
    for name in ("x", "y", "z"):
        lab.job(name)
        lab.kube.update_status(f"{RAY}/rayjobs/{name}", jobDeploymentStatus="Suspended")
    assert "queued by Kueue" in lab.run("status").out
    assert lab.kube.asked("GET", "workloads") == 1


@REASONS
def test_the_doctor_says_it_too(lab: Lab, tmp_path: Path, setup: Callable[[Lab], None], reason: str) -> None:
    healthy(lab, tmp_path)
    setup(lab)
    assert any(reason in line for lines in examined(lab)[1].values() for line in lines)


def test_the_doctor_looks_at_the_clusters_of_jobs_where_they_lack_pods(lab: Lab, tmp_path: Path) -> None:
    healthy(lab, tmp_path)
    about = {"metadata": {"ownerReferences": [{"kind": "RayJob", "name": "x"}]}}
    lab.kube.put(f"{RAY}/rayclusters/x-abcde", {**raycluster(), **about})
    assert len(examined(lab)[1]["cluster"]) == 1
    refused = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: gpus"}
    lab.kube.update_status(f"{RAY}/rayclusters/x-abcde", readyWorkerReplicas=0, conditions=[refused])
    code, findings = examined(lab)
    assert code == 1
    assert "x-abcde is ready: 0 of 1 worker: FailedCreate: exceeded quota: gpus" in findings["cluster"][1]


def test_status_says_that_a_jobs_cluster_is_missing_or_gone(lab: Lab) -> None:
    lab.begun("running")
    lab.job("waiting")
    lab.kube.update_status(f"{RAY}/rayjobs/waiting", jobDeploymentStatus="Initializing")
    no_cluster(lab)
    messages = {job["name"]: job["message"] for job in json.loads(lab.run("status", "--json").out)["jobs"]}
    assert messages == {"running": "its cluster is gone", "waiting": "there is no RayCluster 'sdp'"}


def test_status_says_that_the_job_which_another_waits_for_has_failed(lab: Lab) -> None:
    line = "train is waiting: for s3://b/latents to be complete"
    lab.begun("sdp-train", f"{line}\n".encode())
    text = "source: {uri: s3://b/images}\noutput: {uri: s3://b/other}\nmodel: {source: 'builtin:tiny'}\n"
    moments = {"older": "2026-11-21T07:00:00Z", "newer": "2026-11-21T07:10:00Z", "elsewhere": "2026-11-21T07:20:00Z"}
    for name, moment in moments.items():
        overrides = [] if name == "elsewhere" else ["output.uri=s3://b/latents/"]
        job = make_rayjob(Submission(job="process", name=name, overrides=overrides), text)
        job["metadata"]["creationTimestamp"] = moment
        lab.kube.put(f"{RAY}/rayjobs/{name}", job)
        lab.end(name, "FAILED", "exit code 1")
    assert f"sdp-train: {line}; newer, which writes it, has ended: failed\n" in lab.run("status", "sdp-train").out
    for name, odd in (("another", {"entrypoint": "sh run.sh"}), ("odd", {"runtimeEnvYAML": "[" * 3000})):
        lab.kube.put(f"{RAY}/rayjobs/{name}", make_rayjob(Submission(job="process", name=name), text))
        lab.kube.objects[f"{RAY}/rayjobs/{name}"]["spec"].update(odd)
    lab.kube.update_status(f"{RAY}/rayjobs/newer", jobDeploymentStatus="Running", jobStatus="RUNNING")
    assert f"sdp-train: {line}\n" in lab.run("status", "sdp-train").out
    for job in lab.ray.jobs:
        lab.ray.write(job, b"train: 362 rows to train on\n")
    assert "waiting" not in lab.run("status", "sdp-train").out


@pytest.mark.parametrize(
    ("record", "code"),
    [({"status": "SUCCEEDED"}, 0), ({"status": "FAILED", "driver_exit_code": 2}, 2), ({"status": "STOPPED"}, 1)],
)
def test_a_jobs_end_that_the_operator_does_not_notice_is_reported(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], code: int
) -> None:
    lab.begun("x", b"done\n")
    lab.ray.jobs["x-zz9zz"].record = {**record, "end_time": time.time() * 1000}
    lab.ray.end("x-zz9zz")
    assert json.loads(lab.run("status", "--json").out)["jobs"][0]["message"] == "", "the operator has a minute"
    lab.ray.jobs["x-zz9zz"].record["end_time"] -= 61_000
    line = f"{record['status'].lower()}, which KubeRay does not report: KubeRay's operator does not answer; sdp doctor"
    assert line in lab.run("status").out
    monkeypatch.setattr(kube_logs, "NOTICED_S", 0.0)
    out, err = lab.run("logs", "x", "--follow", code=code)
    assert out == "done\n"
    assert f"x: {line}" in err


def test_logs_are_printed_while_a_job_runs_and_after_its_end(lab: Lab) -> None:
    text = "".join(f"line {number}\n" for number in range(30_000))
    lab.begun("x", text.encode())
    assert lab.run("logs", "x").out == text
    lab.end("x", "FAILED", "exit code 1")
    assert lab.run("logs", "x", "--follow", code=1).out == text


def test_what_jobs_and_pods_write_cannot_control_the_terminal(lab: Lab) -> None:
    written = "\x1b[36m(pid=7)\x1b[0m 10 %\r20 %\r\n\x1b]0;title\x07 \x9b2J \u202e größer\nno end"
    shown = "(pid=7) 10 %\n20 %\n\\x1b]0;title\\x07 \\x9b2J \\u202e größer\nno end"
    lab.begun("x")

    def write() -> None:
        for byte in written.encode():  # each is a message of its own, so that all is cut everywhere
            until(lambda: lab.ray.streams, "the log is read")
            lab.ray.write("x-zz9zz", bytes([byte]))
        lab.end("x", "FAILED", "a \x1b[2Jmessage")

    writer = threading.Thread(target=write)
    writer.start()
    out = lab.run("logs", "x", "--follow", code=1).out
    writer.join()
    assert out == shown
    assert lab.run("logs", "x").out == shown
    assert "a \\x1b[2Jmessage" in lab.run("status", "x").out


@pytest.mark.parametrize("sent", [False, True], ids=["the cluster's configuration", "one sent along"])
def test_logs_of_an_ended_job_are_read_from_its_output_when_the_head_is_gone(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    text = TRAIN.replace("s3://b/run", str(tmp_path / "elsewhere" if sent else tmp_path / "run"))
    overrides = [f"output.uri={tmp_path}/run"] if sent else []
    rayjob = make_rayjob(Submission(job="train", name="x", overrides=overrides), text if sent else None)
    lab.kube.put(f"{CORE}/configmaps/sdp-jobs", {"data": {"train.yaml": text}})
    lab.kube.put(f"{RAY}/rayjobs/x", rayjob)
    submission = lab.begin("x")
    lab.end("x", "FAILED", "exit code 1")
    lab.ray.jobs.clear()
    saved = tmp_path / "run" / "_logs" / submission
    saved.mkdir(parents=True)
    (saved / "driver.log").write_text("why\n")
    (saved / "worker-1.log").write_text("SIGSEGV\n")
    assert lab.run("logs", "x").out == f"--- {saved}/driver.log\nwhy\n\n--- {saved}/worker-1.log\nSIGSEGV\n"
    refusal = AccessDenied("no credentials")
    monkeypatch.setattr(LocalStorage, "names", Mock(side_effect=refusal))
    says = f"sdp: logs: the cluster's head is gone; its log in {saved} cannot be read: no credentials\n"
    assert lab.run("logs", "x", code=refusal.exit_code).err == says


@pytest.mark.parametrize("interrupted", [True, False])
def test_ending_to_follow_a_job_leaves_it_running(lab: Lab, interrupted: bool) -> None:
    """By Ctrl-C, which says how to look again, or because the reader of the log has seen enough, as `head` does."""
    lab.begun("x", b"hello\n")
    words = [sys.executable, "-m", "sdp", "logs", "x", "--follow"]
    with subprocess.Popen(
        words, cwd=ROOT, env=os.environ.copy(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "hello\n"
        if interrupted:
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
            lab.ray.write("x-zz9zz", b"more\n")
        err = process.stderr.read()
        assert process.wait(30) == (130 if interrupted else 0)
    how = "the job continues; sdp logs x --follow follows it again, sdp stop x ends it"
    assert err.splitlines()[1:] == ([f"sdp: stopped by SIGINT; {how}"] if interrupted else [])
    assert not lab.ray.jobs["x-zz9zz"].stopped
    assert lab.jobs() == ["x"]


def test_an_api_server_that_is_away_is_waited_for_until_a_deadline(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib3.Retry.sleep", lambda *_: None)
    lab.begun("x")
    lab.end("x")
    lab.kube.fault("GET", "rayjobs/x", "drop", 6)  # each request is tried three times
    err = lab.run("logs", "x", "--follow").err
    assert err.count("retrying for up to 15 minutes, the job continues") == 1
    assert err.count("answers again") == 1
    monkeypatch.setattr(kube_logs, "LOST_S", 0.3)
    lab.kube.fault("GET", "rayjobs", "drop", 10_000)
    assert "gave up, sdp logs x --follow tries again" in lab.run("logs", "x", "--follow", code=1).err


def test_a_job_deleted_during_the_command_is_reported_as_deleted(lab: Lab) -> None:
    lab.plays(lambda name, _: lab.kube.objects.clear())  # noqa: ARG005
    assert "this RayJob was deleted" in lab.run("submit", "train", code=2).err


# --- stop ------------------------------------------------------------------------------------------------------------


def test_stop_requests_a_jobs_end_and_waits_for_it(lab: Lab) -> None:
    lab.run("submit", "train", "--no-follow", "--name", "x", "--set", "limit=5")
    lab.begin("x")
    lab.ray.on_stop = lambda _: threading.Timer(0.3, lambda: lab.end("x", "STOPPED")).start()
    err = lab.run("stop", "x").err
    assert lab.ray.jobs["x-zz9zz"].stopped
    assert "x is stopping; it has up to 300 s for a last checkpoint" in err
    assert "x: stopped; sdp submit train --set limit=5 continues from storage" in err
    assert lab.jobs() == ["x"], "the record stays"
    assert "x has already ended: stopped" in lab.run("stop", "x").err
    lab.run("stop", "x", "--delete")
    assert lab.jobs() == []


@pytest.fixture
def given_up(lab: Lab) -> Lab:
    """A job that KubeRay gave up long ago, and Ray runs."""
    lab.begun("x")
    ended = {"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded", "endTime": "2026-11-21T08:30:00Z"}
    lab.kube.update_status(f"{RAY}/rayjobs/x", message="too long", **ended)
    return lab


def test_stop_ends_a_job_that_kuberay_has_given_up_and_ray_runs_on(given_up: Lab) -> None:
    lab, advice = given_up, "Ray still runs it: sdp stop x ends it"
    assert f"DeadlineExceeded: too long; {advice}" in lab.run("status").out, "although it ended long ago"
    threading.Timer(0.5, lab.ray.end, ["x-zz9zz"]).start()
    assert f"x: failed (DeadlineExceeded: too long; {advice})" in lab.run("logs", "x", "--follow", code=1).err
    record = lab.ray.jobs["x-zz9zz"].record

    def on_stop(_: str) -> None:
        lab.kube.fault("POST", "portforward", 503)
        lab.kube.fault("GET", "portforward", 503)
        record.update(status="STOPPED", end_time=1_700_000_000_000)

    lab.ray.on_stop = on_stop
    assert "x: stopped; sdp submit train continues from storage" in lab.run("stop", "x").err
    assert lab.ray.jobs["x-zz9zz"].stopped
    assert advice not in lab.run("status", "x").out


@pytest.mark.parametrize("is_known", [True, False])
def test_a_job_that_kuberay_has_given_up_and_ray_has_ended_needs_no_stop(given_up: Lab, is_known: bool) -> None:
    if is_known:
        given_up.ray.jobs["x-zz9zz"].record.update(status="SUCCEEDED", end_time=1_700_000_000_000)
    else:  # another head
        given_up.ray.jobs.clear()
    assert "x has already ended: failed" in given_up.run("stop", "x").err
    assert "1 older job" in given_up.run("status").out


def test_following_a_silent_log_takes_another_connection(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_head, "QUIET_S", 0.3)
    lab.begun("x", b"step 1\n")

    def goes_on() -> None:
        until(lambda: lab.ray.streams > 1, "another connection")
        lab.ray.write("x-zz9zz", b"step 2\n")
        lab.end("x")

    threading.Thread(target=goes_on).start()
    assert lab.run("logs", "x", "--follow").out == "step 1\nstep 2\n"


def test_a_job_that_has_not_started_is_deleted(lab: Lab) -> None:
    lab.job("x")
    assert "x had not started\nsdp: deleted the RayJob x" in lab.run("stop", "x").err
    assert lab.jobs() == []


def test_stop_waits_until_a_job_is_deleted_and_says_what_holds_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.job("x")
    path = f"{RAY}/rayjobs/x"
    lab.kube.objects[path]["metadata"]["finalizers"] = ["ray.io/rayjob-finalizer"]
    monkeypatch.setattr(kube_stop, "NOTICED_S", 0.3)
    err = lab.run("stop", "x", code=1).err
    assert "x is being deleted since 2026-11-21 07:30Z, held by ray.io/rayjob-finalizer; KubeRay's operator" in err
    assert "deleted the RayJob" not in err
    monkeypatch.setattr(kube_submit, "PAUSE_S", 0.01)
    err = lab.run("submit", "train", "--name", "x", "--no-follow", code=2).err
    assert "could not be created: it is being deleted since 2026-11-21 07:30Z, held by" in err
    monkeypatch.setattr(kube_stop, "NOTICED_S", 30.0)
    threading.Timer(0.3, lambda: lab.kube.objects.pop(path)).start()
    assert "deleted the RayJob x" in lab.run("stop", "x").err
    assert lab.jobs() == []


def test_a_job_whose_head_is_gone_can_still_be_deleted(lab: Lab) -> None:
    lab.begun("x")
    lab.kube.update_status(f"{CORE}/pods/sdp-head-abcde", phase="Failed")
    err = lab.run("stop", "x", code=1).err
    assert "the head of 'sdp' is not running" in err
    assert "sdp stop x --delete deletes the RayJob anyway" in err
    assert lab.jobs() == ["x"]
    lab.run("stop", "x", "--delete")
    assert lab.jobs() == []


# --- doctor ----------------------------------------------------------------------------------------------------------


def healthy(lab: Lab, storage: Path) -> None:
    """A cluster where nothing is wrong."""
    lab.kube.put(CRD, {"spec": {"versions": [{"name": "v1", "schema": dict.fromkeys(FIELDS)}]}})
    about = {"namespace": "kuberay-system", "labels": {"app.kubernetes.io/name": "kuberay-operator"}}
    spec = {"template": {"spec": {"containers": [{"image": "quay.io/kuberay/operator:v1.7.0"}]}}}
    lab.kube.put(OPERATOR, {"metadata": about, "spec": spec, "status": {"availableReplicas": 1}})
    lab.kube.put("/api/v1/nodes/gpu", node("gpu", 1, "NVIDIA-A10G"))
    selector = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A10G"}}
    lab.kube.put(f"{RAY}/rayclusters/sdp", raycluster(group("cpu"), group("a10g", 1, "A10G", **selector)))
    process = {
        "source": {"uri": str(storage / "images")},
        "output": {"uri": str(storage / "latents")},
        "model": {"source": "builtin:tiny"},
        "encode": {"accelerator": "A10G"},
    }
    lab.kube.put(f"{CORE}/configmaps/sdp-jobs", {"data": {"process.yaml": yaml.safe_dump(process)}})


def examined(lab: Lab, *words: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and what the doctor found: check -> its lines."""
    code = main(["doctor", *words])
    checks: dict[str, list[str]] = {}
    for line in lab.terminal.readouterr().out.splitlines()[:-1]:
        check, _, says = line[8:].partition(": ")
        checks.setdefault(check, []).append(f"{line[:8].strip()}: {says}")
    return code, checks


def test_the_doctor_finds_nothing_where_nothing_is_wrong(lab: Lab, tmp_path: Path) -> None:
    healthy(lab, tmp_path)
    *lines, total = lab.run("doctor").out.splitlines()
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert total == f"{len(lines)} ok, 0 warnings, 0 failed"
    assert {"server", "CRDs", "operator", "cluster", "group a10g", "jobs", "placement", "process output.uri"} <= {
        line.split(":")[0].removeprefix("ok").strip() for line in lines
    }


def old_operator(lab: Lab) -> None:
    lab.kube.put(OPERATOR, json.loads(json.dumps(lab.kube.objects[OPERATOR]).replace("v1.7.0", "v1.6.2")))


def starting(lab: Lab) -> None:
    lab.kube.put(f"{RAY}/rayclusters/sdp", {**lab.kube.objects[f"{RAY}/rayclusters/sdp"], "status": {}})


def no_operator(lab: Lab) -> None:
    starting(lab)
    lab.kube.objects.pop(OPERATOR)


def bad_image(lab: Lab) -> None:
    starting(lab)
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}}
    status = {"containerStatuses": [{"state": waiting}]}
    lab.kube.put(f"{CORE}/pods/worker", {"metadata": {"labels": {"ray.io/cluster": "sdp"}}, "status": status})


def bad_config(lab: Lab) -> None:
    lab.kube.put(f"{CORE}/configmaps/sdp-jobs", {"data": {"train.yaml": "limt: 5\n"}})


@pytest.mark.parametrize(
    ("setup", "check", "says"),
    [
        (no_crd, "CRDs", 'failed: kubernetes: customresourcedefinitions "rayclusters.ray.io" not found'),
        (no_crd, "cluster", "failed: kubernetes: this cluster does not serve /apis/ray.io/v1/namespaces/lab/raycl"),
        (lambda lab: lab.kube.put(CRD, {}), "CRDs", "failed: older than the chart: no authOptions, "),
        (old_operator, "operator", "failed: kuberay-system/kuberay-operator is 1.6.2; upgrade it"),
        (no_operator, "operator", "failed: no deployment of KubeRay's operator; install"),
        (lambda lab: lab.kube.objects.pop(OPERATOR), "operator", "warning: no deployment of KubeRay's operator, but"),
        (no_cluster, "cluster", "failed: --cluster: there is no RayCluster 'sdp' in namespace 'lab'"),
        (bad_image, "pods", "failed: worker: ImagePullBackOff (no such tag); check image, tag and imagePullSecrets"),
        (bad_image, "cluster", "failed: sdp is starting; kubectl describe raycluster sdp"),
        (bad_config, "jobs", "failed: train.yaml:1: limt: "),
        (unplaced, "pods", "warning: worker-0 is not scheduled: 0/4 nodes"),
        (may_not("list", "nodes"), "groups", "warning: not checked: kubernetes: nodes is forbidden"),
        (may_not("list", "deployments"), "operator", "warning: not checked: "),
        (may_not("get", "customresourcedefinitions"), "CRDs", "warning: not checked: "),
        (may_not("get", "configmaps"), "jobs", "warning: not checked: "),
    ],
)
def test_the_doctor_finds_what_is_wrong_and_warns_of_what_may_be_fine_or_may_not_be_read(
    lab: Lab, tmp_path: Path, setup: Callable[[Lab], Any], check: str, says: str
) -> None:
    healthy(lab, tmp_path)
    setup(lab)
    code, findings = examined(lab)
    assert code == says.startswith("failed")
    assert any(line.startswith(says) for line in findings[check]), findings


def test_in_a_pod_the_mounted_configurations_are_checked_without_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "generate.yaml").write_text("prompts: [a lake]\ncheckpoint: run\n")
    findings = {each.check: each.state for each in examine_pod(mounted_texts(tmp_path))}
    assert findings == {"server": "warning", "jobs": "warning"}
    assert mounted_texts(tmp_path / "none") == {}


def test_a_server_lost_during_the_examination_still_yields_findings(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib3.Retry.sleep", lambda *_: None)
    healthy(lab, tmp_path)
    lab.kube.fault("GET", "^/apis?/", "drop", 10_000)
    code, findings = examined(lab)
    assert code == 1
    assert findings["server"][0].startswith("ok: ")
    assert "does not answer" in findings["cluster"][0]


@pytest.mark.needs("helm")
def test_a_chart_is_examined_before_it_is_applied(lab: Lab, tmp_path: Path, tool: Callable[[str], Path]) -> None:
    healthy(lab, tmp_path)
    no_cluster(lab)
    example = CHART / "examples" / "minimal.yaml"
    command = [str(tool("helm")), "template", "sdp", str(CHART), "-f", str(example)]
    done = ended(command, check=True)
    file = tmp_path / "rendered.yaml"
    # Nobody here answers for a bucket: the jobs' storage is a folder.
    file.write_text(done.stdout.replace("s3://my-bucket", str(tmp_path)))
    _, findings = examined(lab, "--manifest", str(file))
    assert findings["cluster"] == ["ok: sdp, from the manifests"]
    assert findings["accounts"] == ["ok: the pods' service accounts and secrets exist"], "the chart makes them"
    made = file.read_text()
    secrets = ["storage.secretName=keys", "imagePullSecrets[0].name=pull"]
    secrets += ["auth.secretName=token", "envFrom[0].secretRef.name=hub"]

    def accounts() -> list[str]:
        return [line.partition(";")[0] for line in examined(lab, "--manifest", str(file))[1]["accounts"]]

    done = ended([*command, *(word for value in secrets for word in ("--set", value))], check=True)
    file.write_text(done.stdout)
    lab.kube.put(f"{CORE}/secrets/pull", {})
    assert accounts() == [f"failed: there is no secret {name} in lab" for name in ("hub", "keys", "token")]
    file.write_text(made.replace("kind: ServiceAccount", "kind: Other"))
    lab.kube.put(f"{CORE}/serviceaccounts/sdp", {})
    assert accounts() == [f"failed: there is no service account sdp-{name} in lab" for name in ("downloads", "head")]
    file.write_text(made)
    assert findings["group a10g"] == ["ok: 1 node with A10G"]
    assert findings["group a100"][0].startswith("warning: no node has 8 GPUs and nvidia.com/gpu.product=NVIDIA-A100-")
    assert findings["placement"][0].startswith("ok: ")
    code, findings = examined(lab, "--manifest", str(file), "--context", "elsewhere")
    assert (code, findings.keys()) == (0, {"server", "jobs", "placement"}), "what needs no API server"
    assert findings["server"][0].startswith(
        "warning: operator, nodes, storage and models are not checked: kubernetes: "
    )
    file.write_text(file.read_text().replace("maxReplicas: 4", "maxReplicas: 1"))
    code, findings = examined(lab, "--manifest", str(file), "--context", "elsewhere")
    assert (code, findings["placement"][0][:47]) == (1, "failed: train.yaml: needs 24 A100 GPUs to start")
    for text, says in (("{", "expected a file of YAML"), ("- a\n", "expected Kubernetes objects")):
        file.write_text(text)
        assert says in lab.run("doctor", "--manifest", str(file), code=2).err
