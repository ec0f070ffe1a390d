"""A dataset being written: its identity, what it is made from, what has been done and what has not.

All state is in the output's own folder; a job asks for it with one listing and works off `pending()`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from sdp.datasets import index as index_files
from sdp.datasets.index import Index
from sdp.datasets.records import BadRecord, Kind, parse
from sdp.datasets.units import PARTS, Work, parse_part_name
from sdp.errors import AlreadyExists, DatasetError, NotFound
from sdp.storage import Storage

HEAD = "_dataset.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Head:
    """What makes a dataset this one and no other; written once, before anything else."""

    kind: Kind
    unit_rows: Annotated[int, Field(ge=1, le=1 << 40)]
    derived: bool
    """Made from another dataset, and so holding only the addresses that were written there."""
    identity: Mapping[str, Any]
    """The configuration's keys that decide the bytes of the output, by dotted path."""

    def to_bytes(self) -> bytes:
        data = {"format": FORMAT, **{name: getattr(self, name) for name in self.__slots__}}
        return (json.dumps(data, indent=1, sort_keys=True, default=str) + "\n").encode()


@dataclass(frozen=True)
class Output:
    """An output and the index that says what it is to hold."""

    storage: Storage
    head: Head
    index: Index

    def with_index(self, index: Index) -> "Output":
        return Output(self.storage, self.head, index)

    def done(self) -> set[tuple[int, int]]:
        """The parts that are there: (unit, attempt)."""
        return parts_in(self.storage)

    def pending(self) -> list[Work]:
        """The parts that are not there yet, from one listing."""
        done = self.done()
        return [work for work in self.index.works() if (work.unit.number, work.attempt) not in done]


def open_output(storage: Storage, head: Head) -> Output:
    """Open an output for writing, or begin it. One that belongs to another configuration is refused."""
    if parts_in(storage) and not storage.exists(HEAD):
        raise DatasetError(f"{storage.uri}: has parts but no {HEAD}; choose an empty output.uri")
    try:
        storage.create(HEAD, head.to_bytes())
    except AlreadyExists:
        _refuse_another(storage, read_head(storage), head)
    return _with_index(storage, head)


def peek_output(storage: Storage, head: Head) -> Output:
    """The same without writing anything, for a dry run."""
    try:
        _refuse_another(storage, read_head(storage), head)
    except NotFound:
        if parts_in(storage):
            raise DatasetError(f"{storage.uri}: has parts but no {HEAD}; choose an empty output.uri") from None
    return _with_index(storage, head)


def _with_index(storage: Storage, head: Head) -> Output:
    index = index_files.load(storage, head.unit_rows)
    if not index.versions and parts_in(storage):
        raise DatasetError(
            f"{storage.uri}: has parts but no index (_index/), without which their addresses mean nothing; restore it "
            "from a backup, or choose an empty output.uri"
        )
    return Output(storage, head, index)


def read_output(storage: Storage) -> Output:
    """An output as it lies there, whoever wrote it."""
    head = read_head(storage)
    return Output(storage, head, index_files.load(storage, head.unit_rows))


def read_head(storage: Storage) -> Head:
    where = storage.uri_of(HEAD)
    try:
        data = read_json(storage, HEAD)
        refuse_other_format(data, where)
        return parse(Head, data)
    except BadRecord as error:
        raise DatasetError(f"{where}: {error}; restore it from a backup") from error


def refuse_other_format(data: Mapping[str, Any], where: str) -> None:
    """Refuse what another version of sdp wrote, before its fields are looked at."""
    if (version := data.get("format")) != FORMAT:
        raise DatasetError(f"{where}: format {version}, this sdp reads {FORMAT}; use the sdp that wrote it")


def read_json(storage: Storage, path: str) -> dict[str, Any]:
    """A JSON object, or a line that says which file is none."""
    try:
        data = json.loads(storage.read(path))
    except (ValueError, RecursionError) as error:
        cause = "brackets in brackets without end" if isinstance(error, RecursionError) else str(error)[:120]
        raise DatasetError(f"{storage.uri_of(path)}: not JSON ({cause}); restore it from a backup") from error
    if not isinstance(data, dict):
        raise DatasetError(f"{storage.uri_of(path)}: not a JSON object; restore it from a backup")
    return data


def parts_in(storage: Storage) -> set[tuple[int, int]]:
    """The parts of a folder by its listing; files of other names are nobody's part."""
    return {part for name in storage.names(PARTS) if (part := parse_part_name(name)) is not None}


def _refuse_another(storage: Storage, there: Head, wanted: Head) -> None:
    if there.kind != wanted.kind:
        raise DatasetError(
            f"output.uri: {storage.uri} holds a dataset of {there.kind}, not of {wanted.kind}; choose another folder"
        )
    now = json.loads(wanted.to_bytes())
    here = {"unit_rows": there.unit_rows, "derived": there.derived, **there.identity}
    now = {"unit_rows": now["unit_rows"], "derived": now["derived"], **now["identity"]}
    differing = sorted(path for path in now if here.get(path) != now[path])
    if differing:
        what = "; ".join(f"{path} was {here.get(path)!r} there and is {now.get(path)!r} now" for path in differing)
        raise DatasetError(
            f"output.uri: {storage.uri} was made with another configuration ({what}); "
            "set it back or choose another output.uri"
        )
