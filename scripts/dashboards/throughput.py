"""The dashboard Throughput: is it fast, what holds it back, and what does it cost?"""

from scripts.dashboards.panels import (
    AMOUNT,
    BYTES_PER_SECOND,
    IMAGES_PER_SECOND,
    PLAIN,
    RATIO,
    ROWS_PER_SECOND,
    SECONDS,
    TOKENS_PER_SECOND,
    Dashboard,
    Limits,
    Query,
    Row,
    lines,
    number,
    stacked,
)
from scripts.dashboards.selecting import APART, RANK, RUN, increase_of_gauge, nonzero, per_run, rate, select

TRAINED = f"sum({rate('sdp_train_samples_total', RUN)})"
TRAINED_PER_RUN = f"sum by ({APART}, run) ({rate('sdp_train_samples_total', RUN)})"
WORKERS = per_run(select("sdp_train_workers", RUN))
STEP_TIME = rate("sdp_train_rank_seconds_total", RANK)
WAITING = rate("sdp_train_rank_seconds_total", RANK, 'part="data"')
BUSY = f"sum({rate('sdp_process_encoder_busy_seconds_total', RUN)})"
IDLE = f"(sum({rate('sdp_process_encoder_waiting_seconds_total', RUN)}) or 0 * {BUSY})"
"""A counter that has never counted has no series, so it counts as 0."""
COST = per_run(select("sdp_train_cost", RUN))
SAMPLES = per_run(select("sdp_train_samples_seen", RUN))
CURRENCY = "in the currency of prices.trainer_hour (USD if that names an instance type)"
TOKENS = 77
"""Length of a caption, as the text encoder reads it."""

WRITTEN, NOT_WRITTEN = 'outcome="written"', 'outcome!="written"'

_FIRST = Row(
    "Is it fast, what holds it back, what does it cost?",
    (
        number(
            "Trained",
            "Images per second that all chosen runs train on.",
            Query(TRAINED),
            unit=IMAGES_PER_SECOND,
        ),
        number(
            "Per GPU",
            "The same, per trainer. The best published figures for an A100: 184.6 at 256 pixels, 42.2 at 512.",
            Query(f"{TRAINED} / {nonzero(f'sum({WORKERS})')}"),
            unit=IMAGES_PER_SECOND,
        ),
        number(
            "MFU",
            "Share of the GPUs' dense bf16 peak that the U-Net's arithmetic reaches. 0.3 or more is good.",
            Query(f"avg({per_run(select('sdp_train_mfu', RUN))})"),
            unit=RATIO,
            limits=Limits(0.25, 0.15),
        ),
        number(
            "Trainers wait for data",
            "Share of the trainers' time. If it is high, the input limits training: see Encoders below. Collocated "
            "trainers encode during this time.",
            Query(f"sum({WAITING}) / {nonzero(f'sum({STEP_TIME})')}"),
            unit=RATIO,
            limits=Limits(0.05, 0.2),
        ),
        number(
            "Encoders wait for input",
            "Share of the encoders' time, online and in process jobs. High while trainers wait: transforms or storage "
            "are too slow. High while trainers do not wait: there are more encoders than needed.",
            Query(f"1 - avg({per_run(select('sdp_train_encoders_busy', RUN))})", "online"),
            Query(f"{IDLE} / {nonzero(f'{IDLE} + {BUSY}')}", "process"),
            unit=RATIO,
        ),
        number(
            "Cost per million images",
            f"Cost of the chosen runs so far, per million images trained on, {CURRENCY}.",
            Query(f"1e6 * sum({COST}) / {nonzero(f'sum({SAMPLES})')}"),
            unit=PLAIN,
        ),
        lines(
            "Images per second, by stage",
            "Written by downloads, encoded by process jobs, encoded for trainers, trained on, and generated.",
            Query(f"sum({rate('sdp_download_rows_total', RUN, WRITTEN)})", "downloaded"),
            Query(f"sum({rate('sdp_process_encoded_total', RUN)})", "encoded"),
            Query(f"sum({rate('sdp_train_encoded_total', RUN)})", "encoded online"),
            Query(TRAINED, "trained"),
            Query(f"sum({rate('sdp_generate_images_total', RUN)})", "generated"),
            unit=IMAGES_PER_SECOND,
            width=12,
        ),
        stacked(
            "Where a step's time goes",
            "All trainers. backward includes the wait for the slowest trainer, because gradients are exchanged there.",
            Query(f"sum by (part) ({STEP_TIME}) / on () group_left () sum({STEP_TIME})", "{{part}}"),
            unit=RATIO,
            width=12,
            most=1,
        ),
    ),
)

_TRAINERS = Row(
    "Trainers",
    (
        lines(
            "Per GPU, by run",
            "Images per second, per trainer.",
            Query(f"{TRAINED_PER_RUN} / on ({APART}, run) {WORKERS}", "{{run}}"),
            unit=IMAGES_PER_SECOND,
        ),
        lines(
            "Wait for data: most, median, least",
            "Share of a trainer's time. If the curves are far apart, data is unevenly distributed or one node is slow.",
            *(
                Query(
                    f"quantile({quantile}, sum by ({APART}, run, rank) ({WAITING}) "
                    f"/ sum by ({APART}, run, rank) ({STEP_TIME}))",
                    name,
                )
                for quantile, name in ((1, "most"), (0.5, "median"), (0, "least"))
            ),
            unit=RATIO,
        ),
        lines(
            "Speed against the last hour",
            "1 is the median speed of the last hour. SdpThroughputFell fires below 0.8.",
            Query(
                f"{select('sdp:train_samples:rate5m', RUN)} "
                f"/ quantile_over_time(0.5, {select('sdp:train_samples:rate5m', RUN)}[1h])",
                "{{run}}",
            ),
            unit=RATIO,
        ),
        lines(
            "Epochs",
            "Passes over the data.",
            Query(per_run(select("sdp_train_epoch", RUN)), "{{run}}"),
            unit=AMOUNT,
        ),
        lines(
            "Text tokens per second",
            "Every caption is 77 tokens long.",
            Query(f"{TOKENS} * {TRAINED_PER_RUN}", "{{run}}"),
            unit=TOKENS_PER_SECOND,
        ),
        lines(
            "Samples trained on",
            "Samples lost in a failure and trained on again count once.",
            Query(SAMPLES, "{{run}}"),
            unit=AMOUNT,
        ),
    ),
)

_ENCODERS = Row(
    "Encoders",
    (
        lines(
            "Encoders ready",
            "In online training and in process jobs.",
            Query(per_run(select("sdp_train_encoders", RUN)), "{{run}}"),
            Query(per_run(select("sdp_process_encoders", RUN)), "{{run}}"),
        ),
        lines(
            "Busy",
            "Share of their time that encoders spend encoding.",
            Query(per_run(select("sdp_train_encoders_busy", RUN)), "{{run}}"),
            Query(f"{BUSY} / {nonzero(f'{IDLE} + {BUSY}')}", "process"),
            unit=RATIO,
            most=1,
        ),
        lines(
            "Images per second, per encoder",
            "A published figure for an A10G at 256 pixels, online: 102.",
            Query(
                f"sum by ({APART}, run) ({rate('sdp_train_encoded_total', RUN)}) "
                f"/ on ({APART}, run) {per_run(select('sdp_train_encoders', RUN))}",
                "{{run}}",
            ),
            Query(
                f"sum by ({APART}, run) ({rate('sdp_process_encoded_total', RUN)}) "
                f"/ on ({APART}, run) {per_run(select('sdp_process_encoders', RUN))}",
                "{{run}}",
            ),
            unit=IMAGES_PER_SECOND,
        ),
        lines(
            "Transforms and their backlog",
            "Running transforms, and pieces that wait for an encoder. Without a backlog there are too few transforms.",
            Query(per_run(select("sdp_process_transforms", RUN)), "{{run}}: transforms"),
            Query(per_run(select("sdp_process_ready", RUN)), "{{run}}: waiting pieces"),
        ),
        lines(
            "Time per image",
            "Time of a transform on one core, and its wait for the source.",
            Query(
                f"sum({rate('sdp_process_transform_seconds_total', RUN)}) "
                f"/ sum({rate('sdp_process_transformed_total', RUN)})",
                "transform",
            ),
            Query(
                f"sum({rate('sdp_process_reading_seconds_total', RUN)}) "
                f"/ sum({rate('sdp_process_transformed_total', RUN)})",
                "reading",
            ),
            unit=SECONDS,
        ),
        lines(
            "Latents written",
            "Bytes of finished parts.",
            Query(f"sum({rate('sdp_process_written_bytes_total', RUN)})", "written"),
            unit=BYTES_PER_SECOND,
        ),
    ),
)

_DOWNLOAD = Row(
    "Download",
    (
        stacked(
            "Rows per second, by outcome",
            "Written, filtered by a rule, or failed.",
            Query(f"sum by (outcome) ({rate('sdp_download_rows_total', RUN)})", "{{outcome}}"),
            unit=ROWS_PER_SECOND,
        ),
        stacked(
            "Not written, by reason",
            "Investigate a reason that grows; docs/download.md explains each.",
            Query(f"sum by (reason) ({rate('sdp_download_rows_total', RUN, NOT_WRITTEN)})", "{{reason}}"),
            unit=ROWS_PER_SECOND,
        ),
        lines(
            "Bytes per second",
            "Received from the web, and stored as images.",
            Query(f"sum({rate('sdp_download_fetched_bytes_total', RUN)})", "received"),
            Query(f"sum({rate('sdp_download_stored_bytes_total', RUN)})", "stored"),
            unit=BYTES_PER_SECOND,
        ),
        lines(
            "Time to fetch an image",
            "Mean, from the first request to the last byte, retries included.",
            Query(
                f"sum({rate('sdp_download_fetch_seconds_total', RUN)}) / sum({rate('sdp_download_rows_total', RUN)})"
            ),
            unit=SECONDS,
        ),
        lines(
            "Requests per row",
            "Includes retries and redirects. About 1 is usual; more means that hosts fail.",
            Query(f"sum({rate('sdp_download_requests_total', RUN)}) / sum({rate('sdp_download_rows_total', RUN)})"),
            unit=AMOUNT,
        ),
        lines(
            "Bytes per row",
            "Received, retries included.",
            Query(
                f"sum({rate('sdp_download_fetched_bytes_total', RUN)}) / sum({rate('sdp_download_rows_total', RUN)})"
            ),
            unit="bytes",
        ),
    ),
)

_COST = Row(
    "Cost",
    (
        lines(
            "Cost so far",
            f"So far, {CURRENCY}.",
            Query(COST, "{{run}}"),
            unit=PLAIN,
        ),
        lines(
            "Cost per hour",
            "At the current rate.",
            Query(f"3600 * {per_run(increase_of_gauge('sdp_train_cost', RUN))}", "{{run}}"),
            unit=PLAIN,
        ),
        lines(
            "Cost per million images",
            "At the current rate; rises when throughput falls.",
            Query(
                f"1e6 * {per_run(increase_of_gauge('sdp_train_cost', RUN))} / on ({APART}, run) {TRAINED_PER_RUN}",
                "{{run}}",
            ),
            unit=PLAIN,
        ),
    ),
)

DASHBOARD = Dashboard("throughput", "Throughput", _FIRST.title, (_FIRST, _TRAINERS, _ENCODERS, _DOWNLOAD, _COST))
