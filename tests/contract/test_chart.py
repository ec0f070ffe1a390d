"""The chart: what it renders for each example, and what it refuses. Rendered by the real helm."""

import ipaddress
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import chart_readme, chart_schema
from sdp.config import Range, draft, parse
from sdp.hardware import GPUS
from tests.contract.sdp_cluster import CHART, RENDERED, VALUES, Manifest, helm_template, one, parsed, pods, rendered

MANIFESTS = Path(__file__).parents[2] / "manifests"
EXAMPLES = list(VALUES)
NEEDS_HELM = pytest.mark.needs("helm")
STATIC = ("autoscaling.enabled=false", "groups.cpu.replicas=1", "groups.a10g.replicas=8", "groups.a100.replicas=4")
"""A cluster that does not grow, with what the chart's jobs ask for."""
LEAST = "image: {repository: registry.example.com/sdp/ray}\n"

Render = Callable[..., list[Manifest]]


@pytest.fixture
def render(tool: Callable[[str], Path]) -> Render:
    """`render("minimal", "groups.cpu=null")`: an example with settings over it, as a list of manifests."""

    def run(example: str, *settings: str) -> list[Manifest]:
        done = helm_template(tool("helm"), example, *settings)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, done.stderr
        return parsed(done.stdout)

    return run


def policies(manifests: list[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"]


@NEEDS_HELM
@pytest.mark.parametrize("example", RENDERED)
def test_the_chart_renders_what_is_committed(tool: Callable[[str], Path], example: str) -> None:
    committed = RENDERED[example].read_text()
    assert rendered(tool("helm"), example) == committed, "python -m tests.contract.sdp_cluster writes it"


@NEEDS_HELM
def test_the_head_gets_grafana_s_address_under_ray_s_names(render: Render) -> None:
    import ray.dashboard.modules.metrics.metrics_head as ray_s

    (head, *_), *workers = (pod["spec"]["containers"] for pod in pods(one(render("full"), "RayCluster")).values())
    names = {ray_s.GRAFANA_HOST_ENV_VAR, ray_s.GRAFANA_CLUSTER_FILTER_ENV_VAR, ray_s.GRAFANA_IFRAME_HOST_ENV_VAR}
    assert {*names, ray_s.PROMETHEUS_HOST_ENV_VAR} <= {variable["name"] for variable in head["env"]}
    assert not any(names & {variable["name"] for variable in containers[0]["env"]} for containers in workers)


@NEEDS_HELM
def test_an_umbrella_chart_renders_both_charts(tool: Callable[[str], Path], tmp_path: Path) -> None:
    """Helm has one table of named templates for all charts of a release."""
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: umbrella, version: 1.0.0}\n")
    for chart in ("sdp-cluster", "sdp-monitoring"):
        shutil.copytree(CHART.parent / chart, tmp_path / "charts" / chart)
    exporter = {"exporter": {"image": {"repository": "registry.example.com/sdp/exporter"}}}
    values = {"sdp-cluster": yaml.safe_load(VALUES["minimal"].read_text()), "sdp-monitoring": exporter}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    command = [str(tool("helm")), "template", "umbrella", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
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


@NEEDS_HELM
@pytest.mark.parametrize("example", EXAMPLES)
def test_every_pod_passes_the_standard_restricted(render: Render, example: str) -> None:
    manifests = render(example)
    test = one(manifests, "Pod")["spec"]
    assert list(beyond_restricted({"volumes": [], **test}, test["containers"])) == []
    cluster = one(manifests, "RayCluster")
    for name, template in pods(cluster).items():
        containers = template["spec"]["containers"][:1]  # Ray's; the others are the user's
        if name == "head" and "autoscalerOptions" in cluster["spec"]:
            containers.append(cluster["spec"]["autoscalerOptions"])
        assert list(beyond_restricted(template["spec"], containers)) == [], name


@NEEDS_HELM
@pytest.mark.parametrize("example", EXAMPLES)
def test_each_job_s_configuration_is_one_that_the_job_takes(render: Render, example: str, tmp_path: Path) -> None:
    jobs = one(render(example), "ConfigMap")["data"]
    assert {"download.yaml", "process.yaml", "train.yaml", "generate.yaml"} <= jobs.keys()
    for name, text in jobs.items():
        (tmp_path / name).write_text(text)
        resolved = draft(re.split(r"[.-]", name)[0], str(tmp_path / name), [])
        assert set(resolved.missing) <= {"source.uri", "prompts", "model.source"}, name
        assert name == "download.yaml" or "source.uri" not in resolved.missing or name == "generate.yaml"


@NEEDS_HELM
@pytest.mark.parametrize("job", ["train", "train-online"])
def test_training_by_default_is_the_recipe_of_stable_diffusion_2(render: Render, job: str) -> None:
    """Samples of each phase as MosaicML and Anyscale give them; what a GPU takes at once as the latter does."""
    config = parse("train", yaml.safe_load(one(render("efa"), "ConfigMap")["data"][f"{job}.yaml"]))
    second = config.phase_2
    assert (config.data.global_batch_size or 0) * (config.max_steps or 0) == 1_126_400_000
    assert (second.global_batch_size or 0) * (second.max_steps or 0) == 1_740_800_000
    assert (config.data.resolution, config.data.batch_size) == (256, 128)
    assert (second.resolution, second.batch_size) == (512, 32)
    assert (config.strategy.kind, config.strategy.compile) == ("fsdp", True)
    assert config.scaling.num_workers == Range(min=24, max=32), "a node of eight may be lost"


@NEEDS_HELM
def test_trainers_take_all_gpus_of_their_accelerator_or_a_pod_s_fewer(render: Render) -> None:
    def workers(*settings: str) -> object:
        jobs = one(render("minimal", *settings), "ConfigMap")["data"]
        return yaml.safe_load(jobs["train-online.yaml"])["scaling"].get("num_workers")

    assert workers("groups.a100.maxReplicas=2") == {"min": 8, "max": 16}
    assert workers("groups.a100.maxReplicas=1") == 8
    assert workers("jobs.train-online.scaling.num_workers=3") == 3
    assert workers("jobs.train-online.encode.accelerator=A100") == {"min": 16, "max": 24}, "encoders take eight"
    assert workers("groups.more.gpus=4", "groups.more.accelerator=A100") == {"min": 28, "max": 36}


@NEEDS_HELM
def test_generators_and_evaluators_name_their_accelerator(render: Render) -> None:
    """A cluster without pods shows no GPUs."""

    def placed(example: str, *settings: str) -> list[Any]:
        jobs = one(render(example, "jobs.evaluate.limit=9", *settings), "ConfigMap")["data"]
        return [yaml.safe_load(jobs.get(name, "{}")).get("scaling") for name in ("generate.yaml", "evaluate.yaml")]

    assert placed("minimal") == [{"accelerator": "A10G"}, {"accelerator": "A10G"}]
    own = placed("minimal", "jobs.evaluate.scaling.accelerator=A100", "jobs.generate.scaling.num_workers=2")
    assert own == [{"accelerator": "A10G", "num_workers": 2}, {"accelerator": "A100"}]
    cpus = placed("no-gpu")
    assert cpus == [{"accelerator": "cpu"}] * 2
    assert placed("minimal", "jobs.generate=null", "jobs.evaluate.scaling.accelerator=gpu")[-1] == {
        "accelerator": "gpu"
    }


@NEEDS_HELM
def test_score_reads_the_images_on_the_encoders_of_process_or_its_own(render: Render) -> None:
    def encoders(example: str, *settings: str) -> Any:
        job = yaml.safe_load(one(render(example, "jobs.score.limit=9", *settings), "ConfigMap")["data"]["score.yaml"])
        assert job["source"]["uri"].endswith("/images")
        assert job["output"]["uri"].endswith("/scores")
        return job.get("encode")

    assert encoders("minimal") == {"accelerator": "A10G", "num_workers": 8}
    assert encoders("minimal", "jobs.score.encode.accelerator=cpu") == {"accelerator": "cpu"}
    assert encoders("minimal", "jobs.score.encode.batch_size=64")["batch_size"] == 64
    assert not encoders("minimal", "jobs.process=null")


@NEEDS_HELM
def test_trainers_wait_for_pods_that_the_autoscaler_brings_and_only_for_those(render: Render) -> None:
    """A group begins with no pod: without can_grow the very first training would be refused."""

    def can_grow(*settings: str) -> list[bool]:
        jobs = one(render("minimal", *settings), "ConfigMap")["data"]
        configs = [yaml.safe_load(jobs[name]) for name in ("train.yaml", "train-online.yaml")]
        return [config["scaling"].get("can_grow", False) for config in configs]

    assert can_grow() == [True, True]
    assert can_grow(*STATIC) == [False, False]
    assert can_grow("jobs.train.scaling.can_grow=false") == [False, True]


@NEEDS_HELM
def test_an_hour_s_price_goes_by_the_instance_type_that_a_group_s_node_selector_names(render: Render) -> None:
    def prices(*settings: str) -> list[object]:
        jobs = one(render("minimal", *settings), "ConfigMap")["data"]
        return [yaml.safe_load(jobs[name]).get("prices") for name in ("train.yaml", "train-online.yaml")]

    kind = "nodeSelector.node\\.kubernetes\\.io/instance-type"
    both = {"trainer_hour": "p4de.24xlarge", "encoder_hour": "g5.2xlarge"}
    named = [f"groups.a100.{kind}=p4de.24xlarge", f"groups.a10g.{kind}=g5.2xlarge"]
    assert prices() == [None, None]
    assert prices(*named) == [{"trainer_hour": "p4de.24xlarge"}, both]
    assert prices(*named, "jobs.train.prices.trainer_hour=9")[0] == {"trainer_hour": 9}


@NEEDS_HELM
def test_downloads_use_all_groups_without_gpus_at_their_full_size_and_no_others(render: Render) -> None:
    """Pods with GPUs that downloads keep busy would never go; and of groups without a pod Ray knows nothing."""

    def values_of(example: str, *settings: str) -> tuple[object, ...]:
        config = yaml.safe_load(one(render(example, *settings), "ConfigMap")["data"]["download.yaml"])
        workers = config.get("workers", {})
        return config.get("concurrency"), workers.get("cpus"), workers.get("node_labels")

    on_cpu = {"ray.io/node-group": "in(cpu)"}
    assert values_of("minimal") == (70, 4, on_cpu), "10 pods, 7 workers of 4 CPUs on the 31 of each"
    more = ("groups.small.cpu=3", "groups.small.maxReplicas=5")
    assert values_of("minimal", *more) == (105, 3, {"ray.io/node-group": "in(cpu,small)"})
    cluster = one(render("minimal"), "RayCluster")["spec"]
    labels = {group["groupName"]: group["labels"].get("ray.io/node-group") for group in cluster["workerGroupSpecs"]}
    assert labels == {name: name for name in labels}, "or the autoscaler would not know which group to grow"
    assert values_of("minimal", "groups.cpu.cpu=700m") == (10, 1, on_cpu), "KubeRay tells Ray of whole CPUs, rounded up"
    assert values_of("minimal", *STATIC) == (None, 4, on_cpu)
    assert values_of("minimal", "groups.cpu=null") == (None, None, None), "only GPUs: wherever there are CPUs"
    assert values_of("no-gpu")[2] is None
    own = values_of("minimal", "jobs.download.workers.node_labels.zone=b", "jobs.download.concurrency=3")
    assert own == (3, None, {"zone": "b"})


@NEEDS_HELM
def test_groups_are_a_map_to_add_to_and_to_take_from(render: Render) -> None:
    rendered = render("minimal", "groups.cpu=null", "groups.l4.gpus=1", "groups.l4.accelerator=L4")
    groups = {group["groupName"]: group for group in one(rendered, "RayCluster")["spec"]["workerGroupSpecs"]}
    assert groups.keys() == {"a10g", "a100", "l4"}
    assert groups["l4"]["labels"]["ray.io/accelerator-type"] == "L4"
    (container,) = groups["l4"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert groups["l4"]["template"]["spec"]["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]


@NEEDS_HELM
def test_no_variable_is_set_twice_and_the_most_specific_value_wins(render: Render) -> None:
    """The API server takes no RayCluster with one name twice in a list."""
    everywhere = ("env.X=all", "env.NCCL_BUFFSIZE=8388608", "env.HOME=/data", "env.Y=all")
    templates = pods(one(render("efa", *everywhere, "groups.a100.env.X=own", "groups.a100.env.Y="), "RayCluster"))
    for name, template in templates.items():
        (container,) = template["spec"]["containers"]
        listed = [variable["name"] for variable in container["env"]]
        assert len(listed) == len(set(listed)), name
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        assert environment["X"] == ("own" if name == "a100" else "all")
        assert environment["Y"] == ("" if name == "a100" else "all")
        assert environment["NCCL_BUFFSIZE"] == "8388608"
        assert environment["HOME"] == "/data"
    (loud,) = pods(one(render("efa", "groups.a100.env.NCCL_DEBUG=INFO"), "RayCluster"))["a100"]["spec"]["containers"]
    assert [variable["value"] for variable in loud["env"] if variable["name"] == "NCCL_DEBUG"] == ["INFO"]


@NEEDS_HELM
def test_a_key_that_is_null_in_a_job_is_left_to_the_job_to_judge(render: Render) -> None:
    jobs = one(render("minimal", "jobs.train.optimizer=null"), "ConfigMap")["data"]
    assert yaml.safe_load(jobs["train.yaml"])["optimizer"] is None
    assert policies(render("minimal", "jobs.download.workers=null", "networkPolicy.clientNamespaces=null"))


def template_digests(manifests: list[Manifest]) -> dict[str, str]:
    return {
        name: template["metadata"]["annotations"]["sdp/template"]
        for name, template in pods(one(manifests, "RayCluster")).items()
    }


@NEEDS_HELM
@pytest.mark.parametrize(
    ("setting", "older"),
    [
        ("groups.a10g.minReplicas=1", set()),
        ("groups.a10g.maxReplicas=9", set()),
        ("groups.a10g.priority=5", set()),
        ("groups.a10g.idleTimeoutSeconds=9", set()),
        ("groups.extra.cpu=1", set()),
        ("groups.cpu=null", set()),
        ("autoscaling.idleTimeoutSeconds=9", set()),
        ("upgradeStrategy=Recreate", set()),
        ("jobs.train.max_steps=9", set()),
        ("groups.a10g.env.X=1", {"a10g"}),
        ("groups.a10g.labels.x=y", {"a10g"}),
        ("groups.a10g.rayStartParams.x=y", {"a10g"}),
        ("head.rayStartParams.x=y", {"head"}),
        ("labels.x=y", set()),
        ("groups.a10g.terminationGracePeriodSeconds=60", {"a10g"}),
        ("head.cpu=8", {"head"}),
        ("autoscaling.resources.limits.memory=2Gi", {"head"}),
        ("image.tag=new", {"head", "cpu", "a10g", "a100"}),
        ("podLabels.team=x", {"head", "cpu", "a10g", "a100"}),
        ("auth.mode=disabled", {"head", "cpu", "a10g", "a100"}),
        (",".join(STATIC), {"head", "cpu", "a10g", "a100"}),
    ],
)
def test_a_template_s_digest_changes_only_with_settings_that_need_new_pods(
    render: Render, setting: str, older: set[str]
) -> None:
    before, after = template_digests(render("minimal")), template_digests(render("minimal", setting))
    assert {name for name in before.keys() & after.keys() if before[name] != after[name]} == older
    assert len(set(before.values())) == len(before)


@NEEDS_HELM
def test_labels_that_go_by_the_chart_s_version_make_no_pod_an_older_one(
    tool: Callable[[str], Path], tmp_path: Path, render: Render
) -> None:
    newer = shutil.copytree(CHART, tmp_path / "chart")
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "9.9.9"}))
    command = [str(tool("helm")), "template", "sdp", str(newer), "-f", str(VALUES["minimal"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    manifests = [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]
    assert pods(one(manifests, "RayCluster"))["cpu"]["metadata"]["labels"]["helm.sh/chart"] == "sdp-cluster-9.9.9"
    assert template_digests(manifests) == template_digests(render("minimal"))


PROBE = """
apiVersion: v1
kind: Probe
{{- $pods := .Files.Get "pods.json" | fromJsonArray }}
older: {{ include "sdp-cluster.older" (dict "root" . "pods" $pods) | fromYaml | toJson }}
"""


@NEEDS_HELM
def test_an_upgrade_counts_the_pods_of_older_templates_by_group(
    tool: Callable[[str], Path], tmp_path: Path, render: Render
) -> None:
    """Check the template behind NOTES.txt with pods from a file, since there is no cluster to query."""
    templates = pods(one(render("minimal"), "RayCluster"))

    def pod(group: str, **about: Any) -> Manifest:
        made = templates[group]["metadata"]
        return {"metadata": {**made, "labels": {**made["labels"], "ray.io/cluster": "sdp"}, **about}}

    others = {"metadata": {"labels": {"ray.io/cluster": "blue", "sdp/group": "a10g"}}}
    older_pods = [
        *[pod("head"), pod("cpu"), pod("a10g"), pod("a10g"), pod("a100")],
        *[pod("cpu", annotations=None), pod("cpu", annotations={"sdp/template": "0"}, deletionTimestamp="now")],
        *[
            others,
            {"metadata": {"name": "nobody's"}},
            pod("cpu", labels={"ray.io/cluster": "sdp", "sdp/group": "gone"}),
        ],
    ]
    chart = shutil.copytree(CHART, tmp_path / "chart")
    (chart / "templates" / "probe.yaml").write_text(PROBE)
    (chart / "pods.json").write_text(json.dumps(older_pods))

    def older(*settings: str) -> dict[str, int]:
        arguments = [argument for setting in settings for argument in ("--set", setting)]
        command = [str(tool("helm")), "template", "sdp", str(chart), "-f", str(VALUES["minimal"]), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        counts: dict[str, int] = one([manifest for manifest in yaml.safe_load_all(done.stdout) if manifest], "Probe")[
            "older"
        ]
        return counts

    assert older() == {"cpu": 1}, "that which says nothing of its template"
    assert older("groups.a10g.env.X=1") == {"cpu": 1, "a10g": 2}
    without = ("groups.a10g=null", "jobs.process=null", "jobs.train-online=null", "jobs.generate=null")
    assert older(*without, "head.cpu=8") == {"cpu": 1, "head": 1}


@NEEDS_HELM
@pytest.mark.parametrize("release", ["sdp", "other"])
def test_the_notes_first_job_goes_to_the_cluster_of_this_release(
    tool: Callable[[str], Path], tmp_path: Path, release: str
) -> None:
    command = [str(tool("helm")), "install", release, str(CHART), "-n", "team", "--dry-run=client"]
    done = subprocess.run(
        [*command, "--set", "storage.uri=s3://b1/f,image.repository=r.example.com/ray"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "KUBECONFIG": str(tmp_path / "none")},
    )
    (line,) = [line.strip() for line in done.stdout.splitlines() if "manifests/download.yaml" in line]
    assert "jobs.download.source.uri is not set" in done.stdout
    assert "model is not set" in done.stdout
    assert "older template" not in done.stdout
    if release == "sdp":
        assert line == "kubectl -n team apply -f manifests/download.yaml"
        return
    edit, _, create = line.partition(" | ")
    assert create == "kubectl -n team apply -f -"
    edited = subprocess.run(["sh", "-c", edit], cwd=CHART.parents[1], capture_output=True, text=True, check=True)
    assert yaml.safe_load(edited.stdout)["spec"]["clusterSelector"] == {"ray.io/cluster": "other"}


@NEEDS_HELM
def test_trainers_share_the_cpus_of_their_pod_to_compile(render: Render) -> None:
    for cpu, threads in (("92", "11"), ("7500m", "1"), ("16.5", "2")):
        templates = pods(one(render("minimal", "groups.a100.gpus=8", f"groups.a100.cpu={cpu}"), "RayCluster"))
        (container,) = templates["a100"]["spec"]["containers"]
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == threads
        assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@NEEDS_HELM
def test_the_charts_own_labels_and_annotations_win(render: Render) -> None:
    """Pods are selected, and jobs placed, by them."""
    mine = (
        "podLabels.sdp/group=x",
        "podAnnotations.sdp/template=x",
        "groups.a10g.annotations.sdp/template=x",
        "groups.a10g.labels.ray\\.io/accelerator-type=T4",
        "labels.app\\.kubernetes\\.io/name=x",
    )
    cluster, usual = (one(render("minimal", *settings), "RayCluster") for settings in (mine, ()))
    assert cluster["metadata"] == usual["metadata"]
    (own,), (usual_group,) = (
        [group for group in each["spec"]["workerGroupSpecs"] if group["groupName"] == "a10g"]
        for each in (cluster, usual)
    )
    assert own["labels"] == usual_group["labels"]
    assert own["template"]["metadata"]["labels"]["sdp/group"] == "a10g"
    assert own["template"]["metadata"]["annotations"]["sdp/template"] != "x"


@NEEDS_HELM
def test_nothing_is_rendered_that_was_not_asked_for(render: Render) -> None:
    off = ("networkPolicy.enabled=false", "podDisruptionBudget=false", "serviceAccount.create=false")
    manifests = render("minimal", *off, *STATIC)
    assert sorted(manifest["kind"] for manifest in manifests) == ["ConfigMap", "Pod", "RayCluster"], (
        "the pod of helm test"
    )
    cluster = one(manifests, "RayCluster")["spec"]
    assert "autoscalerOptions" not in cluster
    assert not any("projected" in volume for volume in pods(one(manifests, "RayCluster"))["head"]["spec"]["volumes"])


@NEEDS_HELM
def test_the_autoscaler_alone_has_an_account_s_token(render: Render) -> None:
    cluster = one(render("minimal"), "RayCluster")
    (token,) = (volume for volume in pods(cluster)["head"]["spec"]["volumes"] if "projected" in volume)
    account = {"name": token["name"], "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}
    autoscaler = cluster["spec"]["autoscalerOptions"]
    assert account in autoscaler["volumeMounts"]
    head = pods(cluster)["head"]["spec"]
    assert head["shareProcessNamespace"] is True
    users = {spec["securityContext"]["runAsUser"] for spec in (autoscaler, head)}
    assert len(users) == 2, "or /proc/PID/root has it"
    (ray,) = head["containers"]
    shared = {mount["name"] for mount in autoscaler["volumeMounts"]} & {mount["name"] for mount in ray["volumeMounts"]}
    assert shared == set(), "what a job leaves in a home is run by the next Python of that home"
    for template in pods(cluster).values():
        (container,) = template["spec"]["containers"]
        assert not any(mount["name"] == token["name"] for mount in container["volumeMounts"])


@NEEDS_HELM
def test_gpus_may_be_parts_of_gpus(render: Render) -> None:
    mig = ("groups.a100.gpuResource=nvidia.com/mig-3g.20gb", "jobs.train.scaling.num_workers=1")
    (container,) = pods(one(render("minimal", *mig), "RayCluster"))["a100"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/mig-3g.20gb"] == 8
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


@NEEDS_HELM
def test_downloads_reach_no_private_network(render: Render) -> None:
    """Judged by Python's own list of what is private."""

    def egress(*settings: str) -> Manifest | None:
        named = [
            policy for policy in policies(render("minimal", *settings)) if policy["metadata"]["name"] == "sdp-downloads"
        ]
        return named[0]["spec"] if named else None

    spec = egress()
    assert spec is not None
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
    assert egress("networkPolicy.downloads.enabled=false") is None
    private = egress("jobs.download.fetch.allow_networks={10.1.0.0/16}")
    assert private is not None
    assert private["egress"][2]["to"][2:] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    for endpoint, namespace in {"http://storage:7070": "default", "http://minio.data.svc:9000": "data"}.items():
        own = egress(f"storage.endpoint={endpoint}")
        assert own is not None
        (storage,) = own["egress"][2]["to"]
        assert storage == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    public = egress("storage.endpoint=https://storage.example.com")
    assert public == spec
    further = egress("networkPolicy.downloads.egress[0].to[0].ipBlock.cidr=10.1.2.3/32")
    assert further is not None
    assert further["egress"][2] == {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}]}


def test_the_schema_knows_the_catalogue_s_accelerators() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    listed = schema["properties"]["groupDefaults"]["properties"]["accelerator"]["enum"]
    assert set(listed) == {"", *(name for gpu in GPUS.values() for name in gpu.accelerators)}


def test_the_schema_knows_the_jobs_keys() -> None:
    text = (CHART / "values.schema.json").read_text()
    assert text == chart_schema.current(text), "python -m scripts.chart_schema writes it"


@pytest.mark.parametrize(
    "settings",
    [
        ["jobs.process.encode.num_workers=4"],
        ["jobs.train.encode.num_workers.min=1", "jobs.train.encode.num_workers.max=4"],
        ["jobs.train.samples.prompts={a,b}"],
        ["jobs.train.source.also[0].uri=s3://b/more", "jobs.train.source.also[0].weight=2"],
        ["jobs.train.transform.node_labels.zone=a"],
        ["jobs.train.data=null"],
        ["jobs.train.strategy.kind=null"],
    ],
)
@NEEDS_HELM
def test_valid_job_settings_are_rendered(render: Render, settings: list[str]) -> None:
    assert "train.yaml" in one(render("minimal", *settings), "ConfigMap")["data"]


def test_the_readme_is_made_from_the_values() -> None:
    text = (CHART / "values.yaml").read_text()
    assert (CHART / "README.md").read_text() == chart_readme.page(text)
    documented = {path for path, _ in chart_readme.documented(text)}

    def undocumented(value: Any, path: str) -> Iterator[str]:
        """Neither itself nor all that is in it."""
        if path not in documented:
            inner = value.items() if isinstance(value, dict) and value else ()
            yield from (
                [at for key, nested in inner for at in undocumented(nested, f"{path}.{key}")] if inner else [path]
            )

    for name, value in yaml.safe_load(text).items():
        assert list(undocumented(value, name)) == []


@NEEDS_HELM
@pytest.mark.parametrize(
    "path", sorted(set(MANIFESTS.glob("*.yaml")) - {MANIFESTS / "kustomization.yaml"}), ids=lambda path: path.stem
)
def test_a_manifest_runs_its_job_under_the_supervisor_by_the_chart_s_configuration(path: Path, render: Render) -> None:
    job = yaml.safe_load(path.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["metadata"]["name"] == f"sdp-{path.stem}"
    spec = job["spec"]
    name = path.stem.removesuffix("-own-cluster")
    kind = re.split("-", name)[0]
    rest = " --set scaling.can_grow=false" if name != path.stem else ""  # its cluster has all pods that it ever has
    assert spec["entrypoint"] == f"python -m sdp.supervisor {kind} --config /etc/sdp/jobs/{name}.yaml{rest}"
    assert job["metadata"]["labels"]["sdp/job"] == name
    assert spec["submissionMode"] == "HTTPMode"
    asked = [f"jobs.{name}.limit=9"] if name in ("score", "evaluate", "dreambooth") else []  # no values of their own
    assert f"{name}.yaml" in one(render("minimal", *asked), "ConfigMap")["data"]
    assert f"kubectl apply -f manifests/{path.name}" in path.read_text()


def own_cluster(*, efa: bool) -> Manifest:
    """Return the RayJob with a cluster of its own, with the patch for EFA if wanted."""
    job: Manifest = json.loads(json.dumps(yaml.safe_load((MANIFESTS / "train-own-cluster.yaml").read_text())))
    for change in json.loads((MANIFESTS / "efa.json").read_text()) if efa else []:
        assert change["op"] == "add"
        *path, last = (part.replace("~1", "/") for part in change["path"].split("/")[1:])
        parent: Any = job
        for part in path:
            parent = parent[int(part) if isinstance(parent, list) else part]
        if last == "-":
            parent.append(change["value"])
        else:
            parent[last] = change["value"]
    return job


@NEEDS_HELM
@pytest.mark.parametrize("settings", [[], ["groups.a100.efaDevices=4"]], ids=["plain", "efa"])
def test_the_job_with_a_cluster_of_its_own_has_pods_like_the_chart_s(render: Render, settings: list[str]) -> None:
    spec = own_cluster(efa=bool(settings))["spec"]
    assert "clusterSelector" not in spec
    assert spec["backoffLimit"] > 0
    assert spec["shutdownAfterJobFinishes"] is True
    own = spec["rayClusterSpec"]
    chart = one(render("minimal", *settings), "RayCluster")["spec"]
    assert "enableInTreeAutoscaling" not in own, "Kueue takes none"
    assert own["authOptions"] == chart["authOptions"]
    assert own["rayVersion"] == chart["rayVersion"]
    templates = pods({"spec": chart})
    for name, template in pods({"spec": own}).items():
        actual, expected = template["spec"], templates[name]["spec"]
        (our_container,), (their_container,) = actual["containers"], expected["containers"]
        assert actual["securityContext"] == expected["securityContext"]
        assert actual["shareProcessNamespace"] == expected["shareProcessNamespace"]
        assert our_container["securityContext"] == their_container["securityContext"]
        assert our_container["resources"] == their_container["resources"] or name == "head"
        assert our_container["image"].startswith("REGISTRY/"), "which no cluster takes: whose it is has to be said"
        assert actual["serviceAccountName"] == "sdp"
        assert template["metadata"]["labels"] == {"sdp/jobs-of": "sdp"}, "what the chart's network policy goes by"
        assert our_container["name"] == their_container["name"]
        assert our_container["volumeMounts"] == their_container["volumeMounts"]
        network = [
            {v["name"]: v["value"] for v in c["env"] if v["name"].startswith(("FI_", "NCCL_", "PYTORCH_", "TORCH"))}
            for c in (our_container, their_container)
        ]
        assert network[0] == network[1]
        drains = {variable["name"] for variable in our_container["env"]} & {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"}
        assert bool(drains) == (name == "a100"), "nobody waits for a head"
        assert bool(our_container["lifecycle"]) == (name == "head")
        autoscaler = ("token", "autoscaler-tmp", "autoscaler-home")
        assert actual["volumes"] == [volume for volume in expected["volumes"] if volume["name"] not in autoscaler]
        assert actual["enableServiceLinks"] is expected["enableServiceLinks"]
        assert actual.get("nodeSelector") == expected.get("nodeSelector")
        assert actual.get("tolerations") == expected.get("tolerations")
    (group,) = own["workerGroupSpecs"]
    assert group["labels"]["ray.io/accelerator-type"] == "A100"
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    train = yaml.safe_load(one(render("minimal"), "ConfigMap")["data"]["train.yaml"])
    assert group["replicas"] * 8 == train["scaling"]["num_workers"]["max"], "neither idle GPUs nor trainers without one"
