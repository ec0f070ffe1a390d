"""The lines that a download prints before, during and after its work, and its metrics."""

import shlex
from collections.abc import Iterator, Sequence

from sdp.console import counted, duration, rerun, size, table
from sdp.datasets.manifest import MANIFEST, Dataset, open_dataset
from sdp.datasets.outcomes import FAILED, FAILURE_REASONS, FILTER_REASONS, FILTERED, WRITTEN, rule_of
from sdp.datasets.output import Output
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
        *(f"{figures.of(outcome):,} {outcome}" for outcome in (WRITTEN, FAILED, FILTERED)),
        f"{size(figures.bytes / elapsed_s)}/s",
        eta,
    ]
    return " · ".join(part for part in parts if part)


def emit(telemetry: Telemetry, figures: DownloadFigures, total: int) -> None:
    """Emit the figures as metrics."""
    telemetry.progress("download", min(figures.done, total), total)
    for (outcome, reason), count in figures.outcomes.items():
        telemetry.reach("sdp_download_rows_total", count, outcome=outcome, reason=reason)
    telemetry.reach("sdp_download_requests_total", figures.requests)
    telemetry.reach("sdp_download_fetched_bytes_total", figures.bytes)
    telemetry.reach("sdp_download_stored_bytes_total", figures.stored_bytes)
    telemetry.reach("sdp_download_fetch_seconds_total", figures.fetch_s)


def intention(output: Output, files: int) -> Iterator[str]:
    """Yield the lines of a dry run."""
    index, works, pending = output.index, output.index.works(), output.pending()
    listed = f"{counted(index.listed_rows, 'row')} listed, {index.rows:,} of them to be downloaded"
    yield f"source: {counted(files, 'file')}, {listed}"
    done = len(works) - len(pending)
    yield f"output: {output.storage.uri}, {counted(len(works), 'part')} in all, {done:,} of them done"
    yield f"to do: {counted(len(pending), 'part')} with {counted(rows_to_do(output, pending), 'row')}"


def rows_to_do(output: Output, pending: Sequence[Work]) -> int:
    """Count the rows of some parts; in a retry, those that the manifest counts as failed."""
    retried = any(work.attempt for work in pending) and output.storage.exists(MANIFEST)
    failures = open_dataset(output.storage).failures() if retried else {}
    return sum(failures.get(work.unit.number, len(work.unit)) if work.attempt else len(work.unit) for work in pending)


def closing(dataset: Dataset, figures: DownloadFigures, seconds: float) -> Iterator[str]:
    """Yield the result, the reasons of failures, and the next command."""
    counts = dataset.manifest.counts
    outcomes = f"{counts.written:,} written, {counts.failed:,} failed, {counts.filtered:,} filtered"
    stored = f"{counted(dataset.manifest.parts, 'part')}, {size(dataset.manifest.size)}"
    yield f"{dataset.storage.uri}: {counted(counts.input, 'row')}: {outcomes}; {stored}"
    if counts.reasons:
        ordered = sorted(counts.reasons.items(), key=lambda item: (-item[1], item[0]))
        rows = [(f"{count:,}", reason, _MEANINGS.get(rule_of(reason), "")) for reason, count in ordered]
        yield table(rows, ("rows", "reason", ""))
    if figures.done:
        done = f"{counted(figures.done, 'row')} in {duration(seconds)}, {figures.of(WRITTEN):,} of them written"
        yield f"this run: {done}, {counted(figures.requests, 'request')}, {size(figures.bytes)} fetched"
    if counts.failed:
        see = shlex.join(["sdp", "inspect", dataset.storage.uri, "--account", "account.csv"])
        yield f"to retry failures: {rerun('download', '--only-failed')}; to see them, each with its URL: {see}"
