"""A survey of the source before anything is fetched: the number of images per host, and the repeated URLs.

The rows are read in pieces, in parallel. Each piece counts its hosts and returns, for each row to be fetched, a hash of
the URL and the address (16 bytes), in a partition by hash. The repeated URLs of each partition are then found
separately. The result is stored beside the output in `_survey/`, so that it is made once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from pyroaring import BitMap64

from sdp.console import duration
from sdp.datasets import address_sets
from sdp.datasets.index import Index
from sdp.datasets.records import BadRecord, Whole, dump, parse
from sdp.datasets.repeated import Keys
from sdp.datasets.units import Rows
from sdp.download.budgets import HostLimits
from sdp.download.plan import Rules, plan
from sdp.download.spans import iter_units
from sdp.errors import NotFound
from sdp.storage import Storage, StorageOptions
from sdp.urls import key64

FOLDER = "_survey/"

PIECE_ROWS = 4_000_000
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
) -> tuple[Counter[str], list[tuple[Keys, Rows]]]:
    """Survey the rows [start, stop): return the images per host, and by partition the URLs' hashes and addresses."""
    hosts: Counter[str] = Counter()
    keys: list[list[int]] = [[] for _ in range(partitions)]
    rows: list[list[int]] = [[] for _ in range(partitions)]
    lengths = [min(_READ_ROWS, stop - at) for at in range(start, stop, _READ_ROWS)]
    at = start
    for table in iter_units(lengths, index.slices(start, stop), rules.columns(), options):
        for wanted in plan(table, np.arange(at, at + table.num_rows, dtype=np.int64), rules).to_fetch:
            hosts[wanted.url.host] += 1
            if partitions:
                key = key64(wanted.url.text)
                keys[key % partitions].append(key)
                rows[key % partitions].append(wanted.row)
        at += table.num_rows
    shares = [(np.array(k, np.uint64), np.array(r, np.int64)) for k, r in zip(keys, rows, strict=True)]
    return most_common(hosts), shares


def most_common(hosts: Counter[str]) -> Counter[str]:
    """Return the hosts that the survey keeps, most frequent first."""
    return Counter(dict(hosts.most_common(_KEPT_HOSTS)))


def publish(storage: Storage, stop: int, hosts: Counter[str], duplicates: Iterable[Rows]) -> Survey:
    """Store a survey; its record is written last and makes it valid."""
    count = address_sets.publish(storage, _folder(stop), duplicates)
    survey = Survey(stop, dict(most_common(hosts).most_common()), count)
    storage.publish(f"{_folder(stop)}.json", dump(survey))
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


def forecast(hosts: Mapping[str, int], limits: HostLimits, other_hosts_s: float) -> Iterator[str]:
    """Yield a line for each host that alone takes much longer than all others together."""
    for host, count in sorted(hosts.items(), key=lambda item: -item[1])[:5]:
        seconds = host_seconds(count, limits)
        if seconds < max(_NOTEWORTHY_S, 1.5 * other_hosts_s):
            return
        yield (
            f"{host} alone has {count:,} of the images and takes {duration(seconds)} at "
            f"{_rate(limits):g} a second, the rest about {duration(other_hosts_s)}; raise hosts.per_second or "
            "hosts.at_once if that host agrees, or put it on a list of blocklists.domains"
        )


def host_seconds(count: int, limits: HostLimits) -> float:
    """Return the least time that this many images of one host take."""
    return count / _rate(limits)


def _rate(limits: HostLimits) -> float:
    by_number = limits.at_once / _LATENCY_S
    return by_number if limits.per_second is None else min(limits.steady, by_number)


def _folder(stop: int) -> str:
    return f"{FOLDER}{stop:012d}"
