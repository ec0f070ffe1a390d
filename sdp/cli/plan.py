"""`sdp plan`: the hours, cost and memory of a job."""

import json
from dataclasses import asdict
from typing import Any

from sdp.cli.command import JSON, LOOK, SETTINGS, Arguments, UsageError, argument, command, say

_PLANNED = ("train", "process", "download")
_PRESETS = ("seed-table-2", "seed-table-4")
_HAVE = ("nothing", "images", "latents")
_TERMS = ("on-demand", "reserved-1y", "reserved-3y", "spot")
_PLAN_OPTIONS = ("config", "set", "prices", "region", "trainers", "encoders", "rows", "have")
_NOT_TAKEN = {
    "--preset": (*_PLAN_OPTIONS, "memory"),
    "process": ("trainers", "have"),
    "download": ("trainers", "encoders", "have", "memory"),
}
"""Options of `sdp plan` that a preset or a job does not take."""


@command(LOOK, "plan --config train.yaml")
@argument("JOB", ", ".join(_PLANNED), nargs="?", choices=_PLANNED)
@SETTINGS
@argument("--preset NAME", f"a published table: {', '.join(_PRESETS)}", choices=_PRESETS)
@argument("--trainers [Nx]TYPE", "instances that train: 4xp4de.24xlarge")
@argument("--encoders [Nx]TYPE", "instances that encode: 40xg5.2xlarge")
@argument("--rows N", "images in the dataset (default: limit, or one for each training sample)", type=int)
@argument(f"--have {{{','.join(_HAVE)}}}", "the data that storage already holds (default: images)", choices=_HAVE)
@argument("--terms TERMS", ", ".join(_TERMS), choices=_TERMS, default="on-demand")
@argument("--prices FILE", "your prices, in the shape of sdp/plan/prices.yaml")
@argument("--region NAME", "region whose prices are preferred, such as us-west-2")
@argument("--memory", "also estimate the GPU memory, and the largest batch that fits")
@JSON
def plan(args: Arguments) -> None:
    """Estimate a job's hours and cost, in each mode, before it runs."""
    if args.config and args.job is None:
        say(f"plan: of the job train, since none is named; to plan another: sdp plan JOB --config {args.config}")
    args.job = args.job or "train"
    chosen = "--preset" if args.preset else args.job
    for option in _NOT_TAKEN.get(chosen, ()):
        if getattr(args, option):
            raise UsageError(f"plan: --{option}: not used with {chosen}; leave it out")
    if args.preset:
        from sdp.plan import presets

        print(json.dumps(presets.preset_json(args.preset)) if args.json else presets.preset_text(args.preset))
        return
    if args.rows is not None and not 0 < args.rows < 1e15:
        expected = "less than 1e15" if args.rows > 0 else "more than 0"
        raise UsageError(f"plan: --rows: expected {expected}, got {args.rows:g}")
    from sdp.config import draft
    from sdp.hardware import GPUS
    from sdp.plan import make, memory, show
    from sdp.plan.prices import load_prices
    from sdp.plan.speeds import speeds_of

    prices = load_prices(args.prices, args.region)
    config: Any = draft(args.job, args.config, args.set).config
    options = make.Options(args.trainers, args.encoders, args.rows, args.terms, args.have or "images")
    work = make.work_of(config, prices, options)
    speeds = speeds_of(config)
    plans = make.plans(work, speeds, prices)
    memories = _memories(config, work) if args.memory and work.trainer_gpus else []
    encoders = list(memory.encoders(config, GPUS[str(work.encoders.gpu)])) if args.memory else []
    if args.json:
        estimates = [
            asdict(estimate) | {"total": estimate.total, "largest_batch": estimate.largest_batch}
            for phase in memories
            for estimate in phase
        ]
        print(json.dumps(show.as_json(plans, work, speeds, prices) | {"memory": estimates, "encoders": encoders}))
        return
    print(show.as_text(plans, work, speeds, prices))
    for lines in (*map(memory.as_text, memories), encoders):
        if lines:
            print("\n".join(["", *lines]))


def _memories(config: Any, work: Any) -> list[list[Any]]:
    """Return the estimates of each phase."""
    from sdp.hardware import GPUS
    from sdp.plan.memory import TrainerGpus, estimates
    from sdp.train.data.sources import embedded

    place = TrainerGpus(GPUS[work.trainers.gpu], work.trainer_gpus, embedded(config), work.trainers.gpus)
    return [estimates(phase, place) for phase in config.phases]
