"""The section of a dataset: the outcomes of its rows, and pictures."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow.compute as pc

from sdp.console import counted, size
from sdp.datasets.inspect import Description, describe
from sdp.datasets.names import names_of
from sdp.datasets.outcomes import FAILURE_REASONS, FILTER_REASONS, OUTCOMES, rule_of
from sdp.datasets.parts import PartInfo, iter_rows, read_account, resolve
from sdp.datasets.records import reading
from sdp.errors import DatasetError, NotFound
from sdp.model.checkpoints import newer_than
from sdp.report.page import Bar, Block, Folded, Gallery, PageSection, Table, Tile, listing
from sdp.storage import Storage

_PARTS_READ = 12
_MISSING = 5
"""Missing parts shown."""
_EXAMPLES = 3
"""Rows shown for each reason."""
_BATCH = 16
_EDGE = 1024
"""Longest side of a picture on the page, in pixels, if the worker extra is installed."""
_LARGE = 40_000
"""Size in bytes from which pictures are compressed for the page."""


def dataset_section(
    storage: Storage, *, verify: bool = False, pictures: int = 0, problems: Iterable[str] = ()
) -> PageSection:
    """Describe a dataset, with at most this many pictures and further `problems`; `verify` reads every byte."""
    dataset = describe(storage, verify=verify)
    counts, facts, manifest = dataset.counts, dataset.to_json(), dataset.dataset and dataset.dataset.manifest
    columns, kind, taken_down, stored = (facts[name] for name in ("columns", "kind", "takedowns", "bytes"))
    parts = random.Random(0).sample(dataset.parts, min(len(dataset.parts), _PARTS_READ))
    parts.sort(key=lambda part: part.path)
    problems = [*dataset.problems, *problems]
    gallery = [_pictures(storage, dataset, parts, pictures, problems)] if pictures and "image" in columns else []
    if kind == "captions" and pictures:
        from sdp.report.captions import captioned

        gallery = [captioned(dataset, parts, pictures)]
    problems = sorted(set(problems))
    missing = [(work.name, work.unit.start, work.unit.stop) for work in dataset.missing[:_MISSING]]
    blocks = [
        *gallery,
        Bar("Outcomes of the rows", [(name, n := getattr(counts, name), f"{n:,}") for name in OUTCOMES], "cbf"),
        _reasons(dataset, parts),
        Table("The first missing parts", ("part", "from row", "to"), missing),
        listing("Notes", [*dataset.notes, *_drawn_with(dataset)]),
    ]
    details: list[Block] = [
        listing("Made from", dataset.lineage, "source"),
        Table("Columns", ("column", "type"), [*columns.items()]),
        Folded("Configuration", json.dumps(facts["config"], indent=1)),
    ]
    facts["complete"] = complete = dataset.complete and not problems
    if problems:
        verdict = f"Damaged: {counted(len(problems), 'problem')}, listed below."
    elif not complete:
        ordered = counted(len(dataset.parts) + len(dataset.missing), "part")
        verdict = f"Incomplete: {len(dataset.parts):,} of {ordered} written; run the job again to write the rest."
    else:
        others = [f", {n:,} {name}" for n, name in ((counts.filtered, "filtered"), (counts.failed, "failed")) if n]
        written = f"{counts.written:,} of {counted(counts.input, 'row')} written{''.join(others)}"
        verdict = f"Complete: {written}{'; every byte verified' if verify else ''}."
    figures = [
        ("rows" if complete else "rows done so far", f"{counts.input:,}"),
        ("written", f"{counts.written:,}"),
        ("takedowns", f"{taken_down:,}" if taken_down else ""),
        ("bytes per row", f"{stored / counts.written:,.0f}" if counts.written else ""),
        ("size", size(stored)),
        ("parts", f"{len(dataset.parts):,}"),
        ("version", f"{manifest.version}, {manifest.created[:10]}, sdp {manifest.sdp}" if manifest else ""),
    ]
    title = "Pictures drawn" if kind == "samples" else kind.capitalize()
    return PageSection(title, storage.uri, verdict, complete, figures, blocks, details, problems, facts)


def _drawn_with(dataset: Description) -> Iterator[str]:
    """Yield which checkpoint drew the pictures, and whether its run has a newer one."""
    if dataset.dataset is not None and (model := dataset.dataset.manifest.models.get("checkpoint")):
        uri = model.rpartition(" sha256:")[0]
        newer = newer_than(uri, dataset.output.storage.options)
        yield f"drawn with {uri}{f'; {newer} is newer' if newer else ''}"


def _reasons(dataset: Description, parts: Iterable[PartInfo]) -> Block:
    """Return the number of rows by reason, with a few rows as examples from some of the parts."""
    examples: dict[str, list[str]] = {}
    names = names_of(dataset.output.storage)
    for unit in dict.fromkeys(part.unit for part in parts):
        attempts = sorted((part.attempt, part.path) for part in dataset.parts if part.unit == unit)
        with suppress(DatasetError):  # a damaged part, which is among the problems
            account = resolve([read_account(dataset.output.storage, path) for _, path in attempts])
            for row in account.filter(pc.is_valid(account["reason"])).slice(0, 1000).to_pylist():
                if len(shown := examples.setdefault(row["reason"], [])) < _EXAMPLES:
                    (name,) = names(np.array([row["row"]]))
                    address = f"row {row['row']}"
                    text = f"{name} ({address})" if name else address
                    shown.append(f"{text} {row['detail'] or ''}".strip())
    counts, meaning = dataset.counts, {**FILTER_REASONS, **FAILURE_REASONS}
    rows = [
        (reason, count, f"{count / counts.input:.2%}", meaning.get(rule_of(reason), ""),
         "; ".join(examples.get(reason, [])))
        for reason, count in sorted(counts.reasons.items(), key=lambda item: -item[1])
    ]  # fmt: skip
    return Table("Filtered and failed rows", ("reason", "rows", "share", "meaning", "examples"), rows)


def _pictures(
    storage: Storage, dataset: Description, parts: Sequence[PartInfo], pictures: int, problems: list[str]
) -> Block:
    """Return pictures from some parts, by prompt if they have any, except those taken down."""
    if dataset.taken_down is None:
        return listing("Pictures", ["not shown, since the takedowns cannot be read"])
    gone, rows = dataset.taken_down.rows, list[dict[str, Any]]()
    for number, part in enumerate(parts, 1):
        try:
            batches = iter_rows(storage, part.path, None, _BATCH)
            usable = (row for batch in batches for row in batch.to_pylist() if row["row"] not in gone)
            rows += islice(usable, pictures * number // len(parts) - len(rows))
        except DatasetError as error:
            problems.append(str(error))
    by_prompt: dict[str, list[Tile]] = {}
    for row in rows:
        prompt = str(row.get("prompt", ""))
        seed = f" · seed {row['seed']}" if "seed" in row else ""
        original = f", was {row['original_width']} × {row['original_height']}" if "original_width" in row else ""
        pixels = f": {row['width']} × {row['height']}{original}" if "width" in row and not seed else ""
        with noted(problems):
            data = small(row["image"], f"{storage.uri}: row {row['row']}")
            tile = Tile(data, str(row.get("caption", prompt)), f"row {row['row']}{seed}{pixels}")
            by_prompt.setdefault(prompt, []).append(tile)
    omitted = gone.rank(dataset.output.index.rows - 1)
    remark = f"; not shown: {omitted:,} taken down" if omitted else ""
    title = "Pictures by prompt" if any(by_prompt) else f"{counted(len(rows), 'picture')} from the whole dataset"
    if all(len(tiles) == 1 for tiles in by_prompt.values()):  # a row would hold one picture
        by_prompt = {"": [*chain(*by_prompt.values())]} if by_prompt else {}
    return Gallery(title + remark, [*by_prompt.items()])


@contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Turn the error of a file that is damaged or gone into a problem."""
    try:
        yield
    except (DatasetError, NotFound) as error:
        problems.append(str(error))


def small(data: bytes, where: str) -> bytes:
    """Return a picture as a JPEG for the page if it is large; DatasetError names `where` if it cannot be decoded."""
    if len(data) < _LARGE:
        return data
    try:
        import io

        from PIL import Image

        from sdp.imaging import decode, fit
    except ModuleNotFoundError:  # without the worker extra the page is larger
        return data
    with reading(where, "restore or delete it", "not a picture that sdp decodes"):
        pixels = fit(decode(data, min_side=_EDGE).pixels, _EDGE)
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "JPEG", quality=90)
    return sink.getvalue()
