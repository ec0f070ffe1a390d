"""All commands. To add one, write a function that takes the parsed arguments, and a line here."""

import importlib
import signal
from dataclasses import replace

from sdp.cli import cluster, completion, init, look, plan
from sdp.cli.command import PIPELINE, SETTINGS, Arguments, Command, UsageError, all_of, argument


def job_command(name: str, summary: str, **flags: str) -> Command:
    """Return the command that runs a job: sdp.NAME.job.run(config, dry_run=…, and each of `flags` by its name).

    `flags` are the job's own switches and their help: only_failed="retry the rows that failed".
    """

    def run(args: Arguments) -> None:
        from sdp.config import parse, read
        from sdp.ray.lost import explained

        source = read(args.config, args.set)
        with source.placed():
            config = parse(name, source.data)
            job = importlib.import_module(f"sdp.{name}.job")
            with explained(name):
                result = job.run(config, dry_run=args.dry_run, **{flag: getattr(args, flag) for flag in flags})
        reason, _, signal_name = str(getattr(result, "reason", "")).partition(": ")
        if reason == "asked to stop" and signal_name in signal.Signals.__members__:
            raise KeyboardInterrupt(signal_name)  # training stopped cleanly, but before its end

    switches = [argument(f"--{flag.replace('_', '-')}", description) for flag, description in flags.items()]
    arguments = all_of(SETTINGS, argument("--dry-run", "only print what would be done"), *switches)
    return Command(name, PIPELINE, summary, arguments.add, run, f"{name} --config {name}.yaml")


def generate_command() -> Command:
    """Return the command that generates by a configuration, or draws a prompt at once."""
    job = job_command("generate", "Draw pictures for prompts with a trained checkpoint or a model.")
    prompts = all_of(
        argument("RUN", "draw now, with a run, checkpoint or model; --config and --set may change how", nargs="?"),
        argument("PROMPT", "what to draw with RUN", nargs="*"),
        argument("-n N", "pictures of each PROMPT (default: 1)", type=int, default=1),
    )

    def run(args: Arguments) -> int | None:
        if args.run is None:
            return job.run(args)
        if not args.prompt or args.n < 1:
            got = "none" if not args.prompt else f"-n {args.n}"
            expected = "prompts, and 1 or more pictures of each"
            raise UsageError(f"generate: expected {expected}, got {got}; write RUN 'a cat'")
        from sdp.config import read
        from sdp.generate.draw import draw

        source = read(args.config, args.set)
        with source.placed():
            for uri in draw(args.run, args.prompt, args.n, source.data, dry_run=args.dry_run):
                print(uri, flush=True)
        return None

    example = 'generate my/run "a cat on the moon" -n 4'
    return replace(job, arguments=lambda parser: (job.arguments(parser), prompts.add(parser)), run=run, example=example)


COMMANDS: tuple[Command, ...] = (
    job_command(
        "download",
        "Fetch the images of a metadata table, check them and write them as a dataset.",
        only_failed="retry the rows that failed",
    ),
    job_command(
        "score",
        "Score pictures by aesthetics, captions and near-duplicates, for process to filter by.",
        only_failed="score again what failed",
    ),
    job_command(
        "caption",
        "Caption pictures by a vision-language model, for process to use in place of alt texts.",
        only_failed="ask again what failed",
    ),
    job_command(
        "process",
        "Encode the images and captions of a dataset to latents and tokens.",
        only_failed="retry the rows that failed",
        changed="encode again what was edited in a folder of pictures, and take down what is gone",
    ),
    job_command("train", "Train or fine-tune a model, whole or as a LoRA, and continue from its last checkpoint."),
    generate_command(),
    job_command("evaluate", "Judge pictures by CLIP score, FID and KID."),
    job_command("dreambooth", "Teach a model one subject from a handful of pictures, and draw it."),
    look.export,
    init.init,
    look.config_show,
    look.config_schema,
    plan.plan,
    look.inspect,
    look.report,
    look.audit,
    cluster.doctor,
    cluster.submit,
    cluster.status,
    cluster.logs,
    cluster.stop,
    completion.completion,
)
