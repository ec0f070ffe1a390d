"""What each run of a job did for a dataset, beside it: `_runs/000001.json`, `_runs/000002.json`, …

    noted = runs.begin("download")
    …
    runs.keep(storage, noted.ended(infos, …))

Written once, by the job that holds the lease, when it ends; nothing is decided by them, they are for people: reports
tell throughput and where time went from them. A run that was broken off leaves none, one that found nothing to do none
either. Files that are damaged or are none of ours are told and left alone.
"""

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field

import sdp
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import Counts, StoredCounts
from sdp.datasets.parts import PartInfo
from sdp.datasets.records import Kind, Whole, parse
from sdp.errors import SdpError, StorageError, one_line
from sdp.storage import Storage

FOLDER = "_runs/"
STORED = "stored"
"""Among the bytes that were moved: those of the parts."""
_NAME = re.compile(r"_runs/(\d{6,9})\.json", re.ASCII)
_Seconds = Annotated[float, Field(ge=0, le=1e12)]
_Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[0-9.:+Z-]{0,20}$")]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobRun:
    """What one run of a job did."""

    job: Kind
    began: _Time
    ended: _Time
    seconds: _Seconds
    """From its first work to its last, as a clock on the wall tells it."""
    counts: StoredCounts
    """Of the addresses that it worked off."""
    moved: Mapping[str, Whole] = field(default_factory=dict)
    """Bytes, such as `fetched` and `stored`."""
    work: Mapping[str, Mapping[str, _Seconds]] = field(default_factory=dict)
    """Seconds by who worked and at what, summed over all of them: `{"encoders": {"at work": 61.2, "waiting": 3.1}}`."""
    workers: Mapping[str, Whole] = field(default_factory=dict)
    """How many there were at most."""
    replaced: Whole = 0
    """Workers that died, and had another one put in their place."""
    sdp: Annotated[str, Field(min_length=1, max_length=60)] = sdp.__version__
    format: Literal[1] = 1

    def to_bytes(self) -> bytes:
        data = {name: getattr(self, name) for name in self.__slots__}
        return (json.dumps({**data, "counts": self.counts.to_json()}, indent=1) + "\n").encode()


@dataclass(frozen=True, slots=True)
class Begun:
    """A run that goes on."""

    job: str
    at: str
    clock: float

    def ended(
        self,
        infos: Sequence[PartInfo],
        *,
        moved: Mapping[str, int] | None = None,
        work: Mapping[str, Mapping[str, float]] | None = None,
        workers: Mapping[str, int] | None = None,
        replaced: int = 0,
    ) -> JobRun:
        """What it did, as of now: the parts that it has made, and what else is told of it."""
        rounded = {who: {what: round(s, 3) for what, s in each.items()} for who, each in (work or {}).items()}
        seconds = round(time.monotonic() - self.clock, 3)
        counts = sum((info.counts for info in infos), Counts())
        all_moved = {**(moved or {}), STORED: sum(info.size for info in infos)}
        return JobRun(self.job, self.at, _now(), seconds, counts, all_moved, rounded, workers or {}, replaced)


def begin(job: str) -> Begun:
    """To be called when the work begins."""
    return Begun(job, _now(), time.monotonic())


def keep(storage: Storage, run: JobRun) -> None:
    """Write down what a run did, if it did anything. That it cannot be is told and spoils nothing: the work is done."""
    if not run.counts.input:
        return
    try:
        numbers = [int(found[1]) for name in storage.names(FOLDER) if (found := _NAME.fullmatch(name))]
        storage.create(f"{FOLDER}{max(numbers, default=0) + 1:06d}.json", run.to_bytes())
    except StorageError as error:
        log.warning("what this run did could not be kept for reports: %s", error)


def read(storage: Storage) -> tuple[list[JobRun], list[str]]:
    """The runs that are known, in their order; and a line for each file that tells of none."""
    runs, notes = list[JobRun](), list[str]()
    for found in ordered_map(lambda name: _read(storage, name), storage.names(FOLDER)):
        if isinstance(found, JobRun):
            runs.append(found)
        else:
            notes.append(found)
    return runs, notes


def _read(storage: Storage, name: str) -> JobRun | str:
    if not _NAME.fullmatch(name):
        return f"{storage.uri_of(name)}: no record of a run, so it is not read"
    try:
        return parse(JobRun, storage.read(name))
    except ValueError as error:
        return f"{storage.uri_of(name)}: a damaged record of a run ({one_line(error, 120)}); delete it"
    except SdpError as error:
        return str(error)


def total(runs: Sequence[JobRun]) -> JobRun | None:
    """All of them as one: seconds, counts and bytes added up, workers the most that there were."""
    if not runs:
        return None
    work: dict[str, dict[str, float]] = {}
    moved, workers = dict[str, int](), dict[str, int]()
    for run in runs:
        for who, seconds in run.work.items():
            for what, each in seconds.items():
                work.setdefault(who, {})[what] = work.get(who, {}).get(what, 0.0) + each
        for what, count in run.moved.items():
            moved[what] = moved.get(what, 0) + count
        for who, count in run.workers.items():
            workers[who] = max(workers.get(who, 0), count)
    return JobRun(
        job=runs[-1].job,
        began=runs[0].began,
        ended=runs[-1].ended,
        seconds=sum(run.seconds for run in runs),
        counts=sum((run.counts for run in runs), Counts()),
        moved=moved,
        work=work,
        workers=workers,
        replaced=sum(run.replaced for run in runs),
        sdp=runs[-1].sdp,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
