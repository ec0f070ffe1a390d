"""The doctor's judgements, on objects as Kubernetes has them."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sdp.errors import UserError
from sdp.hardware import CUDA_MAJOR
from sdp.kube.check_cluster import judge, judge_drivers, judge_products, judge_state, named_by
from sdp.kube.check_jobs import accelerators, access, memory, read
from sdp.kube.check_network import dns_of_groups, dns_of_this_machine
from sdp.kube.check_server import judge_clock, lacking_fields, version_of, watches
from sdp.kube.clusters import pods_wanted
from sdp.kube.placing import place
from sdp.kube.site import Finding, failed, mounted_texts, read_manifests, warning
from sdp.kube.state import cluster_state
from sdp.model.family import SD2
from tests.kube_server import group, node, raycluster

A100 = "NVIDIA-A100-SXM4-80GB"


def states(findings: list[Finding]) -> list[str]:
    return [finding.state for finding in findings]


@pytest.mark.parametrize(
    ("nodes", "wanted", "makers", "state", "says"),
    [
        ([node("a", 8, A100)], (1, 1), [], "ok", "1 node with room for 1 pod, up to 1 wanted"),
        ([node("a", 8, A100)], (0, 4), [], "warning", "room for 1 pod, up to 4 wanted"),
        ([node("a", 8, A100)], (2, 4), [], "failed", "room for 1 pod, at least 2 wanted"),
        ([node("a", 8, A100)], (2, 4), ["Karpenter"], "ok", "Karpenter adds more"),
        (
            [node("a", 4, A100)],
            (0, 4),
            [],
            "failed",
            "no node can take its pods: 1 node: has 4 of nvidia.com/gpu",
        ),
        ([node("a", 4, A100)], (0, 4), ["Karpenter"], "warning", "no node fits now (1 node: has 4 of nvidia.com/gpu"),
        ([], (0, 4), [], "failed", "there are no nodes"),
        ([], (0, 0), [], "ok", "needs no pods"),
    ],
)
def test_a_group_fails_when_its_pods_would_never_run(
    nodes: list[Any], wanted: tuple[int, int], makers: list[str], state: str, says: str
) -> None:
    spec = group("a100", 8, "A100")["template"]["spec"]
    verdict = judge("a100", wanted, place(spec, nodes), makers)
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
        ("A100", [A100], [], ""),
        ("A100", ["NVIDIA-A100-SXM4-40GB", A100], [], ""),
        ("A100-80G", ["NVIDIA-A100-SXM4-40GB"], ["failed"], "its pods run on NVIDIA-A100-SXM4-40GB"),
        ("A10G", [A100], ["failed"], "is labelled A10G (NVIDIA-A10G), but its pods run on NVIDIA-A100-SXM4-80GB"),
        ("A10G", ["NVIDIA-A10G-SHARED"], ["warning"], "time-shared"),
        ("", [A100], ["failed"], "no label ray.io/accelerator-type"),
        ("T4", ["Tesla-T4"], ["warning"], "T4 is not in the catalogue"),
        ("A10G", [""], [], ""),
    ],
)
def test_a_group_s_nodes_have_the_gpu_that_its_label_says(
    label: str, products: list[str], expected: list[str], says: str
) -> None:
    spec = group("g", 1, label)["template"]["spec"]
    nodes = [node(f"n{number}", 8, product) for number, product in enumerate(products)]
    findings = list(judge_products("g", label, spec, nodes))
    assert states(findings) == expected
    assert says in " ".join(map(str, findings))


@pytest.mark.parametrize("label", ["nvidia.com/cuda.driver-version.major", "nvidia.com/cuda.driver.major"])
def test_a_driver_that_is_too_old_for_the_image_is_found_by_its_node(label: str) -> None:
    def with_driver(name: str, version: str) -> dict[str, Any]:
        return {**node(name), "metadata": {"name": name, "labels": {label: version}}}

    old = judge_drivers([with_driver("a", "570"), with_driver("b", "580"), node("c")])
    assert old.state == "failed"
    assert old.says == "the image's CUDA 13 needs driver 580 or later; a has 570"
    new = judge_drivers([with_driver("b", "580"), node("c")])
    assert new.state == "ok"
    assert new.says.endswith("; 1 of 2 GPU nodes report 580")


def test_for_nodes_that_do_not_report_their_driver_the_needed_version_is_named() -> None:
    silent = judge_drivers([node("a")])
    assert silent.state == "ok"
    assert "needs driver 580 or later; no node reports its driver" in silent.says


def test_the_driver_s_table_knows_the_cuda_of_the_pinned_torch() -> None:
    import torch

    assert torch.version.cuda
    assert int(torch.version.cuda.partition(".")[0]) == CUDA_MAJOR


def test_a_group_without_gpus_needs_no_label() -> None:
    assert list(judge_products("cpu", "", group("cpu")["template"]["spec"], [node("a")])) == []


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


def test_a_pods_prerequisites_are_found_in_every_field() -> None:
    pod = {
        "serviceAccountName": "sdp",
        "imagePullSecrets": [{"name": "pull"}],
        "volumes": [
            {"name": "a", "secret": {"secretName": "certificates"}},
            {"name": "b", "configMap": {"name": "jobs"}},
            {"name": "c", "configMap": {"name": "maybe", "optional": True}},
            {"name": "d", "emptyDir": {}},
        ],
        "initContainers": [{"envFrom": [{"configMapRef": {"name": "first"}}]}],
        "containers": [
            {
                "envFrom": [{"secretRef": {"name": "keys"}}, {"secretRef": {"name": "perhaps", "optional": True}}],
                "env": [
                    {"name": "A", "value": "1"},
                    {"name": "B", "valueFrom": {"secretKeyRef": {"name": "one", "key": "k"}}},
                    {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
            }
        ],
    }
    assert sorted(named_by(pod)) == [
        ("ConfigMap", "first"),
        ("ConfigMap", "jobs"),
        ("Secret", "certificates"),
        ("Secret", "keys"),
        ("Secret", "one"),
        ("Secret", "pull"),
        ("ServiceAccount", "sdp"),
    ]


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


def test_a_clock_is_compared_with_the_server_s_date() -> None:
    date = "Fri, 21 Nov 2025 04:40:00 GMT"  # 1,763,700,000 s
    assert judge_clock(1_763_700_002.5, date).state == "ok"
    assert str(judge_clock(1_763_700_010.5, date)) == (
        "warning clock: this machine's is 10 s ahead of the API server's; synchronise it by NTP"
    )
    assert judge_clock(1_763_699_000.5, date).says == "this machine's is 1000 s behind the API server's"
    assert judge_clock(1_763_700_010.5, None).says == judge_clock(0, "noon").says == "the API server sent no Date"


# --- jobs ------------------------------------------------------------------------------------------------------------

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
    assert "data.batch_size: expected at most 5" in second.says
    assert "got 128, which needs 166 GiB; strategy.kind: fsdp" in second.says
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
            [("A100", 8, 4), ("A10G", 1, 4)],
            "num_workers: 32",
            "num_workers: 8, accelerator: A10G, gpus_per_worker: 0.5",
            True,
            ["ok"],
            "",
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


@pytest.mark.parametrize(
    ("text", "names", "state", "says"),
    [
        ("nameserver 127.0.0.1\n", ["localhost"], "ok", "1 names resolved"),
        ("search a.local b.local\noptions ndots:1\n", ["localhost"], "ok", "ndots:1, 2 search domains"),
        ("search a b c\noptions timeout:1 ndots:5\n", ["localhost"], "warning", "up to 4 lookups (ndots:5"),
        ("options ndots:5\n", ["localhost"], "ok", "ndots:5, 0 search domains"),
        ("", ["localhost", "no.invalid"], "warning", "no address for no.invalid within 5 s"),
    ],
)
def test_a_resolver_that_does_not_answer_or_asks_several_times_is_one_line(
    tmp_path: Path, text: str, names: list[str], state: str, says: str
) -> None:
    (tmp_path / "resolv.conf").write_text(text)
    (finding,) = dns_of_this_machine(tmp_path / "resolv.conf", names)
    assert (finding.state, says in finding.says) == (state, True), finding
    assert bool(finding.do) == (state == "warning")


def test_groups_that_download_are_to_look_names_up_as_they_are() -> None:
    once, thrice, with_gpus = group("cpu"), group("slow"), group("a100", gpus=8)
    once["template"]["spec"]["dnsConfig"] = {"options": [{"name": "ndots", "value": "1"}]}
    cluster = raycluster(once, thrice, with_gpus)
    download, _ = read({"download": "source: {uri: s3://a/b}\noutput: {uri: s3://a/c}\n"})
    generate, _ = read({"generate": "prompts: [a lake]\ncheckpoint: run\n"})
    assert [finding.says for finding in dns_of_groups(download, cluster)] == [
        "group slow makes up to 5 lookups per host (ndots:5)"
    ]
    assert list(dns_of_groups(generate, cluster)) == []
