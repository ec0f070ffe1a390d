"""Searches over all rows, on Ray: a survey of the source, and a search for images with repeated content."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from sdp import cluster
from sdp.config import DownloadConfig
from sdp.console import Progress, counted, say
from sdp.datasets import repeated
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.download import survey
from sdp.download.plan import Rules
from sdp.download.survey import Survey
from sdp.storage import Storage

_SMALL_SOURCE = 100_000
"""Rows that the driver surveys itself, since starting a process would take longer."""


def survey_source(
    config: DownloadConfig, output: Output, rules: Rules, ray_options: Mapping[str, Any], check: Callable[[], None]
) -> Survey:
    """Survey the source and store the result; `check` is called before each wait."""
    index, storage, options = output.index, output.storage, config.storage.options()
    partitions = repeated.partitions_for(index.rows) if config.dedup.urls else 0
    if index.rows <= _SMALL_SOURCE:
        hosts, shares = survey.survey_rows(index, 0, index.rows, rules, options, partitions)
        return survey.publish(storage, index.rows, hosts, map(repeated.repeated, shares))
    starts = range(0, index.rows, survey.PIECE_ROWS)
    shared, shared_rules = ray.put(index), ray.put(rules)
    task: Any = _survey_piece.options(num_returns=2 + partitions, **ray_options)
    pieces = [
        task.remote(shared, start, min(start + survey.PIECE_ROWS, index.rows), shared_rules, options, partitions)
        for start in starts
    ]
    searches = _search([piece[1:-1] for piece in pieces], ray_options)

    def wait(reference: Any) -> Any:
        check()
        return ray.get(reference)

    hosts = Counter()
    with Progress("surveying the source") as progress:
        for number, piece in enumerate(pieces, 1):
            hosts.update(wait(piece[0]))
            hosts = survey.most_common(hosts)
            progress.update(f"{min(number * survey.PIECE_ROWS, index.rows):,} of {counted(index.rows, 'row')}")
    return survey.publish(storage, index.rows, hosts, map(wait, searches))


def find_repeated(storage: Storage, ray_options: Mapping[str, Any], parts: Sequence[PartInfo], digest: str) -> int:
    """Find and store the rows that repeat the content of a lower row; return their number."""
    if (known := repeated.known(storage, digest)) is not None:
        return known
    pieces = repeated.pieces(parts)
    partitions = repeated.partitions_for(sum(part.counts.written for part in parts))
    if len(pieces) <= 1:
        shares = [share for piece in pieces for share in repeated.read_hashes(storage, piece, partitions)]
        return repeated.keep(storage, digest, map(repeated.repeated, shares))
    say(f"download: looking for repeated content in {counted(len(parts), 'part')}")
    cluster.connect()
    task: Any = _read_hashes.options(num_returns=1 + partitions, **ray_options)
    results = [task.remote(storage, piece, partitions) for piece in pieces]
    return repeated.keep(storage, digest, map(ray.get, _search([result[:-1] for result in results], ray_options)))


def _search(shares: Sequence[Sequence[Any]], ray_options: Mapping[str, Any]) -> list[Any]:
    """Start a search for each partition, over its keys and rows from all pieces."""
    search: Any = _repeated.options(**ray_options)
    return [search.remote(*partition) for partition in zip(*shares, strict=True)]


_repeated = ray.remote(num_cpus=0.5)(repeated.repeated)


@ray.remote(num_cpus=0.5)
def _survey_piece(*arguments: Any) -> Any:
    """Survey a piece: return its hosts, each partition's share, and None, since Ray unpacks several values only."""
    hosts, shares = survey.survey_rows(*arguments)
    return (hosts, *shares, None)


@ray.remote(num_cpus=0.5)
def _read_hashes(*arguments: Any) -> Any:
    """Read a piece's hashes: return each partition's share, and None, as above."""
    return (*repeated.read_hashes(*arguments), None)
