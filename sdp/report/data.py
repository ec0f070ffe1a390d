"""The section of a dataset: the outcomes of its rows, its runs, and pictures."""

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sdp.console import counted, duration, size, spent
from sdp.datasets import runs, tombstones
from sdp.datasets.inspect import Description, with_problems
from sdp.datasets.outcomes import FAILURE_REASONS, FILTER_REASONS, OUTCOMES, rule_of
from sdp.datasets.parts import read_account, reading
from sdp.datasets.runs import JobRun
from sdp.datasets.units import PARTS, parse_part_name, part_name
from sdp.errors import DatasetError, SdpError
from sdp.report.page import Bar, Block, Folded, Gallery, PageSection, Share, Strips, Table, Tile, listing
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


def dataset_section(dataset: Description, storage: Storage, pictures: int) -> PageSection:
    """Return the section of a dataset, with at most this many pictures."""
    counts, names = dataset.counts, _sample_parts(storage)
    records, notes = runs.read(storage)
    work = runs.total(records)
    unrecorded = counts.input - work.counts.input if work is not None else 0
    if unrecorded > 0:
        notes.append(f"{unrecorded:,} of the rows are from runs that were killed and left no record of their time")
    galleries: list[Block] = []
    if pictures and "image" in dataset.schema:
        galleries, damaged = _galleries(storage, names, pictures, dataset)
        dataset = with_problems(dataset, damaged)
    outcomes = [(name, n := getattr(counts, name), f"{n:,}") for name in OUTCOMES]
    missing = [(part_name(m["unit"], m["attempt"]), m["start"], m["stop"]) for m in dataset.missing]
    example = dataset.samples[0] if dataset.samples else {}
    columns = [(name, kind, str(example.get(name, ""))) for name, kind in dataset.schema.items()]
    blocks = [
        listing("Problems", dataset.problems),
        Bar("Outcomes of the rows", outcomes, "cbf"),
        *_times(work),
        _reasons(dataset, storage, names),
        *galleries,
        Table("The first missing parts", ("part", "from row", "to"), missing),
        _runs(records),
        listing("Notes", [*dataset.notes, *notes]),
        listing("Made from", dataset.lineage, "source"),
        Table("Columns", ("column", "type", "example"), columns),
        Folded("Configuration", json.dumps(dataset.config, indent=1)),
    ]
    title = _TITLES.get(dataset.kind, dataset.kind)
    return PageSection(title, dataset.uri, _verdict(dataset), dataset.complete, _figures(dataset, work), blocks)


def _verdict(dataset: Description) -> str:
    counts = dataset.counts
    if dataset.problems:
        return f"Damaged: {counted(len(dataset.problems), 'problem')}, listed below."
    if not dataset.complete:
        parts = f"{dataset.parts:,} of {counted(dataset.parts_ordered, 'part')}"
        return f"Incomplete: {parts} written; run the job again to write the rest."
    outcomes = [f"{counts.written:,} of {counted(counts.input, 'row')} written"]
    outcomes += [f"{n:,} {name}" for n, name in ((counts.filtered, "filtered"), (counts.failed, "failed")) if n]
    return f"Complete: {', '.join(outcomes)}{'; every byte verified' if dataset.verified else ''}."


def _figures(dataset: Description, work: JobRun | None) -> list[tuple[str, str]]:
    counts = dataset.counts
    figures = [("rows" if dataset.complete else "rows done so far", f"{counts.input:,}")]
    figures += [("written", f"{counts.written:,}"), ("takedowns", f"{dataset.tombstones:,}" * bool(dataset.tombstones))]
    if work is not None and work.seconds:
        figures += [("took", spent(work.seconds, work.gpu_hours)), ("rows/s", _rate(work))]
        figures += [(f"{name}/s", size(count / work.seconds)) for name, count in work.moved.items() if count]
        figures += [(role, f"{count:,}") for role, count in work.workers.items() if count]
        figures += [("workers replaced", f"{work.replaced:,}" * bool(work.replaced))]
    if counts.written:
        figures.append(("bytes per row", f"{dataset.bytes / counts.written:,.0f}"))
    figures += [("size", size(dataset.bytes)), ("parts", f"{dataset.parts:,}")]
    if dataset.created:
        figures.append(("version", f"{dataset.manifest_version}, {dataset.created[:10]}, sdp {dataset.sdp}"))
    return figures


def _rate(run: JobRun) -> str:
    rate = run.counts.input / run.seconds if run.seconds else 0.0
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _times(work: JobRun | None) -> list[Block]:
    """Return a bar for each kind of worker that spent time on more than one activity."""
    return [
        Bar(f"Time of {role}", [(activity, s, duration(s)) for activity, s in seconds.items()])
        for role, seconds in (work.work.items() if work is not None else ())
        if len(seconds) > 1 and sum(seconds.values()) > 0
    ]


def _runs(records: Sequence[JobRun]) -> Block:
    """Return a table of the newest runs."""
    rows = [
        (
            run.job,
            run.began.replace("T", " ").removesuffix("+00:00"),
            spent(run.seconds, run.gpu_hours),
            run.counts.input,
            _rate(run),
            run.counts.written,
            run.counts.failed,
            ", ".join(counted(count, role.removesuffix("s"), role) for role, count in run.workers.items()),
        )
        for run in records[-_RUNS:]
    ]
    header = ("job", "began (UTC)", "took", "rows", "rows/s", "written", "failed", "workers")
    return Table("Runs" if len(records) <= _RUNS else f"The last {_RUNS} of {len(records):,} runs", header, rows)


def _reasons(dataset: Description, storage: Storage, names: Sequence[str]) -> Block:
    """Return the number of rows by reason, with a few rows as examples from some of the parts."""
    examples: dict[str, list[str]] = {}
    for name in names:
        with suppress(DatasetError):  # a damaged part, which is among the problems
            account = read_account(storage, name)
            for row in account.filter(pc.is_valid(account["reason"])).slice(0, 1000).to_pylist():
                examples.setdefault(row["reason"], []).append(f"row {row['row']} {row['detail'] or ''}".strip())
    counts, total = sorted(dataset.counts.reasons.items(), key=lambda item: -item[1]), dataset.counts.input
    meaning = {**FILTER_REASONS, **FAILURE_REASONS}
    rows = [
        (reason, count, Share(count / total, counts[0][1] / total), meaning.get(rule_of(reason), ""),
         "; ".join(examples.get(reason, [])[:_EXAMPLES]))
        for reason, count in counts
    ]  # fmt: skip
    return Table("Filtered and failed rows", ("reason", "rows", "share", "meaning", "examples"), rows)


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
        return [listing("Pictures", [f"not shown, since the takedown list cannot be read: {error}"])], []
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
    if not is_drawn:
        tiles = [Tile(small(row["image"]), str(row.get("caption", "")), _note(row)) for row in rows]
        return [Gallery(f"{counted(len(tiles), 'picture')} from the whole dataset{remark}", tiles)], problems
    prompts: dict[str, list[Tile]] = {}
    for row in sorted(rows, key=lambda row: int(row["row"])):
        tile = Tile(small(row["image"]), str(row["prompt"]), f"row {row['row']}, seed {row.get('seed', '?')}")
        prompts.setdefault(tile.caption, []).append(tile)
    return [Strips(f"Pictures by prompt{remark}", sorted(prompts.items()))], problems


def _note(row: dict[str, Any]) -> str:
    original = f", was {row['original_width']} × {row['original_height']}" if "original_width" in row else ""
    return f"row {row['row']}: {row.get('width')} × {row.get('height')}{original}"


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
