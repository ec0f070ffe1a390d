"""All commands. To add one, write a function that takes the parsed arguments, and a line here."""

from collections.abc import Callable

from sdp.cli import cluster, completion, look, plan
from sdp.cli.command import CLUSTER, LOOK, PIPELINE, Arguments, Command, Parser, job_argument
from sdp.cli.jobs import job_command


def _command(
    name: str, group: str, arguments: Callable[[Parser], None], run: Callable[[Arguments], int | None], example: str
) -> Command:
    """Return a command with its function's docstring as the summary."""
    return Command(name, group, run.__doc__ or "", arguments, run, example)


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
        "process",
        "Encode the images and captions of a dataset to latents and tokens.",
        only_failed="retry the rows that failed",
    ),
    job_command("train", "Train the U-Net from latents or images, and continue from its last checkpoint."),
    job_command("generate", "Draw pictures for prompts with a trained checkpoint or a model."),
    job_command("evaluate", "Judge pictures by CLIP score, FID and KID, and a checkpoint by its held-out loss."),
    job_command("dreambooth", "Teach a model one subject from a handful of pictures, and draw it."),
    _command("export", PIPELINE, look.export_arguments, look.run_export, "export s3://bucket/run ./sd2-mine"),
    _command("init", LOOK, look.init_arguments, look.run_init, "init my-data --pictures ./photos"),
    _command("config show", LOOK, look.config_show_arguments, look.config_show, "config show download > download.yaml"),
    _command("config schema", LOOK, job_argument, look.config_schema, "config schema train"),
    _command("plan", LOOK, plan.plan_arguments, plan.run_plan, "plan --config train.yaml --deadline 100"),
    _command("inspect", LOOK, look.inspect_arguments, look.run_inspect, "inspect s3://bucket/images"),
    _command("report", LOOK, look.report_arguments, look.run_report, "report s3://bucket/run --out run.html"),
    _command(
        "audit",
        LOOK,
        look.audit_arguments,
        look.run_audit,
        "audit s3://bucket/images s3://bucket/run --url https://example.org/cat.jpg",
    ),
    _command("doctor", CLUSTER, cluster.doctor_arguments, cluster.run_doctor, "doctor --namespace sdp"),
    _command("submit", CLUSTER, cluster.submit_arguments, cluster.run_submit, "submit train --set max_steps=1000"),
    _command("status", CLUSTER, cluster.status_arguments, cluster.run_status, "status sdp-train-x7k2p"),
    _command("logs", CLUSTER, cluster.logs_arguments, cluster.run_logs, "logs sdp-train-x7k2p --follow"),
    _command("stop", CLUSTER, cluster.stop_arguments, cluster.run_stop, "stop sdp-train-x7k2p"),
    _command(
        "completion", LOOK, completion.completion_arguments, completion.run_completion, "completion bash >> ~/.bashrc"
    ),
)
