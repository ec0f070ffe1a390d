"""The lines that a download prints before, during and after its work, and its metrics."""

from collections.abc import Iterable, Iterator, Mapping

from sdp.console import counted, duration, size, table
from sdp.datasets.index import Index
from sdp.datasets.manifest import Dataset
from sdp.datasets.outcomes import FAILED, FAILURE_REASONS, FILTER_REASONS, FILTERED, WRITTEN
from sdp.datasets.units import Work
from sdp.download.figures import DownloadFigures
from sdp.telemetry import Telemetry

_MEANINGS = {**FILTER_REASONS, **FAILURE_REASONS}


def progress_line(figures: DownloadFigures, total: int, elapsed_s: float) -> str:
    """Return the progress line: rows, rate, outcomes and the time left."""
    elapsed_s = max(elapsed_s, 1e-3)
    rate = figures.done / elapsed_s
    eta = f"ETA {duration((total - figures.done) / rate)}" if rate and figures.done < total else ""
    parts = [
        f"{min(figures.done, total):,} of {counted(total, 'row')}",  # a replaced worker's rows are counted twice
        f"{rate:,.0f}/s",
        f"{figures.written:,} written",
        f"{figures.failed:,} failed",
        f"{figures.filtered:,} filtered",
        f"{size(figures.bytes / elapsed_s)}/s",
        eta,
    ]
    return " · ".join(part for part in parts if part)


def emit(telemetry: Telemetry, figures: DownloadFigures, total: int) -> None:
    """Emit the figures as metrics."""
    telemetry.progress("download", min(figures.done, total), total)
    telemetry.reach("sdp_download_rows_total", figures.written, outcome=WRITTEN, reason="")
    for reason, count in figures.reasons.items():
        outcome = FILTERED if reason in FILTER_REASONS else FAILED
        telemetry.reach("sdp_download_rows_total", count, outcome=outcome, reason=reason)
    telemetry.reach("sdp_download_requests_total", figures.requests)
    telemetry.reach("sdp_download_fetched_bytes_total", figures.bytes)
    telemetry.reach("sdp_download_stored_bytes_total", figures.stored_bytes)
    telemetry.observed("sdp_download_fetch_seconds", figures.durations.tolist())
    telemetry.observed("sdp_download_image_bytes", figures.sizes.tolist())


def intention(index: Index, pending: list[Work], rows: int, where: str, files: int) -> Iterator[str]:
    """Yield the lines of a dry run."""
    works = index.works()
    listed = f"{counted(index.listed_rows, 'row')} listed, {index.rows:,} of them to be downloaded"
    yield f"source: {counted(files, 'file')}, {listed}"
    yield f"output: {where}, {counted(len(works), 'part')} in all, {len(works) - len(pending):,} of them done"
    yield f"to do: {counted(len(pending), 'part')} with {counted(rows, 'row')}"


def rows_to_do(pending: Iterable[Work], failures: Mapping[int, int]) -> int:
    """Count the rows of some parts; in a retry only the failed ones, if `failures` knows them by unit."""
    return sum(failures.get(work.unit.number, len(work.unit)) if work.attempt else len(work.unit) for work in pending)


def lowered_limit(limit: int | None, index: Index) -> Iterator[str]:
    """Yield a line about a limit below the rows that already have addresses."""
    if limit is not None and limit < index.rows:
        yield (
            f"limit: {limit:,} is less than the {index.rows:,} rows that already have addresses; a limit can be "
            "raised, not lowered, so all of them stay"
        )


def retry_intention(dataset: Dataset) -> Iterator[str]:
    """Yield the lines of a retry's dry run."""
    failed, units = dataset.manifest.counts.failed, len(dataset.failures())
    parts = f"{units:,} of {counted(dataset.manifest.parts, 'part')}"
    yield f"to do: {counted(failed, 'failed row')} in {parts} of {dataset.storage.uri}"


def closing(dataset: Dataset, figures: DownloadFigures, seconds: float) -> Iterator[str]:
    """Yield the result, the reasons of failures, and the next command."""
    counts = dataset.manifest.counts
    yield (
        f"{dataset.storage.uri}: {counted(counts.input, 'row')}: {counts.written:,} written, {counts.failed:,} failed, "
        f"{counts.filtered:,} filtered; {counted(dataset.manifest.parts, 'part')}, {size(dataset.manifest.size)}"
    )
    if counts.reasons:
        ordered = sorted(counts.reasons.items(), key=lambda item: (-item[1], item[0]))
        rows = [(f"{count:,}", reason, _MEANINGS.get(reason, "")) for reason, count in ordered]
        yield table(rows, ("rows", "reason", ""))
    if figures.done:
        yield (
            f"this run: {counted(figures.done, 'row')} in {duration(seconds)}, {figures.written:,} of them written, "
            f"{counted(figures.requests, 'request')}, {size(figures.bytes)} fetched"
        )
    if counts.failed:
        yield f"to retry failures: sdp download … --only-failed; to see them: sdp inspect {dataset.storage.uri}"
