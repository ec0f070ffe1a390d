"""`sdp plan`: the hours, cost and memory of a job."""

from pathlib import Path
from typing import Any

from sdp.cli.command import JOBS, LOOK, SETTINGS, Arguments, UsageError, argument, command, say
from sdp.console import either

_PLANNED = ("train", "process", "caption", "download")
_PRESETS = (*(f"seed-table-{number}" for number in ("1", "2", "3a", "3b", "4")), "seed-figure-6", "fast")
_NOT_TAKEN = {
    "--preset": ("config", "set", "prices", "trainers", "encoders", "rows", "memory", "rate"),
    "train": ("rate",),
    "process": ("trainers", "memory", "rate"),
    "caption": ("trainers", "memory"),
    "download": ("trainers", "encoders", "memory", "rate"),
}
"""Options of `sdp plan` that a preset or a job does not take."""


@command(LOOK, "plan --config train.yaml")
@argument("JOB", ", ".join(_PLANNED), nargs="?", choices=_PLANNED)
@SETTINGS
@argument("--preset NAME", f"a published table: {', '.join(_PRESETS)}", choices=_PRESETS)
@argument("--trainers [Nx]TYPE", "instances that train: 4xp4de.24xlarge; with --memory also one card: 4090, 24GB, auto")
@argument("--encoders [Nx]TYPE", "instances that encode: 40xg5.2xlarge")
@argument("--rows N", "images in the dataset (default: limit, or one for each training sample)", type=int)
@argument("--rate N", "captions a second of one GPU, as sdp caption shows them", type=float)
@argument("--prices FILE", "your prices, in the shape of sdp/plan/prices.yaml")
@argument("--memory", "also estimate the GPU memory, and the largest batch that fits")
def plan(args: Arguments) -> None:
    """Estimate a job's hours and cost, in each mode, before it runs."""
    named_by = Path(args.config or "").stem.partition("-")[0]  # sdp init names files by their jobs
    if args.job is None and named_by in JOBS and named_by not in _PLANNED:
        raise UsageError(f"plan: {args.config}: there is no plan of {named_by}; of {either(_PLANNED)} there is")
    if args.config and args.job is None and named_by not in _PLANNED:
        say(f"plan: of the job train, since none is named; to plan another: sdp plan JOB --config {args.config}")
    args.job = args.job or (named_by if named_by in _PLANNED else "train")
    chosen = "--preset" if args.preset else args.job
    for option in _NOT_TAKEN.get(chosen, ()):
        if getattr(args, option):
            raise UsageError(f"plan: --{option}: not used with {chosen}; leave it out")
    if args.preset:
        from sdp.plan.presets import preset_text

        print(preset_text(args.preset))
        return
    if args.rows is not None and not 0 < args.rows < 1e15:
        expected = "less than 1e15" if args.rows > 0 else "more than 0"
        raise UsageError(f"plan: --rows: expected {expected}, got {args.rows:g}")
    from sdp.config import draft
    from sdp.model.sources import BUILTIN
    from sdp.plan import make, memory, show
    from sdp.plan.prices import load_prices

    prices = load_prices(args.prices)
    drafted = draft(args.job, args.config, args.set)
    config: Any = drafted.config
    named = str(drafted.value("model.source") or "")
    family, model, folder = _planned_model(named)
    if family != "Stable Diffusion":
        say(f"plan: speeds of Stable Diffusion 2; docs/families.md has the operations of {family} in comparison")
    if args.job == "train" and args.trainers and args.memory and "." not in args.trainers:
        from sdp.plan import one_gpu

        card = one_gpu.find(args.trainers, "plan: --trainers")
        print("\n\n".join(map(memory.as_text, _memories(config, card, 1, model))))
        say("plan: a card of your own has no price here; training's first line of progress says how long it takes")
        return
    rows = args.rows
    if args.job == "train" and args.config and not (rows or config.limit or Path(config.source.uri).exists()):
        rows = _pictures_of(Path(args.config).parent, config.source.uri)
    choices = {"encoders": args.encoders, "rows": rows}
    work = (
        make.training(config, prices, trainers=args.trainers, model=folder, **choices) if args.job == "train" else None
    )
    if work and not args.trainers and config.scaling.gpu_type is None:
        say("plan: scaling.accelerator names no type of GPU, so this is for A100s; --trainers g5.2xlarge has an A10G")
        say("plan: for a card of your own: --memory --trainers 4090, or 24GB, or auto")
    plans = make.plans(work, prices) if work else [make.plan_of_data(config, prices, rate=args.rate, **choices)]
    if named.startswith(BUILTIN):
        say("plan: a builtin model needs no GPU and trains in minutes; the figures are for a model of full size")
    print(show.as_text(plans, work, prices))
    if args.memory and work and work.trainers.gpu:
        from sdp.hardware import GPUS

        for estimate in _memories(config, GPUS[work.trainers.gpu], work.trainer_gpus, model):
            print(f"\n{memory.as_text(estimate)}")


def _pictures_of(folder: Path, latents: str) -> int | None:
    """Return the number of pictures that the process jobs of a folder's files will make these latents of."""
    from sdp.config import draft
    from sdp.plan.make import count_images

    for file in sorted(folder.glob("process*.yaml")):
        process: Any = draft("process", str(file), ()).config
        if Path(process.output.uri).absolute() == Path(latents).absolute():
            return count_images(process.source.uri)
    return None


def _planned_model(name: str) -> tuple[str, Any, Path | None]:
    """Return a local model's family, known model and folder; for any other, Stable Diffusion 2 and no folder."""
    from sdp.families import INDEX
    from sdp.families.sd import SD, SD2
    from sdp.model import sources

    if not (name.startswith(sources.BUILTIN) or Path(name, INDEX).is_file()):
        return SD.name, SD2, None  # elsewhere, or not there yet
    family = sources.family(name)
    if family is SD:
        return SD.name, SD2, None
    return family.name, sources.known(name), sources.local_folder(sources.parse(name))


def _memories(config: Any, gpu: Any, workers: int, model: Any) -> list[Any]:
    """Return the estimate of each phase."""
    if model is None:
        raise UsageError("plan: --memory: not known for a model of this size; docs/families.md has the sizes")
    from sdp.plan.memory import estimate
    from sdp.train.data.sources import embedded

    with_text = embedded(config)
    return [estimate(phase, gpu, workers, embedded=with_text, family=model) for phase in config.phases]
