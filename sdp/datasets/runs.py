"""Records of a job's runs, beside the dataset: `_runs/000001.json`, `_runs/000002.json`, …

    begun = runs.begin("download")
    …
    runs.keep(storage, begun.ended(infos, …))

The job that holds the lease writes one when it ends. They are for people only: reports show throughput and times from
them. A run that was interrupted or had nothing to do leaves none. Damaged and foreign files are reported and kept.
"""

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
from sdp.datasets.records import Identifier, dump, parse
from sdp.errors import SdpError, StorageError, one_line
from sdp.storage import Storage

FOLDER = "_runs/"
_NAME = re.compile(r"_runs/(\d{6,9})\.json", re.ASCII)
_Seconds = Annotated[float, Field(ge=0, le=1e12)]
_Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[0-9.:+Z-]{0,20}$")]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobRun:
    """The record of one run of a job."""

    job: Identifier
    began: _Time
    ended: _Time
    seconds: _Seconds
    """Wall-clock time from its first work to its last."""
    counts: StoredCounts
    """Outcomes of the addresses that it processed."""
    work: Mapping[str, Mapping[str, _Seconds]] = field(default_factory=dict)
    """Seconds by kind of worker and activity, over all workers: `{"encoders": {"at work": 61.2, "waiting": 3.1}}`."""
    gpu_hours: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """GPU-hours of the workers, at work or waiting."""
    sdp: Annotated[str, Field(min_length=1, max_length=60)] = sdp.__version__
    format: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class Begun:
    """A run that has not ended."""

    job: str
    at: str
    clock: float

    def ended(
        self,
        infos: Sequence[PartInfo],
        *,
        work: Mapping[str, Mapping[str, float]] | None = None,
        gpu_hours: float = 0.0,
    ) -> JobRun:
        """Return the record of this run, which ends now, from its parts and the caller's figures."""
        rounded = {kind: {what: round(s, 3) for what, s in seconds.items()} for kind, seconds in (work or {}).items()}
        seconds = round(time.monotonic() - self.clock, 3)
        counts = sum((info.counts for info in infos), Counts())
        return JobRun(self.job, self.at, _now(), seconds, counts, rounded, round(gpu_hours, 4))


def begin(job: str) -> Begun:
    """Start the clock of a run."""
    return Begun(job, _now(), time.monotonic())


def keep(storage: Storage, run: JobRun) -> None:
    """Store the record of a run that did anything. A failure is only logged, since the work itself is done."""
    if not run.counts.input:
        return
    try:
        numbers = [int(match[1]) for name in storage.names(FOLDER) if (match := _NAME.fullmatch(name))]
        storage.create(f"{FOLDER}{max(numbers, default=0) + 1:06d}.json", dump(run))
    except StorageError as error:
        log.warning("the record of this run could not be stored, so reports lack it: %s", error)


def read(storage: Storage) -> tuple[list[JobRun], list[str]]:
    """Read all records in order; return them, and a line for each file that cannot be read as one."""
    records = list(ordered_map(lambda name: _read(storage, name), storage.names(FOLDER)))
    return [r for r in records if isinstance(r, JobRun)], [r for r in records if isinstance(r, str)]


def _read(storage: Storage, name: str) -> JobRun | str:
    if not _NAME.fullmatch(name):
        return f"{storage.uri_of(name)}: not a record of a run, so it is ignored"
    try:
        return parse(JobRun, storage.read(name))
    except ValueError as error:
        return f"{storage.uri_of(name)}: damaged record of a run ({one_line(error, 120)}); delete it"
    except SdpError as error:
        return str(error)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
