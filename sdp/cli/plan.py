"""`sdp plan`: the hours, cost and memory of a job."""

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sdp.cli.command import JSON, LOOK, SETTINGS, Arguments, UsageError, argument, command, say

_PLANNED = ("train", "process", "download", "dreambooth")
_PRESETS = ("seed-table-2", "seed-table-4")
_HAVE = ("nothing", "images", "latents")
_TERMS = ("on-demand", "reserved-1y", "reserved-3y", "spot")
_PLAN_OPTIONS = (
    *("config", "set", "prices", "region", "trainers", "encoders"),
    *("rows", "have", "run", "calibrate", "deadline", "budget"),
)
_NOT_TAKEN = {
    "--preset": (*_PLAN_OPTIONS, "memory", "page", "values", "egress"),
    "process": ("trainers", "have", "run"),
    "download": ("trainers", "encoders", "have", "run", "memory"),
}
"""Options of `sdp plan` that a preset or a job does not take."""
_PAGE_TITLE, _VALUES_HEADER = "sdp plan", "# Made by sdp plan"
"""The title of a page and the first words of values; a file without them is not replaced."""
_MARKER_WITHIN = 1000
"""Number of a file's first bytes that contain its title or first words."""


@command(LOOK, "plan --config train.yaml --deadline 100")
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
@argument("--run URI", "a run on the same GPUs, for its measured speed")
@argument("--calibrate", "measure the speed in a short run on these GPUs")
@argument("--deadline HOURS", "show the cheapest plan that ends in time", type=float)
@argument("--memory", "also estimate the GPU memory (takes a minute, needs torch)")
@argument("--page FILE", "also write an HTML page with charts")
@argument("--values FILE", "also write the worker groups as values of charts/sdp-cluster")
@argument("--egress GB", "gigabytes that leave the store's region, to price", type=float)
@argument("--budget MONEY", "show the fastest plan that costs no more", type=float)
@JSON
def plan(args: Arguments) -> None:
    """Estimate a job's hours and cost, in each mode and on other GPUs, before it runs."""

    from sdp.plan import presets

    if args.config and args.job is None:
        say(f"plan: of the job train, since none is named; to plan another: sdp plan JOB --config {args.config}")
    args.job = args.job or "train"
    chosen = "--preset" if args.preset else args.job
    for option in _NOT_TAKEN.get(chosen, ()):
        if getattr(args, option):
            raise UsageError(f"plan: --{option}: not used with {chosen}; leave it out")
    if args.preset:
        print(json.dumps(presets.preset_json(args.preset)) if args.json else presets.preset_text(args.preset))
        return
    from sdp.config import draft
    from sdp.hardware import GPUS
    from sdp.plan import make, show
    from sdp.plan.memory import as_text, encoders
    from sdp.plan.prices import load_prices

    for option in ("rows", "deadline", "budget", "egress"):
        if (value := getattr(args, option)) is not None and not 0 < value < 1e15:
            raise UsageError(
                f"plan: --{option}: expected {'less than 1e15' if value > 0 else 'more than 0'}, got {value:g}"
            )
    for option, marker in (("page", f"<title>{_PAGE_TITLE}</title>"), ("values", _VALUES_HEADER)):
        if file := getattr(args, option):
            _refuse_foreign_file(option, file, marker)
    prices = load_prices(args.prices, args.region)
    config: Any = draft(args.job, args.config, args.set).config
    drawing = None
    if args.job == "dreambooth":
        from sdp.dreambooth.job import drawing_of, training_of

        config, drawing = training_of(config), drawing_of(config)
    options = make.Options(
        args.trainers, args.encoders, args.rows, args.terms, args.have or "images", args.egress or 0.0, drawing
    )
    work = make.work_of(config, prices, options)
    speeds = make.speeds_of(config, work, *_measured(args, config, work))
    answer = show.answer(config, work, speeds, prices, deadline_h=args.deadline, budget=args.budget)
    if args.values:
        _write_values(args.values, show.values(config, work, answer.own))
    if args.page:
        from sdp.report.page import write_page
        from sdp.report.plan import plan_section

        write_page(_PAGE_TITLE, [plan_section(answer, work, speeds, prices)], Path(args.page), "plan: --page")
        say(f"wrote {args.page}; open it in a browser")
    memories = _memories(config, work) if args.memory and work.trainer_gpus else []
    encoding = list(encoders(config, GPUS[str(work.encoders.gpu)])) if args.memory and args.job != "download" else []
    if args.json:
        estimates = [estimate for phases in memories for estimate in phases]
        memory = [
            asdict(estimate) | {"total": estimate.total, "largest_batch": estimate.largest_batch}
            for estimate in estimates
        ]
        print(json.dumps(show.as_json(answer, prices) | {"memory": memory, "encoders": encoding}))
        return
    print(show.as_text(answer, prices))
    for lines in (*map(as_text, memories), encoding):
        if lines:
            print("\n".join(["", *lines]))


def _measured(args: Arguments, config: Any, work: Any) -> tuple[Any, str | None]:
    """Return a trainer's measured speeds and their GPU; None if nothing is measured or the GPU is not known."""
    if args.run:
        from sdp.storage import open_storage
        from sdp.train.run_folder import measured_speeds

        return measured_speeds(open_storage(args.run)), None
    if not args.calibrate:
        return None, None
    if args.job != "train":
        raise UsageError("plan: --calibrate: measures only the job train; leave it out")
    from sdp.config import TrainConfig, load_into
    from sdp.train.calibrate import calibrate, gpu_at_hand

    gpu = gpu_at_hand(config, str(work.trainers.gpu))
    return calibrate(load_into(TrainConfig, args.config, args.set)), gpu


def _refuse_foreign_file(option: str, file: str, marker: str) -> None:
    """Refuse to replace a file that sdp plan has not written."""

    start = b""
    with suppress(OSError):
        start = Path(file).read_bytes()[:_MARKER_WITHIN] if Path(file).is_file() else start
    if start and marker.encode() not in start:
        raise UsageError(f"plan: --{option}: {file!r} exists and was not written by sdp plan; choose another name")


def _write_values(file: str, values: Any) -> None:

    from sdp.kube.rayjob import as_yaml
    from sdp.storage.named import written_for

    header = f"{_VALUES_HEADER}: helm install sdp charts/sdp-cluster -f your-values.yaml -f this-file\n"
    with written_for("plan: --values", Path(file)) as sink:
        sink.write((header + as_yaml(values)).encode())
    say(f"wrote {file}")


def _memories(config: Any, work: Any) -> list[list[Any]]:
    from sdp.hardware import GPUS
    from sdp.plan.memory import TrainerGpus, estimate, estimates
    from sdp.train.activations import activations
    from sdp.train.data.sources import embedded

    place = TrainerGpus(GPUS[work.trainers.gpu], work.trainer_gpus, embedded(config), work.trainers.gpus)
    return [
        [estimate(phase, replace(place, measure=activations)), *estimates(phase, place)[1:]] for phase in config.phases
    ]
