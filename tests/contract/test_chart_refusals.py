"""The chart refuses values that cannot work: it names the path, in one sentence, before anything is applied."""

import json
import subprocess
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from scripts import chart_schema
from sdp.config import JOBS, draft
from sdp.config.base import keys
from sdp.hardware import GPUS
from tests.contract.sdp_cluster import CHART, VALUES, helm_template, one, parsed, pods

NEEDS_HELM = pytest.mark.needs("helm")
STATIC = "autoscaling.enabled=false"


@pytest.fixture
def refused(tool: Callable[[str], Path]) -> Callable[..., str]:
    """Return helm's error for an example with settings that cannot work."""

    def run(example: str, *settings: str) -> str:
        done = helm_template(tool("helm"), example, *settings)
        assert done.returncode != 0, "rendered all the same"
        return done.stderr

    return run


@NEEDS_HELM
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["storage.uri="], "storage.uri: required"),
        (["monitoring.grafana.url=grafana:80"], "/monitoring/grafana/url"),
        (["storage.uri=/data"], "/storage/uri"),
        (["groups.a10g.maxReplica=3"], "'maxReplica' not allowed"),
        (["imge.tag=x"], "'imge' not allowed"),
        (["groups.a10g.accelerator=A11"], "/groups/a10g/accelerator"),
        (["groups.a10g.accelerator="], "groups.a10g.accelerator: required if gpus is not 0"),
        (["groups.cpu.accelerator=L4"], "groups.cpu.gpus: expected 1 or more"),
        (["groups.a10g.minReplicas=41"], "groups.a10g.minReplicas: expected at most maxReplicas (40), got 41"),
        (["groups.cpu.efaDevices=1"], "groups.cpu.efaDevices: expected 0 in a group without GPUs, got 1"),
        (["groups.A_B.cpu=1"], "groups.A_B: expected a name"),
        (["nameOverride=" + "n" * 41], "nameOverride: expected at most 40 characters"),
        (["nameOverride=sdp.prod"], "nameOverride: expected lower-case letters"),
        (["nameOverride=1sdp"], "nameOverride: expected lower-case letters"),
        (["groups=null"], "groups: expected one or more, got none"),
        (["groups.cpu=null", "groups.a10g=null", "groups.a100=null"], "groups: expected one or more, got none"),
        (["groups.cpu.cpu=0"], "/groups/cpu/cpu"),
        (["groups.cpu.cpu=4Gi"], "/groups/cpu/cpu"),
        (["groups.cpu.cpu=0m"], "/groups/cpu/cpu"),
        (["head.memory=16"], "/head/memory"),
        (["head.memory=null"], "missing property 'memory'"),
        (["groupDefaults.shmSize=null"], "missing property 'shmSize'"),
        (["head=null"], "missing property 'head'"),
        (["groups.a100.hugepages2Mi=5GB"], "/groups/a100/hugepages2Mi"),
        (["groups.cpu.nodeSelector.gpu=true"], "/groups/cpu/nodeSelector/gpu"),
        (["podLabels.team=7"], "/podLabels/team"),
        (["imagePullSecrets[0].nme=x"], "missing property 'name'"),
        (["storage.endpoint=minio:9000"], "/storage/endpoint"),
        (
            ["faultTolerance.redisAddress=redis:6379", "faultTolerance.passwordSecret.name=redis"],
            "'faultTolerance' not allowed",
        ),
        (["runAsUser=0"], "/runAsUser"),
        (["auth.mode=none"], "/auth/mode"),
        (["head.memory=lots"], "/head/memory"),
        (["jobs.trian.max_steps=1"], "'trian'"),
        (["jobs.train-.max_steps=1"], "'train-'"),
        (["jobs.train.max_step=1"], "'max_step'"),
        (["jobs.train-256.optimizer.lr=1"], "'lr'"),
        (["jobs.train.strategy.kind=fdsp"], "/strategy/kind"),
        (["jobs.train.optimizer=adamw"], "/jobs/train/optimizer"),
        (["jobs.process.encode.num_workers.mx=4"], "'mx'"),
        (["jobs.process.encode.num_workers=lots"], "/num_workers': got string, want null or integer or object"),
        (["jobs.train.max_steps=lots"], "/jobs/train/max_steps': got string, want null or integer"),
        (["jobs.train.data.batch_size=-5"], "/data/batch_size': minimum: got -5, want 1"),
        (["jobs.train.data.resolution=100"], "/data/resolution': multipleOf: got 100, want 8"),
        (["jobs.train.strategy.compile=maybe"], "/strategy/compile': got string, want null or boolean"),
        (["jobs.train.samples.prompts={a,}"], "/samples/prompts/1': minLength: got 0, want 1"),
        (["autoscaling.resources.limits.memory=1Gx"], "/autoscaling/resources/limits/memory': '1Gx' does not match"),
        (["autoscaling.resources.limit.memory=1Gi"], "'limit' not allowed"),
        (["upgradeStrategy=Rolling"], "/upgradeStrategy"),
        (["image.repository="], "image.repository: required: the repository in your registry"),
        (
            ["groups.a10g=null", "jobs.generate=null"],
            "jobs.process.encode.accelerator: expected one that the groups have (A100), got A10G; add a group",
        ),
        (
            [STATIC, "groups.a10g.replicas=8"],
            "jobs.train.scaling.accelerator: expected one that the groups have (A10G), got A100",
        ),
        (["jobs.generate.scaling.accelerator=L4"], "jobs.generate.scaling.accelerator: expected one"),
        (
            ["serviceAccount.create=false", "serviceAccount.annotations.role=x"],
            "serviceAccount.annotations: expected none if serviceAccount.create is false",
        ),
        (["networkPolicy.downloads.except[0]=private"], "/networkPolicy/downloads/except/0"),
        (["groups.head.cpu=1"], "groups.head: expected another name"),
        (
            ["groups.a100.accelerator=H100"],
            "groups.a100.nodeSelector: expected nvidia.com/gpu.product to match accelerator H100 "
            "(NVIDIA-H100-80GB-HBM3, NVIDIA-H100-PCIe, NVIDIA-H100-NVL), got NVIDIA-A100-SXM4-80GB",
        ),
        (
            ["groups.a100.accelerator=A100-40G"],
            "groups.a100.nodeSelector: expected nvidia.com/gpu.product to match accelerator A100-40G",
        ),
        (
            ["storage.uri=gs://b1/f", "storage.endpoint=http://minio:9000"],
            "storage.endpoint: expected none with gs://",
        ),
        (
            ["jobs.train-" + "n" * 32 + ".max_steps=9"],
            f"jobs.train-{'n' * 32}: expected at most 37 characters, because KubeRay allows 47",
        ),
        (["groups.a100.terminationGracePeriodSeconds=29"], "/terminationGracePeriodSeconds': minimum: got 29, want 30"),
    ],
)
def test_values_that_cannot_work_are_refused_with_their_path(
    refused: Callable[..., str], settings: list[str], says: str
) -> None:
    """With the schema's own words, or at the start of the one sentence that the templates have."""
    message = refused("minimal", *settings)
    assert says in message
    if "execution error" in message:
        sentence = message.splitlines()[0].partition("): ")[2]
        assert sentence.startswith(says), sentence


@NEEDS_HELM
@pytest.mark.parametrize(
    "settings",
    [
        ["groups.a10g=null", "jobs.process=null", "jobs.train-online=null", "jobs.generate=null"],
        ["groups.a10g.maxReplicas=8"],
        ["jobs.process.encode.accelerator=null", "jobs.process.encode.num_workers=400"],
        ["jobs.train-2.encode.accelerator=L4"],  # offline: there are no encoders
        ["groups.a100.nodeSelector.nvidia\\.com/gpu\\.product=NVIDIA-A100-SXM4-80GB-MIG-7g.80gb"],
        ["groups.a100.nodeSelector.nvidia\\.com/gpu\\.product=NVIDIA-A100-SXM-64GB"],  # which we do not know
        ["groups.cpu.hugepages2Mi=4Mi"],
        ["storage.uri=gs://b1/f"],
        ["podAnnotations=null", "podLabels=null", "env=null", "volumes=null", "jobs=null"],
        ["jobs.process.encode=null", "jobs.train.data=null", "groups.a10g.nodeSelector=null"],
        ["volumes[0].name=data", "groups.cpu.volumeMounts[0].name=data", "groups.cpu.volumeMounts[0].mountPath=/data"],
        ["groups.a10g.labels.ray\\.io/market-type=spot", "podAnnotations.ray\\.io/x=y"],
        ["jobs.train-" + "n" * 31 + ".scaling.num_workers=1"],
    ],
)
def test_values_that_can_work_are_not_refused(tool: Callable[[str], Path], settings: list[str]) -> None:
    done = helm_template(tool("helm"), "minimal", *settings)
    assert done.returncode == 0, done.stderr


@NEEDS_HELM
def test_each_job_s_defaults_and_examples_are_not_refused(tool: Callable[[str], Path], tmp_path: Path) -> None:
    jobs: dict[str, Any] = {}
    for name, model in JOBS.items():
        jobs[name] = draft(name, None).config.model_dump(mode="json")
        for key in keys(model):
            *sections, last = key.path.split(".")
            if key.example is not None:
                reduce(getitem, sections, jobs[name])[last] = key.example
            if last == "accelerator":
                reduce(getitem, sections, jobs[name])[last] = "A100"
    (tmp_path / "all.yaml").write_text(json.dumps({"jobs": jobs}))
    done = helm_template(tool("helm"), "minimal", values=tmp_path / "all.yaml")
    assert done.returncode == 0, done.stderr


@NEEDS_HELM
def test_the_exporters_image_must_be_the_users_own(tool: Callable[[str], Path]) -> None:
    """The project has no image of its own, neither for the exporter nor for the cluster."""
    command = [str(tool("helm")), "template", "sdp", str(CHART.parent / "sdp-monitoring")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "): exporter.image.repository: required if exporter.enabled is true" in done.stderr
    off = [*command, "--set", "exporter.enabled=false"]
    assert subprocess.run(off, capture_output=True, text=True, timeout=60, check=False).returncode == 0


def test_the_products_are_the_catalogue_s() -> None:
    text = (CHART / "products.json").read_text()
    assert text == chart_schema.products(), "python -m scripts.chart_schema writes it"
    assert json.loads(text)["H100"][0] == "NVIDIA-H100-80GB-HBM3", "as GPU feature discovery has it"
    assert json.loads(text).keys() == {name for gpu in GPUS.values() for name in gpu.accelerators}


@NEEDS_HELM
def test_a_group_goes_to_nodes_with_its_own_gpus_unless_it_says_where_it_goes(tool: Callable[[str], Path]) -> None:
    def required(example: str, group: str, *settings: str) -> object:
        done = helm_template(tool("helm"), example, *settings)
        assert done.returncode == 0, done.stderr
        spec = pods(one(parsed(done.stdout), "RayCluster"))[group]["spec"]
        terms = spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
        return terms and terms["nodeSelectorTerms"]

    h100 = ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"]
    among = [{"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": h100}]}]
    assert required("h100", "h100") == among
    assert required("h100", "h100", "groups.h100.nodeSelector.karpenter\\.sh/capacity-type=spot") == among
    assert required("h100", "h100", "groups.h100.nodeSelector.node\\.kubernetes\\.io/instance-type=p5") is None
    assert required("h100", "h100", "groups.h100.affinity.podAffinity.a=1") is None
    assert required("h100", "a10g") is None, "which names its product itself"
    assert required("gcs", "l4") is None
    (west,) = {str(required("zones", name)) for name in ("a10g-a", "a10g-b")}
    assert "NVIDIA-A10G" in west


@pytest.mark.parametrize("example", list(VALUES))
def test_every_values_file_is_yaml_without_a_key_that_comes_twice(example: str) -> None:
    assert parsed(VALUES[example].read_text())
