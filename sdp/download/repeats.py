"""The search for rows that repeat a lower row: its URL, before any is fetched, or its content, once all are written.

The rows are read in pieces, in parallel. Each piece returns a hash and the address of each of its rows (16 bytes), in
partitions by hash. The repeats of each partition are then found separately. The result is stored beside the output, so
that it is found once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from sdp.config.download import DownloadConfig
from sdp.datasets import repeated
from sdp.datasets.index import Index
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.datasets.repeated import Partitioned, Repeated
from sdp.download.plan import Rules, plan
from sdp.download.spans import iter_units
from sdp.runners.exchange import exchange
from sdp.storage import Storage, StorageOptions
from sdp.urls import key64

_READ_ROWS = 16_384


def find_urls(config: DownloadConfig, output: Output, rules: Rules, check: Callable[[], None]) -> Repeated:
    """Return the rows that repeat the URL of a lower row to fetch; search and store them unless that is done."""
    index, storage = output.index, output.storage
    name = f"urls-{index.rows:011d}"
    if repeated.known(storage, name) is None:
        starts = range(0, index.rows, repeated.PIECE_ROWS)
        pieces = [range(start, min(start + repeated.PIECE_ROWS, index.rows)) for start in starts]
        read = partial(read_urls, index, rules, config.storage.options())
        partitions, labels = repeated.partitions_for(index.rows), config.workers.node_labels
        what = "looking for repeated URLs"
        repeats = exchange(what, index.rows, read, pieces, repeated.repeated, partitions, labels=labels, check=check)
        repeated.keep(storage, name, repeats, check)
    return Repeated(storage, repeated.folder(name))


def find_content(
    storage: Storage, labels: Mapping[str, str], check: Callable[[], None], parts: Sequence[PartInfo], digest: str
) -> int:
    """Find and store the rows that repeat the content of a lower row; return their number."""
    if (known := repeated.known(storage, digest)) is not None:
        return known
    rows = sum(part.counts.written for part in parts)
    read = partial(repeated.read_hashes, storage)
    what, pieces, partitions = "looking for repeated images", repeated.pieces(parts), repeated.partitions_for(rows)
    repeats = exchange(what, rows, read, pieces, repeated.repeated, partitions, labels=labels, check=check)
    return repeated.keep(storage, digest, repeats, check)


def read_urls(index: Index, rules: Rules, options: StorageOptions, piece: range, partitions: int) -> Partitioned:
    """Return the hashes of the URLs in a piece that are to be fetched, with their rows, by partition."""
    lengths = [min(_READ_ROWS, piece.stop - at) for at in piece[::_READ_ROWS]]
    tables = iter_units(lengths, index.slices(piece.start, piece.stop), rules.columns(), index.columns, options)
    keys, rows = [], []
    for at, table in zip(piece[::_READ_ROWS], tables, strict=True):
        to_fetch, _ = plan(table, np.arange(at, at + table.num_rows, dtype=np.int64), rules)
        keys.append(np.array([key64(row.url.text) for row in to_fetch], np.uint64))
        rows.append(np.array([row.row for row in to_fetch], np.int64))
    return repeated.partitioned(np.concatenate(keys), np.concatenate(rows), partitions)
