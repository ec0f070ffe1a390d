"""charts/sdp-monitoring beside a running cluster. A Prometheus with the chart's two files scrapes Ray and the exporter
and loads the rules. mode=plain, since the Prometheus Operator may be missing."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from sdp.dreambooth.template import fill
from tests.e2e import jobs, site
from tests.e2e.conftest import enforce
from tests.e2e.kube import Kube, Object
from tests.e2e.settings import Settings
from tests.programs import ended

CHART = jobs.ROOT / "charts" / "sdp-monitoring"
RELEASE = "sdp-monitoring"
SCRAPED_S = 120.0
RULES = (CHART / "rules" / "recording.yaml", CHART / "rules" / "alerts.yaml")
EVERY = "2s"
ASK = """
import sys, urllib.request
print(urllib.request.urlopen(f"http://{sys.argv[1]}:9090/api/v1/{sys.argv[2]}", timeout=20).read().decode())
"""
TELL = """
import sys, ray
ray.init(address="auto", namespace="e2e", log_to_driver=False)

@ray.remote(num_cpus=0, label_selector={"sdp/group": "a10g"})
class Teller:
    def tell(self):
        from sdp import telemetry
        telemetry.begin("told").show("sdp_job_rows", 7, job="process")

if sys.argv[1] == "begin":
    ray.get(Teller.options(name="teller", lifetime="detached").remote().tell.remote(), timeout=60)
else:
    ray.kill(ray.get_actor("teller"))
"""
"""A process in a worker's pod that emits a process job's metrics during the test."""


@pytest.fixture(scope="module")
def monitoring(cluster: Kube) -> Iterator[Kube]:
    """Make the namespace of the chart, whose exporter mounts a folder of the node."""
    monitoring = Kube(f"{cluster.namespace}-monitoring")
    monitoring.run("create", "namespace", monitoring.namespace)
    enforce(monitoring, "privileged")
    yield monitoring
    cluster.run("delete", "--ignore-not-found", "role,rolebinding", "prometheus")
    monitoring.run("delete", "namespace", monitoring.namespace, "--wait=true", timeout_s=180)


@pytest.fixture(scope="module")
def ask(
    cluster: Kube, monitoring: Kube, settings: Settings, helm: Callable[..., str], tool: Callable[[str], Path]
) -> Callable[..., Any]:
    """Return a function that queries Prometheus' HTTP API."""
    if settings.prometheus_image is None:
        pytest.skip("SDP_E2E_PROMETHEUS_IMAGE is none")
    # Ray's pods let a namespace scrape them that the release names.
    helm("upgrade", "--force-conflicts", "--set", f"networkPolicy.monitoringNamespaces={{{monitoring.namespace}}}")
    command = [tool("helm"), "install", RELEASE, CHART, *_values(cluster, monitoring, settings)]
    done = ended([*command, "-n", monitoring.namespace])
    assert done.returncode == 0, done.stderr
    files = monitoring.get("configmap", f"{RELEASE}-prometheus")["data"]
    values = {"plain": site.PLAIN, "image": settings.prometheus_image, "every": EVERY, "files": files}
    objects = fill(Path(__file__).with_name("prometheus.yaml"), {**values, "namespace": monitoring.namespace})
    files["prometheus.yaml"] = yaml.safe_dump(objects["config"])
    monitoring.apply([*objects["prometheus"], *objects["may_list_pods"]])
    cluster.apply(objects["may_list_pods"])
    monitoring.run("wait", "--for=condition=Ready", "pod/prometheus", "--timeout=180s", timeout_s=190)
    host = f"prometheus.{monitoring.namespace}"
    return lambda what, **asked: json.loads(cluster.python(site.TOOLS, ASK, host, f"{what}?{urlencode(asked)}"))["data"]


def test_every_target_is_up_and_says_where_it_is(cluster: Kube, ask: Callable[..., Any]) -> None:
    targets = cluster.until(lambda: _all_up(ask), SCRAPED_S, "Prometheus scrapes Ray and the exporters")
    head = jobs.head(cluster)
    of_head = {target["discoveredLabels"]["__meta_kubernetes_pod_container_port_name"]
               for target in targets if target["labels"].get("pod") == head}  # fmt: skip
    assert of_head == {"metrics", "as-metrics", "dash-metrics"}
    nodes = {node["metadata"]["name"]: node["metadata"]["labels"] for node in cluster.find("nodes")}
    with_gpus = {name for name, labels in nodes.items() if "nvidia.com/gpu.product" in labels}
    assert {target["labels"]["node"] for target in targets if target["scrapePool"] == "annotated"} == with_gpus
    for target in targets:
        if target["scrapePool"] != "annotated":
            labels = target["labels"]
            assert (labels["namespace"], labels["ray_cluster"]) == (cluster.namespace, "sdp")
            assert labels["ray_group"] in {"headgroup", "cpu", "a10g", "a100"}
            assert labels["node"] in nodes


def test_every_rule_is_loaded_and_none_fails(cluster: Kube, ask: Callable[..., Any]) -> None:
    written = [
        rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]
    ]

    def evaluated() -> list[Object]:
        loaded = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
        return loaded if all(rule["health"] != "unknown" for rule in loaded) else []

    loaded = cluster.until(evaluated, SCRAPED_S, "Prometheus has evaluated its rules")
    assert {rule["name"] for rule in loaded} == {rule.get("alert", rule.get("record")) for rule in written}
    assert [rule for rule in loaded if rule["health"] != "ok"] == []


def test_an_exporter_without_a_driver_answers_and_says_so(
    cluster: Kube, ask: Callable[..., Any], settings: Settings
) -> None:
    if settings.fake_gpus is None:
        pytest.skip("the nodes have real GPUs")
    up = cluster.until(lambda: ask("query", query="sdp_exporter_up")["result"], SCRAPED_S, "exporters are scraped")
    assert {(one["metric"]["node"], one["value"][1]) for one in up} == {(node, "0") for node in settings.fake_gpus}


def test_a_jobs_metrics_have_the_labels_that_rules_and_dashboards_need(cluster: Kube, ask: Callable[..., Any]) -> None:
    cluster.python(jobs.head(cluster), TELL, "begin", container="ray-head")
    try:
        query = 'sdp_job_rows{run="told"}'
        (result,) = cluster.until(lambda: ask("query", query=query)["result"], SCRAPED_S, "a job's figure is there")
    finally:
        cluster.python(jobs.head(cluster), TELL, "end", container="ray-head")
    (pod,) = cluster.find("pods", "sdp/group=a10g")
    labels, value = result["metric"], result["value"][1]
    assert value == "7"
    own_labels = {
        name: labels.pop(name) for name in list(labels) if name not in {"instance", "NodeAddress", "WorkerId"}
    }
    assert own_labels == {
        "__name__": "sdp_job_rows",
        "run": "told",
        "stage": "process",
        "job": f"{RELEASE}-ray-worker",
        "namespace": cluster.namespace,
        "pod": pod["metadata"]["name"],
        "pod_uid": pod["metadata"]["uid"],
        "container": "ray-worker",
        "node": pod["spec"]["nodeName"],
        "ray_cluster": "sdp",
        "ray_group": "a10g",
        "ray_io_cluster": "sdp",
        "Component": "core_worker",
    }


def _all_up(ask: Callable[..., Any]) -> list[Object]:
    """Return true if all targets are up: the head's three, a worker's and an exporter."""
    targets: list[Object] = ask("targets", state="active")["activeTargets"]
    pools = [target["scrapePool"] for target in targets]
    enough = pools.count(f"{RELEASE}-ray-head") == 3 and f"{RELEASE}-ray-worker" in pools and "annotated" in pools
    return targets if enough and all(target["health"] == "up" for target in targets) else []


def _values(cluster: Kube, monitoring: Kube, settings: Settings) -> list[str]:
    repository, _, tag = settings.exporter_image.rpartition(":")
    exporter: Object = {
        "image": {"repository": repository, "tag": tag},
        "env": settings.values.get("env", {}),
        "volumes": settings.values.get("volumes", []),
        "volumeMounts": settings.values.get("volumeMounts", []),
        "imagePullSecrets": settings.values.get("imagePullSecrets", []),
        "networkPolicy": {"monitoringNamespaces": [monitoring.namespace]},
    }
    values = {
        "mode": "plain",
        "ray": {"namespaces": [cluster.namespace], "interval": EVERY, "scrapeTimeout": EVERY},
        "rules": {"interval": EVERY},
    }
    return [
        word
        for name, value in {**values, "exporter": exporter}.items()
        for word in ("--set-json", f"{name}={json.dumps(value)}")
    ]
