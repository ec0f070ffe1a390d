"""The dashboard Run: does the run learn, and is it safe?"""

from scripts.dashboards.panels import (
    AMOUNT,
    COUNT,
    PLAIN,
    RATIO,
    SECONDS,
    STEPS_PER_SECOND,
    Dashboard,
    Limits,
    Query,
    Row,
    lines,
    number,
    stacked,
    table,
)
from scripts.dashboards.selecting import APART, RANK, RUN, per_run, rate, select
from scripts.dashboards.throughput import CURRENCY

LOSS = per_run(select("sdp_train_loss_smoothed", RUN))
STEP = per_run(select("sdp_train_step", RUN))
SAVED = per_run(select("sdp_train_checkpoint_time_seconds", RUN))
STEPS = rate("sdp_train_steps_total", RUN)
ALL_TIMESTEPS = 'timesteps="all"'
ALONE, TOGETHER = 'part=~"copy|forward|optimizer"', 'part="backward"'
NOT_WRITTEN = 'outcome!="written"'
OWN_WORK = f"sum by ({APART}, run, rank) ({rate('sdp_train_rank_seconds_total', RANK, ALONE)})"
IN_BACKWARD = f"sum by ({APART}, run, rank) ({rate('sdp_train_rank_seconds_total', RANK, TOGETHER)})"

LEDGER = f"max(abs({select('sdp_train_ledger_difference', RUN)}))"

_FIRST = Row(
    "Does the run learn, and is it safe?",
    (
        number("Loss", "Smoothed.", Query(LOSS, "{{run}}"), unit=PLAIN),
        number("Step", "Steps of the run.", Query(STEP, "{{run}}"), unit=PLAIN),
        number("Epoch", "Passes over the data.", Query(per_run(select("sdp_train_epoch", RUN)), "{{run}}"), unit=PLAIN),
        number(
            "Time since the last checkpoint",
            "What a failure now would cost.",
            Query(f"time() - {SAVED}", "{{run}}"),
            unit=SECONDS,
            limits=Limits(3600, 7200),
        ),
        number(
            "Recoveries",
            "Times that the job's workers were restarted.",
            Query(per_run(select("sdp_train_recoveries", RUN)), "{{run}}"),
            limits=Limits(1, 3),
        ),
        number(
            "Ledger difference",
            "Samples counted by the newest checkpoint, less the rows in its ledger. Anything but 0 is an error.",
            Query(LEDGER),
            limits=Limits(1, 1),
        ),
        lines(
            "Loss",
            "Over the steps since the last line of the log, smoothed, and on the rows held out for validation.",
            Query(per_run(select("sdp_train_loss", RUN)), "{{run}}"),
            Query(LOSS, "{{run}}, smoothed"),
            Query(per_run(select("sdp_train_validation_loss", RUN, ALL_TIMESTEPS)), "{{run}}, validation"),
            unit=PLAIN,
            width=12,
        ),
        lines(
            "Gradient norm",
            "Before clipping. Spikes precede a diverging loss.",
            Query(per_run(select("sdp_train_gradient_norm", RUN)), "{{run}}"),
            unit=PLAIN,
            width=6,
        ),
        lines(
            "Learning rate",
            "",
            Query(per_run(select("sdp_train_learning_rate", RUN)), "{{run}}"),
            unit="sci",
            width=6,
        ),
    ),
)

_RANKS = Row(
    "Trainers",
    (
        lines(
            "Own work, by trainer",
            "Seconds per second of copy, forward and optimizer. No trainer waits here, so the highest is the slowest.",
            Query(OWN_WORK, "{{run}} {{rank}}"),
            unit=SECONDS,
            width=6,
        ),
        lines(
            "Time in backward, by trainer",
            "Gradients are exchanged here. The slowest trainer waits least, so it is the lowest line.",
            Query(IN_BACKWARD, "{{run}} {{rank}}"),
            unit=SECONDS,
            width=6,
        ),
        lines(
            "Slowest trainer against the mean",
            "Own work of the slowest trainer. Well above 1, check that rank's GPU and node.",
            Query(
                f"max by ({APART}, run) ({OWN_WORK}) / on ({APART}, run) avg by ({APART}, run) ({OWN_WORK})", "{{run}}"
            ),
            unit=RATIO,
            width=6,
        ),
        lines(
            "Trainers",
            "An elastic run continues with fewer.",
            Query(per_run(select("sdp_train_workers", RUN)), "{{run}}"),
            width=6,
        ),
        lines(
            "Validation loss, by timestep",
            "On held-out rows. Early timesteps are fine detail, late ones the composition.",
            Query(
                f"max by ({APART}, run, timesteps) ({select('sdp_train_validation_loss', RUN)})",
                "{{run}} {{timesteps}}",
            ),
            unit=PLAIN,
        ),
        lines("Steps per second", "", Query(f"sum by ({APART}, run) ({STEPS})", "{{run}}"), unit=STEPS_PER_SECOND),
        lines(
            "Skipped steps and bad rows",
            "Steps skipped because they were not finite; rows that proved bad.",
            Query(per_run(select("sdp_train_skipped_steps", RUN)), "{{run}}: skipped steps"),
            Query(f"sum by ({APART}, run) ({select('sdp_train_bad_rows_total', RUN)})", "{{run}}: bad rows"),
        ),
    ),
)

_SAFETY = Row(
    "Checkpoints, failures, cost",
    (
        lines("Time since the last checkpoint", "", Query(f"time() - {SAVED}", "{{run}}"), unit=SECONDS),
        lines(
            "Steps since the last checkpoint",
            "",
            Query(f"{STEP} - on ({APART}, run) {per_run(select('sdp_train_checkpoint_step', RUN))}", "{{run}}"),
        ),
        lines(
            "Training paused for a checkpoint",
            "Training continues while the rest of a checkpoint is written.",
            Query(per_run(select("sdp_train_checkpoint_seconds", RUN)), "{{run}}"),
            unit=SECONDS,
        ),
        lines("Recoveries", "", Query(per_run(select("sdp_train_recoveries", RUN)), "{{run}}")),
        lines(
            "Ledger difference",
            "If not 0, rows were lost or trained on twice.",
            Query(per_run(select("sdp_train_ledger_difference", RUN)), "{{run}}"),
        ),
        lines(
            "Cost",
            f"So far, {CURRENCY}.",
            Query(per_run(select("sdp_train_cost", RUN)), "{{run}}"),
            unit=PLAIN,
        ),
        lines(
            "Time to the end",
            "At the current pace.",
            Query(f"{per_run(select('sdp_train_finish_time_seconds', RUN))} - time()", "{{run}}"),
            unit=SECONDS,
            width=12,
        ),
        lines(
            "GPU-hours",
            "Of trainers and encoders.",
            Query(per_run(select("sdp_train_gpu_hours", RUN)), "{{run}}"),
            unit=AMOUNT,
            width=12,
        ),
    ),
)

_ACCOUNT = Row(
    "Earlier jobs",
    (
        lines(
            "Progress",
            "Share of its rows, by job.",
            Query(
                f"max by ({APART}, stage, run) ({select('sdp_job_rows_done', RUN)}) "
                f"/ on ({APART}, stage, run) max by ({APART}, stage, run) ({select('sdp_job_rows', RUN)})",
                "{{stage}} {{run}}",
            ),
            unit=RATIO,
            most=1,
        ),
        stacked(
            "Rows, by outcome",
            "Of downloads and process jobs, since they started.",
            Query(f"sum by (outcome) ({select('sdp_download_rows_total', RUN)})", "download: {{outcome}}"),
            Query(f"sum by (outcome) ({select('sdp_process_rows_total', RUN)})", "process: {{outcome}}"),
            unit=AMOUNT,
        ),
        table(
            "Not written, by reason",
            "Of downloads.",
            Query(f"sum by ({APART}, run, outcome, reason) ({select('sdp_download_rows_total', RUN, NOT_WRITTEN)})"),
            unit=COUNT,
        ),
    ),
)

DASHBOARD = Dashboard("run", "Run", _FIRST.title, (_FIRST, _RANKS, _SAFETY, _ACCOUNT))
