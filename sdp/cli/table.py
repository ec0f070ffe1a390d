"""All commands. To add one, write a function that takes the parsed arguments, and a line here."""

from sdp.cli import cluster, completion, look, plan
from sdp.cli.command import Command
from sdp.cli.jobs import job_command

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
    look.export,
    look.init,
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
