"""`sdp score`: writes the scores of pictures as `sdp process` writes latents, then the table of near-duplicates."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from sdp.config.score import ScoreConfig
from sdp.console import counted, say, size, table
from sdp.datasets import repeated
from sdp.datasets.columns import parquet_bytes
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Addresses
from sdp.errors import NotFound
from sdp.process.job import ProcessSummary, write_dataset
from sdp.process.messages import ProcessFigures, TableLine, forecast, summary
from sdp.process.prepare import Prepared, begin, with_tombstones
from sdp.runners.exchange import exchange
from sdp.score import near
from sdp.score.prepare import prepare
from sdp.score.stages import ScoreSpec
from sdp.storage import Storage

DUPLICATES = "duplicates/duplicates.parquet"
_MADE_OF = b"sdp.made_of"
_GROUP_ROWS = 65_536
_ROW_BYTES = 40
"""A row of scores, at most."""


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


def _scores_lines(prepared: Prepared[ScoreConfig, ScoreSpec], images: int) -> list[TableLine]:
    """Return the dry run's lines on the scores to write."""
    distance = prepared.config.score.duplicates.distance
    alike = "equal hashes" if distance == 0 else f"hashes that differ in at most {counted(distance or 0, 'bit')}"
    return [
        ("to write", f"about {size(images * _ROW_BYTES)}: {', '.join(prepared.spec.schema.names)}"),
        ("near-duplicates", "not looked for" if distance is None else alike),
        *((role, f"{model[:-48]}…") for role, model in prepared.models.items()),
    ]


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
    groups = near.groups(_search(spec, prepared.config, parts, check))
    count = int(np.count_nonzero(groups["duplicate"].to_numpy()))
    groups = groups.replace_schema_metadata({_MADE_OF: made_of, b"sdp.duplicates": str(count)})
    spec.output.publish_held(DUPLICATES, parquet_bytes(groups, row_group_size=_GROUP_ROWS), check)
    return count


def _read_hashes(spec: ScoreSpec, paths: Sequence[str]) -> tuple[near.Hashes, Addresses]:
    """Return the hashes in some parts, with their rows."""
    table = repeated.read_columns(spec.output, paths, ["row", "hash"])
    hashes, rows = table["hash"].to_numpy(), table["row"].to_numpy()
    gone = np.array(BitMap64.deserialize(spec.taken_down).to_array() if spec.taken_down else [], np.int64)
    kept = ~np.isin(rows, gone)
    return hashes[kept], rows[kept]


def _known(storage: Storage) -> Mapping[bytes, bytes]:
    """Return the metadata of the table of near-duplicates, if there is one."""
    try:
        return pq.read_metadata(storage.open(DUPLICATES)).metadata or {}
    except (NotFound, pa.ArrowException, OSError):  # a damaged one is replaced
        return {}


def _search(
    spec: ScoreSpec, config: ScoreConfig, parts: Sequence[PartInfo], check: Callable[[], None]
) -> Iterator[near.Pairs]:
    """Search mask by mask; by tasks if there are several partitions, since the hashes are then many."""
    distance, labels = config.score.duplicates.distance or 0, config.transform.node_labels
    rows = sum(part.counts.written for part in parts)
    say(f"score: looking for near-duplicates among {counted(rows, 'row')}")
    pieces, masks, partitions = repeated.pieces(parts), near.masks(rows, distance), repeated.partitions_for(rows)
    if partitions == 1:
        shares = [_read_hashes(spec, piece) for piece in pieces]
        yield from (_search_shares(mask, distance, mask == masks[0], *shares) for mask in masks if shares)
        return
    for number, mask in enumerate(masks, 1):
        what = f"looking for near-duplicates, search {number} of {len(masks)}"
        read = partial(_read_partitions, spec, mask)
        search = partial(_search_shares, mask, distance, mask == masks[0])
        yield from exchange(what, rows, read, pieces, search, partitions, labels=labels, check=check)


def _read_partitions(spec: ScoreSpec, mask: int, paths: Sequence[str], partitions: int) -> repeated.Partitioned:
    hashes, rows = _read_hashes(spec, paths)
    partition = near.partition_of(hashes, mask, partitions)
    return repeated.divided(partition, partitions, hashes, rows)


def _search_shares(mask: int, distance: int, equal: bool, *shares: tuple[near.Hashes, Addresses]) -> near.Pairs:
    """Return the pairs of near-duplicates in some hashes, with their rows, that agree under a mask."""
    hashes, rows = (np.concatenate(columns) for columns in zip(*shares, strict=True))
    return near.search(hashes, rows, mask, distance, equal=equal)
