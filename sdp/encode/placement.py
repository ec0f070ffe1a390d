"""The resources that the pipeline's transforms and encoders reserve, from the sections `encode` and `transform`."""

from collections.abc import Mapping
from dataclasses import dataclass

from sdp.config.process import EncoderConfig, TransformWorkersConfig
from sdp.ray import cluster
from sdp.ray.waiting import Place


@dataclass(frozen=True, slots=True)
class Placement:
    """The number of workers of each stage, and what each one reserves."""

    least: int
    """Encoders."""
    most: int
    accelerator: str | None
    gpus: float
    """GPUs of one encoder."""
    encoder_cpus: float
    transform_cpus: float
    start_timeout_s: float
    labels: Mapping[str, str]
    """Labels of the nodes for transforms."""
    concurrency: int | None
    """The most transforms at once; None where they reserve CPUs."""
    output: str
    """URI of the job's output: the `run` label of its metrics."""

    @property
    def encoders(self) -> Place:
        """The places of the fewest encoders."""
        bundle = {name: amount for name, amount in (("GPU", self.gpus), ("CPU", self.encoder_cpus)) if amount}
        labels = {cluster.ACCELERATOR_LABEL: self.accelerator} if self.accelerator else {}
        return Place("encode", bundle, self.least, self.least, labels)

    @property
    def transforms(self) -> Place:
        """The place of one transform."""
        return Place("encode", {"CPU": self.transform_cpus} if self.transform_cpus else {}, 1, 1, self.labels)

    @property
    def places(self) -> list[Place]:
        """The places that must exist before a job begins."""
        return [place for place in (self.encoders, self.transforms) if place.bundle]


def plan_placement(
    encode: EncoderConfig,
    transform: TransformWorkersConfig,
    output: str,
    resources: Mapping[str, float],
    *,
    beside: int = 0,
    grows: bool = False,
) -> Placement:
    """Return the placement of both stages on a cluster with these resources; `beside` CPUs belong to other workers.

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
        accelerator=encode.gpu_type,
        gpus=gpus,
        encoder_cpus=encoder_cpus,
        transform_cpus=transform_cpus,
        start_timeout_s=encode.wait_s,
        labels=transform.node_labels,
        concurrency=None if transform_cpus else max(2, cpus),
        output=output,
    )
