"""The doctor's judgements, on objects as Kubernetes has them."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sdp.errors import AccessDenied
from sdp.kube.check_cluster import groups, judge_group, judge_state, version_of
from sdp.kube.check_jobs import access, gpus_of, placement, read
from sdp.kube.state import cluster_state
from tests.kube_server import group, node, raycluster

A100 = "NVIDIA-A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("gpus", "label", "product", "state", "says"),
    [
        (8, "A100", A100, "ok", "1 node with A100"),
        (4, "A100", A100, "warning", "no node has 8 GPUs now; an autoscaler must add one"),
        (8, "A100-80G", "NVIDIA-A100-SXM4-40GB", "failed", "its pods run on NVIDIA-A100-SXM4-40GB"),
        (8, "A10G", A100, "failed", "is labelled A10G (NVIDIA-A10G), but its pods run on NVIDIA-A100-SXM4-80GB"),
        (8, "A10G", "NVIDIA-A10G-SHARED", "ok", ""),
        (8, "A10G", "", "ok", ""),
        (8, "", A100, "failed", "no label ray.io/accelerator-type"),
        (8, "T9", "Tesla-T9", "ok", "1 node with T9"),
    ],
)
def test_a_groups_nodes_have_as_many_gpus_as_its_pods_and_the_one_that_its_label_says(
    gpus: int, label: str, product: str, state: str, says: str
) -> None:
    finding = judge_group(group("g", 8, label), [node("plain"), node("n", gpus, product)])
    assert finding.state == state
    assert says in str(finding)


@pytest.mark.parametrize(
    ("has", "state"),
    [
        ({"cpu": "94", "memory": "1100Gi"}, "ok"),
        ({"cpu": "91900m", "memory": "1100Gi"}, "warning"),
        ({"cpu": "94", "memory": "1049Gi"}, "warning"),
    ],
)
def test_a_pod_that_is_larger_than_each_node_is_told(has: dict[str, str], state: str) -> None:
    large, own = group("g", 8, "A100"), node("n", 8, A100)
    large["template"]["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "92", "memory": "1050Gi"}
    own["status"]["allocatable"] |= has
    finding = judge_group(large, [own])
    assert finding.state == state
    assert ("no node has the 92 CPUs and 1050 GiB that a pod asks for" in str(finding)) == (state == "warning")


@pytest.mark.parametrize(("cpu", "fits"), [("1500m", True), ("1400m", False)])
def test_a_head_that_is_larger_than_each_node_is_told(cpu: str, fits: bool) -> None:
    cluster, own = raycluster(), node("n")
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1"}}
    own["status"]["allocatable"]["cpu"] = cpu
    findings = [str(finding) for finding in groups(Mock(list=lambda _: [own]), cluster)]
    assert len(findings) == (0 if fits else 1)
    for finding in findings:
        assert "group head: no node has the 1.5 CPUs" in finding, "with the autoscaler's 500m"
        assert "lower head.cpu and memory" in finding


REFUSED = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}
LACKING = {"state": "ready", "desiredWorkerReplicas": 1, "conditions": [REFUSED]}
NO_HEAD = {"type": "HeadPodReady", "status": "False", "reason": "ContainersNotReady", "message": "pulling"}


@pytest.mark.parametrize(
    ("status", "state", "says"),
    [
        ({"state": "ready"}, "ok", "sdp is ready: 0 of 0 workers"),
        ({"conditions": [NO_HEAD]}, "warning", "sdp is starting: ContainersNotReady: pulling"),
        ({"conditions": [REFUSED]}, "failed", "sdp is starting: FailedCreate: exceeded quota"),
        (LACKING, "failed", "0 of 1 worker: FailedCreate"),
        ({"state": "suspended"}, "failed", "sdp is suspended; kubectl describe raycluster sdp"),
    ],
)
def test_a_starting_cluster_is_no_failure_unless_a_quota_or_a_user_holds_it_up(
    status: dict[str, Any], state: str, says: str
) -> None:
    verdict = judge_state(cluster_state({"metadata": {"name": "sdp"}, "status": status}), [])
    assert verdict.state == state
    assert says in str(verdict)


@pytest.mark.parametrize(
    ("image", "label", "version"),
    [
        ("quay.io/kuberay/operator:v1.6.2@sha256:abc", "", (1, 6, 2)),
        ("registry:5000/operator:nightly", "1.7.0", (1, 7, 0)),
        ("registry:5000/operator:nightly", "", None),
        ("operator:v1.8.0-rc.1", "", (1, 8, 0)),
    ],
)
def test_an_operators_version_is_its_images_or_its_charts(image: str, label: str, version: Any) -> None:
    labels = {"app.kubernetes.io/version": label} if label else {}
    assert version_of({"labels": labels}, {"image": image}) == version


TRAIN = "source: {uri: s3://b/i}\noutput: {uri: s3://b/o}\nmodel: {source: 'builtin:tiny'}\n"
DOWNLOAD = "source: {{uri: {0}/in}}\noutput: {{uri: {0}/images}}\n"
PROCESS = "source: {{uri: {0}/images}}\noutput: {{uri: {0}/latents}}\nmodel: {{source: 'builtin:tiny'}}\n"


def test_configurations_are_read_by_the_job_their_name_begins_with() -> None:
    texts = {"download": DOWNLOAD.format("s3://b"), "download-more": "limt: 5\n", "notes": "x: y\n"}
    jobs, (wrong, missing) = read({**texts, "process": "output: {uri: s3://b/o}\n"})
    assert [*jobs] == ["download", "process"]
    assert (wrong.state, wrong.says.startswith("download-more.yaml:1: limt: ")) == ("failed", True)
    assert missing.state == "warning"
    assert "model.source, source.uri not set" in missing.says
    assert (jobs["process"].value("model.source"), jobs["process"].value("output.uri")) == (None, "s3://b/o")


TOO_FEW = "train.yaml: needs 32 A100 GPUs to start, and the groups grow to 8"


@pytest.mark.parametrize(
    ("groups", "scaling", "encode", "grows", "says"),
    [
        ([("A100", 8, 4)], "num_workers: 32", "", True, ""),
        ([("A100", 8, 1)], "num_workers: 32", "", True, TOO_FEW),
        ([("A100", 8, 1)], "num_workers: {min: 8, max: 32}", "", True, ""),
        ([("A100", 8, 1), ("A100", 4, 2)], "num_workers: 16", "", True, ""),
        ([("A100", 8, 4)], "num_workers: 32", "", False, TOO_FEW),  # it has one pod, and never more
        ([("A100", 8, 4), ("A10G", 1, 4)], "num_workers: 32", "num_workers: 8, accelerator: A10G", True, ""),
        ([("A100", 8, 4)], "num_workers: 32", "accelerator: A10G", True, "needs 1 A10G GPUs to start, and the groups"),
        ([("A100", 8, 4)], "num_workers: 32", "num_workers: 2, accelerator: A100", True, "needs 33 A100"),
        ([("A100", 8, 4)], "num_workers: 31", "num_workers: 2, accelerator: A100", True, ""),
        ([("A100", 8, 4), ("A10G", 1, 0)], "num_workers: 1", "accelerator: A10G", True, "the groups grow to 0"),
    ],
)
def test_workers_that_no_group_can_grow_to_are_found_before_a_job_waits_for_them(
    groups: list[tuple[str, int, int]], scaling: str, encode: str, grows: bool, says: str
) -> None:
    online = f"data: {{mode: online}}\nencode: {{{encode}}}\n" if encode else ""
    jobs, wrong = read({"train": f"{TRAIN}scaling: {{accelerator: A100, {scaling}}}\n{online}"})
    assert wrong[0].state == "ok", wrong
    cluster = raycluster(*(group(f"g{number}", gpus, label, most) for number, (label, gpus, most) in enumerate(groups)))
    cluster["spec"]["enableInTreeAutoscaling"] = grows
    for worker_group in cluster["spec"]["workerGroupSpecs"]:
        worker_group["replicas"] = min(1, worker_group["maxReplicas"])
    (finding,) = placement(jobs, cluster)
    assert finding.state == ("failed" if says else "ok")
    assert says in str(finding)


@pytest.mark.parametrize(("grows", "gpus"), [(True, 32), (False, 0)])
def test_a_group_without_pods_has_gpus_only_where_it_can_grow(grows: bool, gpus: int) -> None:
    cluster = raycluster(group("a", 8, "A100", 4))
    cluster["spec"] |= {"enableInTreeAutoscaling": grows}
    cluster["spec"]["workerGroupSpecs"][0]["replicas"] = 0
    assert gpus_of(cluster) == {"A100": gpus}


def test_storage_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.parquet").write_bytes(b"PAR1")
    missing_model = PROCESS.format(tmp_path).replace("builtin:tiny", str(tmp_path / "none"))
    texts = {"download": DOWNLOAD.format(tmp_path), "process": PROCESS.format(tmp_path), "process-2": missing_model}
    jobs, _ = read(texts)
    for in_pod, model, origin in ((True, "failed", "from this pod"), (False, "warning", "from here")):
        by_check = {finding.check: finding for finding in access(jobs, in_pod=in_pod)}
        assert {name: finding.state for name, finding in by_check.items()} == {
            "download source.uri": "ok",
            "download output.uri": "ok",
            "process source.uri": "ok",
            "process output.uri": "ok",
            "process model.source": "ok",
            "process-2 model.source": model,
        }
        assert "does not exist yet" in by_check["process source.uri"].says
        assert origin in by_check["download output.uri"].says
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "in" / "a.parquet"]


def test_a_cause_that_many_checks_meet_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uri: str, _: object) -> None:
        raise AccessDenied(f"{uri}: no AWS credentials found")

    monkeypatch.setattr("sdp.kube.check_jobs.open_storage", refuse)
    texts = {"process": PROCESS.format("s3://b"), "process-2": PROCESS.format("s3://c")}
    refused, model = sorted(access(read(texts)[0], in_pod=True), key=lambda finding: finding.check)[::-1]
    assert refused.says == (
        "s3://b/images: no AWS credentials found (from this pod); the same for process-2 source.uri, "
        "process output.uri, process-2 output.uri"
    )
    assert model.state == "ok"


def test_a_missing_source_and_an_output_that_cannot_be_written_are_failures(tmp_path: Path) -> None:
    (tmp_path / "images").write_text("a file where a folder should be")
    source, output = access(read({"download": DOWNLOAD.format(tmp_path)})[0], in_pod=True)
    assert (source.state, output.state) == ("failed", "failed")
    assert str(tmp_path / "images") in output.says
