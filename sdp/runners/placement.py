"""The number of workers of a job's stages on a cluster, and the resources that each reserves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sdp.config import WorkersConfig
from sdp.config.process import EncoderConfig, TransformWorkersConfig
from sdp.ray import cluster
from sdp.ray.waiting import Place, place_of, wait_for
from sdp.runners.stages import TRIES

_CPU = 0.9
"""The share of a CPU that a worker without a GPU reserves; the rest is for a task that writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The number of workers of each stage, and what each one reserves."""

    job: str = "encode"
    """The name that begins the lines about a run."""
    section: str = "encode"
    """The section of the configuration that sets the workers."""
    role: str = "encoder"
    """One worker's name in lines and metrics."""
    output: str = ""
    """URI of the job's output: the `run` label of its metrics."""
    least: int = 1
    """Workers."""
    most: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes for workers, by Ray's selectors."""
    gpus: float = 0.0
    """GPUs of one worker."""
    cpus: float = 1.0
    at_once: int = 2
    """Pieces at a worker: one is finished while the next is worked on."""
    wait_s: float = 1800.0
    """The limit on waiting for places."""
    tries: int = TRIES
    """Deaths of workers after which a piece is not tried again."""
    prepare_labels: Mapping[str, str] = field(default_factory=dict)
    prepare_cpus: float = 1.0
    prepare_concurrency: int | None = None
    """The most preparations at once; None where they reserve CPUs."""

    @property
    def workers(self) -> Place:
        """The places of the fewest workers, in whole GPUs and CPUs."""
        bundle = {name: math.ceil(amount) for name, amount in (("GPU", self.gpus), ("CPU", self.cpus)) if amount}
        return Place(self.section, bundle, self.least, self.least, self.labels)

    @property
    def preparation(self) -> Place:
        """The place of one preparation."""
        bundle = {"CPU": self.prepare_cpus} if self.prepare_cpus else {}
        return Place(self.section, bundle, 1, 1, self.prepare_labels)

    def places(self, *, prepares: bool) -> list[Place]:
        """Return the places that must exist before a job begins."""
        places = [self.workers, self.preparation] if prepares else [self.workers]
        return [place for place in places if place.bundle]


def join(job: str, role: str, workers: WorkersConfig, output: str, items: int) -> Placement:
    """Join the cluster and wait there for the fewest workers of a job; return the placement of all of them.

    Their section is `scaling`, and there are no more of them than items. What could never start on a local Ray is
    refused.
    """
    cluster.connect()
    place, most = place_of("scaling", workers), max(1, items)
    placement = Placement(
        job=job, section="scaling", role=role, output=output,
        least=min(most, place.least), most=min(most, place.most), at_once=1, wait_s=workers.wait_s,
        labels=place.labels, gpus=place.bundle.get("GPU", 0.0), cpus=_CPU if "CPU" in place.bundle else 0.0,
    )  # fmt: skip
    wait_for(job, [placement.workers], workers.wait_s)
    return placement


def plan_placement(
    encode: EncoderConfig,
    transform: TransformWorkersConfig,
    output: str,
    resources: Mapping[str, float],
    *,
    beside: int = 0,
    grows: bool = False,
) -> Placement:
    """Return the placement of encoders on a cluster with these resources; `beside` CPUs belong to other workers.

    Where there are too few CPUs to reserve one for each worker, encoders and transforms reserve none and share. On one
    machine, encoders reserve CPUs only if they leave more to transforms. On a cluster that adds nodes on demand all
    reserve: what reserves nothing adds no node, and runs on the head.
    """
    cpus = int(resources.get("CPU", 0)) - beside
    grows = grows or not resources.get("CPU")
    gpus = 1.0 if cluster.on_gpus("encode", encode) else 0.0
    encoder_cpus = 1.0 if gpus or grows or cpus > encode.least * (2 if cluster.is_local() else 1) else 0.0
    transform_cpus = 1.0 if grows or not beside or cpus > encode.least * encoder_cpus else 0.0
    return Placement(
        least=encode.least,
        most=encode.most,
        labels=cluster.accelerator_labels(encode.gpu_type),
        gpus=gpus,
        cpus=encoder_cpus,
        wait_s=encode.wait_s,
        prepare_cpus=transform_cpus,
        prepare_labels=transform.node_labels,
        prepare_concurrency=None if transform_cpus else max(2, cpus),
        output=output,
    )
