"""Is it fast, what holds it back, and what does it cost?"""

from scripts.dashboards.panels import (
    BYTES_PER_SECOND,
    COUNT,
    IMAGES_PER_SECOND,
    PER_SECOND,
    PLAIN,
    RATIO,
    SECONDS,
    Dashboard,
    Limits,
    Query,
    Row,
    lines,
    number,
    stacked,
)
from scripts.dashboards.selecting import APART, RANK, RUN, increase_of_gauge, per_run, rate, select, some

TRAINED = f"sum({rate('sdp_train_samples_total', RUN)})"
TRAINED_PER_RUN = f"sum by ({APART}, run) ({rate('sdp_train_samples_total', RUN)})"
WORKERS = per_run(select("sdp_train_workers", RUN))
STEP_TIME = rate("sdp_train_rank_seconds_total", RANK)
WAITING = rate("sdp_train_rank_seconds_total", RANK, 'part="data"')
BUSY = f"sum({rate('sdp_process_encoder_busy_seconds_total', RUN)})"
IDLE = f"(sum({rate('sdp_process_encoder_waiting_seconds_total', RUN)}) or 0 * {BUSY})"
"""A counter that has never counted is no series."""
COST = per_run(select("sdp_train_cost", RUN))
SAMPLES = per_run(select("sdp_train_samples_seen", RUN))
TOKENS = 77
"""Of a caption, as the text encoder takes it."""

WRITTEN, NOT_WRITTEN = 'outcome="written"', 'outcome!="written"'

_FIRST = Row(
    "Is it fast, what holds it back, what does it cost?",
    (
        number(
            "Trained",
            "Images that all chosen runs train on, per second.",
            Query(TRAINED),
            unit=IMAGES_PER_SECOND,
        ),
        number(
            "Per GPU",
            "The same per trainer. The best published for an A100 is 184.6 at 256 pixels and 42.2 at 512.",
            Query(f"{TRAINED} / {some(f'sum({WORKERS})')}"),
            unit=IMAGES_PER_SECOND,
        ),
        number(
            "MFU",
            "Share of the GPUs' dense bf16 peak that the U-Net's arithmetic reaches. 0.3 and more is good.",
            Query(f"avg({per_run(select('sdp_train_mfu', RUN))})"),
            unit=RATIO,
            limits=Limits(0.25, 0.15),
        ),
        number(
            "Trainers wait for data",
            "Share of the trainers' time. High: the input holds training back; see Encoders below. Collocated trainers "
            "encode meanwhile.",
            Query(f"sum({WAITING}) / {some(f'sum({STEP_TIME})')}"),
            unit=RATIO,
            limits=Limits(0.05, 0.2),
        ),
        number(
            "Encoders wait for input",
            "Share of the encoders' time, online and in process jobs. High while trainers wait: transforms or the "
            "storage hold it back. High while they do not: there are more encoders than needed.",
            Query(f"1 - avg({per_run(select('sdp_train_encoders_busy', RUN))})", "online"),
            Query(f"{IDLE} / {some(f'{IDLE} + {BUSY}')}", "process"),
            unit=RATIO,
        ),
        number(
            "A million images cost",
            "What the chosen runs have cost, by the prices of their configuration, per million images trained on.",
            Query(f"1e6 * sum({COST}) / {some(f'sum({SAMPLES})')}"),
            unit=PLAIN,
        ),
        lines(
            "Images per second, by stage",
            "Written by downloads, encoded by process jobs, encoded for trainers, trained on, and drawn.",
            Query(f"sum({rate('sdp_download_rows_total', RUN, WRITTEN)})", "downloaded"),
            Query(f"sum({rate('sdp_process_encoded_total', RUN)})", "encoded"),
            Query(f"sum({rate('sdp_train_encoded_total', RUN)})", "encoded online"),
            Query(TRAINED, "trained"),
            Query(f"sum({rate('sdp_generate_images_total', RUN)})", "drawn"),
            unit=IMAGES_PER_SECOND,
            width=12,
        ),
        stacked(
            "Where a step's time goes",
            "Of all trainers. backward holds the wait for the slowest one, since gradients meet there.",
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
            "Images per second and trainer.",
            Query(f"{TRAINED_PER_RUN} / on ({APART}, run) {WORKERS}", "{{run}}"),
            unit=IMAGES_PER_SECOND,
        ),
        lines(
            "Wait for data, from the luckiest trainer to the unluckiest",
            "Share of its time. Far apart: the data are not dealt out evenly, or one node is slow.",
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
            "Against its own last hour",
            "1 is as fast as the median of the last hour. SdpThroughputFell fires below 0.8.",
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
            unit=COUNT,
        ),
        lines(
            "Tokens of text per second",
            "Captions are 77 tokens long, whatever they say.",
            Query(f"{TOKENS} * {TRAINED_PER_RUN}", "{{run}}"),
            unit=PER_SECOND,
        ),
        lines(
            "Samples trained on",
            "By the run as it stands: what was lost with a failure and done again counts once.",
            Query(SAMPLES, "{{run}}"),
            unit=COUNT,
        ),
    ),
)

_ENCODERS = Row(
    "Encoders",
    (
        lines(
            "Encoders that are ready",
            "Of online training and of process jobs.",
            Query(per_run(select("sdp_train_encoders", RUN)), "{{run}}"),
            Query(per_run(select("sdp_process_encoders", RUN)), "{{run}}"),
        ),
        lines(
            "Busy",
            "Share of the encoders' time in which they encode.",
            Query(per_run(select("sdp_train_encoders_busy", RUN)), "{{run}}"),
            Query(f"{BUSY} / {some(f'{IDLE} + {BUSY}')}", "process"),
            unit=RATIO,
            most=1,
        ),
        lines(
            "Images per second and encoder",
            "A published figure for an A10G at 256 pixels is 102 online.",
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
            "Transforms that run, and pieces that wait for an encoder. No backlog: transforms are too few.",
            Query(per_run(select("sdp_process_transforms", RUN)), "{{run}}: transforms"),
            Query(per_run(select("sdp_process_ready", RUN)), "{{run}}: waiting pieces"),
        ),
        lines(
            "Time for an image",
            "That a transform takes on one core, and that it waits for the source.",
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
            "Of finished parts.",
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
            unit=PER_SECOND,
        ),
        stacked(
            "Not written, by reason",
            "A reason that grows is worth a look; docs/download.md says what each means.",
            Query(f"sum by (reason) ({rate('sdp_download_rows_total', RUN, NOT_WRITTEN)})", "{{reason}}"),
            unit=PER_SECOND,
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
            "From the first request to the last byte, retries included.",
            *(
                Query(
                    f"histogram_quantile({quantile}, sum by (le) ({rate('sdp_download_fetch_seconds_bucket', RUN)}))",
                    name,
                )
                for quantile, name in ((0.5, "half are faster than"), (0.95, "95 % are faster than"))
            ),
            unit=SECONDS,
        ),
        lines(
            "Requests for a row",
            "Retries and redirects included: about 1 is usual, more means trouble with hosts.",
            Query(f"sum({rate('sdp_download_requests_total', RUN)}) / sum({rate('sdp_download_rows_total', RUN)})"),
        ),
        lines(
            "Size of the images received",
            "The mean.",
            Query(
                f"sum({rate('sdp_download_image_bytes_sum', RUN)}) / sum({rate('sdp_download_image_bytes_count', RUN)})"
            ),
            unit="bytes",
        ),
    ),
)

_COST = Row(
    "Cost",
    (
        lines("So far", "By the prices of the configuration.", Query(COST, "{{run}}"), unit=PLAIN),
        lines(
            "Per hour",
            "At the rate of now.",
            Query(f"3600 * {per_run(increase_of_gauge('sdp_train_cost', RUN))}", "{{run}}"),
            unit=PLAIN,
        ),
        lines(
            "Per million images",
            "At the rate of now: rises when throughput falls.",
            Query(
                f"1e6 * {per_run(increase_of_gauge('sdp_train_cost', RUN))} / on ({APART}, run) {TRAINED_PER_RUN}",
                "{{run}}",
            ),
            unit=PLAIN,
        ),
    ),
)

DASHBOARD = Dashboard("throughput", "Throughput", _FIRST.title, (_FIRST, _TRAINERS, _ENCODERS, _DOWNLOAD, _COST))
