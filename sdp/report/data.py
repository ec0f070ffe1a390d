"""The report of a dataset: what became of its rows, and what they look like."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyroaring import BitMap64

from sdp.console import size
from sdp.datasets import tombstones
from sdp.datasets.inspect import Description, describe, with_problems
from sdp.datasets.outcomes import FAILURE_REASONS, FILTER_REASONS
from sdp.datasets.parts import read_account
from sdp.datasets.units import PARTS, parse_part_name
from sdp.errors import DatasetError, SdpError
from sdp.report import charts
from sdp.report.page import Block, Drawing, Folded, Gallery, Section, Table, Tile
from sdp.storage import Storage

_TITLES = {"images": "Images", "latents": "Latents", "samples": "Pictures drawn"}
_PARTS_READ = 12
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
    blocks: list[Block] = [_outcomes(found)]
    if found.counts.reasons:
        blocks.append(_reasons(found))
    if pictures and "image" in found.schema:
        galleries, damaged = _galleries(storage, names, pictures, found, seed)
        blocks += galleries
        found = with_problems(found, damaged)
    if found.counts.reasons:
        blocks.append(_examples(storage, names))
    if found.problems:
        blocks.append(Table("Problems", ("what",), [(problem,) for problem in found.problems[:50]]))
    if found.config:
        blocks.append(Folded("Configuration", json.dumps(found.config, indent=1)))
    return Section(
        _TITLES.get(found.kind, found.kind),
        found.uri,
        _verdict(found),
        found.complete,
        _figures(found),
        blocks,
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


def _figures(found: Description) -> list[tuple[str, str]]:
    counts = found.counts
    figures = [("rows", f"{counts.input:,}"), ("written", f"{counts.written:,}")]
    if counts.written:
        figures.append(("bytes a row", f"{found.bytes / counts.written:,.0f}"))
    return [*figures, ("in all", size(found.bytes)), ("parts", f"{found.parts:,}")]


def _outcomes(found: Description) -> Block:
    counts = found.counts
    parts = (("written", counts.written), ("filtered", counts.filtered), ("failed", counts.failed))
    return Drawing("What became of the rows", charts.shares([(n, float(c), f"{c:,}") for n, c in parts]))


def _reasons(found: Description) -> Block:
    counts = found.counts
    ordered = sorted(counts.reasons.items(), key=lambda item: -item[1])
    rows = [
        (reason, count, f"{count / counts.input:.2%}", {**FILTER_REASONS, **FAILURE_REASONS}.get(reason, ""))
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
    rows = list(_sampled(storage, names, pictures, seed, taken, problems))
    gone = sum(row < found.rows for row in taken)
    left_out = f"; {gone:,} that are taken down are not shown" if gone else ""
    if found.kind != "samples":
        tiles = [Tile(_small(row["image"]), str(row.get("caption", "")), _note(row)) for row in rows]
        return [Gallery(f"{len(tiles)} pictures from all over it{left_out}", tiles)], problems
    tiles = [
        Tile(_small(row["image"]), str(row["prompt"]), f"seed {row['seed']}" if "seed" in row else "") for row in rows
    ]
    ordered = sorted(tiles, key=lambda tile: tile.caption)
    return [Gallery(f"Pictures by prompt{left_out}", ordered, wide=True)], problems


def _note(row: dict[str, Any]) -> str:
    was = f", was {row['original_width']} × {row['original_height']}" if "original_width" in row else ""
    return f"row {row['row']}: {row.get('width')} × {row.get('height')}{was}"


def _sampled(
    storage: Storage, names: list[str], most: int, seed: int, taken_down: BitMap64, problems: list[str]
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
            cause = " ".join(str(error).split())[:160]
            problems.append(f"{storage.uri_of(name)}: cannot be read ({cause}); delete it and run the job again")
            continue
        if "image" not in table.column_names or "row" not in table.column_names:
            continue
        table = table.filter(pa.array([row not in taken_down for row in table["row"].to_pylist()], pa.bool_()))
        taken += min(wanted, table.num_rows)
        chosen = sorted(draw.sample(range(table.num_rows), min(wanted, table.num_rows)))
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
