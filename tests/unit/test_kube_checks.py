"""The doctor's judgements, on objects as Kubernetes has them."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sdp.errors import UserError
from sdp.kube.check_cluster import judge_group, judge_state, lacking_fields, version_of, watches
from sdp.kube.check_jobs import accelerators, access, memory, read
from sdp.kube.clusters import pods_wanted
from sdp.kube.site import Finding, failed, mounted_texts, read_manifests, warning
from sdp.kube.state import cluster_state
from sdp.model.family import SD2
from tests.kube_server import group, node, raycluster

A100 = "NVIDIA-A100-SXM4-80GB"


def states(findings: list[Finding]) -> list[str]:
    return [finding.state for finding in findings]


@pytest.mark.parametrize(
    ("nodes", "autoscalers", "state", "says"),
    [
        ([node("a", 8, A100)], [], "ok", "1 node with A100"),
        ([node("a", 4, A100)], [], "failed", "no node has 8 GPUs; change groups.a100 or the nodes"),
        ([node("a", 4, A100)], ["Karpenter"], "warning", "no node has 8 GPUs now; Karpenter must be able to add one"),
        ([], [], "failed", "no node has 8 GPUs"),
    ],
)
def test_a_group_fails_when_no_node_has_its_gpus(
    nodes: list[Any], autoscalers: list[str], state: str, says: str
) -> None:
    (verdict,) = judge_group(group("a100", 8, "A100"), nodes, autoscalers)
    assert verdict.state == state
    assert says in str(verdict)


NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def starting(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "sdp", "creationTimestamp": "2026-11-21T11:50:00Z"}, "status": status}


REFUSED = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}
NO_HEAD = {"type": "HeadPodReady", "status": "False", "reason": "ContainersNotReady", "message": "pulling"}


@pytest.mark.parametrize(
    ("cluster", "pods", "minutes", "state", "says"),
    [
        (starting(state="ready"), [], 0, "ok", "sdp is ready: 0 of 0 workers"),
        (starting(), [], 0, "warning", "sdp is starting; pods are starting: run sdp doctor again in a few minutes"),
        (starting(conditions=[NO_HEAD]), [], 0, "warning", "sdp is starting: ContainersNotReady: pulling"),
        (starting(), [warning("pods", "x is not scheduled")], 0, "warning", "starting"),
        (starting(), [failed("pods", "x: ImagePullBackOff")], 0, "failed", "kubectl describe raycluster sdp"),
        (starting(conditions=[REFUSED]), [], 0, "failed", "sdp is starting: FailedCreate: exceeded quota"),
        (starting(), [], 25, "failed", "sdp is starting, for 35 minutes; kubectl describe raycluster sdp"),
        (starting(state="suspended"), [], 0, "failed", "sdp is suspended"),
    ],
)
def test_a_cluster_that_has_just_been_made_is_no_failure_unless_something_holds_it_up(
    cluster: dict[str, Any], pods: list[Finding], minutes: int, state: str, says: str
) -> None:
    verdict = judge_state(cluster_state(cluster), pods, NOW + timedelta(minutes=minutes))
    assert verdict.state == state
    assert says in str(verdict)


@pytest.mark.parametrize(
    ("label", "products", "expected", "says"),
    [
        ("A100", [A100], ["ok"], ""),
        ("A100", ["NVIDIA-A100-SXM4-40GB", A100], ["ok"], ""),
        ("A100-80G", ["NVIDIA-A100-SXM4-40GB"], ["failed"], "its pods run on NVIDIA-A100-SXM4-40GB"),
        ("A10G", [A100], ["failed"], "is labelled A10G (NVIDIA-A10G), but its pods run on NVIDIA-A100-SXM4-80GB"),
        ("A10G", ["NVIDIA-A10G-SHARED"], ["warning"], "time-shared"),
        ("", [A100], ["failed"], "no label ray.io/accelerator-type"),
        ("T4", ["Tesla-T4"], ["warning"], "T4 is not in the catalogue"),
        ("A10G", [""], ["ok"], ""),
    ],
)
def test_a_group_s_nodes_have_the_gpu_that_its_label_says(
    label: str, products: list[str], expected: list[str], says: str
) -> None:
    nodes = [node(f"n{number}", 8, product) for number, product in enumerate(products)]
    findings = list(judge_group(group("g", 1, label), nodes, []))
    assert states(findings) == expected
    assert says in " ".join(map(str, findings))


@pytest.mark.parametrize(
    ("group_spec", "wanted"),
    [
        ({"minReplicas": 0, "maxReplicas": 4}, (0, 4)),
        ({"minReplicas": 1, "maxReplicas": 4, "replicas": 3}, (3, 4)),
        ({"minReplicas": 1, "maxReplicas": 2, "numOfHosts": 4}, (4, 8)),
    ],
)
def test_a_group_needs_at_least_its_first_replicas(group_spec: dict[str, int], wanted: tuple[int, int]) -> None:
    assert pods_wanted(group_spec) == wanted


def crd(**properties: Any) -> dict[str, Any]:
    schema = {"openAPIV3Schema": {"properties": {"spec": {"properties": properties}}}}
    return {"spec": {"versions": [{"name": "v1", "served": True, "schema": schema}]}}


def test_an_older_kuberays_crds_are_recognised_by_missing_fields() -> None:
    wanted = {"spec": ("authOptions",), "spec.workerGroupSpecs": ("labels",)}
    items = {"items": {"properties": {"labels": {}}}}
    assert lacking_fields(crd(authOptions={}, workerGroupSpecs=items), wanted) == []
    assert lacking_fields(crd(workerGroupSpecs={"items": {"properties": {}}}), wanted) == [
        "spec.authOptions",
        "spec.workerGroupSpecs.labels",
    ]
    assert lacking_fields({"spec": {"versions": [{"name": "v1alpha1"}]}}, wanted) == ["v1"]


@pytest.mark.parametrize(
    ("image", "label", "version"),
    [
        ("quay.io/kuberay/operator:v1.7.0", "", (1, 7, 0)),
        ("quay.io/kuberay/operator:v1.6.2@sha256:abc", "", (1, 6, 2)),
        ("registry:5000/operator:nightly", "1.7.0", (1, 7, 0)),
        ("registry:5000/operator:nightly", "", None),
        ("operator:v1.8.0-rc.1", "", (1, 8, 0)),
    ],
)
def test_an_operator_s_version_is_its_image_s_or_its_chart_s(image: str, label: str, version: Any) -> None:
    labels = {"app.kubernetes.io/version": label} if label else {}
    assert version_of({"labels": labels}, {"image": image}) == version


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], True),
        (["--watch-namespace=lab,other"], True),
        (["--watch-namespace", "lab"], True),
        (["--watch-namespace=other"], False),
        (["-watch-namespace", "other"], False),
        (["--watch-namespace="], True),
    ],
)
def test_an_operator_that_watches_other_namespaces_is_no_use(arguments: list[str], expected: bool) -> None:
    assert watches({"args": arguments}, "lab") is expected


DOWNLOAD = "source: {{uri: {0}/in}}\noutput: {{uri: {0}/images}}\n"
PROCESS = (
    "source: {{uri: {0}/images}}\noutput: {{uri: {0}/latents}}\nmodel: {{source: 'builtin:tiny'}}\n"
    "encode: {{accelerator: A10G}}\n"
)


def test_configurations_are_read_by_the_job_their_name_begins_with_and_others_are_left_alone() -> None:
    jobs, findings = read({"download": DOWNLOAD.format("s3://b"), "download-more": "limt: 5\n", "notes": "x: y\n"})
    assert [(job.name, job.job) for job in jobs] == [("download", "download")]
    (wrong,) = findings
    assert wrong.state == "failed"
    assert wrong.says.startswith("download-more.yaml: limt: ")


def test_placeholders_are_reported_and_are_not_a_failure() -> None:
    jobs, findings = read({"process": "output: {uri: s3://b/o}\n"})
    assert states(findings) == ["warning"]
    assert "model.source, source.uri not set" in findings[0].says
    assert jobs[0].value("model.source") is None
    assert jobs[0].value("output.uri") == "s3://b/o"


def test_an_accelerator_that_no_group_has_is_found_before_a_job_waits_for_it() -> None:
    jobs, _ = read({"process": PROCESS.format("s3://b")})
    have = raycluster(group("gpu", 1, "A100"), group("none", 1, "A10G", most=0))
    (finding,) = accelerators(jobs, have)
    assert finding.state == "failed"
    assert "process.yaml: encode.accelerator: no group of the cluster has A10G (they have A100)" in finding.says
    assert states(list(accelerators(jobs, raycluster(group("gpu", 1, "A10G"))))) == ["ok"]


TRAIN = "source: {uri: s3://b/i}\noutput: {uri: s3://b/o}\nmodel: {source: 'builtin:tiny'}\n"


def test_trainers_that_cannot_fit_the_accelerator_they_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet/config.json").write_text(json.dumps(dict(SD2.unet)))
    (tmp_path / "unet/diffusion_pytorch_model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    text = (
        TRAIN.replace("'builtin:tiny'", str(tmp_path))
        + "scaling: {accelerator: A100, num_workers: 8}\ndata: {batch_size: 128}\n"
        + "phase_2: {max_steps: 9, resolution: 512, batch_size: 128}\n"
    )
    first, second = memory(read({"train": text})[0])
    assert (first.state, second.state) == ("ok", "failed")
    assert second.check == "train memory at 512 px"
    assert "data.batch_size: expected at most 71" in second.says
    assert "got 128, which needs 130 GiB; strategy.kind: fsdp" in second.says
    assert not list(memory(read({"train": text.replace(str(tmp_path), "builtin:tiny")})[0]))
    assert not list(memory(read({"train": text.replace(str(tmp_path), "s3://nowhere/\x00")})[0]))


@pytest.mark.parametrize(
    ("groups", "scaling", "encode", "grows", "expected", "says"),
    [
        ([("A100", 8, 4)], "num_workers: 32", "", True, ["ok"], "and as many as they need"),
        (
            [("A100", 8, 1)],
            "num_workers: 32",
            "",
            True,
            ["failed"],
            "train.yaml: scaling.num_workers: 32 on A100 need 32 GPUs, and the groups grow to 8: they cannot start",
        ),
        ([("A100", 8, 1)], "num_workers: {min: 8, max: 32}", "", True, ["ok"], ""),
        ([("A100", 8, 1), ("A100", 4, 2)], "num_workers: 16", "", True, ["ok"], ""),
        ([("A100", 8, 4)], "num_workers: 32", "", False, ["failed"], "grow to 8"),  # it has one pod, and never more
        (
            [("A100", 8, 4), ("A10G", 1, 4)],
            "num_workers: 32",
            "num_workers: 8, accelerator: A10G",
            True,
            ["warning"],
            "encode.num_workers: 8 on A10G need 8 GPUs, and the groups grow to 4: fewer will run",
        ),
        (
            [("A100", 8, 4)],
            "num_workers: 32",
            "num_workers: 2, accelerator: A100",
            True,
            ["failed"],
            "encode.num_workers: 2 on A100 need 2 GPUs, and the groups grow to 0 beside the trainers",
        ),
        ([("A100", 8, 4)], "num_workers: 31", "num_workers: 2, accelerator: A100", True, ["warning"], "fewer will run"),
    ],
)
def test_workers_that_no_group_can_grow_to_are_found_before_a_job_waits_for_them(
    groups: list[tuple[str, int, int]], scaling: str, encode: str, grows: bool, expected: list[str], says: str
) -> None:
    online = f"data: {{mode: online}}\nencode: {{{encode}}}\n" if encode else ""
    jobs, wrong = read({"train": f"{TRAIN}scaling: {{accelerator: A100, {scaling}}}\n{online}"})
    assert wrong[0].state == "ok", wrong
    cluster = raycluster(
        *(group(f"g{number}", gpus, label, 1, most) for number, (label, gpus, most) in enumerate(groups))
    )
    cluster["spec"]["enableInTreeAutoscaling"] = grows
    for worker_group in cluster["spec"]["workerGroupSpecs"]:
        worker_group["replicas"] = 1
    findings = list(accelerators(jobs, cluster))
    assert states(findings) == expected
    assert says in str(findings[0])


def test_storage_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    jobs, _ = read({"download": DOWNLOAD.format(tmp_path), "process": PROCESS.format(tmp_path)})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.parquet").write_bytes(b"PAR1")
    before = sorted(tmp_path.rglob("*"))
    by_check = {finding.check: finding for finding in access(jobs, in_pod=True)}
    assert {name: finding.state for name, finding in by_check.items()} == {
        "download source.uri": "ok",
        "download output.uri": "ok",
        "process source.uri": "ok",
        "process output.uri": "ok",
        "process model.source": "ok",
    }
    assert "does not exist yet" in by_check["process source.uri"].says
    assert "from this pod" in by_check["download output.uri"].says
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file()] == [
        path for path in before if path.is_file()
    ]


def test_a_source_that_is_not_there_and_an_output_that_cannot_be_written_are_failures(tmp_path: Path) -> None:
    (tmp_path / "images").write_text("a file where a folder should be")
    jobs, _ = read({"download": DOWNLOAD.format(tmp_path)})
    by_check = {finding.check: finding for finding in access(jobs, in_pod=True)}
    assert by_check["download source.uri"].state == "failed"
    assert by_check["download output.uri"].state == "failed"
    assert str(tmp_path / "images") in by_check["download output.uri"].says


def model_states(drafts: list[Any], *, in_pod: bool) -> list[str]:
    return states([finding for finding in access(drafts, in_pod=in_pod) if finding.check.endswith("model.source")])


def test_a_model_that_is_missing_is_a_failure_and_a_folder_of_one_s_own_a_warning(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").touch()
    config = f"source: {{uri: {tmp_path}/in}}\noutput: {{uri: {tmp_path}/out}}\nmodel: {{source: "
    jobs, _ = read({"process": f"{config}'builtin:tiny'}}\n", "process-other": f"{config}{tmp_path / 'none'}}}\n"})
    assert model_states(jobs, in_pod=False) == ["ok", "warning"]
    assert model_states(jobs, in_pod=True) == ["ok", "failed"]


def test_in_a_pod_the_mounted_configurations_are_checked(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("limit: 5\n")
    assert mounted_texts(tmp_path) == {"train": "limit: 5\n"}
    assert mounted_texts(tmp_path / "none") == {}


def test_malformed_manifests_are_refused() -> None:
    with pytest.raises(UserError, match="--manifest: x: expected YAML"):
        read_manifests("{", "x")
    with pytest.raises(UserError, match="--manifest: x: expected Kubernetes objects"):
        read_manifests("- a\n", "x")
    assert read_manifests("---\nkind: A\n---\n", "x") == [{"kind": "A"}]
