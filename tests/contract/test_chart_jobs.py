"""The chart's configurations of jobs: connected by storage.uri, and placed on its groups."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdp.config import draft, parse
from sdp.config.shared import Range
from tests.contract.sdp_cluster import CHART, VALUES, Manifest, Render, one
from tests.contract.test_kube_docs import values_of

pytestmark = pytest.mark.needs("helm")
STATIC = "autoscaling.enabled=false groups.cpu.replicas=1 groups.a10g.replicas=8 groups.a100.replicas=4"
"""A cluster that does not grow, with what the chart's jobs ask for."""
ON_CPU = {"ray.io/node-group": "in(cpu)"}
OF_IMAGES = {"encode": {"accelerator": "A10G", "num_workers": 8}, "source.uri": "s3://my-bucket/sd2/images"}
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))


def check_jobs(manifests: list[Manifest], folder: Path) -> None:
    jobs = one(manifests, "ConfigMap")["data"]
    assert {"download.yaml", "process.yaml", "train.yaml", "generate.yaml"} <= jobs.keys()
    for name, text in jobs.items():
        (folder / name).write_text(text)
        kind = re.split(r"[.-]", name)[0]
        missing = set(draft(kind, str(folder / name), []).missing)
        assert missing <= {"prompts", "model.source", *(["source.uri"] if kind in ("download", "generate") else [])}


@pytest.mark.parametrize("example", VALUES)
def test_each_job_s_configuration_is_one_that_the_job_takes(render: Render, example: str, tmp_path: Path) -> None:
    check_jobs(render(example), tmp_path)


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_example_can_be_laid_over_the_values_of_the_readme(render: Render, example: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(values_of("README"))
    check_jobs(render(example, under=tmp_path / "values.yaml"), tmp_path)


def test_training_by_default_is_the_recipe_of_stable_diffusion_2(render: Render) -> None:
    """Samples of each phase as MosaicML and Anyscale give them; what a GPU takes at once as the latter does."""
    for job in ("train", "train-online"):
        config = parse("train", yaml.safe_load(one(render("efa"), "ConfigMap")["data"][f"{job}.yaml"]))
        second = config.phase_2
        assert (config.data.global_batch_size or 0) * (config.max_steps or 0) == 1_126_400_000
        assert (second.global_batch_size or 0) * (second.max_steps or 0) == 1_740_800_000
        assert (config.data.resolution, config.data.batch_size) == (256, 128)
        assert (second.resolution, second.batch_size) == (512, 32)
        assert (config.strategy.kind, config.strategy.compile) == ("fsdp", True)
        assert config.scaling.num_workers == Range(min=24, max=32), "a node of eight may be lost"


@pytest.mark.parametrize(
    ("job", "settings", "expected"),
    [
        # Trainers take all GPUs of their accelerator, or a pod's fewer, and wait only for pods that can come.
        ("train-online", "groups.a100.maxReplicas=2", {"scaling.num_workers": {"min": 8, "max": 16}}),
        ("train-online", "groups.a100.maxReplicas=1", {"scaling.num_workers": 8, "scaling.can_grow": True}),
        ("train-online", "jobs.train-online.scaling.num_workers=3", {"scaling.num_workers": 3}),
        ("train-online", "jobs.train-online.encode.accelerator=A100", {"scaling.num_workers": {"min": 16, "max": 24}}),
        ("train-online", "groups.b.gpus=4 groups.b.accelerator=A100", {"scaling.num_workers": {"min": 28, "max": 36}}),
        ("train", STATIC, {"scaling.can_grow": None}),
        # Encoders take what their accelerator's groups have, up to eight.
        ("process", "groups.a10g.maxReplicas=3", {"encode.num_workers": 3}),
        ("process", "jobs.process.encode.num_workers=4", {"encode.num_workers": 4}),
        ("train-online", "groups.a10g.maxReplicas=3", {"encode.num_workers": 3, "scaling.num_workers.max": 32}),
        ("score", "jobs.score.limit=9 groups.a10g.maxReplicas=3", {"encode.num_workers": 3}),
        ("train", "jobs.train.scaling.can_grow=false", {"scaling.can_grow": False}),
        # A cluster without pods shows no GPUs: evaluators run where generators do, score's encoders where process's do.
        ("evaluate", "jobs.evaluate.limit=9", {"scaling": {"accelerator": "A10G"}}),
        ("evaluate", "jobs.evaluate.scaling.accelerator=A100", {"scaling": {"accelerator": "A100"}}),
        ("evaluate", "jobs.generate=null jobs.evaluate.scaling.accelerator=gpu", {"scaling": {"accelerator": "gpu"}}),
        ("score", "jobs.score.limit=9", OF_IMAGES | {"output.uri": "s3://my-bucket/sd2/scores"}),
        ("caption", "jobs.caption.captions.model=a/b", OF_IMAGES | {"output.uri": "s3://my-bucket/sd2/captions"}),
        ("score", "jobs.score.encode.accelerator=cpu", {"encode": {"accelerator": "cpu"}}),
        ("score", "jobs.score.limit=9 jobs.process=null", {"encode": {}}),
        # Downloads use the groups without GPUs at their full size: GPUs that they keep busy would never go.
        ("download", "", {"concurrency": 70, "workers": {"cpus": 4, "node_labels": ON_CPU}}),
        (
            "download",
            "groups.small.cpu=3 groups.small.maxReplicas=5",
            {"concurrency": 105, "workers": {"cpus": 3, "node_labels": {"ray.io/node-group": "in(cpu,small)"}}},
        ),
        ("download", "groups.cpu.cpu=700m", {"concurrency": 10, "workers.cpus": 1}),  # KubeRay rounds up for Ray
        ("download", STATIC, {"concurrency": 7, "workers": {"cpus": 4, "node_labels": ON_CPU}}),
        ("download", "groups.cpu=null", {"concurrency": None, "workers": None}),
        (
            "download",
            "jobs.download.workers.node_labels.zone=b jobs.download.concurrency=3",
            {"concurrency": 3, "workers": {"node_labels": {"zone": "b"}}},
        ),
    ],
)
def test_a_job_is_placed_and_sized_by_the_groups(
    render: Render, job: str, settings: str, expected: Mapping[str, Any]
) -> None:
    config = yaml.safe_load(one(render("minimal", *settings.split()), "ConfigMap")["data"][f"{job}.yaml"])

    def value(path: str) -> Any:
        here = config
        for key in path.split("."):
            here = (here or {}).get(key)
        return here

    assert {path: value(path) for path in expected} == expected
