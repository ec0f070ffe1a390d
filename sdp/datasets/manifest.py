"""Manifests: written last, they say that a dataset is complete, what is in it, and what it was made from."""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import AfterValidator, Field

import sdp
from sdp.datasets import repeated
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import Counts, StoredCounts
from sdp.datasets.output import HEAD, Head, Output, read_head, read_json, refuse_other_format
from sdp.datasets.parts import PartInfo, read_info
from sdp.datasets.records import BadRecord, Kind, Whole, parse
from sdp.datasets.units import PARTS, parse_part_name
from sdp.errors import AlreadyExists, DatasetError, NotFound
from sdp.storage import FileInfo, Storage
from sdp.storage.uri import near, resolved

MANIFEST = "_manifest.json"
FORMAT = 1
_VERSION = re.compile(r"_manifests/(\d{6})\.json", re.ASCII)

log = logging.getLogger(__name__)

PARTS_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("etag", pa.string()),
        pa.field("unit", pa.int64(), nullable=False),
        pa.field("attempt", pa.int16(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("written", pa.int64(), nullable=False),
        pa.field("filtered", pa.int64(), nullable=False),
        pa.field("failed", pa.int64(), nullable=False),
        pa.field("retried", pa.int64(), nullable=False),  # failures of earlier attempts that it supersedes
        pa.field(
            "row_groups",
            pa.list_(pa.struct([("rows", pa.int64()), ("offset", pa.int64()), ("bytes", pa.int64())])),
            nullable=False,
        ),
    ]
)


def _source(value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Check what a dataset was made from: a dataset, files at a URI, or nothing (of prompts that a file listed)."""
    if value is None:
        return None
    for name in ("uri", "manifest_digest"):
        if not isinstance(text := value.get(name), str | None):
            raise ValueError(f"input.{name}: expected some text, got {text!r:.60}")
    if value.get("manifest_digest") and not value.get("uri"):
        raise ValueError("input.uri: missing")
    return value


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of a complete dataset."""

    kind: Kind
    version: Annotated[int, Field(ge=1)]
    rows: Whole
    """Addresses that it accounts for (of a derived dataset: that it spans)."""
    counts: StoredCounts
    parts: Whole
    size: Whole
    """Bytes of all parts."""
    files: Annotated[str, Field(pattern=r"^_files/[0-9a-f]{16}\.parquet$")]
    """The list of parts, relative to the dataset."""
    files_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    schema: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    """Model sources by role, with the digest of their content."""
    input: Annotated[Mapping[str, Any] | None, AfterValidator(_source)] = None
    """The dataset that it was made from: uri and manifest digest; or the source's URI."""
    repeated: Whole = 0
    """Rows that are in parts and counted as filtered, since lower ones have the same content."""
    sdp: str = sdp.__version__
    created: str = ""
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        data = {name: getattr(self, name) for name in self.__slots__}
        data["counts"] = self.counts.to_json()
        return (json.dumps(data, indent=1, sort_keys=True, default=str) + "\n").encode()


@dataclass(frozen=True)
class Dataset:
    """A complete dataset, as its manifest lists it."""

    storage: Storage
    head: Head
    manifest: Manifest
    digest: str
    """Of the manifest: what a downstream dataset records as its lineage."""
    parts: pa.Table

    @property
    def rows(self) -> int:
        return self.manifest.rows

    @property
    def lineage(self) -> dict[str, Any]:
        return {"uri": self.storage.uri, "manifest_digest": self.digest, "version": self.manifest.version}

    @property
    def repeated_rows(self) -> repeated.Repeated | None:
        """The rows that are in parts and to be left out, since lower ones have the same content."""
        return repeated.of(self.storage, self.manifest.repeated, self.manifest.files_digest)

    def units_with_failures(self) -> list[int]:
        """The units of which some address has failed at its last attempt."""
        return sorted(self.failures())

    def failures(self) -> dict[int, int]:
        """How many addresses of a unit have failed at their last attempt, where some have."""
        failed: dict[int, int] = {}
        columns = (self.parts[name].to_pylist() for name in ("unit", "failed", "retried"))
        for unit, count, retried in zip(*columns, strict=True):
            failed[unit] = failed.get(unit, 0) + count - retried
        return {unit: count for unit, count in failed.items() if count}


def read_manifest(storage: Storage, path: str = MANIFEST) -> Manifest:
    """The newest manifest, or an earlier one, without what it lists."""
    where = storage.uri_of(path)
    data = read_json(storage, path)
    refuse_other_format(data, where)
    try:
        manifest = parse(Manifest, data)
        if manifest.input and manifest.input.get("uri"):
            placed = {**manifest.input, "uri": resolved(manifest.input["uri"], storage.uri)}
            manifest = replace(manifest, input=placed)
        return manifest
    except BadRecord as error:
        raise DatasetError(f"{where}: not a manifest ({error}); run the job again to write it anew") from error


def repeated_rows(storage: Storage) -> repeated.Repeated | None:
    """The repeated rows that the newest manifest speaks of; there may be none yet."""
    try:
        manifest = read_manifest(storage)
    except NotFound:
        return None
    return repeated.of(storage, manifest.repeated, manifest.files_digest)


def open_dataset(storage: Storage, kind: str | None = None, *, version: int | None = None) -> Dataset:
    """Open a complete dataset for reading; an incomplete one is refused. NotFound where there is no such version."""
    path = MANIFEST if version is None else _version_name(version)
    try:
        raw = storage.read(path)
    except NotFound:
        if version is not None:
            raise
        if storage.exists(HEAD):
            raise DatasetError(
                f"{storage.uri}: incomplete (no {MANIFEST} yet); finish the job that writes it, "
                f"`sdp inspect {storage.uri}` says what is missing"
            ) from None
        raise DatasetError(f"{storage.uri}: no dataset of sdp there (no {HEAD}); check the address") from None
    where = storage.uri_of(path)
    manifest = read_manifest(storage, path)
    if kind is not None and manifest.kind != kind:
        raise DatasetError(f"{storage.uri}: a dataset of {manifest.kind}, where {kind} are needed; check the address")
    listing = storage.read(manifest.files)
    if hashlib.sha256(listing).hexdigest() != manifest.files_digest:
        raise DatasetError(f"{storage.uri_of(manifest.files)}: not the list that {where} names; run the job again")
    parts = pq.ParquetFile(pa.BufferReader(listing)).read().cast(PARTS_SCHEMA)
    return Dataset(storage, read_head(storage), manifest, hashlib.sha256(raw).hexdigest(), parts)


def _version_name(version: int) -> str:
    return f"_manifests/{version:06d}.json"


def part_infos(storage: Storage, known: Iterable[PartInfo] = (), workers: int = 32) -> list[PartInfo]:
    """The footers of all parts that a listing shows; those given and unchanged are not read again."""
    by_path = {info.path: info for info in known}
    files = [f for f in storage.list(PARTS) if parse_part_name(f.path) is not None]

    def info(file: FileInfo) -> PartInfo:
        have = by_path.get(file.path)
        same = have is not None and have.size == file.size and have.etag == file.etag
        return have if same and have is not None else read_info(storage, file)

    return list(ordered_map(info, files, workers))


def total(infos: Iterable[PartInfo]) -> Counts:
    """The outcomes of all addresses, each counted once however often it was attempted."""
    counts, reasons = np.zeros(3, np.int64), dict[str, int]()
    for info in infos:
        superseded = info.superseded
        counts += (info.counts.written, info.counts.filtered, info.counts.failed - superseded.failed)
        for sign, by_reason in ((1, info.counts.reasons), (-1, superseded.reasons)):
            for reason, number in by_reason.items():
                reasons[reason] = reasons.get(reason, 0) + sign * number
    written, filtered, failed = (int(number) for number in counts)
    return Counts(written, filtered, failed, {r: n for r, n in sorted(reasons.items()) if n})


def check_ledger(output: Output, parts: Sequence[PartInfo]) -> Counts:
    """What the parts account for must be what the index put up, to the last address."""
    where = output.storage.uri
    ordered = output.index.ordered()
    for part in parts:
        work = ordered.get((part.unit.number, part.attempt))
        if work is None or work.unit != part.unit or part.kind != output.head.kind:
            raise DatasetError(f"{where}/{part.path}: no such part was ordered here; move it away")
    counts = total(parts)
    expected = _expected(output)
    if expected is not None and counts.input != expected:
        raise DatasetError(
            f"{where}: the account does not add up: {expected} addresses were put up, {counts.input} have an outcome; "
            f"`sdp inspect --verify {where}` finds the part"
        )
    return counts


def _expected(output: Output) -> int | None:
    index = output.index
    if not output.head.derived:
        return index.rows
    if index.rows < index.listed_rows:
        return None  # a limit cuts a part of upstream: how many of its rows lie below is not in any listing
    files = {path: written for v in index.versions for path, written in _written(v.files)}
    return sum(files.values())


def _written(files: pa.Table) -> Iterable[tuple[str, int]]:
    return zip(files["path"].to_pylist(), files["written"].to_pylist(), strict=True)


def finish(
    output: Output,
    *,
    infos: Iterable[PartInfo] = (),
    config: Mapping[str, Any] | None = None,
    models: Mapping[str, str] | None = None,
    input: Mapping[str, Any] | None = None,
    find_repeated: repeated.Find | None = None,
) -> Dataset:
    """Write the manifest of an output of which every part is there; the counts are checked first.

    A dataset that is as its newest manifest says keeps that manifest.
    """
    storage = output.storage
    missing = output.pending()
    if missing:
        raise DatasetError(
            f"{storage.uri}: {len(missing)} parts are missing, first {missing[0].name}; run the job again"
        )
    parts = part_infos(storage, infos)
    counts = check_ledger(output, parts)
    listing = pa.BufferOutputStream()
    pq.write_table(parts_table(parts), listing, compression="zstd")
    digest = hashlib.sha256(listing.getvalue()).hexdigest()
    again = find_repeated(parts, digest) if find_repeated is not None else 0
    versions = [name for name in storage.names("_manifests/") if _VERSION.fullmatch(name)]
    newest = _readable(storage, versions[-1]) if versions else None
    draft = Manifest(
        kind=output.head.kind,
        version=int(versions[-1][-11:-5]) + 1 if versions else 1,
        rows=output.index.rows,
        counts=repeated.without(counts, again),
        repeated=again,
        parts=len(parts),
        size=sum(p.size for p in parts),
        files=f"_files/{digest[:16]}.parquet",
        files_digest=digest,
        schema=_schema(storage, parts),
        config=dict(config or {}),
        models=dict(models or {}),
        input=_kept(input, storage.uri),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if newest is not None and _says(replace(newest, input=_kept(newest.input, storage.uri))) == _says(draft):
        storage.publish(MANIFEST, storage.read(versions[-1]))
        return open_dataset(storage)
    storage.publish(draft.files, listing.getvalue())
    try:
        storage.create(_version_name(draft.version), draft.to_bytes())
    except AlreadyExists as error:
        raise DatasetError(f"{storage.uri}: another job has just completed this dataset; run again") from error
    storage.publish(MANIFEST, draft.to_bytes())
    return open_dataset(storage)


def _readable(storage: Storage, path: str) -> Manifest | None:
    """An earlier manifest; one that is damaged is written anew under the next number."""
    try:
        return read_manifest(storage, path)
    except DatasetError as error:
        log.warning("%s", error)
        return None


def _kept(made_from: Mapping[str, Any] | None, folder: str) -> dict[str, Any] | None:
    """What a dataset was made from, by an address that still holds when both are moved together."""
    if not made_from or not made_from.get("uri"):
        return None if made_from is None else dict(made_from)
    return {**made_from, "uri": near(made_from["uri"], folder)}


def _says(manifest: Manifest) -> tuple[object, ...]:
    """What must not differ for a manifest to stand."""
    return manifest.files_digest, manifest.input, manifest.repeated, manifest.rows, manifest.counts


def parts_table(parts: Iterable[PartInfo]) -> pa.Table:
    """The list of parts, by unit and attempt."""
    rows = [
        {
            "path": p.path,
            "size": p.size,
            "etag": p.etag,
            "unit": p.unit.number,
            "attempt": p.attempt,
            "start": p.unit.start,
            "stop": p.unit.stop,
            "written": p.counts.written,
            "filtered": p.counts.filtered,
            "failed": p.counts.failed,
            "retried": sum(p.retried.values()),
            "row_groups": [{"rows": r, "offset": o, "bytes": b} for r, o, b in p.row_groups],
        }
        for p in sorted(parts, key=lambda p: (p.unit.number, p.attempt))
    ]
    return pa.Table.from_pylist(rows, schema=PARTS_SCHEMA)


def _schema(storage: Storage, parts: Sequence[PartInfo]) -> dict[str, str]:
    """Column names and types, as the first part has them."""
    if not parts:
        return {}
    schema = pq.read_schema(storage.open(parts[0].path))
    return {f.name: str(f.type) for f in schema}
