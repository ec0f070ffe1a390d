"""`sdp train`: checks, then a worker in this process or workers on Ray. All state is in the run's folder.

Running the job again continues the run from its newest complete checkpoint.
"""

import shlex
from importlib.util import find_spec

from sdp.config import identity
from sdp.config.train import TrainConfig
from sdp.console import say, spent, starting
from sdp.errors import UserError
from sdp.lease import Lease
from sdp.model import sources
from sdp.model.checkpoints import TrainState
from sdp.ray import cluster
from sdp.storage.uri import near
from sdp.train.data.pinned import open_pinned
from sdp.train.data.sources import open_sources, uris_of
from sdp.train.driver import TrainSummary
from sdp.train.limits import reached_limit
from sdp.train.messages import forecast_line, summary_lines
from sdp.train.phases import finished_phases, refuse_other_phases
from sdp.train.plan import make_plan
from sdp.train.run_folder import RunFolder
from sdp.train.settle import settled, with_hours


def run(config: TrainConfig, *, dry_run: bool = False) -> TrainSummary:
    """Train all phases, or continue."""
    _refuse_missing_library(config)
    phases = settled(config)
    refuse_other_phases(config)
    done = finished_phases(phases)
    for phase in phases[len(done) + 1 :]:
        make_plan(phase, begun=False)  # so that errors of the last phase appear before the first begins
    spent = done[-1] if done else TrainState(0)
    for number, phase in enumerate(phases, 1):
        if number <= len(done):
            say(f"train: phase {number} of {len(phases)} is finished: {phase.output.uri}")
            continue
        if len(phases) > 1:
            say(f"train: phase {number} of {len(phases)}: {phase.output.uri}")
        phase = with_hours(phase, spent)
        summary = _run(phase, dry_run=dry_run, begun=not dry_run or number == len(done) + 1)
        spent = summary.state
        if not dry_run and reached_limit(phase, summary.state) is None:
            break
    return summary


def _refuse_missing_library(config: TrainConfig) -> None:
    for key, place in config.log.trackers.items():
        library = key.split(".")[1]
        if find_spec(library) is None:
            raise UserError(
                f"{key}: {place!r} needs {library}, which is not installed; pip install {library} (in "
                "the image, if the job runs on a cluster), or set it to null"
            )


def _run(config: TrainConfig, *, dry_run: bool, begun: bool) -> TrainSummary:
    """Run one phase; in a dry run, only the first unfinished phase has `begun`."""
    plan = make_plan(config, begun=begun)
    folder = RunFolder.of(config)
    head = {
        "datasets": [near(uri, config.output.uri) for uri in uris_of(config)],
        "identity": {**identity(config), **plan.identity},
    }
    folder.refuse_another(head)
    for line in plan.lines():
        say(line)
    if dry_run:
        say(forecast_line(config, plan))
        return TrainSummary(config.output.uri, plan.checkpoint, plan.state, "dry run")
    family = sources.family(config.model.source, storage=config.storage.options())
    lora = config.lora.rank is not None and family.lora_names is not None
    here = _trains_here(config)
    if not here:
        cluster.require_gpu_setting("scaling", config.scaling)
        if config.data.mode == "online":
            cluster.require_gpu_setting("encode", config.encode)
        cluster.require_reachable()
    with Lease.acquire(folder.storage, "sdp train") as lease:
        folder = RunFolder(folder.storage, lease.confirm)
        folder.claim(head)
        if (folder.latest() or 0) != plan.state.step:  # another job continued the run until its lease ended
            plan = make_plan(config, begun=begun)
        _pin_sources(config, lease, newest=plan.state.position == 0)
        if plan.finished:
            say(f"{config.output.uri}: nothing to do: {plan.finished}")
            cost = plan.state.cost(config.prices.model_dump())
            say(f"train: so far it took {spent(plan.state.seconds, plan.state.gpu_hours, cost)}")
            return TrainSummary(config.output.uri, plan.checkpoint, plan.state, plan.finished)
        if plan.changed:
            keys = {key: list(both) for key, both in plan.changed.items()}
            folder.record("changed", from_step=plan.state.step, keys=keys)
        say(f"train: to watch it in a browser: sdp report {shlex.quote(config.output.uri)} --watch")
        if here:
            with starting("train", "starting: loading the model, then the first steps") as progressed:
                from sdp.train.here import train_here

                summary = train_here(config, plan, folder, lease, progressed)
        else:
            from sdp.train.launch import train_on_ray

            summary = train_on_ray(config, plan, folder, lease)
    for line in summary_lines(summary.state, summary.checkpoint, summary.reason, config.prices, lora=lora):
        say(line)
    return summary


def _trains_here(config: TrainConfig) -> bool:
    """Return whether this process trains, since Ray would add nothing."""
    return config.data.mode == "offline" and config.strategy.kind != "fsdp" and cluster.is_needless(config.scaling)


def _pin_sources(config: TrainConfig, lease: Lease, *, newest: bool) -> None:
    """Pin the versions of the datasets once for all trainers, which share an epoch's order."""
    if config.data.mode == "offline":
        open_sources(config, newest=newest, write=lease.confirm)
    else:
        open_pinned(config, 0, config.source.uri, "images", newest=newest, write=lease.confirm)
