"""The chart: the objects and pods that it renders, by the real helm."""

import ipaddress
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdp.kube.clusters import jobs_map
from sdp.kube.mounted import READER
from tests.contract.sdp_cluster import (
    CHART,
    MANIFESTS,
    OWN_CLUSTER,
    RENDERED,
    VALUES,
    Manifest,
    Render,
    manifest_of,
    one,
    own_cluster,
    parsed,
    pods,
    rendered,
)
from tests.programs import ended

pytestmark = pytest.mark.needs("helm")
STATIC = ("autoscaling.enabled=false", "groups.cpu.replicas=1", "groups.a10g.replicas=8", "groups.a100.replicas=4")
"""A cluster that does not grow, with what the chart's jobs ask for."""
KUEUE, ELASTIC = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/elastic-job"
VOLCANO, OF_POD = "volcano.sh/queue-name", "scheduling.volcano.sh/queue-name"
KAI = "kai.scheduler/queue"
AUTOSCALER = ("autoscaler-tmp", "autoscaler-home")
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.fixture
def pod_specs(render: Render) -> Callable[..., dict[str, Manifest]]:
    """Return each group's pod spec."""

    def run(example: str, *settings: str) -> dict[str, Manifest]:
        return {name: pod["spec"] for name, pod in pods(one(render(example, *settings), "RayCluster")).items()}

    return run


def environment(spec: Manifest) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in spec["containers"][0]["env"]}


@pytest.mark.parametrize("example", RENDERED)
def test_the_chart_renders_what_is_committed(tool: Callable[[str], Path], example: str) -> None:
    committed = RENDERED[example].read_text()
    assert rendered(tool("helm"), example) == committed, "python -m tests.contract.sdp_cluster writes it"


def test_an_umbrella_chart_renders_both_charts(tool: Callable[[str], Path], tmp_path: Path) -> None:
    """Helm has one table of named templates for all charts of a release."""
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: umbrella, version: 1.0.0}\n")
    for chart in ("sdp-cluster", "sdp-monitoring"):
        shutil.copytree(CHART.parent / chart, tmp_path / "charts" / chart)
    exporter = {"exporter": {"image": {"repository": "registry.example.com/sdp/exporter"}}}
    values = {"sdp-cluster": yaml.safe_load(VALUES["minimal"].read_text()), "sdp-monitoring": exporter}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    done = ended([tool("helm"), "template", "umbrella", tmp_path])
    assert done.returncode == 0, done.stderr
    assert {"RayCluster", "DaemonSet", "PrometheusRule"} <= {manifest["kind"] for manifest in parsed(done.stdout)}


VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def beyond_restricted(pod: dict[str, Any], containers: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the Pod Security Standard `restricted` refuses in a pod."""
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    yield from (volume["name"] for volume in pod["volumes"] if not volume.keys() & VOLUMES)
    for container in containers:
        of = pod["securityContext"] | container["securityContext"]
        capabilities = {"drop": [], "add": [], **of.get("capabilities", {})}
        checks = {
            "allowPrivilegeEscalation": of.get("allowPrivilegeEscalation") is False,
            "privileged": not of.get("privileged"),
            "runAsNonRoot": of.get("runAsNonRoot") is True and of.get("runAsUser", 1) != 0,
            "seccompProfile": of.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "capabilities": "ALL" in capabilities["drop"] and set(capabilities["add"]) <= {"NET_BIND_SERVICE"},
            "hostPort": not any("hostPort" in port for port in container.get("ports", [])),
        }
        yield from (f"{container.get('name', 'autoscaler')}.{check}" for check, passed in checks.items() if not passed)


@pytest.mark.parametrize("example", list(VALUES))
def test_every_pod_passes_the_standard_restricted(render: Render, example: str) -> None:
    manifests = render(example)
    cluster = one(manifests, "RayCluster")
    for name, template in pods(cluster).items():
        containers = template["spec"]["containers"][:1]  # Ray's; the others are the user's
        if name == "head" and "autoscalerOptions" in cluster["spec"]:
            containers.append(cluster["spec"]["autoscalerOptions"])
        assert list(beyond_restricted(template["spec"], containers)) == [], name


def test_groups_are_a_map_to_add_to_and_to_take_from(render: Render) -> None:
    cluster = one(render("minimal", "groups.cpu=null", "groups.l4.gpus=1", "groups.l4.accelerator=L4"), "RayCluster")
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    assert groups.keys() == {"a10g", "a100", "l4"}
    spec = groups["l4"]["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_a_pod_has_the_fields_of_podspec_and_container_in_addition_to_the_chart_s(
    pod_specs: Callable[..., dict[str, Manifest]],
) -> None:
    """Lists are appended, maps merged, other values replaced, and null removes a value."""
    usual = pod_specs("minimal")["a100"]
    pod = (
        "priorityClassName=high", "shareProcessNamespace=false", "affinity=null",
        "tolerations[0].key=spot", "volumes[0].name=data", "containers[0].name=proxy",
        "securityContext.supplementalGroups[0]=7",
    )  # fmt: skip
    container = ("volumeMounts[0].name=data", "securityContext.readOnlyRootFilesystem=false",
                 "securityContext.capabilities.add[0]=IPC_LOCK", "resources.limits.rdma/hca=1")  # fmt: skip
    settings = [f"groups.a100.podSpec.{field}" for field in pod] + [f"groups.a100.container.{c}" for c in container]
    specs = pod_specs("minimal", *settings)
    spec, (ray, proxy) = specs["a100"], specs["a100"]["containers"]
    assert (spec["priorityClassName"], spec["shareProcessNamespace"], spec["affinity"]) == ("high", False, None)
    assert spec["tolerations"] == [*usual["tolerations"], {"key": "spot"}]
    assert spec["volumes"] == [*usual["volumes"], {"name": "data"}]
    assert spec["securityContext"] == usual["securityContext"] | {"supplementalGroups": [7]}
    assert proxy == {"name": "proxy"}
    assert ray["volumeMounts"][-1] == {"name": "data"}
    assert ray["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
    }
    assert ray["resources"]["limits"] == usual["containers"][0]["resources"]["limits"] | {"rdma/hca": 1}
    assert specs["a10g"] == pod_specs("minimal")["a10g"]


def test_no_variable_is_set_twice_and_the_most_specific_value_wins(
    pod_specs: Callable[..., dict[str, Manifest]],
) -> None:
    """The API server takes no RayCluster with one name twice in a list."""
    everywhere = ("env.X=all", "env.NCCL_BUFFSIZE=8388608", "env.HOME=/data", "env.Y=all")
    own = ("groups.a100.env.X=own", "groups.a100.env.Y=", "groups.a100.env.NCCL_DEBUG=INFO")
    for name, spec in pod_specs("efa", *everywhere, *own).items():
        variables = environment(spec)
        assert len(spec["containers"][0]["env"]) == len(variables), name
        expected = {"X": "own", "Y": "", "NCCL_DEBUG": "INFO"} if name == "a100" else {"X": "all", "Y": "all"}
        assert variables.items() >= {**expected, "NCCL_BUFFSIZE": "8388608", "HOME": "/data"}.items()


def test_the_notes_say_what_is_not_set_and_how_to_start_the_first_job(
    tool: Callable[[str], Path], tmp_path: Path
) -> None:
    command = [tool("helm"), "install", "blue", CHART, "-f", VALUES["minimal"], "-n", "team", "--dry-run=client"]
    done = ended(command, check=True, env={**os.environ, "KUBECONFIG": str(tmp_path / "none")})
    assert "\n  sdp submit download --namespace team --cluster blue\n" in done.stdout
    assert "jobs.download.source.uri is not set" in done.stdout
    assert "model is not set" in done.stdout
    assert "Running pods" not in done.stdout, "for upgrades alone"


def test_trainers_share_the_cpus_of_their_pod_to_compile(pod_specs: Callable[..., dict[str, Manifest]]) -> None:
    for cpu, threads in (("92", "11"), ("7500m", "1"), ("16.5", "2")):
        variables = environment(pod_specs("minimal", f"groups.a100.cpu={cpu}")["a100"])
        assert variables["TORCHINDUCTOR_COMPILE_THREADS"] == threads


def test_the_charts_own_labels_and_annotations_win(render: Render) -> None:
    """Pods are selected, and jobs placed, by them."""
    labels = ("groups.a10g.labels.ray\\.io/accelerator-type=T4", "labels.app\\.kubernetes\\.io/name=x")
    mine = ("podLabels.sdp/group=x", *labels)
    cluster, usual = (one(render("minimal", *settings), "RayCluster") for settings in (mine, ()))
    assert cluster["metadata"] == usual["metadata"]
    own, expected = ([group["labels"] for group in each["spec"]["workerGroupSpecs"]] for each in (cluster, usual))
    assert own == expected
    assert pods(cluster)["a10g"]["metadata"]["labels"]["sdp/group"] == "a10g"


def test_nothing_is_rendered_that_was_not_asked_for(render: Render) -> None:
    off = ("networkPolicy.enabled=false", "podDisruptionBudget=false", "serviceAccount.create=false")
    manifests = render("minimal", *off, "serviceAccount.reader=false", *STATIC)
    assert sorted(manifest["kind"] for manifest in manifests) == ["ConfigMap", "RayCluster"]
    cluster = one(manifests, "RayCluster")
    assert "autoscalerOptions" not in cluster["spec"]
    assert not any("projected" in volume for volume in pods(cluster)["head"]["spec"]["volumes"])


def test_jobs_in_the_head_read_their_configurations_and_nothing_else(render: Render) -> None:
    manifests = render("full")
    secret, role, cluster = (one(manifests, kind) for kind in ("Secret", "Role", "RayCluster"))
    name = jobs_map(cluster)
    assert secret["stringData"] == {"jobs": name}
    assert secret["type"] == "kubernetes.io/service-account-token"
    assert secret["metadata"]["annotations"] == {"kubernetes.io/service-account.name": role["metadata"]["name"]}
    own = {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get"]}
    assert role["rules"] == [own]
    for group, template in pods(cluster).items():
        container = template["spec"]["containers"][0]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "reader"]
        assert mounts == ([str(READER)] if group == "head" else [])


def test_the_autoscaler_alone_has_an_account_s_token(render: Render) -> None:
    cluster = one(render("minimal"), "RayCluster")
    head, autoscaler = pods(cluster)["head"]["spec"], cluster["spec"]["autoscalerOptions"]
    (token,) = (volume for volume in head["volumes"] if "projected" in volume)
    account = {"name": token["name"], "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}
    assert account in autoscaler["volumeMounts"]
    assert head["shareProcessNamespace"] is True
    users = {spec["securityContext"]["runAsUser"] for spec in (autoscaler, head)}
    assert len(users) == 2, "or /proc/PID/root has it"
    (ray,) = head["containers"]
    shared = {mount["name"] for mount in autoscaler["volumeMounts"]} & {mount["name"] for mount in ray["volumeMounts"]}
    assert shared == set(), "what a job leaves in a home is run by the next Python of that home"
    for template in pods(cluster).values():
        (container,) = template["spec"]["containers"]
        assert not any(mount["name"] == token["name"] for mount in container["volumeMounts"])


def test_gpus_may_be_parts_of_gpus(pod_specs: Callable[..., dict[str, Manifest]]) -> None:
    mig = ("groups.a100.gpuResource=nvidia.com/mig-3g.20gb", "jobs.train.scaling.num_workers=1")
    limits = pod_specs("minimal", *mig)["a100"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/mig-3g.20gb"] == 8
    assert "nvidia.com/gpu" not in limits


def policies(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"}


def test_downloads_reach_no_private_network(render: Render) -> None:
    """Judged by Python's own list of what is private."""

    def egress(*settings: str) -> list[Any]:
        rules: list[Any] = policies(render("minimal", *settings))["sdp-downloads"]["egress"]
        return rules

    spec = policies(render("minimal"))["sdp-downloads"]
    assert spec["podSelector"]["matchExpressions"] == [{"key": "sdp/group", "operator": "In", "values": ["cpu"]}]
    inside, dns, outside = spec["egress"]
    assert inside == {"to": [{"podSelector": {"matchLabels": {"ray.io/cluster": "sdp"}}}]}
    assert {port["port"] for port in dns["ports"]} == {53}
    blocks = [block["ipBlock"] for block in outside["to"]]
    assert [block["cidr"] for block in blocks] == ["0.0.0.0/0", "::/0"]
    refused = [ipaddress.ip_network(network) for block in blocks for network in block["except"]]

    def reached(address: str) -> bool:
        return not any(ipaddress.ip_address(address) in network for network in refused)

    private = ["169.254.169.254", "169.254.170.23", "10.100.0.1", "172.20.0.10", "192.168.1.1", "100.64.0.1",
               "168.63.129.16", "fd00:ec2::254", "fe80::1", "64:ff9b:1::a9fe:a9fe"]  # fmt: skip
    assert [address for address in private if reached(address)] == []
    assert reached("93.184.215.14")
    assert reached("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
    assert "sdp-downloads" not in policies(render("minimal", "networkPolicy.downloads.enabled=false"))
    own = egress("jobs.download.fetch.allow_networks={10.1.0.0/16}")
    assert own[2]["to"][2:] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    for endpoint, namespace in {"http://storage:7070": "default", "http://minio.data.svc:9000": "data"}.items():
        (storage,) = egress(f"storage.endpoint={endpoint}")[2]["to"]
        assert storage == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    assert egress("storage.endpoint=https://storage.example.com") == spec["egress"]
    further = egress("networkPolicy.downloads.egress[0].to[0].ipBlock.cidr=10.1.2.3/32")
    assert further[2] == {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}]}


@pytest.mark.parametrize(("cloud", "ports"), [("gke", {988, 80}), ("openshift", {5353}), ("aks", set())])
def test_downloads_reach_what_their_cloud_needs_beside_the_internet(
    render: Render, cloud: str, ports: set[int]
) -> None:
    """GKE's metadata server for credentials, and OpenShift's DNS, whose pods have another port than its service."""
    rules = policies(render(cloud))["sdp-downloads"]["egress"]
    assert {port["port"] for rule in rules for port in rule.get("ports", [])} == ports | {53}


@pytest.mark.parametrize(
    ("settings", "expected", "scheduler"),
    [
        ((), {}, None),
        (("queue.manager=kueue", "queue.name=gpus"), {KUEUE: "gpus", ELASTIC: "true"}, None),
        (("queue.manager=kueue", "queue.name=gpus", *STATIC), {KUEUE: "gpus"}, None),
        (("queue.manager=volcano", "queue.name=gpus"), {VOLCANO: "gpus"}, "volcano"),
        (("queue.manager=kai", "queue.name=gpus"), {KAI: "gpus"}, "kai-scheduler"),
    ],
)
def test_each_manager_of_queues_finds_its_own_label_and_no_other(
    render: Render, settings: tuple[str, ...], expected: dict[str, str], scheduler: str | None
) -> None:
    """As Kueue's and KAI's pages and KubeRay 1.7's volcano_scheduler.go name them."""
    cluster = one(render("minimal", "labels.team=vision", *settings), "RayCluster")
    marks = {**cluster["metadata"]["labels"], **cluster["metadata"].get("annotations", {})}
    assert {name: value for name, value in marks.items() if name in (KUEUE, ELASTIC, VOLCANO, KAI)} == expected
    assert marks["team"] == "vision"
    for template in pods(cluster).values():
        assert template["spec"].get("schedulerName") == scheduler
        queue = "gpus" if scheduler == "volcano" else None
        assert template["metadata"].get("annotations", {}).get(OF_POD) == queue, "Volcano reads a pod's annotation"


PRODUCT = "nvidia.com/gpu.product"
H100 = {"key": PRODUCT, "operator": "In", "values": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"]}
WITHOUT_GPU = {"key": PRODUCT, "operator": "DoesNotExist"}
OWN_NODES = f"affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0].key=mine"


@pytest.mark.parametrize(
    ("example", "group", "setting", "expression"),
    [
        ("h100", "h100", "", H100),
        ("h100", "h100", "nodeSelector.karpenter\\.sh/capacity-type=spot", H100),
        ("h100", "h100", "nodeSelector.node\\.kubernetes\\.io/instance-type=p5", None),
        ("h100", "h100", "affinity.podAffinity.x=1", H100),
        ("h100", "h100", OWN_NODES, {"key": "mine"}),
        ("h100", "a10g", "", None),  # which names its product itself
        ("h100", "cpu", "", WITHOUT_GPU),
        ("gcs", "l4", "", None),
        ("zones", "a10g-a", "", {**H100, "values": ["NVIDIA-A10G"]}),
    ],
)
def test_a_group_goes_to_nodes_with_its_own_gpus_unless_it_says_where_it_goes(
    pod_specs: Callable[..., dict[str, Manifest]],
    example: str,
    group: str,
    setting: str,
    expression: dict[str, Any] | None,
) -> None:
    settings = [f"groups.{group}.podSpec.{setting}"] if setting else []
    affinity = pod_specs(example, *settings, f"groups.{group}.colocateBy=rack")[group]["affinity"]
    terms = affinity.get("nodeAffinity", {REQUIRED: {"nodeSelectorTerms": []}})[REQUIRED]["nodeSelectorTerms"]
    assert terms == ([{"matchExpressions": [expression]}] if expression else [])
    labels = {"ray.io/cluster": "sdp", "sdp/group": group}
    expected = [{"topologyKey": "rack", "labelSelector": {"matchLabels": labels}}]
    assert affinity["podAffinity"][REQUIRED] == expected, "one rack, too"


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


def test_a_manifest_runs_its_job_under_the_supervisor_by_the_chart_s_configuration(render: Render) -> None:
    asked = [f"jobs.{name}.limit=9" for name in ("score", "caption", "evaluate", "dreambooth")]
    configurations = one(render("minimal", *asked), "ConfigMap")["data"]
    for path in set(MANIFESTS.glob("*.yaml")) - {MANIFESTS / "kustomization.yaml"}:
        job = yaml.safe_load(path.read_text())
        assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
        assert job["metadata"]["name"] == f"sdp-{path.stem}"
        name = path.stem.removesuffix("-own-cluster")
        kind = re.split("-", name)[0]
        rest = " --set scaling.can_grow=false" if name != path.stem and kind == "train" else ""
        command = f"python -m sdp.supervisor {kind} --config /etc/sdp/jobs/{name}.yaml{rest}"
        assert job["spec"]["entrypoint"] == command
        assert job["metadata"]["labels"]["sdp/job"] == name
        assert f"{name}.yaml" in configurations
        assert f"kubectl apply -f manifests/{path.name}" in path.read_text()


@pytest.mark.parametrize("job", OWN_CLUSTER)
def test_the_manifest_with_a_cluster_of_its_own_is_what_sdp_submit_makes(tool: Callable[[str], Path], job: str) -> None:
    committed = (MANIFESTS / f"{job}-own-cluster.yaml").read_text()
    assert manifest_of(tool("helm"), job) == committed, "python -m tests.contract.sdp_cluster writes it"


QUEUED = ("queue.manager=volcano", "queue.name=gpus", "ownCluster.labels.priority=high", "ownCluster.backoffLimit=1")


@pytest.mark.parametrize(
    ("example", "settings", "replicas"),
    [
        ("minimal", (), {"a10g": 8, "a100": 4}),
        ("minimal", ("groups.a100.efaDevices=4", "groups.a100.colocateBy=rack"), {"a10g": 8, "a100": 4}),
        ("minimal", QUEUED, {"a10g": 8, "a100": 4}),
        ("spot", (), {"a10g-spot": 8, "a100": 4}),
    ],
)
def test_a_job_s_own_cluster_has_the_pods_of_the_release_and_as_many_as_the_job_needs(
    render: Render, tool: Callable[[str], Path], example: str, settings: tuple[str, ...], replicas: dict[str, int]
) -> None:
    release = one(render(example, *settings), "RayCluster")
    job = own_cluster(tool("helm"), "train-online", *settings, example=example)
    name, spec = job["metadata"]["name"], job["spec"]["rayClusterSpec"]
    assert {group["groupName"]: group["replicas"] for group in spec["workerGroupSpecs"]} == replicas
    assert all(group["minReplicas"] == group["maxReplicas"] == group["replicas"] for group in spec["workerGroupSpecs"])
    assert spec.keys() == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}, "Kueue takes no more"
    templates, expected_templates = pods({"spec": spec}), pods(release)
    for group, template in templates.items():
        labels = {"sdp/jobs-of": "sdp", "sdp/rayjob": name}
        assert template["metadata"]["labels"] == expected_templates[group]["metadata"]["labels"] | labels
        assert template["metadata"].get("annotations") == expected_templates[group]["metadata"].get("annotations")
        actual, expected = template["spec"], expected_templates[group]["spec"]
        volumes = [volume for volume in expected["volumes"] if volume["name"] not in ("token", *AUTOSCALER)]
        selects = {"affinity": None, "topologySpreadConstraints": None}
        assert actual | selects == expected | selects | {"volumes": volumes}
        near = actual.get("affinity", {}).get("podAffinity", {}).get(REQUIRED, [])
        for selector in [*near, *actual.get("topologySpreadConstraints", [])]:
            assert selector["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    if settings == QUEUED:
        marks = job["metadata"]["labels"]
        assert (marks[VOLCANO], marks["priority"], marks["sdp/job"]) == ("gpus", "high", "train-online")
        assert job["spec"]["backoffLimit"] == 1
        assert "labels" not in job["spec"]
    else:
        assert job["spec"]["backoffLimit"] == 0, "what the user must mend is tried once"


def test_a_download_on_its_own_cluster_reaches_no_private_network(render: Render, tool: Callable[[str], Path]) -> None:
    rules = policies(render("minimal"))
    own, shared = rules["sdp-jobs-downloads"], rules["sdp-downloads"]
    assert own["egress"][1:] == shared["egress"][1:]
    source = "jobs.download.source.uri=s3://my-bucket/urls"
    spec = own_cluster(tool("helm"), "download", source)["spec"]["rayClusterSpec"]
    assert [(group["groupName"], group["replicas"]) for group in spec["workerGroupSpecs"]] == [("cpu", 10)]
    (expression,) = own["podSelector"]["matchExpressions"]
    labels = spec["workerGroupSpecs"][0]["template"]["metadata"]["labels"]
    assert own["podSelector"]["matchLabels"].items() <= labels.items()
    assert labels[expression["key"]] in expression["values"]
