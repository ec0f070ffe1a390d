"""Cards: README.md beside an export, and README.md with Croissant metadata for a dataset.

A card's tables of datasets and evaluations are made from manifests and evaluation.json alone, so that
`sdp audit --card` can make them again and compare.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from html import unescape
from pathlib import Path
from typing import Any

from pyroaring import BitMap64

from sdp.charts import markdown, render
from sdp.console import spent
from sdp.datasets import tombstones
from sdp.datasets.inspect import describe
from sdp.datasets.ledger import address_offset
from sdp.datasets.manifest import manifest_with, open_dataset
from sdp.datasets.records import reading
from sdp.errors import DatasetError, SdpError, UserError
from sdp.evaluate.layout import RESULT, headlines
from sdp.model import sources
from sdp.model.checkpoints import averages, read_ledger, run_of, training_config
from sdp.model.export import Exported
from sdp.report.run import checkpoint_section
from sdp.storage import Storage, open_storage
from sdp.train.run_folder import RunFolder

CARD, _CROISSANT = "README.md", "croissant.json"
_ROW = re.compile(r"\| (\S.*?) \| ([0-9a-f]{64}) \|")
"""The beginning of a dataset's row, or of an evaluation's."""
_EVALUATION = "| {} | {} | {} |"
"""The row of an evaluation; a dataset's has more cells."""


def write_model_card(exported: Exported) -> None:
    """Write the card of an exported folder, with the samples that its run drew last before the step."""
    target, folder = open_storage(exported.uri), open_storage(exported.checkpoint)
    run, facts = RunFolder(open_storage(run_of(folder.uri))), checkpoint_section(folder).facts
    sampled = max((step for step in run.sample_steps() if step <= exported.step), default=0)
    samples = list(run.samples(sampled)) if sampled else []
    for file, _, picture in samples:
        target.publish(f"samples/{file}", picture)
    evaluations = []
    for uri, weights in run.evaluations(folder.uri.rpartition("/")[2]):
        with suppress(SdpError):  # it is gone, or cannot be read
            if averages(training_config(folder), weights, folder) == exported.ema:
                evaluations.append(_evaluation(uri))
    values = {
        "name": target.uri.rpartition("/")[2], "family": exported.family, "ema": exported.ema, "facts": facts,
        "base": sources.parse(facts["config"]["model"]["source"]), "sampled": sampled, "samples": samples,
        "metrics": run.metrics(), "evaluations": evaluations, "takedowns": _takedowns(folder, facts["datasets"]),
        "data": _rows(facts["datasets"]), "json": json.dumps, "spent": spent,
    }  # fmt: skip
    target.publish(CARD, render(Path(__file__).with_name("model_card.md"), values).encode(errors="replace"))


def _takedowns(folder: Storage, datasets: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of each dataset that are taken down by now, and how many of them a checkpoint has consumed."""
    ledger = read_ledger(folder)
    consumed = BitMap64.union(BitMap64(), *map(ledger.rows, ledger.epochs()))
    for number, dataset in enumerate(datasets):
        counts = "unknown", "unknown"
        with suppress(SdpError):  # it is gone, or cannot be read
            rows = tombstones.load(open_dataset(open_storage(dataset["uri"])).storage).rows
            used = len(consumed & BitMap64.shift(rows, address_offset(number)))
            counts = f"{len(rows):,}", f"{used:,}"
        yield dataset["uri"], *counts


def write_dataset_card(storage: Storage, out: str) -> None:
    """Write the card of a dataset and its Croissant metadata to a folder."""
    dataset, target = open_dataset(storage), open_storage(out)
    if target.exists(CARD) and b"sdp inspect" not in target.read(CARD):
        raise UserError(f"inspect: --card: {target.uri_of(CARD)} is not a card of sdp; choose another folder")
    values = {
        "name": storage.uri.rpartition("/")[2], "manifest": dataset.manifest, "digest": dataset.digest,
        "taken_down": len(tombstones.load(storage).rows), "data": _rows([dataset.lineage]),
    }  # fmt: skip
    for file, template in ((CARD, "dataset_card.md"), (_CROISSANT, _CROISSANT)):
        target.publish(file, render(Path(__file__).with_name(template), values).encode(errors="replace"))


def check_card(uri: str) -> Iterator[tuple[str, str]]:
    """Yield each dataset and evaluation in the card of a folder, and what contradicts its row; "" if nothing does."""
    storage = open_storage(uri)
    lines = storage.read(CARD).decode(errors="replace").splitlines()
    rows = [(unescape(match[1]), match[2], line) for line in lines if (match := _ROW.match(line))]
    if not rows:
        raise DatasetError(f"{storage.uri_of(CARD)}: not a card of sdp that names datasets; check the URI")
    for dataset, digest, line in rows:
        try:
            if line.count("|") == _EVALUATION.count("|"):
                row, problems = _evaluation(dataset), list[str]()
            else:
                row, problems = _row(dataset, digest)[0], describe(open_storage(dataset)).problems
            if row != line:
                problems = [f"the card says {line}, its record {row}", *problems]
            yield dataset, "; ".join(problems)
        except SdpError as error:
            yield dataset, str(error)


def _evaluation(uri: str) -> str:
    """Return the row of an evaluation."""
    storage = open_storage(uri)
    content = storage.read(RESULT)
    with reading(storage.uri_of(RESULT), "evaluate again"):
        figures = [f"{name} {value} ({of})" for name, value, of in headlines(json.loads(content)) if value]
    return _EVALUATION.format(markdown(uri), hashlib.sha256(content).hexdigest(), markdown("; ".join(figures)))


def _rows(datasets: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows of some datasets and of those that they were made from."""
    lines: dict[str, None] = {}
    for dataset in datasets:
        source: Mapping[str, Any] | None = dataset
        while source and source.get("uri"):
            uri, digest = source["uri"], source.get("manifest_digest")
            try:
                line, source = _row(uri, digest) if digest else (f"| {markdown(uri)} | plain files | | | |", None)
            except SdpError:
                line, source = f"| {markdown(uri)} | {digest} | cannot be read | | |", None
            lines[line] = None
    return "\n".join(lines)


def _row(uri: str, digest: str) -> tuple[str, Mapping[str, Any] | None]:
    """Return the row of a dataset's version, and what that was made from."""
    manifest = manifest_with(open_storage(uri), digest)
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in manifest.counts.reasons.items())
    counts = f"{manifest.counts.input:,} | {manifest.counts.written:,} | {markdown(reasons)}"
    return f"| {markdown(uri)} | {digest} | {counts} |", manifest.input
