"""For any values, the chart renders what an API server accepts: types, keys, and no name twice in a list.

The schemas of Kubernetes' own kinds are those of its official client; RayCluster's is what KubeRay 1.7 has in ray.io/v1
of the fields that the chart uses. kubeconform judges by them, without a network.
"""

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest
import yaml

from tests.contract.sdp_cluster import VALUES, Manifest, Render, one, parsed, pods
from tests.kit import write_files
from tests.monitoring import chart as monitoring
from tests.programs import ended

MANIFESTS = Path(__file__).parents[2] / "manifests"
NEEDS_HELM = pytest.mark.needs("helm")
NEEDS_BOTH = pytest.mark.needs("helm", "kubeconform")
KINDS = {
    "ServiceAccount": kubernetes.client.V1ServiceAccount,
    "ConfigMap": kubernetes.client.V1ConfigMap,
    "Secret": kubernetes.client.V1Secret,
    "Role": kubernetes.client.V1Role,
    "RoleBinding": kubernetes.client.V1RoleBinding,
    "NetworkPolicy": kubernetes.client.V1NetworkPolicy,
    "PodDisruptionBudget": kubernetes.client.V1PodDisruptionBudget,
    "DaemonSet": kubernetes.client.V1DaemonSet,
}
OPERATOR_S = {"PodMonitor", "PrometheusRule"}
"""Kinds of the Prometheus Operator, whose schemas are nowhere without a network."""
Schema = dict[str, Any]
Judge = Callable[[str], tuple[int, list[str]]]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def schema_of(model: Any) -> Schema:
    """A kind of Kubernetes', by its client, which has one type too few: a quantity may be a number."""
    schema: Schema = model.model_json_schema(by_alias=True)
    named = {**schema.get("$defs", {}), schema["title"]: schema}
    for field in ("limits", "requests") if "V1ResourceRequirements" in named else ():
        amounts = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
        named["V1ResourceRequirements"]["properties"][field] = amounts
    return schema


def fields(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    needed = {"required": list(required)} if required else {}  # kubeconform takes no empty list
    return {"type": "object", "additionalProperties": False, **needed, "properties": properties}


def schema_of_raycluster() -> Schema:
    """By the CRD of KubeRay 1.7."""
    definitions: Schema = {}

    def known(model: Any) -> Schema:
        schema = schema_of(model)
        definitions.update(schema.pop("$defs", {}))
        definitions[model.__name__] = schema
        return {"$ref": f"#/$defs/{model.__name__}"}

    client = kubernetes.client
    group = {"rayStartParams": TEXTS, "labels": TEXTS, "template": known(client.V1PodTemplateSpec)}
    scaler = fields(
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        image=TEXT,
        imagePullPolicy=TEXT,
        resources=known(client.V1ResourceRequirements),
        securityContext=known(client.V1SecurityContext),
        env={"type": "array", "items": known(client.V1EnvVar)},
        volumeMounts={"type": "array", "items": known(client.V1VolumeMount)},
    )
    spec = fields(
        ("headGroupSpec",),
        rayVersion=TEXT,
        authOptions=fields(mode={"enum": ["disabled", "token"]}, secretName=TEXT),
        upgradeStrategy=fields(type={"enum": ["Recreate", "None"]}),
        enableInTreeAutoscaling={"type": "boolean"},
        autoscalerOptions=scaler,
        headGroupSpec=fields(("template",), **group),
        workerGroupSpecs={
            "type": "array",
            "items": fields(
                ("groupName", "maxReplicas", "minReplicas", "template"),
                groupName=TEXT,
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                idleTimeoutSeconds=COUNT,
                priority={"type": "integer"},
                **group,
            ),
        },
    )
    about = fields(name=TEXT, labels=TEXTS, annotations=TEXTS)
    return {**fields(("spec",), apiVersion=TEXT, kind=TEXT, metadata=about, spec=spec), "$defs": definitions}


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    by_kind = {kind: schema_of(model) for kind, model in KINDS.items()} | {"RayCluster": schema_of_raycluster()}
    files = {f"{kind.lower()}.json": json.dumps(schema) for kind, schema in by_kind.items()}
    return write_files(tmp_path_factory.mktemp("schemas"), files)


@pytest.fixture
def judged(tool: Callable[[str], Path], schemas: Path) -> Judge:
    """Return the number of valid resources in a stream, and kubeconform's complaints."""

    def run(text: str) -> tuple[int, list[str]]:
        where = f"{schemas}/{{{{.ResourceKind}}}}.json"
        command = [str(tool("kubeconform")), "-strict", "-summary", "-output", "json", "-schema-location", where, "-"]
        done = ended(command, input=text)
        report = json.loads(done.stdout)
        against = [f"{resource['kind']}: {resource['msg']}" for resource in report.get("resources") or []]
        assert (done.returncode == 0) == (not against), done.stderr
        return report["summary"]["valid"], against

    return run


@NEEDS_BOTH
@pytest.mark.parametrize("example", list(VALUES))
def test_an_api_server_would_take_it(render: Render, judged: Judge, example: str) -> None:
    manifests = render(example)  # which refuses a key that comes twice
    assert judged(yaml.safe_dump_all(manifests)) == (len(manifests), [])
    assert list(twice(manifests)) == []
    assert len({(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}) == len(manifests)


@pytest.mark.needs("kubeconform")
def test_strict_readers_take_the_manifests(tool: Callable[[str], Path], judged: Judge, tmp_path: Path) -> None:
    """They refuse a key that replaces one of a merged mapping."""
    manifests = [path for path in MANIFESTS.glob("*.yaml") if path.stem != "kustomization"]
    options = ["-strict", "-ignore-missing-schemas", "-schema-location", tmp_path]
    done = ended([tool("kubeconform"), *options, *manifests])
    assert (done.returncode, done.stdout) == (0, "")
    for path in MANIFESTS.glob("*-own-cluster.yaml"):
        job = yaml.safe_load(path.read_text())
        cluster = {"apiVersion": job["apiVersion"], "kind": "RayCluster", "metadata": job["metadata"]}
        assert judged(yaml.safe_dump({**cluster, "spec": job["spec"]["rayClusterSpec"]})) == (1, [])


@NEEDS_BOTH
@pytest.mark.parametrize("mode", ["operator", "plain"])
def test_an_api_server_would_take_the_monitoring_chart_too(
    tool: Callable[[str], Path], judged: Judge, mode: str
) -> None:
    done = monitoring.helm_template(tool("helm"), f"mode={mode}", "exporter.networkPolicy.enabled=true")
    manifests = [manifest for manifest in parsed(done.stdout) if manifest["kind"] not in OPERATOR_S]
    assert {"DaemonSet", "NetworkPolicy", "ConfigMap"} == {manifest["kind"] for manifest in manifests}
    assert judged(yaml.safe_dump_all(manifests)) == (len(manifests), [])
    assert list(twice(manifests)) == []


@NEEDS_BOTH
@pytest.mark.parametrize(
    ("kind", "at", "wrong"),
    [
        ("RayCluster", "spec.autoscalerOptions.upscalingMode", "Slow"),
        ("RayCluster", "spec.headGroupSpec.template.spec.containers.0.env.0.value", 7),
        ("RayCluster", "spec.headGroupSpec.template.spec.nodeSelectors", {}),
        ("RayCluster", "spec.workerGroupSpecs.0.maxReplicas", 1.5),
        ("NetworkPolicy", "spec.ingress.0.from", "all"),
    ],
)
def test_manifests_that_an_api_server_would_refuse_are_detected(
    render: Render, judged: Judge, kind: str, at: str, wrong: object
) -> None:
    manifest = next(manifest for manifest in render("minimal") if manifest["kind"] == kind)
    spoilt = copy.deepcopy(manifest)
    here: Any = spoilt
    *path, last = at.split(".")
    for step in path:
        here = here[int(step)] if step.isdigit() else here[step]
    here[last] = wrong
    assert judged(yaml.safe_dump(manifest)) == (1, [])
    valid, against = judged(yaml.safe_dump(spoilt))
    assert valid == 0
    assert against


def twice(value: Any, at: str = "") -> Iterator[str]:
    """Names, and paths of mounts, that come more than once in a list: an API server takes no such list."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from twice(item, f"{at}.{name}")
    elif isinstance(value, list):
        key = "mountPath" if at.endswith(".volumeMounts") else "groupName" if at.endswith("GroupSpecs") else "name"
        names = Counter(item[key] for item in value if isinstance(item, dict) and key in item)
        yield from (f"{at}: {name}" for name, count in names.items() if count > 1)
        for number, item in enumerate(value):
            yield from twice(item, f"{at}[{number}]")


@NEEDS_HELM
@pytest.mark.parametrize("example", list(VALUES))
def test_every_label_that_something_is_found_by_is_one_that_pods_have(render: Render, example: str) -> None:
    """The labels are those of running pods, including KubeRay's own."""
    manifests = render(example)
    cluster = one(manifests, "RayCluster")
    name = cluster["metadata"]["name"]
    labels = {}
    for group, template in pods(cluster).items():
        kuberay_s = {"ray.io/cluster": name, "ray.io/node-type": "head" if group == "head" else "worker"}
        labels[group] = template["metadata"]["labels"] | kuberay_s

    def selected(selector: Manifest) -> set[str]:
        return {group for group, has in labels.items() if selector["matchLabels"].items() <= has.items()}

    for manifest in manifests:
        if manifest["kind"] == "NetworkPolicy":
            expected = set() if manifest["metadata"]["name"].startswith(f"{name}-jobs") else set(labels)
            assert selected({"matchLabels": manifest["spec"]["podSelector"]["matchLabels"]}) == expected
            for expression in manifest["spec"]["podSelector"].get("matchExpressions", []):
                assert set(expression["values"]) <= set(labels), "groups that there are"
        if manifest["kind"] == "PodDisruptionBudget":
            assert selected(manifest["spec"]["selector"]) == {manifest["metadata"]["name"].removeprefix(f"{name}-")}
    for group, template in pods(cluster).items():
        assert template["metadata"]["labels"]["sdp/group"] == group
        for spread in template["spec"].get("topologySpreadConstraints", []):
            assert selected(spread["labelSelector"]) == {group}
    for group in cluster["spec"]["workerGroupSpecs"]:
        has, gpus = group["labels"], group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert (has["sdp/group"], has["ray.io/node-group"]) == (group["groupName"], group["groupName"])
        assert ("ray.io/accelerator-type" in has) == ("nvidia.com/gpu" in gpus)
