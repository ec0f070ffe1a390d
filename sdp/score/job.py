"""`sdp score`: writes the scores of pictures as `sdp process` writes latents, then the table of near-duplicates."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from sdp.config import ScoreConfig
from sdp.console import counted, say, size, table
from sdp.datasets import repeated
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Addresses
from sdp.errors import NotFound
from sdp.process.job import ProcessSummary, write_dataset
from sdp.process.messages import ProcessFigures, forecast, summary
from sdp.process.prepare import Prepared, begin, with_tombstones
from sdp.score import near
from sdp.score.prepare import prepare
from sdp.score.stages import ScoreSpec
from sdp.storage import Storage

DUPLICATES = "duplicates/duplicates.parquet"
_MADE_OF = b"sdp.made_of"
_GROUP_ROWS = 65_536
_ROW_BYTES = 40
"""Bytes of a row of scores, at most."""


def run(config: ScoreConfig, *, dry_run: bool = False, only_failed: bool = False) -> ProcessSummary:
    """Score what is missing; with `only_failed`, retry the failed rows."""
    prepared = prepare(config)
    if dry_run:
        output = begin(prepared, only_failed=only_failed, write=False)
        say(table(forecast(prepared, output, lambda images: _scores_lines(prepared, images))))
        return ProcessSummary(None, ProcessFigures(job="score"))
    duplicates: int | None = None

    def find(check: Callable[[], None], parts: Sequence[PartInfo], digest: str) -> int:
        nonlocal duplicates
        if config.score.duplicates.distance is not None:
            duplicates = find_duplicates(prepared, parts, digest, check)
        return 0  # they stay in the dataset

    dataset, figures = write_dataset(prepared, "score", only_failed=only_failed, after=find)
    more = []
    if duplicates is not None:
        share = duplicates / max(1, dataset.manifest.counts.written)
        more.append(("near-duplicates", f"{duplicates:,} of a lower row, {share * 100:.1f} %"))
    say(table(summary(config, dataset, figures, more)))
    dataset.require_rows()
    return ProcessSummary(dataset, figures, duplicates)


def find_duplicates(
    prepared: Prepared[ScoreConfig, ScoreSpec], parts: Sequence[PartInfo], digest: str, check: Callable[[], None]
) -> int:
    """Write the table of near-duplicates, unless it is there; return the number of rows that repeat a lower one.

    Rows that are taken down are left out, so that they stand for no other.
    """
    spec, distance = with_tombstones(prepared), prepared.config.score.duplicates.distance or 0
    made_of = hashlib.sha256(f"{digest} {distance} ".encode() + spec.taken_down).hexdigest()
    known = _known(spec.output)
    if known.get(_MADE_OF) == made_of.encode():
        return int(known[b"sdp.duplicates"])
    rows = sum(part.counts.written for part in parts)
    say(f"score: looking for near-duplicates among {counted(rows, 'row')}")
    paths = [part.path for part in parts if part.counts.written]
    groups = near.find(*read_hashes(spec, paths), distance)
    count = int(np.count_nonzero(groups["duplicate"].to_numpy()))
    sink = pa.BufferOutputStream()
    metadata = {_MADE_OF: made_of, b"sdp.duplicates": str(count)}
    pq.write_table(groups.replace_schema_metadata(metadata), sink, row_group_size=_GROUP_ROWS, compression="zstd")
    spec.output.publish_held(DUPLICATES, sink.getvalue(), check)
    return count


def read_hashes(spec: ScoreSpec, paths: Sequence[str]) -> tuple[near.Hashes, Addresses]:
    """Return the hashes in some parts, with their rows."""
    table = repeated.read_columns(spec.output, paths, ["row", "hash"]) if paths else spec.schema.empty_table()
    hashes, rows = table["hash"].to_numpy(), table["row"].to_numpy()
    kept = ~np.isin(rows, np.array(BitMap64.deserialize(spec.taken_down).to_array(), np.int64))
    return hashes[kept], rows[kept]


def _known(storage: Storage) -> Mapping[bytes, bytes]:
    """Return the metadata of the table of near-duplicates, if there is one."""
    try:
        return pq.read_metadata(storage.open(DUPLICATES)).metadata or {}
    except (NotFound, pa.ArrowException, OSError):  # a damaged one is replaced
        return {}


def _scores_lines(prepared: Prepared[ScoreConfig, ScoreSpec], images: int) -> list[tuple[str, str]]:
    """Return the dry run's lines on the scores to write."""
    distance = prepared.config.score.duplicates.distance
    alike = "equal hashes" if distance == 0 else f"hashes that differ in at most {counted(distance or 0, 'bit')}"
    return [
        ("to write", f"about {size(images * _ROW_BYTES)}: {', '.join(prepared.spec.schema.names)}"),
        ("near-duplicates", "not looked for" if distance is None else alike),
        *((role, f"{model[:-48]}…") for role, model in prepared.models.items()),
    ]
