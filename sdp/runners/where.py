"""The choice between this process and Ray for a job's stages."""

from sdp.config import WorkersConfig
from sdp.console import say
from sdp.ray import cluster
from sdp.runners.here import Here
from sdp.runners.runner import Runner
from sdp.runners.stages import Stages


def works_here(workers: WorkersConfig, *, isolate: bool) -> bool:
    """Return whether this process does the work; to `isolate` a row that kills its process, Ray does."""
    needless = cluster.is_needless(workers)
    if needless and isolate:
        say("the run before ended without a word, so Ray runs this one, and isolates a row that kills its worker")
    return needless and not isolate


def runner_for(
    stages: Stages, job: str, role: str, workers: WorkersConfig, output: str, items: int, *, isolate: bool
) -> Runner:
    """Return the runner of stages without preparation, for a number of items; on a cluster, wait for its workers."""
    if works_here(workers, isolate=isolate):
        return Here(stages, job, role, at_once=1)
    from sdp.runners.on_ray import OnRay
    from sdp.runners.placement import join

    return OnRay(stages, join(job, role, workers, output, items))
