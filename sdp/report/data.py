"""The section of a dataset: the outcomes of its rows, its runs, and pictures."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sdp.console import counted, duration, size, spent
from sdp.datasets import runs, tombstones
from sdp.datasets.inspect import Description, describe, with_problems
from sdp.datasets.outcomes import FAILURE_REASONS, FILTER_REASONS, rule_of
from sdp.datasets.parts import read_account, reading
from sdp.datasets.runs import JobRun
from sdp.datasets.units import PARTS, parse_part_name
from sdp.errors import DatasetError, SdpError
from sdp.report.page import Bar, Block, Cell, Folded, Gallery, PageSection, Share, Strips, Table, Tile, listing
from sdp.storage import Storage

_TITLES = {"images": "Images", "scores": "Scores", "latents": "Latents", "samples": "Pictures drawn"}
_PARTS_READ = 12
_RUNS = 20
_EXAMPLES = 3
"""Rows shown for each reason."""
_EDGE = 256
"""Longest side of a picture on the page, in pixels, if Pillow is installed."""
_LARGE = 40_000
"""Size in bytes from which pictures are scaled down."""


def dataset_section(storage: Storage, pictures: int) -> PageSection:
    """Return the section of a dataset, with at most this many pictures."""
    dataset = describe(storage)
    names = _sample_parts(storage)
    records, notes = runs.read(storage)
    work = runs.total(records)
    blocks: list[Block] = [_outcomes(dataset), *_times(work)]
    if dataset.counts.reasons:
        blocks.append(_reasons(dataset))
    if pictures and "image" in dataset.schema:
        galleries, damaged = _galleries(storage, names, pictures, dataset)
        blocks += galleries
        dataset = with_problems(dataset, damaged)
    if dataset.counts.reasons:
        blocks.append(_examples(storage, names))
    if records:
        blocks.append(_runs(records))
    blocks += listing("Problems", dataset.problems)
    blocks += listing("Notes", notes + _unrecorded(dataset, work))
    if dataset.config:
        blocks.append(Folded("Configuration", json.dumps(dataset.config, indent=1)))
    title, verdict = _TITLES.get(dataset.kind, dataset.kind), _verdict(dataset)
    glance = _glance(dataset, work)
    return PageSection(title, dataset.uri, verdict, dataset.complete, _figures(dataset, work), blocks, glance)


def _verdict(dataset: Description) -> str:
    counts = dataset.counts
    if dataset.problems:
        return f"Damaged: {counted(len(dataset.problems), 'problem')}, listed below."
    if not dataset.complete:
        parts = f"{dataset.parts:,} of {counted(dataset.parts_ordered, 'part')}"
        return f"Incomplete: {parts} written; run the job again to write the rest."
    outcomes = [f"{counts.written:,} of {counted(counts.input, 'row')} written"]
    outcomes += [f"{n:,} {name}" for n, name in ((counts.filtered, "filtered"), (counts.failed, "failed")) if n]
    return f"Complete: {', '.join(outcomes)}."


def _figures(dataset: Description, work: JobRun | None) -> list[tuple[str, str]]:
    counts = dataset.counts
    figures = [("rows", f"{counts.input:,}"), ("written", f"{counts.written:,}")]
    if not dataset.complete:
        figures[0] = ("rows done so far", f"{counts.input:,}")
    if work is not None and work.seconds:
        figures += [("took", spent(work.seconds, work.gpu_hours))]
        figures += [("rows/s", _rate(work.counts.input / work.seconds))]
        figures += [(f"{name}/s", size(count / work.seconds)) for name, count in work.moved.items() if count]
        figures += [(role, f"{count:,}") for role, count in work.workers.items() if count]
        if work.replaced:
            figures.append(("workers replaced", f"{work.replaced:,}"))
    if counts.written:
        figures.append(("bytes per row", f"{dataset.bytes / counts.written:,.0f}"))
    return [*figures, ("size", size(dataset.bytes)), ("parts", f"{dataset.parts:,}")]


def _glance(dataset: Description, work: JobRun | None) -> str:
    amount = f"{dataset.counts.written:,} of {counted(dataset.counts.input, 'row')}"
    if not dataset.complete:
        amount = f"{dataset.parts:,} of {counted(dataset.parts_ordered, 'part')}"
    if work is None or not work.seconds:
        return f"{amount} · {size(dataset.bytes)}"
    return f"{amount} · {_rate(work.counts.input / work.seconds)} rows/s · {spent(work.seconds, work.gpu_hours)}"


def _rate(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


def _outcomes(dataset: Description) -> Block:
    counts = dataset.counts
    parts = (("written", counts.written), ("filtered", counts.filtered), ("failed", counts.failed))
    return Bar("Outcomes of the rows", [(name, float(count), f"{count:,}") for name, count in parts], "cbf")


def _times(work: JobRun | None) -> list[Block]:
    """Return a bar for each kind of worker that spent time on more than one activity."""
    return [
        Bar(f"Time of {role}", [(activity, s, duration(s)) for activity, s in seconds.items()], half=True)
        for role, seconds in (work.work.items() if work is not None else ())
        if len(seconds) > 1 and sum(seconds.values()) > 0
    ]


def _runs(records: Sequence[JobRun]) -> Block:
    """Return a table of the newest runs."""
    moved = list(dict.fromkeys(name for run in records for name in run.moved))
    rows: list[tuple[Cell, ...]] = [
        (
            run.job,
            run.began.replace("T", " ").removesuffix("+00:00"),
            spent(run.seconds, run.gpu_hours),
            run.counts.input,
            round(run.counts.input / run.seconds, 2) if run.seconds else "",
            run.counts.written,
            run.counts.failed,
            *(size(run.moved[name]) if name in run.moved else "" for name in moved),
            ", ".join(counted(count, role.removesuffix("s"), role) for role, count in run.workers.items()),
        )
        for run in records[-_RUNS:]
    ]
    header = ("job", "began (UTC)", "took", "rows", "rows/s", "written", "failed", *moved, "workers")
    title = "Runs" if len(records) <= _RUNS else f"The last {_RUNS} of {len(records):,} runs"
    return Table(title, header, rows)


def _unrecorded(dataset: Description, work: JobRun | None) -> list[str]:
    """Return a note on rows whose run was killed before it recorded its time."""
    unrecorded = dataset.counts.input - work.counts.input if work is not None else 0
    if unrecorded <= 0:
        return []
    return [f"{unrecorded:,} of the rows are from runs that were killed and left no record of their time"]


def _reasons(dataset: Description) -> Block:
    reasons, total = dataset.counts.reasons, dataset.counts.input
    largest, meaning = max(reasons.values()) / total, {**FILTER_REASONS, **FAILURE_REASONS}
    rows = [
        (reason, count, Share(count / total, largest), meaning.get(rule_of(reason), ""))
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1])
    ]
    return Table("Filtered and failed rows", ("reason", "rows", "share", "meaning"), rows)


def _sample_parts(storage: Storage) -> list[str]:
    """Return the names of some randomly chosen parts."""
    names = sorted(name for name in storage.names(PARTS) if parse_part_name(name) is not None)
    return sorted(random.Random(0).sample(names, min(len(names), _PARTS_READ)))


def _galleries(
    storage: Storage, names: list[str], pictures: int, dataset: Description
) -> tuple[list[Block], list[str]]:
    """Return pictures, except those taken down, and the problems with the parts that hold them."""
    try:
        taken_down = tombstones.load(storage).rows
    except SdpError as error:
        return [Table("Pictures", ("not shown",), [(f"the takedown list cannot be read: {error}",)])], []
    is_drawn, rng = dataset.kind == "samples", random.Random(0)

    def sample(name: str, count: int) -> list[dict[str, Any]]:
        """Return at most `count` rows from one row group of a part."""
        with reading(storage, name):
            file = pq.ParquetFile(storage.open(name), page_checksum_verification=True)
            if not count or not file.metadata.num_row_groups:
                return []
            table = file.read_row_group(rng.randrange(file.metadata.num_row_groups))
            table = table.filter(pa.array([row not in taken_down for row in table["row"].to_pylist()], pa.bool_()))
            count = min(count, table.num_rows)
            # The pictures drawn for one prompt are neighbours, so consecutive rows are taken.
            chosen = list(range(count)) if is_drawn else sorted(rng.sample(range(table.num_rows), count))
            rows: list[dict[str, Any]] = table.take(pa.array(chosen, pa.int64())).to_pylist()
            return rows

    problems, rows = list[str](), list[dict[str, Any]]()
    names = [name for name in names if not any(line.startswith(storage.uri_of(name)) for line in dataset.problems)]
    for number, name in enumerate(names, 1):
        try:
            rows += sample(name, pictures * number // len(names) - len(rows))
        except DatasetError as error:
            problems.append(str(error))
    omitted = sum(row < dataset.rows for row in taken_down)
    remark = f"; not shown: {omitted:,} taken down" if omitted else ""
    if is_drawn:
        return [_by_prompt(rows, remark)], problems
    tiles = [Tile(small(row["image"]), str(row.get("caption", "")), _note(row)) for row in rows]
    return [Gallery(f"{counted(len(tiles), 'picture')} from the whole dataset{remark}", tiles)], problems


def _by_prompt(rows: Sequence[dict[str, Any]], remark: str) -> Block:
    """Return a strip of pictures for each prompt, or a gallery if each prompt has one picture."""
    prompts: dict[str, list[Tile]] = {}
    for row in sorted(rows, key=lambda row: int(row["row"])):
        prompt = str(row["prompt"])
        note = f"row {row['row']}, seed {row.get('seed', '?')}"
        prompts.setdefault(prompt, []).append(Tile(small(row["image"]), prompt, note))
    if any(len(tiles) > 1 for tiles in prompts.values()):
        return Strips(f"Pictures by prompt{remark}", sorted(prompts.items()))
    return Gallery(f"Pictures by prompt{remark}", [tile for _, (tile,) in sorted(prompts.items())], wide=True)


def _note(row: dict[str, Any]) -> str:
    original = f", was {row['original_width']} × {row['original_height']}" if "original_width" in row else ""
    return f"row {row['row']}: {row.get('width')} × {row.get('height')}{original}"


def _examples(storage: Storage, names: list[str]) -> Block:
    """Return a few rows for each reason, with details."""
    rows, seen = list[tuple[str, int, str, int]](), Counter[str]()
    for name in names:
        try:
            account = read_account(storage, name)
        except DatasetError:
            continue
        excluded = account.filter(pc.is_valid(account["reason"]))
        for row in excluded.slice(0, 1000).to_pylist():
            if seen[row["reason"]] < _EXAMPLES:
                seen[row["reason"]] += 1
                rows.append((row["reason"], row["row"], row["detail"] or "", row["attempts"]))
    return Table("Examples", ("reason", "row", "detail", "attempts"), sorted(rows))


def small(data: bytes) -> bytes:
    """Return a picture, scaled down for the page if it is large."""
    if len(data) < _LARGE:
        return data
    try:
        import io

        from PIL import Image
    except ModuleNotFoundError:  # without the worker extra the page is larger
        return data
    with Image.open(io.BytesIO(data)) as opened:
        opened.thumbnail((_EDGE, _EDGE))
        sink = io.BytesIO()
        opened.convert("RGB").save(sink, "JPEG", quality=85)
    return sink.getvalue()
