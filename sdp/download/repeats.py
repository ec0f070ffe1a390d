"""The search for rows that repeat a lower row: its URL, before any is fetched, or its content, once all are written.

The rows are read in pieces, in parallel. Each piece returns a hash and the address of each of its rows (16 bytes), in
partitions by hash. The repeats of each partition are then found separately. The result is stored beside the output, so
that it is found once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from sdp.config.download import DownloadConfig
from sdp.console import Progress, counted
from sdp.datasets import repeated
from sdp.datasets.index import Index
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.datasets.repeated import Keys, Repeated
from sdp.datasets.units import Addresses
from sdp.download.plan import Rules, plan
from sdp.download.spans import iter_units
from sdp.ray import cluster
from sdp.storage import Storage, StorageOptions
from sdp.urls import key64

Piece = TypeVar("Piece")
Read = Callable[[Piece, int], list[tuple[Keys, Addresses]]]
"""A function that reads a piece into so many partitions."""

_READ_ROWS = 16_384


def placement(config: DownloadConfig) -> dict[str, Any]:
    """Return Ray's options that place work on the configured nodes."""
    return {"label_selector": dict(config.workers.node_labels) or None}


def find_urls(
    config: DownloadConfig, output: Output, rules: Rules, ray_options: Mapping[str, Any], check: Callable[[], None]
) -> Repeated:
    """Find and store the rows whose URL a lower row to fetch has, unless they are known."""
    index, storage = output.index, output.storage
    name = f"urls-{index.rows:011d}"
    if repeated.known(storage, name) is None:
        starts = range(0, index.rows, repeated.PIECE_ROWS)
        pieces = [range(start, min(start + repeated.PIECE_ROWS, index.rows)) for start in starts]
        read = partial(read_urls, index, rules, config.storage.options())
        repeated.keep(storage, name, _search("URLs", read, pieces, index.rows, ray_options, check), check)
    return Repeated(storage, repeated.folder(name))


def find_content(
    storage: Storage, ray_options: Mapping[str, Any], check: Callable[[], None], parts: Sequence[PartInfo], digest: str
) -> int:
    """Find and store the rows that repeat the content of a lower row; return their number."""
    known = repeated.known(storage, digest)
    if known is not None:
        return known
    rows = sum(part.counts.written for part in parts)
    read = partial(repeated.read_hashes, storage)
    repeats = _search("images", read, repeated.pieces(parts), rows, ray_options, check)
    return repeated.keep(storage, digest, repeats, check)


def read_urls(
    index: Index, rules: Rules, options: StorageOptions, piece: range, partitions: int
) -> list[tuple[Keys, Addresses]]:
    """Return the hashes of the URLs in a piece that are to be fetched, with their rows, by partition."""
    lengths = [min(_READ_ROWS, piece.stop - at) for at in piece[::_READ_ROWS]]
    tables = iter_units(lengths, index.slices(piece.start, piece.stop), rules.columns(), index.columns, options)
    keys, rows = [], []
    for at, table in zip(piece[::_READ_ROWS], tables, strict=True):
        to_fetch, _ = plan(table, np.arange(at, at + table.num_rows, dtype=np.int64), rules)
        keys.append(np.array([key64(row.url.text) for row in to_fetch], np.uint64))
        rows.append(np.array([row.row for row in to_fetch], np.int64))
    return repeated.partitioned(np.concatenate(keys), np.concatenate(rows), partitions)


def _search(
    what: str,
    read: "Read[Piece]",
    pieces: Sequence[Piece],
    rows: int,
    ray_options: Mapping[str, Any],
    check: Callable[[], None],
) -> Iterator[Addresses]:
    """Yield the repeated rows of each partition; Ray looks for them if there are several pieces."""
    partitions = repeated.partitions_for(rows)
    if len(pieces) <= 1:  # starting a process would take longer
        yield from (repeated.repeated(share) for piece in pieces for share in read(piece, partitions))
        return
    import ray

    cluster.connect()
    options = {"num_cpus": 0.5, **ray_options}
    task: Any = ray.remote(_read).options(num_returns=partitions + 1, **options)
    search: Any = ray.remote(repeated.repeated).options(**options)
    shared = ray.put(read)
    shares = [task.remote(shared, piece, partitions) for piece in pieces]
    searches = [search.remote(*partition) for partition in list(zip(*shares, strict=True))[:-1]]
    with Progress(f"looking for repeated {what}") as progress:
        for number, share in enumerate(shares, 1):
            check()
            ray.get(share[-1])
            progress.update(f"{rows * number // len(pieces):,} of {counted(rows, 'row')}")
        for each in searches:
            check()
            yield ray.get(each)


def _read(read: Any, piece: Any, partitions: int) -> Any:
    """Read a piece: return each partition's share, and None, since Ray unpacks several values only."""
    return (*read(piece, partitions), None)
