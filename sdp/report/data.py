"""The report of a dataset: what became of its rows, and what they look like."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from sdp.console import duration, size
from sdp.datasets import runs, tombstones
from sdp.datasets.inspect import Description, describe, with_problems
from sdp.datasets.outcomes import FAILURE_REASONS, FILTER_REASONS
from sdp.datasets.parts import read_account
from sdp.datasets.runs import JobRun
from sdp.datasets.units import PARTS, parse_part_name
from sdp.errors import DatasetError, SdpError, one_line
from sdp.report.page import Bar, Block, Cell, Folded, Gallery, Section, Share, Strips, Table, Tile
from sdp.storage import Storage

_TITLES = {"images": "Images", "latents": "Latents", "samples": "Pictures drawn"}
_PARTS_READ = 12
_RUNS = 20
_EXAMPLES = 3
"""Of each reason."""
_EDGE = 256
"""Larger pictures are made smaller, where Pillow is installed."""
_LARGE = 40_000
"""Bytes from which that is worth while."""


def dataset_section(storage: Storage, pictures: int, seed: int = 0) -> Section:
    """What there is to say of a dataset, and up to so many of its pictures."""
    found = describe(storage)
    names = _spread(storage, seed)
    known, notes = runs.read(storage)
    done = runs.total(known)
    blocks: list[Block] = [_outcomes(found), *_times(done)]
    if found.counts.reasons:
        blocks.append(_reasons(found))
    if pictures and "image" in found.schema:
        galleries, damaged = _galleries(storage, names, pictures, found, seed)
        blocks += galleries
        found = with_problems(found, damaged)
    if found.counts.reasons:
        blocks.append(_examples(storage, names))
    if known:
        blocks.append(_runs(known))
    if found.problems:
        blocks.append(Table("Problems", ("what",), [(problem,) for problem in found.problems[:50]]))
    notes += _unrecorded(found, done)
    if notes:
        blocks.append(Table("Notes", ("what",), [(note,) for note in notes[:50]]))
    if found.config:
        blocks.append(Folded("Configuration", json.dumps(found.config, indent=1)))
    return Section(
        _TITLES.get(found.kind, found.kind),
        found.uri,
        _verdict(found),
        found.complete,
        _figures(found, done),
        blocks,
        _glance(found, done),
    )


def _verdict(found: Description) -> str:
    if found.problems:
        return f"Broken: {len(found.problems)} problems, listed below."
    if not found.complete:
        left = found.parts_ordered - found.parts
        return (
            f"Incomplete: {left:,} of {found.parts_ordered:,} parts are missing; run its job again, it does the rest."
        )
    counts = found.counts
    words = f"Complete: {counts.written:,} of {counts.input:,} rows were written"
    lost = [f"{counts.filtered:,} filtered"] * bool(counts.filtered) + [f"{counts.failed:,} failed"] * bool(
        counts.failed
    )
    return words + (f", {' and '.join(lost)}." if lost else ".")


def _figures(found: Description, done: JobRun | None) -> list[tuple[str, str]]:
    counts = found.counts
    figures = [("rows", f"{counts.input:,}"), ("written", f"{counts.written:,}")]
    if done is not None and done.seconds:
        figures += [("took", duration(done.seconds)), ("rows/s", _rate(done.counts.input / done.seconds))]
        figures += [(f"{what}/s", size(count / done.seconds)) for what, count in done.moved.items() if count]
        figures += [(who, f"{count:,}") for who, count in done.workers.items() if count]
        if done.replaced:
            figures.append(("workers replaced", f"{done.replaced:,}"))
    if counts.written:
        figures.append(("bytes a row", f"{found.bytes / counts.written:,.0f}"))
    return [*figures, ("in all", size(found.bytes)), ("parts", f"{found.parts:,}")]


def _glance(found: Description, done: JobRun | None) -> str:
    words = f"{found.counts.written:,} of {found.counts.input:,} rows"
    if done is None or not done.seconds:
        return f"{words} · {size(found.bytes)}"
    return f"{words} · {_rate(done.counts.input / done.seconds)} rows/s · {duration(done.seconds)}"


def _rate(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"


def _outcomes(found: Description) -> Block:
    counts = found.counts
    parts = (("written", counts.written), ("filtered", counts.filtered), ("failed", counts.failed))
    return Bar("What became of the rows", [(name, float(count), f"{count:,}") for name, count in parts], "cbf")


def _times(done: JobRun | None) -> list[Block]:
    """What the time of each kind of worker went into, where there is more than one thing."""
    return [
        Bar(
            f"Where the time of {who} went",
            [(what, each, duration(each)) for what, each in seconds.items()],
            half=True,
        )
        for who, seconds in (done.work.items() if done is not None else ())
        if len(seconds) > 1 and sum(seconds.values()) > 0
    ]


def _runs(known: Sequence[JobRun]) -> Block:
    """The newest of them."""
    moved = list(dict.fromkeys(what for run in known for what in run.moved))
    rows: list[tuple[Cell, ...]] = [
        (
            run.job,
            run.began.replace("T", " ").removesuffix("+00:00"),
            duration(run.seconds),
            run.counts.input,
            round(run.counts.input / run.seconds, 2) if run.seconds else "",
            run.counts.written,
            run.counts.failed,
            *(size(run.moved[what]) if what in run.moved else "" for what in moved),
            ", ".join(
                f"{count:,} {who if count != 1 else who.removesuffix('s')}" for who, count in run.workers.items()
            ),
        )
        for run in known[-_RUNS:]
    ]
    header = ("job", "began (UTC)", "took", "rows", "rows/s", "written", "failed", *moved, "with")
    title = "Its runs" if len(known) <= _RUNS else f"The last {_RUNS} of its {len(known):,} runs"
    return Table(title, header, rows)


def _unrecorded(found: Description, done: JobRun | None) -> list[str]:
    """Rows of which no run tells: it was broken off, and what it had written stayed."""
    left = found.counts.input - (done.counts.input if done is not None else 0)
    if left <= 0 or done is None:
        return []
    return [f"{left:,} of the rows were worked off by runs that were broken off and left no record of their time"]


def _reasons(found: Description) -> Block:
    counts = found.counts
    ordered = sorted(counts.reasons.items(), key=lambda item: -item[1])
    most = max(counts.reasons.values()) / counts.input
    rows = [
        (reason, count, Share(count / counts.input, most), {**FILTER_REASONS, **FAILURE_REASONS}.get(reason, ""))
        for reason, count in ordered
    ]
    return Table("Why rows were left out", ("reason", "rows", "share", "which means"), rows)


def _spread(storage: Storage, seed: int) -> list[str]:
    """Parts from all over the dataset."""
    names = sorted(name for name in storage.names(PARTS) if parse_part_name(name) is not None)
    return sorted(random.Random(seed).sample(names, min(len(names), _PARTS_READ)))


def _galleries(
    storage: Storage, names: list[str], pictures: int, found: Description, seed: int
) -> tuple[list[Block], list[str]]:
    """Pictures, none of which is taken down; and what is wrong with the parts that they were to come from."""
    try:
        taken = tombstones.load(storage).rows
    except SdpError as error:
        return [Table("Pictures", ("none is shown",), [(f"which are taken down is not known: {error}",)])], []
    problems: list[str] = []
    named = tuple(found.problems)
    names = [name for name in names if not any(line.startswith(storage.uri_of(name)) for line in named)]
    # Those of a prompt lie side by side, so that of pictures drawn what is taken are neighbours.
    rows = list(_sampled(storage, names, pictures, seed, taken, problems, together=found.kind == "samples"))
    gone = sum(row < found.rows for row in taken)
    left_out = f"; {gone:,} that are taken down are not shown" if gone else ""
    if found.kind != "samples":
        tiles = [Tile(_small(row["image"]), str(row.get("caption", "")), _note(row)) for row in rows]
        return [Gallery(f"{len(tiles)} pictures from all over it{left_out}", tiles)], problems
    return [_by_prompt(rows, left_out)], problems


def _by_prompt(rows: Sequence[dict[str, Any]], left_out: str) -> Block:
    """A row of pictures for each prompt; side by side where each has one."""
    prompts: dict[str, list[Tile]] = {}
    for row in sorted(rows, key=lambda row: int(row["row"])):
        prompt = str(row["prompt"])
        prompts.setdefault(prompt, []).append(
            Tile(_small(row["image"]), prompt, f"row {row['row']}, seed {row.get('seed', '?')}")
        )
    if any(len(tiles) > 1 for tiles in prompts.values()):
        return Strips(f"Pictures by prompt{left_out}", sorted(prompts.items()))
    return Gallery(f"Pictures by prompt{left_out}", [tile for _, (tile,) in sorted(prompts.items())], wide=True)


def _note(row: dict[str, Any]) -> str:
    was = f", was {row['original_width']} × {row['original_height']}" if "original_width" in row else ""
    return f"row {row['row']}: {row.get('width')} × {row.get('height')}{was}"


def _sampled(
    storage: Storage,
    names: list[str],
    most: int,
    seed: int,
    taken_down: BitMap64,
    problems: list[str],
    *,
    together: bool,
) -> Iterator[dict[str, Any]]:
    """Rows drawn by address, from one row group of each part."""
    draw, taken = random.Random(seed), 0
    for number, name in enumerate(names):
        wanted = most * (number + 1) // len(names) - taken
        try:
            file = pq.ParquetFile(storage.open(name), page_checksum_verification=True)
            groups = file.metadata.num_row_groups
            if not wanted or not groups:
                continue
            table = file.read_row_group(draw.randrange(groups))
        except (pa.ArrowException, OSError) as error:
            cause = one_line(error, 160)
            problems.append(f"{storage.uri_of(name)}: cannot be read ({cause}); delete it and run the job again")
            continue
        if "image" not in table.column_names or "row" not in table.column_names:
            continue
        table = table.filter(pa.array([row not in taken_down for row in table["row"].to_pylist()], pa.bool_()))
        count = min(wanted, table.num_rows)
        taken += count
        chosen = list(range(count)) if together else sorted(draw.sample(range(table.num_rows), count))
        yield from table.take(pa.array(chosen, pa.int64())).to_pylist()


def _examples(storage: Storage, names: list[str]) -> Block:
    """A few rows of each reason, with their detail."""
    rows, seen = list[tuple[str, int, str, int]](), Counter[str]()
    for name in names:
        try:
            account = read_account(storage, name)
        except DatasetError:
            continue
        left_out = account.filter(pc.is_valid(account["reason"]))
        for row in left_out.slice(0, 1000).to_pylist():
            if seen[row["reason"]] < _EXAMPLES:
                seen[row["reason"]] += 1
                rows.append((row["reason"], row["row"], row["detail"] or "", row["attempts"]))
    return Table("Examples", ("reason", "row", "detail", "tries"), sorted(rows))


def _small(data: bytes) -> bytes:
    """As large as a page of many needs it."""
    if len(data) < _LARGE:
        return data
    try:
        import io

        from PIL import Image
    except ModuleNotFoundError:  # the laptop's install: the page is larger for it
        return data
    with Image.open(io.BytesIO(data)) as opened:
        opened.thumbnail((_EDGE, _EDGE))
        sink = io.BytesIO()
        opened.convert("RGB").save(sink, "JPEG", quality=85)
    return sink.getvalue()
