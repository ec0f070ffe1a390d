"""A look over the whole source before anything is fetched: how often each host occurs, and which URLs occur again.

The rows are read in pieces, in parallel. Each piece gives its hosts' counts and, spread over partitions by their hash,
16 bytes for each row that is to be fetched; each partition then finds its repeated URLs by itself. What comes of it
lies beside the output in `_survey/`, so that it is done once.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from sdp.console import duration
from sdp.datasets import address_sets
from sdp.datasets.index import Index
from sdp.datasets.units import Rows
from sdp.download.plan import Rules, plan
from sdp.download.politeness import HostLimits
from sdp.download.spans import iter_units
from sdp.errors import NotFound
from sdp.storage import Storage, StorageOptions
from sdp.urls import key64

FOLDER = "_survey/"

PIECE_ROWS = 4_000_000
PARTITION_ROWS = 16_000_000
_READ_ROWS = 16_384
_KEPT_HOSTS = 10_000
"""Of each piece and of the whole: a host that is rarer holds up nothing."""

_LATENCY_S = 0.5
"""What a request to a busy host is taken to last where only the number at once is limited."""
_NOTEWORTHY_S = 6 * 3600.0

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Piece:
    """What was seen of some addresses."""

    hosts: Counter[str]
    keys: Sequence[Keys]
    """The hashes of the URLs to be fetched, by partition."""
    rows: Sequence[Rows]
    """Their addresses."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What was seen of the whole source up to an address."""

    stop: int
    hosts: Mapping[str, int] = field(default_factory=dict)
    """The most frequent ones."""
    duplicates: int = 0

    def to_bytes(self) -> bytes:
        data = {"stop": self.stop, "duplicates": self.duplicates, "hosts": dict(self.hosts)}
        return (json.dumps(data, indent=1) + "\n").encode()


def look(
    index: Index, start: int, stop: int, rules: Rules, options: StorageOptions | None, *, partitions: int
) -> Piece:
    """Read the rows [start, stop)."""
    hosts: Counter[str] = Counter()
    keys: list[list[int]] = [[] for _ in range(partitions)]
    rows: list[list[int]] = [[] for _ in range(partitions)]
    lengths = [min(_READ_ROWS, stop - at) for at in range(start, stop, _READ_ROWS)]
    at = start
    for table in iter_units(lengths, index.slices(start, stop), rules.columns(), options):
        for wanted in plan(table, np.arange(at, at + table.num_rows, dtype=np.int64), rules).wanted:
            hosts[wanted.url.host] += 1
            if partitions:
                key = key64(wanted.url.text)
                keys[key % partitions].append(key)
                rows[key % partitions].append(wanted.row)
        at += table.num_rows
    return Piece(
        most_common(hosts),
        [np.array(part, dtype=np.uint64) for part in keys],
        [np.array(part, dtype=np.int64) for part in rows],
    )


def most_common(hosts: Counter[str], count: int = _KEPT_HOSTS) -> Counter[str]:
    return Counter(dict(hosts.most_common(count)))


def partitions_for(rows: int) -> int:
    return max(1, -(-rows // PARTITION_ROWS))


def publish(storage: Storage, stop: int, hosts: Counter[str], duplicates: Iterable[Rows]) -> Survey:
    """Keep what was seen beside the output; the summary comes last and makes it valid."""
    count = address_sets.publish(storage, _folder(stop), duplicates)
    survey = Survey(stop, dict(most_common(hosts).most_common()), count)
    storage.publish(_name(stop), survey.to_bytes())
    return survey


def load(storage: Storage, stop: int) -> Survey | None:
    """The survey of the addresses below `stop`, if there is one."""
    try:
        data = json.loads(storage.read(_name(stop)))
        return Survey(int(data["stop"]), dict(data["hosts"]), int(data["duplicates"]))
    except (NotFound, ValueError, KeyError, TypeError):  # damaged, it is as good as none: it is made again
        return None


def duplicates_in(storage: Storage, survey_stop: int, start: int, stop: int) -> BitMap64:
    """Of the addresses [start, stop) those whose URL a lower one has."""
    return address_sets.within(storage, _folder(survey_stop), start, stop)


def forecast(hosts: Mapping[str, int], limits: HostLimits, others_s: float) -> Iterator[str]:
    """What to tell before the start: the hosts that alone will take much longer than all the rest."""
    for host, count in sorted(hosts.items(), key=lambda item: -item[1])[:5]:
        seconds = host_seconds(count, limits)
        if seconds < max(_NOTEWORTHY_S, 1.5 * others_s):
            return
        yield (
            f"{host} alone has {count:,} of the images and takes {duration(seconds)} at "
            f"{_rate(limits):g} a second, the rest about {duration(others_s)}; raise hosts.per_second or hosts.at_once "
            "if that host agrees, or put it on a list of blocklists.domains"
        )


def host_seconds(count: int, limits: HostLimits) -> float:
    """How long so many images of one host take at least."""
    return count / _rate(limits)


def _rate(limits: HostLimits) -> float:
    by_number = limits.at_once / _LATENCY_S
    return by_number if limits.per_second is None else min(limits.steady, by_number)


def _name(stop: int) -> str:
    return f"{FOLDER}{stop:012d}.json"


def _folder(stop: int) -> str:
    return f"{FOLDER}{stop:012d}"
