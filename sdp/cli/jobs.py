"""The commands that run the jobs of the pipeline."""

import importlib
import signal

from sdp.cli.command import PIPELINE, SETTINGS, Arguments, Command, all_of, argument


def job_command(name: str, summary: str, **flags: str) -> Command:
    """Return the command that runs a job: sdp.NAME.job.run(config, dry_run=…, and each of `flags` by its name).

    `flags` are the job's own switches and their help: only_failed="retry the rows that failed".
    """

    def run(args: Arguments) -> None:
        from sdp.config import load
        from sdp.ray_loss import explained

        config = load(name, args.config, args.set)
        job = importlib.import_module(f"sdp.{name}.job")
        with explained(name):
            result = job.run(config, dry_run=args.dry_run, **{flag: getattr(args, flag) for flag in flags})
        reason, _, signal_name = str(getattr(result, "reason", "")).partition(": ")
        if reason == "asked to stop" and signal_name in signal.Signals.__members__:
            raise KeyboardInterrupt(signal_name)  # training stopped cleanly, but before its end

    switches = [argument(f"--{flag.replace('_', '-')}", description) for flag, description in flags.items()]
    arguments = all_of(SETTINGS, argument("--dry-run", "only print what would be done"), *switches)
    return Command(name, PIPELINE, summary, arguments.add, run, f"{name} --config {name}.yaml --set limit=1000")
