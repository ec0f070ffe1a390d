"""The monitoring chart: what it renders and refuses, and that all it asks of Prometheus exists."""

import json
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import pytest
import yaml

from scripts.dashboards import __main__ as dashboards
from sdp.exporter.catalogue import CATALOGUE as OF_EXPORTER
from sdp.telemetry import CATALOGUE as OF_JOBS
from tests.monitoring import chart, promql
from tests.monitoring.chart import CHART, Manifest, helm_template, one, rendered
from tests.monitoring.prometheus import as_prometheus
from tests.monitoring.ray_names import KUBERNETES, RAY
from tests.programs import ended

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
UNIT_TESTS = ROOT / "tests" / "monitoring" / "alerts.test.yaml"
NEEDS_HELM = pytest.mark.needs("helm")
NEEDS_PROMTOOL = pytest.mark.needs("promtool")

TARGET = frozenset({"namespace", "pod", "pod_uid", "container", "node", "instance", "job", "ray_cluster", "ray_group"})
"""Labels that scraping puts on, and the chart's relabelings."""
DERIVED = frozenset({"container_pid", "role", "rank", "run", "job_name"})
"""Labels that recording rules put on besides."""

Render = Callable[..., list[Manifest]]


@pytest.fixture
def render(tool: Callable[[str], Path]) -> Render:
    return lambda *settings: rendered(tool("helm"), *settings)


def labels_of(name: str) -> frozenset[str] | None:
    """Return a metric's own labels, or None for an unknown metric."""
    exported = {metric.name: frozenset(metric.labels) for metric in OF_EXPORTER}
    if name in exported:
        return exported[name]
    if name in RAY or name in KUBERNETES:
        return RAY.get(name) or KUBERNETES[name]
    if name not in OF_JOBS:
        return None
    # by the PodMonitors' relabelings
    return frozenset({"run", *("stage" if label == "job" else label for label in OF_JOBS[name].labels)})


def complaints(expressions: Iterable[chart.Expression]) -> list[str]:
    """Return unknown metrics, and labels that their metrics lack."""
    recorded = {rule["record"] for rule in chart.rules("record")}
    problems = []
    for expression in expressions:
        where, text = expression.where, expression.filled()
        known = set(TARGET | DERIVED)
        for selector in promql.selectors(text):
            for name in selector.names:
                own = TARGET | DERIVED if name in recorded else labels_of(name)
                if own is None:
                    problems.append(f"{where}: {name}: no such metric")
                    continue
                known |= own
                problems += [f"{where}: {name}: no label {label}" for label in sorted(selector.labels - own - TARGET)]
        if any(name in recorded for selector in promql.selectors(text) for name in selector.names):
            known |= {"gpu", "uuid", "product", "process"}
        problems += [f"{where}: nobody has {label}" for label in sorted(promql.labels_of_lists(text) - known)]
    return problems


def test_expressions_name_only_metrics_and_labels_that_exist() -> None:
    assert complaints([*chart.queries(), *chart.records(), *chart.alerts()]) == []


@NEEDS_PROMTOOL
def test_every_expression_parses(tool: Callable[[str], Path], tmp_path: Path) -> None:
    """Queries of panels are put into a file of rules, since promtool reads those."""
    rules = [{"record": f"panel:{number}", "expr": query.filled()} for number, query in enumerate(chart.queries())]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = ended([tool("promtool"), "check", "rules", path, *sorted((CHART / "rules").glob("*.yaml"))])
    assert done.returncode == 0, done.stderr
    assert len(rules) > 100


@NEEDS_PROMTOOL
def test_each_alert_fires_where_it_should_and_not_where_it_should_not(
    tool: Callable[[str], Path], tmp_path: Path
) -> None:
    for path in [*(CHART / "rules").glob("*.yaml"), UNIT_TESTS]:
        (tmp_path / path.name).write_text(path.read_text())
    done = ended([tool("promtool"), "test", "rules", tmp_path / UNIT_TESTS.name])
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_that_sees_it_fire_and_one_that_sees_it_quiet() -> None:
    tests = yaml.safe_load(UNIT_TESTS.read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    alerts = {rule["alert"] for rule in chart.rules("alert")}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    runbooks = {rule["annotations"]["runbook"] for rule in chart.rules("alert")}
    assert runbooks == {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    for rule in chart.rules("alert"):
        assert f"`{rule['alert']}`" in (RUNBOOKS / f"{rule['annotations']['runbook']}.md").read_text()
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert {"summary", "description"} <= rule["annotations"].keys()


def test_the_dashboards_agree_with_the_code_that_generates_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboards.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(chart.dashboards()))
def test_a_dashboard_has_its_variables_and_answers_in_its_first_row(name: str) -> None:
    dashboard = chart.dashboards()[name]
    variables = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert variables == ["datasource", "namespace", "cluster", "run", "group", "node"]
    assert dashboard["uid"] == f"sdp-{name}"
    rows = [number for number, panel in enumerate(dashboard["panels"]) if panel["type"] == "row"]
    first = dashboard["panels"][1 : rows[1] if len(rows) > 1 else None]
    assert rows[0] == 0
    assert all(dashboard["panels"][number].get("collapsed") for number in rows[1:]), "only the first is open"
    assert max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in first) <= 12, "more than a screen"
    figures = 5 if name == "home" else 6
    assert [panel["type"] for panel in first[:figures]] == ["stat"] * figures
    ids = [panel["id"] for panel in chart.laid_out(dashboard)]
    assert len(set(ids)) == len(ids)
    for panel in chart.panels(dashboard):
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["targets"], panel["title"]


@pytest.mark.parametrize("name", sorted(chart.dashboards()))
def test_panels_of_a_dashboard_do_not_overlap_and_only_the_end_of_a_row_has_room(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in chart.laid_out(chart.dashboards()[name]):
        x, y, width, height = (panel["gridPos"][key] for key in "xywh")
        cells = set(product(range(x, x + width), range(y, y + height)))
        assert not cells & taken, panel["title"]
        taken |= cells
    for y in {y for _, y in taken}:
        assert sum(1 for x, at in taken if at == y) == 24, f"a gap at line {y}"


def test_a_figure_that_is_not_known_is_a_dash_that_is_neither_good_nor_bad() -> None:
    """0 / 0 is NaN, and a dash without a mapping has the colour of the lowest values."""
    for name, dashboard in chart.dashboards().items():
        for panel in chart.panels(dashboard):
            if panel["type"] == "stat":
                (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
                expected = {"match": "null+nan", "result": {"text": "–", "color": "text"}}
                assert (mapping["type"], mapping["options"]) == ("special", expected), (name, panel["title"])


def test_series_separated_by_cluster_or_run_are_separated_by_namespace_too() -> None:
    """Two namespaces may each have a cluster `sdp` with a run `sd2`."""
    for expression in (*chart.queries(), *chart.records(), *chart.alerts()):
        for labels in promql.lists(expression.filled()):
            if labels & {"ray_cluster", "run", "ray_group", "rank"}:
                assert labels >= {"namespace", "ray_cluster"}, (expression.where, labels)
    for query in chart.queries():
        for selector in promql.selectors(query.filled()):
            if not all(name in KUBERNETES for name in selector.names):  # whose series are of no RayCluster
                assert ("ray_cluster" in selector.labels) == ("namespace" in selector.labels), query.where
    for dashboard in chart.dashboards().values():
        (variable,) = [v for v in dashboard["templating"]["list"] if v["name"] == "namespace"]
        assert variable["allValue"] == ".*", "also what has no such label, outside of Kubernetes"


def test_every_query_can_be_narrowed_down_by_the_variables() -> None:
    """Each asks for a cluster, or for a node of those that a cluster owns; RayJobs and queues have neither."""
    for query in chart.queries():
        if not any(name in query.text for name in KUBERNETES):
            assert "$cluster" in query.text or "$node" in query.text, query.where


@NEEDS_HELM
def test_the_exporter_has_the_host_s_pids_and_no_other_privilege(render: Render) -> None:
    manifests = render()
    policy = one(manifests, "NetworkPolicy")["spec"]
    assert (policy["policyTypes"], "egress" in policy) == (["Ingress", "Egress"], False), "it opens no connection"
    pod = one(manifests, "DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["hostPID"] is True
    assert not {"hostNetwork", "hostIPC", "volumes"} & pod.keys()
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    cluster = yaml.safe_load((ROOT / "charts" / "sdp-cluster" / "values.yaml").read_text())
    assert pod["securityContext"]["runAsUser"] not in {0, 1000, cluster["runAsUser"]}, "it could read their environment"
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "nvidia.com/gpu" not in json.dumps(container["resources"]), "it would take a GPU from training"


@NEEDS_HELM
def test_the_exporter_goes_only_where_a_label_says_that_there_are_gpus(render: Render) -> None:
    pod = one(render(), "DaemonSet")["spec"]["template"]["spec"]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {expression["key"] for term in terms for expression in term["matchExpressions"]} == {
        "nvidia.com/gpu.product",
        "nvidia.com/gpu.present",
        "cloud.google.com/gke-accelerator",
    }
    assert pod["tolerations"] == [{"operator": "Exists"}]


@NEEDS_HELM
def test_the_exporter_has_the_volumes_that_it_is_given_beside_its_own(render: Render) -> None:
    """If no runtime mounts the driver's library, the chart mounts the node's folder of it."""
    settings = ["exporter.volumes[0].name=driver", "exporter.volumes[0].hostPath.path=/home/kubernetes/bin/nvidia"]
    settings += ["exporter.volumeMounts[0].name=driver", "exporter.volumeMounts[0].mountPath=/usr/local/nvidia"]
    settings += ["exporter.env.LD_LIBRARY_PATH=/usr/local/nvidia/lib64"]
    manifests = render(*settings)
    pod = one(manifests, "DaemonSet")["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["driver"]
    assert [mount["name"] for mount in pod["containers"][0]["volumeMounts"]] == ["driver"]
    assert {"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"} in pod["containers"][0]["env"]


@NEEDS_HELM
def test_the_exporter_takes_the_arguments_that_it_is_given(render: Render) -> None:
    from sdp.exporter.__main__ import make_parser

    settings = ["exporter.extraArgs={--log-level=debug}", "exporter.address=::", "exporter.timeoutSeconds=3"]
    manifests = render(*settings, "ray.interval=1m30s", "ray.scrapeTimeout=80s")
    pod = one(manifests, "DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "sdp.exporter"]
    options = make_parser().parse_args(container["args"])
    assert (options.port, options.address, options.timeout_s, options.log_level) == (9850, "::", 3, "debug")
    assert container["livenessProbe"]["tcpSocket"] == {"port": "metrics"}


@NEEDS_HELM
def test_selectors_match_existing_pods(render: Render) -> None:
    """Ray's pods have KubeRay's labels and charts/sdp-cluster's port; the exporter has its own."""
    manifests = render()
    exporter = one(manifests, "DaemonSet")["spec"]
    labels = exporter["template"]["metadata"]["labels"]
    assert exporter["selector"]["matchLabels"].items() <= labels.items()
    monitor = one(manifests, "PodMonitor", "exporter")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert {e["port"] for e in monitor["podMetricsEndpoints"]} == {
        p["name"] for p in exporter["template"]["spec"]["containers"][0]["ports"]
    }
    for who in ("head", "worker"):
        ray = one(manifests, "PodMonitor", f"ray-{who}")["spec"]
        assert ray["selector"]["matchLabels"] == {"ray.io/node-type": who}
        assert ray["namespaceSelector"] == {"any": True}
        assert ray["podMetricsEndpoints"][0]["port"] == "metrics"


KUBE_PROMETHEUS_STACK = {
    "podMonitorSelector": {"release": "kube-prometheus-stack"},
    "ruleSelector": {"release": "kube-prometheus-stack"},
    "sidecar": {"grafana_dashboard": "1"},
}
"""The labels that kube-prometheus-stack 88.5.3, rendered under this name with its default values, selects in every
namespace: its Prometheus with empty namespace selectors, Grafana's sidecar with searchNamespace ALL."""


@NEEDS_HELM
def test_kube_prometheus_stack_selects_everything_that_is_for_it(render: Render) -> None:
    selectors = {"PodMonitor": "podMonitorSelector", "PrometheusRule": "ruleSelector", "ConfigMap": "sidecar"}
    seen = set()
    for manifest in render():
        if manifest["kind"] in selectors:
            wanted = KUBE_PROMETHEUS_STACK[selectors[manifest["kind"]]]
            assert wanted.items() <= manifest["metadata"]["labels"].items(), manifest["metadata"]["name"]
            seen.add(manifest["kind"])
    assert seen == set(selectors)


@NEEDS_HELM
def test_dashboards_come_as_config_maps_that_grafana_s_sidecar_finds(render: Render) -> None:
    maps = [m for m in render() if m["kind"] == "ConfigMap"]
    assert all(m["metadata"]["labels"]["grafana_dashboard"] == "1" for m in maps)
    loaded = {name: json.loads(text) for m in maps for name, text in m["data"].items()}
    assert loaded == {f"sdp-{name}.json": dashboard for name, dashboard in chart.dashboards().items()}
    assert all(sum(map(len, m["data"].values())) < 900_000 for m in maps), "etcd takes 1 MiB"
    (moved, *_) = [m for m in render("dashboards.namespace=grafana") if m["kind"] == "ConfigMap"]
    assert moved["metadata"]["namespace"] == "grafana"


@NEEDS_HELM
def test_rules_come_as_they_are_written_with_their_runbook_s_address(render: Render) -> None:
    spec = one(render(), "PrometheusRule")["spec"]
    rules = {rule.get("alert", rule.get("record")): rule for group in spec["groups"] for rule in group["rules"]}
    written = {
        rule.get("alert", rule.get("record")): rule for kind in ("record", "alert") for rule in chart.rules(kind)
    }
    assert {name: rule["expr"] for name, rule in rules.items()} == {n: rule["expr"] for n, rule in written.items()}
    base = yaml.safe_load((CHART / "values.yaml").read_text())["rules"]["runbooks"]
    for name, rule in rules.items():
        if "alert" in rule:
            assert rule["annotations"]["runbook_url"] == f"{base}/{written[name]['annotations']['runbook']}.md"
            assert rule["annotations"]["summary"] == written[name]["annotations"]["summary"]


@NEEDS_HELM
def test_an_alert_can_be_changed_and_left_out(render: Render) -> None:
    settings = ["rules.alerts.SdpSpilling.enabled=false", "rules.alerts.SdpGpuXid.severity=info"]
    settings += ["rules.alerts.SdpCheckpointLate.for=3h", "rules.alertLabels.team=training"]
    spec = one(render(*settings, "rules.alerts.SdpGpuLost.expr=sdp_gpu_up < 1"), "PrometheusRule")["spec"]
    alerts = {rule["alert"]: rule for group in spec["groups"] for rule in group["rules"] if "alert" in rule}
    assert "SdpSpilling" not in alerts
    assert alerts["SdpGpuXid"]["labels"] == {"severity": "info", "team": "training"}
    assert alerts["SdpCheckpointLate"]["for"] == "3h"
    assert alerts["SdpGpuLost"]["expr"] == "sdp_gpu_up < 1"


@NEEDS_HELM
def test_without_the_exporter_its_alerts_are_left_out(render: Render) -> None:
    def alerts(*settings: str) -> set[str]:
        groups = one(render(*settings), "PrometheusRule")["spec"]["groups"]
        return {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}

    assert alerts() - alerts("exporter.enabled=false") == {"SdpExporterDown", "SdpExporterBlind"}


@NEEDS_HELM
@NEEDS_PROMTOOL
def test_without_the_operator_there_are_annotations_and_a_configuration_that_says_the_same(
    render: Render, tool: Callable[[str], Path], tmp_path: Path
) -> None:
    plain, operator = render("mode=plain"), render()
    assert {m["kind"] for m in plain} == {"DaemonSet", "ConfigMap", "NetworkPolicy"}
    annotations = one(plain, "DaemonSet")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert annotations["prometheus.io/port"] == "9850"
    assert "annotations" not in one(operator, "DaemonSet")["spec"]["template"]["metadata"]
    data = one(plain, "ConfigMap", "-prometheus")["data"]
    assert yaml.safe_load(data["rules.yaml"]) == one(operator, "PrometheusRule")["spec"]
    jobs = {job["job_name"]: job for job in yaml.safe_load(data["scrape.yaml"])["scrape_configs"]}
    for who in ("head", "worker"):
        (endpoint, *_) = one(operator, "PodMonitor", f"ray-{who}")["spec"]["podMetricsEndpoints"]
        job = jobs[f"sdp-ray-{who}"]
        assert job["metric_relabel_configs"] == as_prometheus(endpoint["metricRelabelings"])
        assert job["relabel_configs"][-5:] == as_prometheus(endpoint["relabelings"])
        (discovery,) = job.pop("kubernetes_sd_configs")  # Debian builds Prometheus without it
        assert discovery["role"] == "pod"
        assert discovery["selectors"] == [{"role": "pod", "label": f"ray.io/node-type={who}"}]
    job = jobs["sdp-operator"]
    (endpoint,) = one(operator, "PodMonitor", "-operator")["spec"]["podMetricsEndpoints"]
    assert job["metric_relabel_configs"] == as_prometheus(endpoint["metricRelabelings"])
    assert job["honor_labels"] is endpoint["honorLabels"] is True, "the RayJob's namespace"
    (discovery,) = job.pop("kubernetes_sd_configs")
    assert discovery["selectors"] == [{"role": "pod", "label": "app.kubernetes.io/component=kuberay-operator"}]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump({"scrape_configs": list(jobs.values())}))
    (tmp_path / "rules.yaml").write_text(data["rules.yaml"])
    for what, path in (("config", "prometheus.yaml"), ("rules", "rules.yaml")):
        done = ended([tool("promtool"), "check", what, tmp_path / path])
        assert done.returncode == 0, done.stderr


@NEEDS_HELM
@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (["exporter.enabled=false"], {"PodMonitor", "PrometheusRule", "ConfigMap"}),
        (["exporter.enabled=false", "ray.enabled=false", "operator.enabled=false"], {"PrometheusRule", "ConfigMap"}),
        (["exporter.enabled=false", "exporter.image.repository="], {"PodMonitor", "PrometheusRule", "ConfigMap"}),
        (["rules.enabled=false", "dashboards.enabled=false"], {"PodMonitor", "DaemonSet", "NetworkPolicy"}),
    ],
)
def test_nothing_is_rendered_that_was_not_asked_for(render: Render, settings: list[str], kinds: set[str]) -> None:
    assert {manifest["kind"] for manifest in render(*settings)} == kinds


@NEEDS_HELM
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("mode=both", "/mode"),
        ("exporter.portt=1", "'portt' not allowed"),
        ("exporter.runAsUser=null", "missing property 'runAsUser'"),  # which nothing but root would be
        ("mode=null", "missing property 'mode'"),
        ("rules.alerts.SdpSpiling.for=3h", "rules.alerts.SdpSpiling: no such alert; the alerts are SdpCheckpointLate"),
        ("ray.scrapeTimeout=20s", "ray.scrapeTimeout: expected at most ray.interval (15s), got 20s"),
        ("exporter.interval=9500ms", "exporter.scrapeTimeout: expected at most exporter.interval (9500ms), got 10s"),
        ("exporter.timeoutSeconds=10", "exporter.timeoutSeconds: expected less than exporter.scrapeTimeout (10s)"),
        ("exporter.podLabels.app\\.kubernetes\\.io/name=x", "exporter.podLabels: app.kubernetes.io/name is the chart"),
        ("nameOverride=" + "n" * 41, "nameOverride: expected at most 40 characters"),
    ],
)
def test_values_that_cannot_work_are_refused_with_their_path(
    tool: Callable[[str], Path], setting: str, says: str
) -> None:
    done = helm_template(tool("helm"), setting)
    assert done.returncode != 0, "rendered all the same"
    assert says in done.stderr
