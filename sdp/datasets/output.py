"""A dataset being written: its identity, its index, and which parts exist.

All state is in the output's own folder. One listing shows it, and a job writes the parts that are `pending()`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from sdp.config.phrases import got
from sdp.datasets import index as index_files
from sdp.datasets.index import Index
from sdp.datasets.records import Identifier, dump, parse, reading
from sdp.datasets.units import PARTS, PartKey, Work, parse_part_name
from sdp.errors import DatasetError, NotFound
from sdp.storage import Storage

HEAD = "_dataset.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Head:
    """The identity of a dataset, written once and first."""

    kind: Identifier
    unit_rows: Annotated[int, Field(ge=1, le=1 << 40)]
    derived: bool
    """True for a dataset made from another one: it holds only the addresses that were written there."""
    identity: Mapping[str, Any]
    """The configuration's keys that decide the output's bytes, by dotted path."""
    format: int = FORMAT


@dataclass(frozen=True)
class Output:
    """An output, and the index of the rows that it will hold."""

    storage: Storage
    head: Head
    index: Index
    writes: bool = True
    """False for a dry run: further versions of the index stay in memory."""

    def with_index(self, index: Index) -> "Output":
        return replace(self, index=index)

    def pending(self) -> list[Work]:
        """Return the parts that do not exist yet, from one listing."""
        done = parts_in(self.storage)
        return [work for work in self.index.works() if (work.unit.number, work.attempt) not in done]


def open_output(storage: Storage, head: Head, *, writes: bool = True) -> Output:
    """Open an output for writing, or create it; refuse one with another configuration.

    Without `writes` nothing is written, now or later, for a dry run.
    """
    try:
        _refuse_different(storage, read_head(storage), head)
    except NotFound:
        if parts_in(storage):
            raise DatasetError(f"{storage.uri}: has parts but no {HEAD}; choose an empty output.uri") from None
        if writes:
            storage.create(HEAD, dump(head))
    index = index_files.load(storage, head.unit_rows)
    if not index.versions and parts_in(storage):
        raise DatasetError(
            f"{storage.uri}: has parts but no index (_index/), without which their addresses mean nothing; restore it "
            "from a backup, or choose an empty output.uri"
        )
    return Output(storage, head, index, writes)


def read_output(storage: Storage) -> Output:
    """Read an existing output, whatever its configuration."""
    head = read_head(storage)
    return Output(storage, head, index_files.load(storage, head.unit_rows))


def read_head(storage: Storage) -> Head:
    where = storage.uri_of(HEAD)
    with reading(where, "restore it from a backup"):
        data = read_json(storage, HEAD)
        refuse_other_format(data, where)
        return parse(Head, data)


def refuse_other_format(data: Mapping[str, Any], where: str) -> None:
    """Refuse a record of another format, before its fields are checked."""
    version = data.get("format")
    if type(version) is not int:
        raise DatasetError(f"{where}: format: expected a number, got {version!r:.60}; restore it from a backup")
    if version != FORMAT:
        raise DatasetError(
            f"{where}: format {version}, but this sdp reads format {FORMAT}; use the version of sdp that wrote it"
        )


def read_json(storage: Storage, path: str) -> dict[str, Any]:
    """Read a JSON object."""
    return json_in(storage.read(path), storage.uri_of(path))


def json_in(content: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object that a file holds."""
    with reading(where, "restore it from a backup", "not a JSON object"):
        if not isinstance(data := json.loads(content), dict):
            raise ValueError(f"but {got(data)}")
    return data


def parts_in(storage: Storage) -> set[PartKey]:
    """Return the parts in a folder, as (unit, attempt); files of other names are ignored."""
    return {part for name in storage.names(PARTS) if (part := parse_part_name(name)) is not None}


def _refuse_different(storage: Storage, stored: Head, wanted: Head) -> None:
    if stored.kind != wanted.kind:
        raise DatasetError(
            f"output.uri: {storage.uri} holds a dataset of {stored.kind}, not of {wanted.kind}; choose another folder"
        )
    heads = (stored, parse(Head, dump(wanted)))
    before, now = ({"output.rows_per_file": head.unit_rows, "derived": head.derived, **head.identity} for head in heads)
    if differing := sorted(path for path in now if before.get(path) != now[path]):
        changes = "; ".join(
            f"{path} was {json.dumps(before.get(path))} and is {json.dumps(now.get(path))} now" for path in differing
        )
        raise DatasetError(
            f"output.uri: {storage.uri} was made with another configuration ({changes}); "
            "set it back or choose another output.uri"
        )
