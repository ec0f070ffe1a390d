"""The chart refuses values that cannot work: it names the path, in one sentence, before anything is applied."""

import json
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import chart_readme, chart_schema
from sdp.config import JOBS, draft
from sdp.config.base import keys
from tests.contract.sdp_cluster import CHART, VALUES, helm_template, parsed
from tests.programs import ended

NEEDS_HELM = pytest.mark.needs("helm")


def product(name: str) -> str:
    return f"groups.a100.podSpec.nodeSelector.nvidia\\.com/gpu\\.product={name}"


@NEEDS_HELM
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        # by the schema
        ("storage.uri=/data", "/storage/uri"),
        ("groups.a10g.maxReplica=3", "'maxReplica' not allowed"),
        ("groups.a10g.accelerator=A11", "/groups/a10g/accelerator"),
        ("groups.cpu.cpu=4Gi", "/groups/cpu/cpu"),
        ("head.memory=16", "/head/memory"),
        ("groupDefaults.shmSize=null", "missing property 'shmSize'"),
        ("groups.cpu.podSpec.nodeSelector.gpu=true", "/groups/cpu/podSpec/nodeSelector/gpu"),
        ("head.podSpec.tolerationz=x", "'tolerationz' not allowed"),
        ("groups.a10g.podSpec.terminationGracePeriodSeconds=60", "'terminationGracePeriodSeconds' not allowed"),
        ("groupDefaults.container.volumeMounts=x", "/groupDefaults/container/volumeMounts': got string, want null or"),
        ("imagePullSecrets[0].nme=x", "missing property 'name'"),
        ("storage.endpoint=minio:9000", "/storage/endpoint"),
        ("runAsUser=0", "/runAsUser"),
        ("auth.mode=none", "/auth/mode"),
        ("queue.manager=slurm queue.name=gpus", "/queue/manager"),
        ("groups.a100.terminationGracePeriodSeconds=29", "/terminationGracePeriodSeconds': minimum: got 29, want 30"),
        ("networkPolicy.downloads.except[0]=private", "/networkPolicy/downloads/except/0"),
        ("autoscaling.resources.limits.memory=1Gx", "/autoscaling/resources/limits/memory': '1Gx' does not match"),
        ("jobs.trian.max_steps=1", "'trian'"),
        (f"jobs.train-{'n' * 32}.max_steps=9", f"'train-{'n' * 32}'"),
        ("jobs.train-256.optimizer.lr=1", "'lr'"),
        ("jobs.train.strategy.kind=fdsp", "/strategy/kind"),
        ("jobs.process.encode.num_workers=lots", "/num_workers': got string, want null or integer or object"),
        ("jobs.train.data.resolution=100", "/data/resolution': multipleOf: got 100, want 8"),
        # by the templates
        ("storage.uri=", "storage.uri: required"),
        ("image.repository=", "image.repository: required: the repository in your registry"),
        ("groups.a10g.accelerator=", "groups.a10g.accelerator: required if gpus is not 0"),
        ("groups.cpu.accelerator=L4", "groups.cpu.gpus: expected 1 or more if accelerator is set (L4), got 0"),
        ("groups.cpu.efaDevices=1", "groups.cpu.gpus: expected 1 or more if efaDevices is set (1), got 0"),
        ("groups.a10g.minReplicas=41", "groups.a10g.minReplicas: expected at most maxReplicas (40), got 41"),
        ("groups.A_B.cpu=1", "groups.A_B: expected a name"),
        (f"nameOverride={'n' * 41}", "nameOverride: expected at most 40 lower-case letters"),
        ("groups=null", "groups: expected one or more, got none"),
        ("queue.manager=kueue", "queue: expected both manager and name, or neither"),
        ("jobs.generate.scaling.accelerator=L4", "jobs.generate.scaling.accelerator: expected one that the groups"),
        (
            "groups.a10g=null jobs.generate=null",
            "jobs.process.encode.accelerator: expected one that the groups have (A100), got A10G; add a group",
        ),
        (
            "autoscaling.enabled=false groups.a10g.replicas=8",
            "jobs.train.scaling.accelerator: expected one that the groups have (A10G), got A100",
        ),
        (
            "serviceAccount.create=false serviceAccount.downloadsAnnotations.role=x",
            "serviceAccount.annotations: expected none if serviceAccount.create is false",
        ),
        (
            "groups.a100.accelerator=H100",
            "groups.a100.podSpec.nodeSelector: expected nvidia.com/gpu.product to match accelerator H100 "
            "(NVIDIA-H100-80GB-HBM3, NVIDIA-H100-PCIe, NVIDIA-H100-NVL), got NVIDIA-A100-SXM4-80GB",
        ),
        ("storage.uri=gs://b1/f storage.endpoint=http://minio:9000", "storage.endpoint: expected none with gs://"),
    ],
)
def test_values_that_cannot_work_are_refused_with_their_path(
    tool: Callable[[str], Path], settings: str, says: str
) -> None:
    """With the schema's own words, or at the start of the one sentence that the templates have."""
    done = helm_template(tool("helm"), "minimal", *settings.split())
    assert done.returncode != 0, "rendered all the same"
    assert says in done.stderr
    if "execution error" in done.stderr:
        sentence = done.stderr.splitlines()[0].partition("): ")[2]
        assert sentence.startswith(says), sentence


@NEEDS_HELM
def test_all_jobs_that_lost_their_group_are_named_at_once(tool: Callable[[str], Path]) -> None:
    done = helm_template(tool("helm"), "minimal", "groups.a10g=null")
    jobs = ("generate.scaling", "process.encode", "train-online.encode")
    assert [f"jobs.{job}.accelerator: expected one that" in done.stderr for job in jobs] == [True] * 3


@NEEDS_HELM
@pytest.mark.parametrize(
    "settings",
    [
        "groups.a10g=null jobs.process=null jobs.train-online=null jobs.generate=null",
        "jobs.process.encode.accelerator=null jobs.process.encode.num_workers=400",
        "jobs.train-2.encode.accelerator=L4",  # offline: there are no encoders
        product("NVIDIA-A100-SXM4-80GB-MIG-7g.80gb"),
        product("NVIDIA-A100-SXM-64GB"),  # which we do not know
        "storage.uri=gs://b1/f",
        "podAnnotations=null podLabels=null env=null volumes=null jobs=null networkPolicy.clientNamespaces=null",
        "jobs.process.encode=null jobs.train.data=null jobs.train.optimizer=null jobs.download.workers=null",
        "groups.a10g.podSpec=null groups.a10g.container=null head.podSpec.affinity=null",
        "volumes[0].name=data groups.cpu.container.volumeMounts[0].name=data",
        f"jobs.train-{'n' * 31}.scaling.num_workers=1",
        "jobs.train.encode.num_workers.min=1 jobs.train.encode.num_workers.max=4 jobs.train.samples.prompts={a,b}",
        "jobs.train.source.also[0].uri=s3://b/more jobs.train.source.also[0].weight=2 jobs.train.strategy.kind=null",
    ],
)
def test_values_that_can_work_are_not_refused(tool: Callable[[str], Path], settings: str) -> None:
    done = helm_template(tool("helm"), "minimal", *settings.split())
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
    done = helm_template(tool("helm"), "minimal", under=tmp_path / "all.yaml")
    assert done.returncode == 0, done.stderr


@NEEDS_HELM
def test_the_exporters_image_must_be_the_users_own(tool: Callable[[str], Path]) -> None:
    """The project has no image of its own, neither for the exporter nor for the cluster."""
    done = ended([tool("helm"), "template", "sdp", CHART.parent / "sdp-monitoring"])
    assert "): exporter.image.repository: required if exporter.enabled is true" in done.stderr


def test_the_schema_and_the_products_are_made_from_the_code() -> None:
    """GPU feature discovery labels an H100 so."""
    schema, products = (CHART / "values.schema.json").read_text(), (CHART / "products.json").read_text()
    assert schema == chart_schema.current(schema), "python -m scripts.chart_schema writes it"
    assert products == chart_schema.products(), "python -m scripts.chart_schema writes it"
    assert json.loads(products)["H100"][0] == "NVIDIA-H100-80GB-HBM3"


@pytest.mark.parametrize("example", list(VALUES))
def test_every_values_file_is_yaml_without_a_key_that_comes_twice(example: str) -> None:
    assert parsed(VALUES[example].read_text())


@pytest.mark.parametrize("chart", chart_readme.HEADS)
def test_the_readme_is_made_from_the_values(chart: str) -> None:
    folder = CHART.parent / chart
    text = (folder / "values.yaml").read_text()
    page = chart_readme.page(text, chart_readme.HEADS[chart])
    assert (folder / "README.md").read_text() == page, "python -m scripts.chart_readme writes it"
    documented = {path for path, _ in chart_readme.documented(text)}

    def undocumented(value: Any, path: str) -> Iterator[str]:
        """Yield paths of which neither they nor all that is in them is documented."""
        if path not in documented:
            if not isinstance(value, dict) or not value:
                yield path
            else:
                for key, nested in value.items():
                    yield from undocumented(nested, f"{path}.{key}")

    assert [path for name, value in yaml.safe_load(text).items() for path in undocumented(value, name)] == []


def test_there_is_a_values_file_that_says_everything() -> None:
    full = yaml.safe_load(VALUES["full"].read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def missing(target: Any, source: Any, path: str = "") -> Iterator[str]:
        for key, value in source.items():
            if key not in target:
                yield f"{path}{key}"
            elif isinstance(value, dict) and value and path + key not in ("groups", "jobs"):
                yield from missing(target[key], value, f"{path}{key}.")

    assert list(missing(full, values)) == []
    assert set(full["groups"]["spelled-out"]) == set(values["groupDefaults"])
