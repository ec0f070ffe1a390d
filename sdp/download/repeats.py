"""A survey of the source before anything is fetched, and after it the search for images with repeated content.

A survey counts the images per host and finds the repeated URLs. The rows are read in pieces, in parallel. Each piece
counts its hosts and returns, for each row to be fetched, a hash of the URL and the address (16 bytes), in a partition
by hash. The repeated URLs of each partition are then found separately. The result is stored beside the output in
`_survey/`, so that it is made once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from pyroaring import BitMap64

from sdp import cluster
from sdp.config import DownloadConfig
from sdp.config.download import HostsConfig
from sdp.console import Progress, counted, duration, say
from sdp.datasets import address_sets, repeated
from sdp.datasets.index import Index
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.datasets.records import BadRecord, Whole, dump, parse
from sdp.datasets.repeated import PIECE_ROWS, Keys
from sdp.datasets.units import Addresses
from sdp.download.plan import Rules, plan
from sdp.download.spans import iter_units
from sdp.errors import NotFound
from sdp.storage import Storage, StorageOptions
from sdp.urls import key64

FOLDER = "_survey/"

_SMALL_SOURCE = 100_000
"""Rows that the driver surveys itself, since starting a process would take longer."""
_READ_ROWS = 16_384
_KEPT_HOSTS = 10_000
"""Hosts kept of each piece and in total; rarer ones delay nothing."""

_LATENCY_S = 0.5
"""Assumed duration of a request to a busy host, where only the number at once is limited."""
_NOTEWORTHY_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Survey:
    """The survey of the source up to an address."""

    stop: Whole
    hosts: Mapping[str, Whole] = field(default_factory=dict)
    """Images of the most frequent hosts."""
    duplicates: Whole = 0


def survey_rows(
    index: Index, start: int, stop: int, rules: Rules, options: StorageOptions | None, partitions: int
) -> tuple[Counter[str], list[tuple[Keys, Addresses]]]:
    """Survey the rows [start, stop): return the images per host, and by partition the URLs' hashes and addresses."""
    hosts: Counter[str] = Counter()
    keys: list[int] = []
    rows: list[int] = []
    lengths = [min(_READ_ROWS, stop - at) for at in range(start, stop, _READ_ROWS)]
    at = start
    for table in iter_units(lengths, index.slices(start, stop), rules.columns(), index.columns, options):
        to_fetch, _ = plan(table, np.arange(at, at + table.num_rows, dtype=np.int64), rules)
        for wanted in to_fetch:
            hosts[wanted.url.host] += 1
            if partitions:
                keys.append(key64(wanted.url.text))
                rows.append(wanted.row)
        at += table.num_rows
    return most_common(hosts), repeated.partitioned(np.array(keys, np.uint64), np.array(rows, np.int64), partitions)


def most_common(hosts: Counter[str]) -> Counter[str]:
    """Return the hosts that the survey keeps, most frequent first."""
    return Counter(dict(hosts.most_common(_KEPT_HOSTS)))


def publish(
    storage: Storage, stop: int, hosts: Counter[str], duplicates: Iterable[Addresses], check: Callable[[], None]
) -> Survey:
    """Store a survey; its record is written last and makes it valid."""
    count = address_sets.publish(storage, _folder(stop), duplicates, check)
    survey = Survey(stop, dict(hosts.most_common(_KEPT_HOSTS)), count)
    storage.publish_held(f"{_folder(stop)}.json", dump(survey), check)
    return survey


def load(storage: Storage, stop: int) -> Survey | None:
    """Load the survey of the addresses below `stop`; None if there is none, or a damaged one."""
    try:
        return parse(Survey, storage.read(f"{_folder(stop)}.json"))
    except (NotFound, BadRecord):
        return None


def duplicates_in(storage: Storage, survey_stop: int, start: int, stop: int) -> BitMap64:
    """Return the addresses in [start, stop) whose URL a lower one has."""
    return address_sets.within(storage, _folder(survey_stop), start, stop)


def forecast(hosts: Mapping[str, int], limits: HostsConfig, other_hosts_s: float) -> Iterator[str]:
    """Yield a line for each host that alone takes much longer than all others together."""
    for host, count in sorted(hosts.items(), key=lambda item: -item[1])[:5]:
        seconds = count / _rate(limits)
        if seconds < max(_NOTEWORTHY_S, 1.5 * other_hosts_s):
            return
        yield (
            f"{host} alone has {count:,} of the images and takes {duration(seconds)} at "
            f"{_rate(limits):g} a second, the rest about {duration(other_hosts_s)}; raise hosts.per_second or "
            "hosts.at_once if that host agrees, or put it on a list of blocklists.domains"
        )


def _rate(limits: HostsConfig) -> float:
    by_number = limits.at_once / _LATENCY_S
    return by_number if limits.per_second is None else min(limits.steady, by_number)


def _folder(stop: int) -> str:
    return f"{FOLDER}{stop:012d}"


def survey_source(
    config: DownloadConfig, output: Output, rules: Rules, ray_options: Mapping[str, Any], check: Callable[[], None]
) -> Survey:
    """Survey the source and store the result; `check` is called before each wait."""
    index, storage, options = output.index, output.storage, config.storage.options()
    partitions = repeated.partitions_for(index.rows) if config.dedup.urls else 0
    if index.rows <= _SMALL_SOURCE:
        hosts, shares = survey_rows(index, 0, index.rows, rules, options, partitions)
        return publish(storage, index.rows, hosts, map(repeated.repeated, shares), check)
    starts = range(0, index.rows, PIECE_ROWS)
    shared, shared_rules = ray.put(index), ray.put(rules)
    task: Any = _survey_piece.options(num_returns=2 + partitions, **ray_options)
    pieces = [
        task.remote(shared, start, min(start + PIECE_ROWS, index.rows), shared_rules, options, partitions)
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
            hosts = most_common(hosts)
            progress.update(f"{min(number * PIECE_ROWS, index.rows):,} of {counted(index.rows, 'row')}")
    return publish(storage, index.rows, hosts, map(wait, searches), check)


def find_repeated(
    storage: Storage, ray_options: Mapping[str, Any], check: Callable[[], None], parts: Sequence[PartInfo], digest: str
) -> int:
    """Find and store the rows that repeat the content of a lower row; return their number."""
    if (known := repeated.known(storage, digest)) is not None:
        return known
    pieces = repeated.pieces(parts)
    partitions = repeated.partitions_for(sum(part.counts.written for part in parts))
    if len(pieces) <= 1:
        shares = [share for piece in pieces for share in repeated.read_hashes(storage, piece, partitions)]
        return repeated.keep(storage, digest, map(repeated.repeated, shares), check)
    say(f"download: looking for repeated content in {counted(len(parts), 'part')}")
    cluster.connect()
    task: Any = _read_hashes.options(num_returns=1 + partitions, **ray_options)
    results = [task.remote(storage, piece, partitions) for piece in pieces]
    searches = _search([result[:-1] for result in results], ray_options)
    return repeated.keep(storage, digest, map(ray.get, searches), check)


def _search(shares: Sequence[Sequence[Any]], ray_options: Mapping[str, Any]) -> list[Any]:
    """Start a search for each partition, over its keys and rows from all pieces."""
    search: Any = _repeated.options(**ray_options)
    return [search.remote(*partition) for partition in zip(*shares, strict=True)]


_repeated = ray.remote(num_cpus=0.5)(repeated.repeated)


@ray.remote(num_cpus=0.5)
def _survey_piece(*arguments: Any) -> Any:
    """Survey a piece: return its hosts, each partition's share, and None, since Ray unpacks several values only."""
    hosts, shares = survey_rows(*arguments)
    return (hosts, *shares, None)


@ray.remote(num_cpus=0.5)
def _read_hashes(*arguments: Any) -> Any:
    """Read a piece's hashes: return each partition's share, and None, as above."""
    return (*repeated.read_hashes(*arguments), None)
