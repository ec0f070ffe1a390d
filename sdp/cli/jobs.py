"""The commands that run the jobs of the pipeline."""

import importlib
import signal

from sdp.cli.command import PIPELINE, Arguments, Command, Parser, missing_library, settings


def job_command(name: str, summary: str, **flags: str) -> Command:
    """Return the command that runs a job: sdp.NAME.job.run(config, dry_run=…, and each of `flags` by its name).

    `flags` are the job's own switches and their help: only_failed="retry the rows that failed".
    """

    def arguments(parser: Parser) -> None:
        settings(parser)
        parser.add_argument("--dry-run", action="store_true", help="only print what would be done")
        for flag, description in flags.items():
            parser.add_argument(f"--{flag.replace('_', '-')}", action="store_true", help=description)

    def run(args: Arguments) -> None:

        from sdp.config import load
        from sdp.ray_loss import explained

        config = load(name, args.config, args.set)
        try:
            job = importlib.import_module(f"sdp.{name}.job")
            with explained(name):
                result = job.run(config, dry_run=args.dry_run, **{flag: getattr(args, flag) for flag in flags})
        except ModuleNotFoundError as error:
            raise missing_library(error, name) from error
        reason, _, signal_name = str(getattr(result, "reason", "")).partition(": ")
        if reason == "asked to stop" and signal_name in signal.Signals.__members__:
            raise KeyboardInterrupt(signal_name)  # training stopped cleanly, but before its end

    return Command(name, PIPELINE, summary, arguments, run, f"{name} --config {name}.yaml --set limit=1000")
