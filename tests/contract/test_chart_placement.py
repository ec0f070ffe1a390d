"""The placement of charts/sdp-cluster's pods: queues, budgets, one zone, and the clouds' values files."""

import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.sdp_cluster import CHART, Manifest, helm_template, one, parsed, pods

NEEDS_HELM = pytest.mark.needs("helm")
Render = Callable[..., list[Manifest]]
KUEUE, ELASTIC = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/elastic-job"
VOLCANO, OF_POD = "volcano.sh/queue-name", "scheduling.volcano.sh/queue-name"
KAI = "kai.scheduler/queue"
STATIC = ("autoscaling.enabled=false", "groups.cpu.replicas=1", "groups.a10g.replicas=8", "groups.a100.replicas=4")


@pytest.fixture
def render(tool: Callable[[str], Path]) -> Render:
    def run(example: str, *settings: str) -> list[Manifest]:
        done = helm_template(tool("helm"), example, *settings)
        assert done.returncode == 0, done.stderr
        return parsed(done.stdout)

    return run


def marks(cluster: Manifest) -> tuple[dict[str, str], set[Any]]:
    """Return the RayCluster's queue labels and annotations, and the schedulers of its pods."""
    metadata = cluster["metadata"]
    both = {**metadata["labels"], **metadata.get("annotations", {})}
    labels = {name: value for name, value in both.items() if name in (KUEUE, ELASTIC, VOLCANO, KAI)}
    return labels, {template["spec"].get("schedulerName") for template in pods(cluster).values()}


@NEEDS_HELM
@pytest.mark.parametrize(
    ("settings", "labels", "scheduler"),
    [
        ((), {}, None),
        (("queue.manager=kueue", "queue.name=gpus"), {KUEUE: "gpus", ELASTIC: "true"}, None),
        (("queue.manager=kueue", "queue.name=gpus", *STATIC), {KUEUE: "gpus"}, None),
        (("queue.manager=volcano", "queue.name=gpus"), {VOLCANO: "gpus"}, "volcano"),
        (("queue.manager=kai", "queue.name=gpus"), {KAI: "gpus"}, "kai-scheduler"),
    ],
)
def test_each_manager_of_queues_finds_its_own_label_and_no_other(
    render: Render, settings: tuple[str, ...], labels: dict[str, str], scheduler: str | None
) -> None:
    """As Kueue's and KAI's pages and KubeRay 1.7's volcano_scheduler.go name them."""
    cluster = one(render("minimal", *settings), "RayCluster")
    assert marks(cluster) == (labels, {scheduler})
    for template in pods(cluster).values():
        expected = "gpus" if scheduler == "volcano" else None
        assert template["metadata"]["annotations"].get(OF_POD) == expected, "Volcano reads a pod's annotation"


@NEEDS_HELM
def test_labels_of_one_s_own_stay_beside_the_queue_s(render: Render) -> None:
    cluster = one(render("minimal", "queue.manager=kai", "queue.name=gpus", "labels.team=vision"), "RayCluster")
    assert cluster["metadata"]["labels"].items() >= {"team": "vision", KAI: "gpus"}.items()


@NEEDS_HELM
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("queue.manager=kueue",), "queue.name: required with queue.manager kueue"),
        (("queue.name=gpus",), "queue.manager: required with queue.name (gpus)"),
        (("queue.manager=slurm", "queue.name=gpus"), "/queue/manager"),
        (("groups.a100.minAvailable=-1",), "/groups/a100/minAvailable"),
    ],
)
def test_a_queue_or_budget_that_cannot_work_is_refused(
    tool: Callable[[str], Path], settings: tuple[str, ...], says: str
) -> None:
    done = helm_template(tool("helm"), "minimal", *settings)
    assert done.returncode != 0, "rendered all the same"
    assert says in done.stderr


def budgets(manifests: list[Manifest]) -> dict[str, Any]:
    return {
        manifest["metadata"]["name"]: manifest["spec"]["minAvailable"]
        for manifest in manifests
        if manifest["kind"] == "PodDisruptionBudget"
    }


@NEEDS_HELM
def test_a_group_has_a_budget_only_where_it_is_asked_for(render: Render) -> None:
    """By default none: trainers survive an eviction, and a budget for all of a group's pods blocks every drain."""
    assert budgets(render("minimal")) == {"sdp-head": 1}
    assert budgets(render("minimal", "groups.a100.minAvailable=3")) == {"sdp-head": 1, "sdp-a100": 3}
    assert budgets(render("minimal", "podDisruptionBudget=false", "groupDefaults.minAvailable=1")) == {
        "sdp-cpu": 1,
        "sdp-a10g": 1,
        "sdp-a100": 1,
    }


@NEEDS_HELM
def test_pods_of_a_group_share_a_label_of_their_nodes_where_they_should(render: Render) -> None:
    zone = "topology.kubernetes.io/zone"

    def required(*settings: str) -> dict[str, list[Any]]:
        return {
            name: template["spec"]
            .get("affinity", {})
            .get("podAffinity", {})
            .get("requiredDuringSchedulingIgnoredDuringExecution", [])
            for name, template in pods(one(render("minimal", *settings), "RayCluster")).items()
        }

    assert not any(required().values())
    term = {
        "topologyKey": zone,
        "labelSelector": {"matchLabels": {"ray.io/cluster": "sdp", "sdp/group": "a100"}},
    }
    assert required(f"groups.a100.colocateBy={zone}") == {"head": [], "cpu": [], "a10g": [], "a100": [term]}
    own = "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey=rack"
    both = required(f"groups.a100.colocateBy={zone}", f"groups.a100.{own}")["a100"]
    assert [term["topologyKey"] for term in both] == ["rack", zone]


@NEEDS_HELM
def test_a_group_in_one_zone_still_chooses_its_nodes_by_their_gpus(render: Render) -> None:
    settings = ("groups.a100.colocateBy=zone", "groups.cpu.colocateBy=zone")
    templates = pods(one(render("minimal", *settings, "groups.a100.nodeSelector=null"), "RayCluster"))
    for group, operator in (("a100", "In"), ("cpu", "DoesNotExist")):
        affinity = templates[group]["spec"]["affinity"]
        (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert term["matchExpressions"][0]["operator"] == operator
        assert "podAffinity" in affinity


@NEEDS_HELM
@pytest.mark.parametrize(
    ("cloud", "encoders", "nodes"),
    [
        ("gke", "L4", {"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"}),
        ("aks", "A100-80G", {"node.kubernetes.io/instance-type": "Standard_ND96amsr_A100_v4"}),
        ("openshift", "A10G", {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}),
    ],
)
def test_on_each_cloud_encoders_and_trainers_find_their_nodes(
    render: Render, cloud: str, encoders: str, nodes: dict[str, str]
) -> None:
    manifests = render(cloud)
    cluster = one(manifests, "RayCluster")
    jobs = {name: yaml.safe_load(text) for name, text in one(manifests, "ConfigMap")["data"].items()}
    assert jobs["process.yaml"]["encode"]["accelerator"] == encoders
    assert jobs["train.yaml"]["scaling"]["accelerator"] == "A100"
    assert jobs["train.yaml"]["scaling"]["num_workers"]["max"] == 32, "encoders take none of the trainers' GPUs"
    assert pods(cluster)["a100"]["spec"]["nodeSelector"] == nodes
    labels = {group["labels"].get("ray.io/accelerator-type") for group in cluster["spec"]["workerGroupSpecs"]}
    assert labels == {None, "A100", encoders}


@NEEDS_HELM
@pytest.mark.parametrize(
    ("cloud", "ports"),
    [("gke", {988, 80}), ("openshift", {5353}), ("aks", set()), ("minimal", set())],
)
def test_downloads_reach_what_their_cloud_needs_beside_the_internet(
    render: Render, cloud: str, ports: set[int]
) -> None:
    """GKE's metadata server for credentials, and OpenShift's DNS, whose pods have another port than its service."""
    policies = {
        manifest["metadata"]["name"]: manifest for manifest in render(cloud) if manifest["kind"] == "NetworkPolicy"
    }
    rules = policies["sdp-downloads"]["spec"]["egress"]
    assert {port["port"] for rule in rules for port in rule.get("ports", [])} == ports | {53}


def helm_test_pod(manifests: list[Manifest]) -> Manifest:
    (pod,) = [manifest for manifest in manifests if manifest["kind"] == "Pod"]
    assert pod["metadata"]["annotations"] == {
        "helm.sh/hook": "test",
        "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded",
    }
    return pod


@NEEDS_HELM
def test_helm_test_asks_the_head_with_the_token_and_no_right_at_kubernetes(render: Render) -> None:
    manifests = render("minimal", "groups.cpu.minReplicas=2", "groups.a10g.replicas=3")
    pod = helm_test_pod(manifests)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec, "it needs no role at the storage"
    assert container["command"] == ["python", "-c", (CHART / "files" / "helm_test.py").read_text()]
    assert container["args"] == ["http://sdp-head-svc:8265", "2.60.0", "3"], "the head and the groups' minReplicas"
    (variable,) = container["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "sdp", "key": "auth_token"}
    labels = pod["metadata"]["labels"]
    assert "ray.io/cluster" not in labels, "or KubeRay would count it, and policies for Ray's pods let it out"
    policy = next(
        manifest
        for manifest in manifests
        if manifest["kind"] == "NetworkPolicy" and manifest["metadata"]["name"] == "sdp"
    )
    admitted = [
        rule["ports"]
        for rule in policy["spec"]["ingress"]
        for peer in rule["from"]
        if peer.get("podSelector", {}).get("matchLabels", {"": ""}).items() <= labels.items()
        and "namespaceSelector" not in peer
    ]
    assert admitted == [[{"port": 8265, "protocol": "TCP"}]]


@NEEDS_HELM
def test_helm_test_has_no_token_where_none_is_asked_for_and_one_s_own_secret_where_there_is_one(
    render: Render,
) -> None:
    def env(*settings: str) -> Any:
        return helm_test_pod(render("minimal", *settings))["spec"]["containers"][0].get("env")

    assert env("auth.mode=disabled") is None
    assert env("auth.secretName=mine")[0]["valueFrom"]["secretKeyRef"]["name"] == "mine"


@NEEDS_HELM
def test_helm_test_counts_fixed_pods_without_the_autoscaler(render: Render) -> None:
    pod = helm_test_pod(render("minimal", *STATIC))
    assert pod["spec"]["containers"][0]["args"][2] == "14"


def test_the_charts_say_who_makes_them_and_what_a_release_publishes() -> None:
    for chart, image in (("sdp-cluster", "ray"), ("sdp-monitoring", "exporter")):
        about = yaml.safe_load((CHART.parent / chart / "Chart.yaml").read_text())
        assert about.keys() >= {"home", "icon", "keywords", "sources", "maintainers"}
        notes = about["annotations"]
        assert notes["artifacthub.io/license"] == "Apache-2.0"
        (published,) = yaml.safe_load(notes["artifacthub.io/images"])
        assert published["image"] == f"ghcr.io/sdp/sdp/{image}:{about['appVersion']}"
        changes = yaml.safe_load(notes["artifacthub.io/changes"])
        assert {change["kind"] for change in changes} <= {
            "added",
            "changed",
            "deprecated",
            "removed",
            "fixed",
            "security",
        }
        assert about["version"] == about["appVersion"]
        root = "https://raw.githubusercontent.com/sdp/sdp/main/"
        assert (CHART.parents[1] / about["icon"].removeprefix(root)).is_file()


@NEEDS_HELM
def test_a_package_holds_the_chart_without_what_only_its_tests_need(
    tool: Callable[[str], Path], tmp_path: Path
) -> None:
    for chart in ("sdp-cluster", "sdp-monitoring"):
        command = [str(tool("helm")), "package", str(CHART.parent / chart), "-d", str(tmp_path)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        (package,) = tmp_path.glob(f"{chart}-*.tgz")
        with tarfile.open(package) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {"Chart.yaml", "values.schema.json", "README.md"} <= names
        assert not any(name.startswith("ci/") for name in names)


@NEEDS_HELM
def test_what_chart_testing_lints_with_renders(tool: Callable[[str], Path]) -> None:
    for chart in ("sdp-cluster", "sdp-monitoring"):
        (values,) = (CHART.parent / chart / "ci").glob("*-values.yaml")  # the name that chart-testing looks for
        command = [str(tool("helm")), "lint", "--strict", str(CHART.parent / chart), "-f", str(values)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout
