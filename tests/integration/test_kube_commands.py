"""The commands for a cluster, against a fake API server and dashboard with configurable faults."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdp.cli import main
from sdp.kube.access import access
from sdp.kube.api import Api, Timing, Unreachable
from sdp.kube.doctor import examine
from sdp.kube.logs import follow, logs
from sdp.kube.rayjob import make_rayjob
from sdp.kube.site import Site
from tests.kube_server import CORE, RAY, KubeServer, RayJob, RayServer, group, node, raycluster, running
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "sdp-cluster"
TRAIN = "source: {uri: s3://b/latents}\noutput: {uri: s3://b/run}\nmodel: {source: 'builtin:tiny'}\n"
DEADLINE_S = 60.0


@dataclass
class Lab:
    """A cluster, its operator played by the test, and a terminal in front of it."""

    kube: KubeServer
    ray: RayServer
    kubeconfig: Path

    def api(self, **timing: Any) -> Api:
        return Api(access(None, {"KUBECONFIG": str(self.kubeconfig)}), timing=Timing(**timing))

    def begin(self, name: str, start_time: int = 1_800_000_000_000) -> str:
        """The operator has submitted a RayJob, and Ray runs it."""
        submission = f"{name}-zz9zz"
        self.ray.jobs[submission] = RayJob(start_time)
        self.kube.update_status(
            f"{RAY}/rayjobs/{name}",
            jobId=submission,
            rayClusterName="sdp",
            jobDeploymentStatus="Running",
            jobStatus="RUNNING",
            startTime="2026-11-21T07:30:00Z",
        )
        return submission

    def end(self, name: str, how: str = "SUCCEEDED", message: str = "") -> None:
        if (submission := f"{name}-zz9zz") in self.ray.jobs:
            self.ray.end(submission)
        self.kube.update_status(
            f"{RAY}/rayjobs/{name}",
            jobDeploymentStatus="Failed" if how == "FAILED" else "Complete",
            jobStatus=how,
            message=message,
        )

    def job(self, name: str, job: str = "train") -> None:
        """A RayJob that is there already."""
        self.kube.put(f"{RAY}/rayjobs/{name}", make_rayjob(job, None, name=name))

    def jobs(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.kube.objects if path.startswith(f"{RAY}/rayjobs/")]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with running() as (kube, ray):
        kubeconfig = kube.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        for name in (
            "RAY_AUTH_TOKEN",
            "HTTPS_PROXY",
            "https_proxy",
            "HTTP_PROXY",
            "http_proxy",
            "ALL_PROXY",
            "all_proxy",
        ):
            monkeypatch.delenv(name, raising=False)
        kube.put(f"{CORE}/configmaps/sdp-jobs", {"data": {"train.yaml": TRAIN}})
        yield Lab(kube, ray, kubeconfig)


def played(lab: Lab, story: Callable[[str, str], None]) -> None:
    """Play the operator, in a thread of its own: each RayJob that is made begins, and then goes by the story."""

    def on_create(path: str, item: Any) -> None:
        if path.startswith(f"{RAY}/rayjobs/"):
            name = item["metadata"]["name"]
            threading.Thread(target=lambda: story(name, lab.begin(name)), daemon=True).start()

    lab.kube.on_create = on_create


# --- submit ----------------------------------------------------------------------------------------------------------


def test_a_job_is_submitted_and_followed_to_its_end(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    def story(name: str, submission: str) -> None:
        for number in range(50):
            lab.ray.write(submission, f"step {number}: größer\n".encode())
        until(lambda: lab.ray.streams, "the log is read")
        lab.end(name)

    played(lab, story)
    assert main(["submit", "train", "--set", "limit=5"]) == 0
    out, err = capfd.readouterr()
    assert out == "".join(f"step {number}: größer\n" for number in range(50))
    (name,) = lab.jobs()
    assert re.fullmatch(r"sdp-train-[a-z0-9]{5}", name)
    assert f"sdp: submitted {name} to cluster 'sdp' in namespace 'lab'\n" in err
    assert f"sdp: {name}: running\n" in err
    assert err.endswith(f"sdp: {name}: succeeded\n")
    made = lab.kube.objects[f"{RAY}/rayjobs/{name}"]
    wanted = make_rayjob("train", None, overrides=["limit=5"])
    assert made["spec"] == wanted["spec"]
    assert made["metadata"]["labels"] == wanted["metadata"]["labels"]


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (137, 1)])
def test_a_failed_job_reports_its_reason_and_whether_the_user_must_fix_it(
    lab: Lab, capfd: pytest.CaptureFixture[str], code: int, expected: int
) -> None:
    message = (
        f"Job entrypoint command failed with exit code {code}, last available logs (truncated to 20,000 chars):\nx"
    )
    played(lab, lambda name, _: lab.end(name, "FAILED", message))
    assert main(["submit", "train"]) == expected
    assert f"failed (Job entrypoint command failed with exit code {code})" in capfd.readouterr().err


def test_each_byte_of_a_log_is_printed_once_however_often_the_connection_breaks(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
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

    played(lab, story)
    assert main(["submit", "train"]) == 0
    assert capfd.readouterr().out.encode() == b"".join(lines)
    assert lab.ray.streams >= 4


def test_after_a_new_head_the_jobs_new_log_is_printed_from_the_beginning(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def first_head_shown() -> bool:
        shown.append(capfd.readouterr().out)
        return "of the first head\n" in "".join(shown)

    def story(name: str, submission: str) -> None:
        lab.ray.write(submission, b"of the first head\n")
        until(first_head_shown, "the log is shown")
        lab.ray.jobs[submission] = RayJob(1_800_000_999_000, bytearray(b"of the second\n"))
        pod = lab.kube.objects[f"{CORE}/pods/sdp-head-abcde"]
        labels = pod["metadata"]["labels"]
        lab.kube.put(f"{CORE}/pods/sdp-head-fghij", {**pod, "metadata": {"labels": labels}})
        lab.kube.remove(f"{CORE}/pods/sdp-head-abcde")
        lab.kube.cut_forwards()
        until(lambda: lab.ray.streams > 1, "the log is read again")
        lab.end(name)

    played(lab, story)
    assert main(["submit", "train"]) == 0
    assert "".join(shown) + capfd.readouterr().out == "of the first head\nof the second\n"


@pytest.mark.parametrize("times", [1, 2])
def test_a_lost_answer_does_not_make_two_jobs(lab: Lab, capfd: pytest.CaptureFixture[str], times: int) -> None:
    lab.kube.fault("POST", "rayjobs", "lose", 1)
    lab.kube.fault("POST", "rayjobs", "drop", times - 1)
    assert main(["submit", "train", "--no-follow"]) == 0
    assert len(lab.jobs()) == 1
    assert lab.jobs()[0] in capfd.readouterr().err
    assert lab.kube.asked("POST", "rayjobs$") == times + 1


def test_a_configuration_travels_with_the_job_and_is_checked_before(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TRAIN + "limit: 5 # a few\n")
    assert main(["submit", "train", "--config", str(file), "--no-follow", "--name", "mine"]) == 0
    spec = lab.kube.objects[f"{RAY}/rayjobs/mine"]["spec"]
    assert yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["SDP_JOB_CONFIG"] == TRAIN + "limit: 5 # a few\n"
    assert main(["submit", "train", "--config", str(file), "--set", "strategy.kind=zero", "--no-follow"]) == 2
    assert "sdp: strategy.kind: expected ddp or fsdp, got 'zero'" in capfd.readouterr().err
    assert main(["submit", "train", "--set", "limt=5", "--no-follow"]) == 2
    assert "limt" in capfd.readouterr().err
    assert lab.jobs() == ["mine"]


@pytest.mark.usefixtures("lab")
def test_a_local_path_is_remarked_on_since_each_pod_has_a_disk_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "train", "--set", "output.uri=/data/run", "--no-follow"]) == 0
    assert "output.uri: /data/run is a local path" in capfd.readouterr().err


def test_without_access_to_the_configuration_the_job_is_submitted_unchecked_with_a_warning(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    lab.kube.denied.add(("get", "configmaps"))
    assert main(["submit", "train", "--set", "limit=5", "--no-follow"]) == 0
    assert "before the job starts, only --set is checked" in capfd.readouterr().err


def test_a_name_is_used_again_once_its_job_has_ended(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.job("nightly")
    lab.begin("nightly")
    assert main(["submit", "train", "--name", "nightly", "--no-follow"]) == 2
    assert "RayJob 'nightly' has not ended; sdp logs nightly --follow shows it" in capfd.readouterr().err
    lab.end("nightly", "FAILED")
    assert main(["submit", "train", "--name", "nightly", "--no-follow"]) == 0
    assert "continues from storage" in capfd.readouterr().err
    assert "status" not in lab.kube.objects[f"{RAY}/rayjobs/nightly"]


def test_a_second_configuration_of_a_kind_is_submitted_looked_at_and_stopped_like_the_first(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    lab.kube.put(f"{CORE}/configmaps/sdp-jobs", {"data": {"train.yaml": "limt: 5\n", "train-online.yaml": TRAIN}})
    assert main(["submit", "train-online", "--no-follow", "--set", "limit=5"]) == 0
    (name,) = lab.jobs()
    assert re.fullmatch(r"sdp-train-online-[a-z0-9]{5}", name)
    made = lab.kube.objects[f"{RAY}/rayjobs/{name}"]
    assert made["spec"] == make_rayjob("train-online", None, overrides=["limit=5"])["spec"]
    lab.ray.write(lab.begin(name), b"step 1\n")
    assert main(["submit", "train-online", "--no-follow", "--set", "limt=5"]) == 2
    assert main(["submit", "train-2", "--no-follow"]) == 2
    refused = capfd.readouterr().err.splitlines()[-1]
    assert refused.endswith("ConfigMap 'sdp-jobs' has no train-2.yaml (it has train, train-online)")
    assert main(["logs", name]) == 0
    assert capfd.readouterr().out == "step 1\n"
    assert main(["status", name, "--json"]) == 0
    (entry,) = json.loads(capfd.readouterr().out)["jobs"]
    assert (entry["job"], entry["state"]) == ("train-online", "running")
    lab.ray.on_stop = lambda _: threading.Timer(0.3, lambda: lab.end(name, "STOPPED")).start()
    assert main(["stop", name]) == 0
    assert "sdp submit train-online continues from storage" in capfd.readouterr().err


def test_another_job_of_the_kind_is_remarked_on(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.job("other")
    lab.begin("other")
    assert main(["submit", "train", "--no-follow"]) == 0
    assert "other is also a train job and is running" in capfd.readouterr().err


def test_a_dry_run_prints_what_kubectl_would_create_and_needs_no_cluster(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/no/such/file")
    assert main(["submit", "train", "--dry-run", "--set", "model.source=b c", "--cluster", "big"]) == 0
    assert yaml.safe_load(capfd.readouterr().out) == make_rayjob(
        "train", None, cluster="big", overrides=["model.source=b c"]
    )


def test_settings_are_checked_where_no_cluster_is_asked(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "train", "--set", "max_stepz=1000", "--set", "data.batch_size=many", "--dry-run"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "sdp: data.batch_size: expected a whole number of 1 or more, got 'many'",
        "sdp: max_stepz: expected a known key, got an unknown key; did you mean max_steps?",
    ]


def test_settings_may_contradict_defaults_that_the_clusters_file_changes(capfd: pytest.CaptureFixture[str]) -> None:
    settings = [
        "--set",
        "scaling.accelerator=cpu",
        "--set",
        "scaling.accelerator=A100",
        "--set",
        "source.also.0.weight=2",
    ]
    assert main(["submit", "train", "--dry-run", *settings]) == 0
    assert "scaling.accelerator=A100" in capfd.readouterr().out


def test_waiting_for_a_cluster_that_is_not_ready_is_reported(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.kube.update_status(f"{RAY}/rayclusters/sdp", state="", reason="quota exceeded")
    assert main(["submit", "train", "--no-follow"]) == 0
    assert "the cluster 'sdp' is starting: quota exceeded; the job waits for it" in capfd.readouterr().err


# --- what is refused -------------------------------------------------------------------------------------------------


def no_crd(lab: Lab) -> None:
    del lab.kube.groups["/apis/ray.io/v1"]


def no_cluster(lab: Lab) -> None:
    lab.kube.remove(f"{RAY}/rayclusters/sdp")


def two_clusters(lab: Lab) -> None:
    no_cluster(lab)
    for name in ("blue", "green"):
        lab.kube.put(f"{RAY}/rayclusters/{name}", raycluster())
    owned = {"metadata": {"ownerReferences": [{"kind": "RayJob"}]}}
    lab.kube.put(f"{RAY}/rayclusters/of-a-job", {**raycluster(), **owned})


def no_map(lab: Lab) -> None:
    lab.kube.put(f"{RAY}/rayclusters/sdp", raycluster(jobs_map=False))


def may_not(*rights: tuple[str, str]) -> Callable[[Lab], None]:
    return lambda lab: lab.kube.denied.update(rights)


def logged_out(lab: Lab) -> None:
    lab.kube.token = "another"


def begun(lab: Lab) -> None:
    lab.job("x")
    lab.begin("x")


def wrong_token(lab: Lab) -> None:
    begun(lab)
    lab.ray.token = "another"


def no_secret(lab: Lab) -> None:
    begun(lab)
    lab.kube.remove(f"{CORE}/secrets/sdp")


def nothing(lab: Lab) -> None:
    assert lab


@pytest.mark.parametrize(
    ("line", "setup", "says"),
    [
        (
            "submit train",
            no_crd,
            "does not serve /apis/ray.io/v1/namespaces/lab/rayclusters; install the KubeRay operator",
        ),
        ("status", no_crd, "install the KubeRay operator, 1.7 or later, and its CRDs"),
        ("submit train", no_cluster, "--cluster: there is no RayCluster in namespace 'lab'; helm install sdp"),
        (
            "submit train --cluster big",
            nothing,
            "--cluster: there is no RayCluster 'big' in namespace 'lab'; there are sdp",
        ),
        ("submit train", two_clusters, "--cluster: expected one of the clusters of namespace 'lab': blue, green"),
        ("submit train --namespace other", nothing, "there is no RayCluster in namespace 'other'"),
        ("submit train", no_map, "--config: required, since cluster 'sdp' has no configurations"),
        ("submit process", nothing, "--config: required, since ConfigMap 'sdp-jobs' has no process.yaml (it has tr"),
        (
            "submit trian-online",
            nothing,
            "submit: JOB: expected download, score, process, train, generate, evaluate, dreambooth, or one of these "
            "and -NAME, got 'trian-online'; did you mean train-online?",
        ),
        (
            "submit encode --dry-run",
            nothing,
            "submit: JOB: expected download, score, process, train, generate, evaluate, dreambooth",
        ),
        ("submit train --name A_b", nothing, "--name: expected at most 47 lower-case letters"),
        (
            "submit train --config /no/such.yaml",
            nothing,
            "/no/such.yaml: expected a configuration file, got nothing there",
        ),
        (
            "submit train",
            may_not(("create", "rayjobs")),
            'User "me" cannot create resource "rayjobs"; ask for that right',
        ),
        ("status", may_not(("list", "rayclusters")), 'cannot list resource "rayclusters"'),
        ("status", logged_out, "refuses these credentials (401)"),
        ("status --context prod", nothing, "--context: no context 'prod' in "),
        ("status x", nothing, "status: no RayJob or RayCluster 'x' in namespace 'lab'"),
        ("logs x", nothing, "no RayJob 'x' in namespace 'lab'; it has none"),
        ("logs x", lambda lab: lab.job("x"), "logs: x has not started: it is new; --follow waits for it"),
        ("logs x --lines 0", begun, "logs: --lines: expected 1 or more, got 0"),
        ("logs x --lines 5 --follow", begun, "logs: --lines: not used with --follow"),
        ("logs x", wrong_token, "ray: the head of 'sdp' refuses the token of its secret"),
        ("logs x", no_secret, "ray: the cluster's token is in secret 'sdp', which cannot be read"),
        (
            "logs x",
            lambda lab: (begun(lab), may_not(("create", "pods/portforward"))(lab))[0],
            'cannot create resource "pods/portforward"; ask for that right',
        ),
        (
            "logs x",
            lambda lab: (begun(lab), no_cluster(lab))[0],
            "logs: cluster 'sdp' is gone, and the log of x with it",
        ),
        (
            "logs x",
            lambda lab: (begun(lab), lab.ray.jobs.clear())[0],
            "logs: the head of 'sdp' has no log of x: it has no record of the job, and may have been replaced",
        ),
        ("stop x", nothing, "no RayJob 'x'"),
        ("doctor --manifest /no/such", nothing, "doctor: --manifest: /no/such: cannot be read"),
    ],
)
def test_an_error_that_the_user_must_fix_is_one_line_and_exit_code_2(
    lab: Lab, capfd: pytest.CaptureFixture[str], line: str, setup: Callable[[Lab], Any], says: str
) -> None:
    setup(lab)
    assert main(line.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert says in err
    assert len(err.splitlines()) == 1
    assert len(err) < 700


@pytest.mark.parametrize("line", ["submit train", "status", "logs x", "stop x", "doctor"])
def test_without_a_kubeconfig_each_command_says_so(
    line: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(line.split()) == 2
    assert capfd.readouterr().err.startswith("sdp: KUBECONFIG: not set, and ~/.kube/config does not exist")


@pytest.mark.usefixtures("lab")
def test_an_unreachable_server_is_one_line_and_can_be_retried(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--context", "elsewhere"]) == 1
    err = capfd.readouterr().err
    assert "sdp: kubernetes: 127.0.0.1:1 does not answer (" in err
    assert len(err.splitlines()) == 1


def test_a_server_with_another_certificate_is_not_spoken_to(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as (other, _):
        config = yaml.safe_load(other.kubeconfig(tmp_path / "other").read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{lab.kube.port}"
        (tmp_path / "mixed").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "mixed"))
        assert main(["status"]) == 1
    assert lab.kube.requests == []


# --- status and logs -------------------------------------------------------------------------------------------------


def test_status_shows_clusters_and_jobs_page_by_page(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.kube.page = 2
    for number in range(5):
        lab.job(f"job-{number}")
    lab.begin("job-3")
    assert main(["status"]) == 0
    text = capfd.readouterr().out
    assert re.search(r"^sdp +ready +1 of 1 +sdp-head-abcde$", text, re.MULTILINE)
    assert re.search(r"^job-3 +running +2026-11-21 07:30Z .* 1 +sdp$", text, re.MULTILINE)
    assert sorted(re.findall(r"^(job-\d)", text, re.MULTILINE)) == [f"job-{number}" for number in range(5)]
    assert main(["status", "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert [each["name"] for each in data["clusters"]] == ["sdp"]
    assert {each["name"]: each["state"] for each in data["jobs"]}["job-3"] == "running"


def test_the_status_of_one_job_includes_its_events(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.job("x")
    event = {"involvedObject": {"uid": "uid-x"}, "reason": "RayClusterNotFound", "message": "there is\nno cluster"}
    lab.kube.put(f"{CORE}/events/x.1", {**event, "lastTimestamp": "2026-11-21T07:31:00Z"})
    lab.kube.put(f"{CORE}/events/y.1", {"involvedObject": {"uid": "uid-y"}, "reason": "Other", "message": ""})
    assert main(["status", "x"]) == 0
    text = capfd.readouterr().out
    assert "2026-11-21T07:31:00Z  RayClusterNotFound: there is no cluster" in text
    assert "Other" not in text


def test_status_of_a_running_job_has_the_newest_line_that_says_when_it_ends(
    lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    begun(lab)
    lines = ["train: step 10 of 90 · ETA 2:00", "train: step 20 of 90 · cost 1.20 of 5.40 · ETA 1:00", "train: saved"]
    lab.ray.write("x-zz9zz", "\n".join([*lines, "somebody: else · ETA 0:01", ""]).encode())
    assert main(["status", "x"]) == 0
    out = capfd.readouterr().out
    assert "x: train: step 20 of 90 · cost 1.20 of 5.40 · ETA 1:00\n" in out
    assert "ETA 2:00" not in out
    assert main(["status"]) == 0
    assert "x: train: step 20 of 90 · cost 1.20 of 5.40 · ETA 1:00\n" in capfd.readouterr().out
    lab.kube.denied.add(("create", "pods/portforward"))
    assert main(["status", "x"]) == 0
    assert "ETA" not in capfd.readouterr().out


def test_logs_are_printed_whole_or_the_last_lines(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    begun(lab)
    text = "".join(f"line {number}\n" for number in range(30_000))
    lab.ray.write("x-zz9zz", text.encode())
    assert main(["logs", "x"]) == 0
    assert capfd.readouterr().out == text
    assert main(["logs", "x", "--lines", "2"]) == 0
    assert capfd.readouterr().out == "line 29998\nline 29999\n"


def test_logs_show_a_finished_job_that_another_user_submitted(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    begun(lab)
    lab.ray.write("x-zz9zz", b"all of it\n")
    lab.end("x", "FAILED", "exit code 1")
    assert main(["logs", "x", "--follow"]) == 1
    assert capfd.readouterr().out == "all of it\n"


@pytest.mark.parametrize("following", [False, True])
def test_a_reader_that_has_seen_enough_ends_the_looking_and_is_no_failure_of_the_head(
    lab: Lab, following: bool
) -> None:
    class Head(io.BytesIO):
        """`| head -1`, when it is gone."""

        def write(self, _: object) -> int:
            raise BrokenPipeError

    begun(lab)
    lab.ray.write("x-zz9zz", b"hello\n")
    said: list[str] = []
    ended: list[type[BaseException]] = []

    def look() -> None:
        try:
            logs(lab.api(poll_s=0.1), "x", said.append, following=following, out=Head())
        except Exception as error:  # noqa: BLE001 - which one is what the test is about
            ended.append(type(error))

    threading.Thread(target=look, daemon=True).start()
    assert until(lambda: ended, "the end of the looking") == [BrokenPipeError]
    assert [line for line in said if "no log" in line] == []
    assert not lab.ray.jobs["x-zz9zz"].stopped


def test_interrupting_leaves_the_job_running_and_says_how_to_look_again(lab: Lab) -> None:
    begun(lab)
    lab.ray.write("x-zz9zz", b"hello\n")
    words = [sys.executable, "-m", "sdp", "logs", "x", "--follow"]
    with subprocess.Popen(
        words, cwd=ROOT, env=os.environ.copy(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "hello\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    how = "the job continues; sdp logs x --follow follows it again, sdp stop x ends it"
    assert err.splitlines()[-1] == f"sdp: stopped by SIGINT; {how}"
    assert "Traceback" not in err
    assert not lab.ray.jobs["x-zz9zz"].stopped
    assert lab.jobs() == ["x"]


def test_an_api_server_that_stays_away_ends_the_following_and_nothing_else(lab: Lab) -> None:
    begun(lab)
    said: list[str] = []
    api = lab.api(attempts=1, first_pause_s=0.05, longest_pause_s=0.05, lost_s=0.5, poll_s=0.1)
    lab.kube.fault("GET", "rayjobs", "drop", 10_000)
    with pytest.raises(Unreachable, match="gave up, sdp logs x --follow tries again"):
        follow(api, "x", open(os.devnull, "wb"), said.append)  # noqa: PTH123, SIM115
    assert any("the job continues" in line for line in said)


def test_a_recovered_api_server_is_reported_once(lab: Lab) -> None:
    begun(lab)
    said: list[str] = []
    api = lab.api(attempts=1, first_pause_s=0.05, longest_pause_s=0.05, lost_s=30.0, poll_s=0.1)
    lab.kube.fault("GET", "rayjobs/x", "drop", 6)
    lab.end("x")
    with open(os.devnull, "wb") as out:  # noqa: PTH123
        assert follow(api, "x", out, said.append) == 0
    assert sum("retrying for up to" in line for line in said) == 1
    assert sum("answers again" in line for line in said) == 1


def test_a_job_deleted_during_the_command_is_reported_as_deleted(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    played(lab, lambda name, _: lab.kube.remove(f"{RAY}/rayjobs/{name}"))
    assert main(["submit", "train"]) == 2
    assert "this RayJob was deleted" in capfd.readouterr().err


def test_following_a_job_needs_no_permission_to_watch(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.kube.denied.add(("watch", "rayjobs"))
    played(lab, lambda name, _: lab.end(name))
    assert main(["submit", "train"]) == 0
    assert ": succeeded" in capfd.readouterr().err


# --- stop ------------------------------------------------------------------------------------------------------------


def test_stop_requests_a_jobs_end_and_waits_for_it(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    begun(lab)
    lab.ray.on_stop = lambda _: threading.Timer(0.3, lambda: lab.end("x", "STOPPED")).start()
    assert main(["stop", "x"]) == 0
    err = capfd.readouterr().err
    assert "x is stopping; it has up to 300 s for a last checkpoint" in err
    assert "x: stopped; sdp submit train continues from storage" in err
    assert lab.jobs() == ["x"], "the record stays"
    assert main(["stop", "x"]) == 0
    assert "x has already ended: stopped" in capfd.readouterr().err
    assert main(["stop", "x", "--delete"]) == 0
    assert lab.jobs() == []


def test_a_job_that_has_not_begun_is_deleted(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.job("x")
    assert main(["stop", "x"]) == 0
    assert "had not started; deleting its RayJob" in capfd.readouterr().err
    assert lab.jobs() == []


def test_a_job_whose_head_is_gone_can_still_be_taken_away(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    begun(lab)
    lab.kube.update_status(f"{CORE}/pods/sdp-head-abcde", phase="Failed")
    assert main(["stop", "x"]) == 1
    err = capfd.readouterr().err
    assert "the head of 'sdp' is not running" in err
    assert "sdp stop x --delete deletes the RayJob anyway" in err
    assert lab.jobs() == ["x"]
    assert main(["stop", "x", "--delete", "--no-wait"]) == 0
    assert lab.jobs() == []


def test_telling_a_job_to_stop_need_not_mean_waiting(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    begun(lab)
    assert main(["stop", "x", "--no-wait"]) == 0
    assert lab.ray.jobs["x-zz9zz"].stopped
    assert lab.jobs() == ["x"]
    assert "is stopping" in capfd.readouterr().err


# --- doctor ----------------------------------------------------------------------------------------------------------


def crd(kind: str) -> dict[str, Any]:
    from sdp.kube.check_cluster import FIELDS

    spec: dict[str, Any] = {}
    for path, names in sorted(FIELDS[kind].items()):
        inner = spec
        for part in path.split(".")[1:]:
            node = inner[part]
            if part == "workerGroupSpecs":
                node = node.setdefault("items", {})
            inner = node.setdefault("properties", {})
        inner.update({name: {} for name in names} | ({"workerGroupSpecs": {}} if path == "spec" else {}))
    schema = {"openAPIV3Schema": {"properties": {"spec": {"properties": spec}}}}
    return {"spec": {"versions": [{"name": "v1", "served": True, "schema": schema}]}}


def healthy(lab: Lab, storage: Path) -> None:
    """A site where nothing is wrong."""
    for kind in ("rayclusters", "rayjobs"):
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{kind}.ray.io"
        lab.kube.put(path, crd(kind))
    container = {"image": "quay.io/kuberay/operator:v1.7.0"}
    labels = {"app.kubernetes.io/name": "kuberay-operator", "app.kubernetes.io/component": "kuberay-operator"}
    lab.kube.put(
        "/apis/apps/v1/namespaces/kuberay-system/deployments/kuberay-operator",
        {
            "metadata": {"namespace": "kuberay-system", "labels": labels},
            "spec": {"template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}}},
            "status": {"availableReplicas": 1},
        },
    )
    lab.kube.put("/api/v1/nodes/plain", node("plain"))
    lab.kube.put("/api/v1/nodes/gpu", node("gpu", 1, "NVIDIA-A10G"))
    selector = {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A10G"}}
    lab.kube.put(f"{RAY}/rayclusters/sdp", raycluster(group("cpu"), group("a10g", 1, "A10G", 1, 1, **selector)))
    process = {
        "source": {"uri": str(storage / "images")},
        "output": {"uri": str(storage / "latents")},
        "model": {"source": "builtin:tiny"},
        "encode": {"accelerator": "A10G"},
    }
    lab.kube.put(f"{CORE}/configmaps/sdp-jobs", {"data": {"process.yaml": yaml.safe_dump(process)}})


def examined(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and what the doctor found: check -> its lines."""
    code = main(["doctor", "--json", *words])
    data = json.loads(capfd.readouterr().out)
    assert data["ok"] is (code == 0)
    checks: dict[str, list[str]] = {}
    for each in data["findings"]:
        checks.setdefault(each["check"], []).append(f"{each['state']}: {each['says']}; {each['do']}")
    return code, checks


def test_the_doctor_finds_nothing_where_nothing_is_wrong(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    healthy(lab, tmp_path)
    assert main(["doctor"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("ok ")][:-1] == []
    assert re.fullmatch(r"(\d+) ok, 0 warnings, 0 failed", lines[-1])
    assert {"server", "CRDs", "operator", "cluster", "group a10g", "placement"} <= {
        line.split(":")[0].removeprefix("ok").strip() for line in lines
    }


def old_crds(lab: Lab) -> None:
    lab.kube.put("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rayclusters.ray.io", crd("rayjobs"))


def old_operator(lab: Lab) -> None:
    path = "/apis/apps/v1/namespaces/kuberay-system/deployments/kuberay-operator"
    item = json.loads(json.dumps(lab.kube.objects[path]).replace("v1.7.0", "v1.6.2"))
    lab.kube.put(path, item)


def no_operator(lab: Lab) -> None:
    lab.kube.remove("/apis/apps/v1/namespaces/kuberay-system/deployments/kuberay-operator")
    lab.kube.update_status(f"{RAY}/rayclusters/sdp")
    del lab.kube.objects[f"{RAY}/rayclusters/sdp"]["status"]["observedGeneration"]


def other_gpu(lab: Lab) -> None:
    lab.kube.put("/api/v1/nodes/gpu", node("gpu", 1, "NVIDIA-L4"))


def mislabelled(lab: Lab) -> None:
    lab.kube.put(f"{RAY}/rayclusters/sdp", raycluster(group("a10g", 1, "A10G")))
    other_gpu(lab)


def bad_image(lab: Lab) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}}
    lab.kube.put(
        f"{CORE}/pods/worker",
        {"metadata": {"labels": {"ray.io/cluster": "sdp"}}, "status": {"containerStatuses": [{"state": waiting}]}},
    )


def bad_config(lab: Lab) -> None:
    lab.kube.put(f"{CORE}/configmaps/sdp-jobs", {"data": {"train.yaml": "limt: 5\n"}})


@pytest.mark.parametrize(
    ("setup", "check", "says"),
    [
        (no_crd, "CRDs", "failed: ray.io/v1 does not have rayclusters and rayjobs; install the KubeRay operator"),
        (old_crds, "CRDs", "failed: older than the chart: no rayclusters: spec.authOptions"),
        (old_operator, "operator", "failed: kuberay-system/kuberay-operator is 1.6.2; upgrade it"),
        (no_operator, "operator", "failed: no deployment of KubeRay's operator"),
        (no_cluster, "cluster", "failed: there is no RayCluster in namespace 'lab'"),
        (other_gpu, "group a10g", "failed: no node has 1 GPU and nvidia.com/gpu.product=NVIDIA-A10G; change"),
        (mislabelled, "group a10g", "failed: is labelled A10G (NVIDIA-A10G), but its pods run on NVIDIA-L4"),
        (bad_image, "pods", "failed: worker: ImagePullBackOff (no such tag); check image, tag and imagePullSecrets"),
        (bad_config, "jobs", "failed: train.yaml: limt: "),
    ],
)
def test_the_doctor_finds_what_is_wrong(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str], setup: Callable[[Lab], Any], check: str, says: str
) -> None:
    healthy(lab, tmp_path)
    setup(lab)
    code, findings = examined(capfd)
    assert code == 1
    assert any(line.startswith(says) for line in findings[check]), findings[check]


def test_right_after_it_was_installed_a_cluster_that_starts_is_no_failure_unless_its_pods_are_stuck(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    healthy(lab, tmp_path)
    path = f"{RAY}/rayclusters/sdp"
    lab.kube.put(path, {**lab.kube.objects[path], "status": {"observedGeneration": 1}})
    code, findings = examined(capfd)
    assert code == 0
    assert findings["cluster"][0].startswith("warning: sdp is starting; pods are starting")
    bad_image(lab)
    code, findings = examined(capfd)
    assert code == 1
    assert findings["cluster"][0].startswith("failed: sdp is starting; ")


def test_what_the_doctor_may_not_read_is_a_warning_and_the_rest_is_still_checked(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    healthy(lab, tmp_path)
    lab.kube.denied |= {
        ("list", "nodes"),
        ("list", "deployments"),
        ("get", "customresourcedefinitions"),
    }
    code, findings = examined(capfd)
    assert code == 0
    for check in ("groups", "CRDs", "operator"):
        assert findings[check][0].startswith("warning: "), findings[check]
    assert findings["placement"][0].startswith("ok: ")


def test_in_the_head_s_pod_missing_permissions_are_not_failures(lab: Lab, tmp_path: Path) -> None:
    """KubeRay's role for the autoscaler: pods and its own RayCluster, by name."""
    healthy(lab, tmp_path)
    lab.kube.denied |= {(verb, "rayjobs") for verb in ("create", "get", "list", "delete", "watch")}
    lab.kube.denied |= {("list", kind) for kind in ("rayclusters", "nodes", "deployments", "events")}
    lab.kube.denied |= {("get", kind) for kind in ("configmaps", "secrets", "customresourcedefinitions")}
    lab.kube.denied.add(("create", "pods/portforward"))
    mounted = tmp_path / "jobs"
    mounted.mkdir()
    (mounted / "generate.yaml").write_text("prompts: [a lake]\ncheckpoint: run\n")
    pod = replace(access(None, {"KUBECONFIG": str(lab.kubeconfig)}), context="")
    findings = list(examine(Site(Api(pod)), jobs_folder=mounted))
    assert {each.check: each.state for each in findings}["cluster"] == "warning"
    assert [str(each) for each in findings if each.state == "failed"] == []


def test_in_a_pod_the_doctor_looks_at_the_cluster_that_the_pod_is_one_of(lab: Lab, tmp_path: Path) -> None:
    healthy(lab, tmp_path)
    lab.kube.put(f"{RAY}/rayclusters/green", raycluster(group("cpu"), token=False))
    lab.kube.denied.add(("list", "rayclusters"))
    elsewhere = access(None, {"KUBECONFIG": str(lab.kubeconfig)})
    pod = replace(elsewhere, context="")
    variables = {"RAY_CLUSTER_NAME": "green", "RAY_CLUSTER_NAMESPACE": "lab"}

    def seen(site: Site) -> list[str]:
        return [str(each) for each in examine(site, jobs_folder=tmp_path) if each.check == "cluster"]

    assert seen(Site(Api(pod), environ=variables)) == ["ok      cluster: green is ready: 1 of 1 worker"]
    assert seen(Site(Api(pod), "sdp", environ=variables)) == ["ok      cluster: sdp is ready: 1 of 1 worker"]
    for api in (Api(pod, "other"), Api(elsewhere)):  # the name says nothing of another namespace or another server
        assert [line for line in seen(Site(api, environ=variables)) if "green" in line] == []


def test_a_server_lost_during_the_examination_still_yields_findings(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib3.Retry.sleep", lambda *_: None)
    healthy(lab, tmp_path)
    lab.kube.fault("GET", "^/apis?/", "drop", 10_000)
    lab.kube.fault("POST", "^/apis?/", "drop", 10_000)
    code, findings = examined(capfd)
    assert code == 1
    assert findings["server"][0].startswith("ok: ")
    for check in ("cluster", "placement"):
        assert "does not answer" in findings[check][0], findings
    assert findings["jobs"][0].startswith("warning: cannot read the cluster's configurations")


def test_with_karpenter_a_missing_node_is_not_a_failure(
    lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    healthy(lab, tmp_path)
    lab.kube.remove("/api/v1/nodes/gpu")
    assert examined(capfd)[0] == 1
    lab.kube.groups["/apis/karpenter.sh/v1"] = ["nodepools"]
    code, findings = examined(capfd)
    assert code == 0
    assert "Karpenter must be able to add one" in findings["group a10g"][0]


@pytest.mark.usefixtures("lab")
def test_the_doctor_says_that_a_server_is_out_of_reach_and_leaves_the_rest(capfd: pytest.CaptureFixture[str]) -> None:
    code, findings = examined(capfd, "--context", "elsewhere")
    assert code == 1
    assert list(findings) == ["server"]
    assert "does not answer" in findings["server"][0]


@pytest.mark.needs("helm")
def test_a_chart_is_examined_before_it_is_applied(
    lab: Lab, tmp_path: Path, tool: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    healthy(lab, tmp_path)
    lab.kube.remove(f"{RAY}/rayclusters/sdp")
    example = CHART / "examples" / "minimal.yaml"
    command = [str(tool("helm")), "template", "sdp", str(CHART), "-f", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    file = tmp_path / "rendered.yaml"
    # Nobody here answers for a bucket: the jobs' storage is a folder.
    file.write_text(done.stdout.replace("s3://my-bucket", str(tmp_path)))
    code, findings = examined(capfd, "--manifest", str(file))
    assert code == 1
    assert findings["cluster"] == ["ok: sdp, from the manifests; "]
    assert findings["group a10g"] == ["ok: 1 node with A10G; "]
    assert findings["group a100"][0].startswith("failed: no node has 8 GPUs and nvidia.com/gpu.product=NVIDIA-A100-")
    assert findings["placement"][0].startswith("ok: ")


# --- many at once ----------------------------------------------------------------------------------------------------


def test_one_api_is_shared_by_threads(lab: Lab) -> None:
    api = lab.api()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: api.get(api.path("rayclusters", "sdp"))["metadata"]["name"], range(100)))
    assert answers == ["sdp"] * 100
