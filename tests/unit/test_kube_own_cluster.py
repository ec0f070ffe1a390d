"""The groups of a job's own cluster, and how many pods they have."""

import pytest

from sdp.config import draft
from sdp.errors import UserError
from sdp.kube.own_cluster import with_own_cluster
from sdp.kube.rayjob import make_rayjob
from sdp.kube.submit import Submission
from tests.kube_server import Object, group, raycluster

ONLINE = ("data.mode=online", "encode.accelerator=A10G", "encode.num_workers=3")


def groups_of(job: str, *settings: str) -> dict[str, int]:
    """Return the pods by group of a job on a cluster like one with groups of these sizes."""
    slices = group("slices", 0, "A30", 2)
    slices["template"]["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/mig-1g.6gb": 4}
    sizes = (("cpu", 0, "", 10), ("a100", 8, "A100", 4), ("a10g", 1, "A10G", 40), ("amd", 0, "MI300", 1))
    release: Object = raycluster(*(group(name, gpus, label, most) for name, gpus, label, most in sizes), slices)
    config = draft(job, None, settings).config
    made = with_own_cluster(make_rayjob(Submission(job=job)), {**release, "metadata": {"name": "sdp"}}, config)
    return {part["groupName"]: part["replicas"] for part in made["spec"]["rayClusterSpec"]["workerGroupSpecs"]}


@pytest.mark.parametrize(
    ("job", "settings", "expected"),
    [
        ("train", ("scaling.accelerator=A100", "scaling.num_workers=9"), {"a100": 2}),
        ("train", ("scaling.accelerator=A100", "scaling.num_workers={min: 8, max: 99}"), {"a100": 4}),
        ("train", ("scaling.accelerator=A100", *ONLINE), {"a100": 1, "a10g": 3}),
        ("train", ("scaling.accelerator=A10G", "scaling.num_workers=2", *ONLINE), {"a10g": 5}),  # 2 + 3
        ("train", ("scaling.accelerator=A30", "scaling.num_workers=5"), {"slices": 2}),
        ("train", ("scaling.accelerator=cpu",), {"cpu": 10}),
        ("generate", ("scaling.accelerator=gpu", "scaling.num_workers=2"), {"a100": 1}),
        ("process", ("encode.accelerator=A10G", "encode.num_workers={min: 1, max: 6}"), {"a10g": 6}),
        ("process", ("encode.accelerator=A10G", "transform.node_labels={zone: b}"), {"cpu": 10, "a10g": 1}),
        ("download", (), {"cpu": 10}),
    ],
)
def test_a_job_s_cluster_has_the_groups_that_it_works_on(
    job: str, settings: tuple[str, ...], expected: dict[str, int]
) -> None:
    assert groups_of(job, *settings) == expected


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("scaling.accelerator=A100", "scaling.num_workers=33"), "needs 33 A100 GPUs to start, and the groups grow to"),
        (("scaling.accelerator=MI300",), "needs 1 MI300 GPUs to start, and the groups grow to 0"),  # not NVIDIA's
        (("scaling.accelerator=H100",), "needs 1 H100 GPUs to start, and the groups grow to 0"),
        ((), "names no workers that a group has; set scaling.accelerator"),
    ],
)
def test_a_job_for_which_the_groups_do_not_suffice_is_refused(settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=f"--own-cluster: the job {says}"):
        groups_of("train", *settings)
