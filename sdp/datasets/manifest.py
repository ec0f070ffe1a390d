"""Manifests, written last: a dataset with one is complete, and the manifest lists its content and its origin."""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import AfterValidator, Field

import sdp
from sdp.console import counted
from sdp.datasets import repeated
from sdp.datasets.columns import parquet_bytes
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import Counts, StoredCounts
from sdp.datasets.output import HEAD, Head, Output, json_in, read_head, refuse_other_format
from sdp.datasets.parts import PartInfo, read_info
from sdp.datasets.records import Identifier, Whole, dump, parse, reading
from sdp.datasets.units import PARTS, PartKey, Work, parse_part_name
from sdp.errors import AlreadyExists, DatasetError, NotFound
from sdp.storage import FileInfo, Storage
from sdp.storage.uri import near, resolved

MANIFEST = "_manifest.json"
FORMAT = 1
_CARD = "README.md"
"""The page by which Hugging Face's `datasets` finds the rows; a page of the user's own stays."""
_VERSION = re.compile(r"_manifests/(\d{6})\.json", re.ASCII)

log = logging.getLogger(__name__)

_ROW_GROUP = pa.struct([("rows", pa.int64()), ("offset", pa.int64()), ("bytes", pa.int64())])
PARTS_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("etag", pa.string()),
        pa.field("unit", pa.int64(), nullable=False),
        pa.field("attempt", pa.int16(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in ("start", "stop", "written", "filtered", "failed")),
        pa.field("retried", pa.int64(), nullable=False),  # failures of earlier attempts that it supersedes
        pa.field("row_groups", pa.list_(_ROW_GROUP), nullable=False),
    ]
)


def _source(value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Check a dataset's origin: a dataset, files at a URI, or nothing (if prompts came from a file)."""
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
    """The description of a complete dataset."""

    kind: Identifier
    version: Annotated[int, Field(ge=1)]
    rows: Whole
    """Addresses that it accounts for; for a derived dataset, addresses that it spans."""
    counts: StoredCounts
    parts: Whole
    size: Whole
    """Bytes of all parts."""
    files: Annotated[str, Field(pattern=r"^_files/[0-9a-f]{16}\.pq$")]
    """The list of parts, relative to the dataset."""
    files_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    schema: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    """Model sources by role, with the digest of their content."""
    input: Annotated[Mapping[str, Any] | None, AfterValidator(_source)] = None
    """URI and manifest digest of the dataset that it was made from, or the URI of a plain source."""
    repeated: Whole = 0
    """Rows that are in parts but counted as filtered, since lower rows have the same content."""
    sdp: str = sdp.__version__
    created: str = ""
    format: int = FORMAT


@dataclass(frozen=True)
class Dataset:
    """A complete dataset, as its manifest lists it."""

    storage: Storage
    head: Head
    manifest: Manifest
    digest: str
    """Digest of the manifest, which downstream datasets record as their lineage."""
    parts: pa.Table

    @property
    def rows(self) -> int:
        return self.manifest.rows

    @property
    def lineage(self) -> dict[str, Any]:
        return {"uri": self.storage.uri, "manifest_digest": self.digest, "version": self.manifest.version}

    @property
    def repeated_rows(self) -> repeated.Repeated | None:
        """The rows in parts that readers leave out, since lower rows have the same content."""
        return repeated.of_manifest(self.storage, self.manifest.repeated, self.manifest.files_digest)

    def failures(self) -> dict[int, int]:
        """Return the number of addresses whose last attempt failed, for each unit that has some."""
        failed: dict[int, int] = {}
        columns = (self.parts[name].to_pylist() for name in ("unit", "failed", "retried"))
        for unit, count, retried in zip(*columns, strict=True):
            failed[unit] = failed.get(unit, 0) + count - retried
        return {unit: count for unit, count in failed.items() if count}

    def require_rows(self, retry: str = "run it with --only-failed") -> None:
        """Raise an error if none of its rows was written. It says how to `retry` those that failed."""
        counts, uri = self.manifest.counts, self.storage.uri
        if counts.written or not counts.input:
            return
        most = ", ".join(f"{reason} {count:,}" for reason, count in Counter(counts.reasons).most_common(3))
        remedy = f"fix the cause, then {retry}" if counts.failed else "choose other filters"
        if "private_address" in counts.reasons:
            remedy += " (fetch.allow_networks allows some: '[127.0.0.0/8]' those of this machine)"
        raise DatasetError(
            f"{uri}: no row was written, {counts.failed:,} failed and {counts.filtered:,} were filtered ({most}); see "
            f"their details with `sdp inspect {uri}`, {remedy}"
        )


def read_manifest(storage: Storage, path: str = MANIFEST) -> Manifest:
    """Read the newest manifest, or another version, without its list of parts."""
    return _parsed(storage, path, storage.read(path))


def _parsed(storage: Storage, path: str, content: bytes) -> Manifest:
    where = storage.uri_of(path)
    data = json_in(content, where)
    refuse_other_format(data, where)
    with reading(where, "run the job again to rewrite it", "not a manifest"):
        manifest = parse(Manifest, data)
        if manifest.input and manifest.input.get("uri"):
            placed = {**manifest.input, "uri": resolved(manifest.input["uri"], storage.uri)}
            manifest = replace(manifest, input=placed)
        return manifest


def manifest_with(storage: Storage, digest: str) -> Manifest:
    """Return the version of a dataset's manifest that has this digest."""
    for path in reversed(_versions(storage)):
        if hashlib.sha256(content := storage.read(path)).hexdigest() == digest:
            return _parsed(storage, path, content)
    raise DatasetError(f"{storage.uri}: no version of it has the digest {digest[:12]}…; restore it from a backup")


def repeated_rows(storage: Storage) -> repeated.Repeated | None:
    """Return the repeated rows of the newest manifest; None if there are none, or no manifest yet."""
    try:
        manifest = read_manifest(storage)
    except NotFound:
        return None
    return repeated.of_manifest(storage, manifest.repeated, manifest.files_digest)


_PICTURES = (".jpg", ".jpeg", ".png", ".webp")


def _has_pictures(storage: Storage) -> bool:
    """Return whether a folder on this machine has pictures; one in a bucket may have too many files to look at."""
    return "://" not in storage.uri and any(name.lower().endswith(_PICTURES) for name in storage.names())


def open_dataset(storage: Storage, kind: str | None = None, *, version: int | None = None) -> Dataset:
    """Open a complete dataset for reading, and refuse an incomplete one; raise NotFound for an unknown version."""
    path = MANIFEST if version is None else _version_name(version)
    try:
        raw = storage.read(path)
    except NotFound:
        if version is not None:
            raise
        if storage.exists(HEAD):
            raise DatasetError(
                f"{storage.uri}: incomplete (no {MANIFEST} yet); finish the job that writes it, "
                f"`sdp inspect {storage.uri}` shows what is missing"
            ) from None
        if kind == "latents" and _has_pictures(storage):
            raise DatasetError(f"{storage.uri}: these are pictures; run `sdp init` and `sdp process` first") from None
        other = ", or name the columns of other Parquet in source.columns" if kind == "latents" else ""
        raise DatasetError(
            f"{storage.uri}: not a dataset of sdp (no {HEAD}); run the job that writes it, or check the URI{other}"
        ) from None
    where = storage.uri_of(path)
    manifest = _parsed(storage, path, raw)
    if kind is not None and manifest.kind != kind:
        raise DatasetError(f"{storage.uri}: expected a dataset of {kind}, got {manifest.kind}; check the URI")
    listing = storage.read(manifest.files)
    if hashlib.sha256(listing).hexdigest() != manifest.files_digest:
        raise DatasetError(
            f"{storage.uri_of(manifest.files)}: not the list of parts that {where} names; run the job again"
        )
    parts = pq.ParquetFile(pa.BufferReader(listing)).read().cast(PARTS_SCHEMA)
    return Dataset(storage, read_head(storage), manifest, hashlib.sha256(raw).hexdigest(), parts)


def _versions(storage: Storage) -> list[str]:
    """Return the names of all versions of a dataset's manifest, from the oldest."""
    return [name for name in storage.names("_manifests/") if _VERSION.fullmatch(name)]


def _version_name(version: int) -> str:
    return f"_manifests/{version:06d}.json"


def part_infos(storage: Storage, known: Iterable[PartInfo] = ()) -> list[PartInfo]:
    """Read the footers of all existing parts, except those that are known and unchanged."""
    by_path = {info.path: info for info in known}
    files = [f for f in storage.list(PARTS) if parse_part_name(f.path) is not None]

    def info(file: FileInfo) -> PartInfo:
        part = by_path.get(file.path)
        unchanged = part is not None and (part.size, part.etag) == (file.size, file.etag)
        return part if part is not None and unchanged else read_info(storage, file)

    return list(ordered_map(info, files))


def total(infos: Iterable[PartInfo]) -> Counts:
    """Count the outcomes of all addresses, each once however often it was attempted."""
    written, filtered, failed, reasons = 0, 0, 0, Counter[str]()
    for info in infos:
        written += info.counts.written
        filtered += info.counts.filtered
        failed += info.counts.failed - info.superseded
        reasons.update(info.counts.reasons)
        reasons.subtract(info.retried)
    return Counts(written, filtered, failed, {r: n for r, n in sorted(reasons.items()) if n})


def check_ledger(output: Output, parts: Sequence[PartInfo]) -> Counts:
    """Count the outcomes in the parts; refuse parts that do not account for every address of the index."""
    where = output.storage.uri
    works = output.index.works_by_part()
    for part in parts:
        refuse_foreign(output.storage, part, works, output.head.kind)
    counts = total(parts)
    expected = _expected(output)
    if expected is not None and counts.input != expected:
        raise DatasetError(
            f"{where}: the account does not add up: {expected} addresses in the index, {counts.input} with an outcome; "
            f"`sdp inspect --verify {where}` names the part"
        )
    return counts


def refuse_foreign(storage: Storage, part: PartInfo, works: Mapping[PartKey, Work], kind: str | None = None) -> None:
    """Refuse a part that is not among a dataset's works, or of another kind."""
    if works.get((part.unit.number, part.attempt)) != part.work or (kind is not None and part.kind != kind):
        raise DatasetError(f"{storage.uri_of(part.path)}: not a part of this dataset; move it away")


def _expected(output: Output) -> int | None:
    index = output.index
    if not output.head.derived:
        return index.rows
    if index.rows < index.listed_rows:
        return None  # a limit cuts a part upstream, and no listing says how many of its rows are below the limit
    files: dict[str, int] = {}
    for version in index.versions:
        columns = (version.files[name].to_pylist() for name in ("path", "written"))
        files.update(zip(*columns, strict=True))
    return sum(files.values())


def finish(
    output: Output,
    *,
    infos: Iterable[PartInfo] = (),
    config: Mapping[str, Any] | None = None,
    models: Mapping[str, str] | None = None,
    input: Mapping[str, Any] | None = None,
    find_repeated: repeated.Find | None = None,
    check: Callable[[], None] = lambda: None,
) -> Dataset:
    """Write the manifest of an output with all its parts, once their counts and (by `check`) the lease are checked.

    A dataset that its newest manifest still describes keeps that manifest.
    """
    storage = output.storage
    if missing := output.pending():
        raise DatasetError(
            f"{storage.uri}: {counted(len(missing), 'part')} missing, first {missing[0].name}; run the job again"
        )
    parts = part_infos(storage, infos)
    counts = check_ledger(output, parts)
    versions = _versions(storage)
    newest = _readable(storage, versions[-1]) if versions else None
    listing = parquet_bytes(parts_table(parts, _listed(storage, newest)))
    digest = hashlib.sha256(listing).hexdigest()
    repeated_rows = find_repeated(parts, digest) if find_repeated is not None else 0
    draft = Manifest(
        kind=output.head.kind,
        version=int(versions[-1][-11:-5]) + 1 if versions else 1,
        rows=output.index.rows,
        counts=repeated.without(counts, repeated_rows),
        repeated=repeated_rows,
        parts=len(parts),
        size=sum(p.size for p in parts),
        files=f"_files/{digest[:16]}.pq",
        files_digest=digest,
        schema=_schema(storage, parts),
        config=dict(config or {}),
        models=dict(models or {}),
        input=_portable(input, storage.uri),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with suppress(AlreadyExists):
        storage.create(_CARD, Path(__file__).with_name("card.md").read_bytes())
    if newest is not None and _content(replace(newest, input=_portable(newest.input, storage.uri))) == _content(draft):
        storage.publish_held(MANIFEST, storage.read(versions[-1]), check)
        return open_dataset(storage)
    storage.publish(draft.files, listing)
    check()
    try:
        storage.create(_version_name(draft.version), dump(draft))
    except AlreadyExists as error:
        raise DatasetError(f"{storage.uri}: another job has just completed this dataset; run again") from error
    storage.publish_held(MANIFEST, dump(draft), check)
    return open_dataset(storage)


def _readable(storage: Storage, path: str) -> Manifest | None:
    """Read an earlier manifest; return None if it is damaged, so that a new one replaces it."""
    try:
        return read_manifest(storage, path)
    except DatasetError as error:
        log.warning("%s", error)
        return None


def _portable(made_from: Mapping[str, Any] | None, folder: str) -> dict[str, Any] | None:
    """Return the input with a URI that stays valid if the dataset and its input are moved together."""
    if not made_from or not made_from.get("uri"):
        return None if made_from is None else dict(made_from)
    return {**made_from, "uri": near(made_from["uri"], folder)}


def _content(manifest: Manifest) -> tuple[object, ...]:
    """Return the fields whose change needs a new manifest."""
    return manifest.files_digest, manifest.input, manifest.repeated, manifest.rows, manifest.counts


def _listed(storage: Storage, manifest: Manifest | None) -> dict[str, dict[str, Any]]:
    """Return the parts that a manifest lists, by path; none where its list is gone or damaged."""
    if manifest is None:
        return {}
    try:
        table = pq.ParquetFile(pa.BufferReader(storage.read(manifest.files))).read()
    except (NotFound, pa.ArrowException, OSError):
        return {}
    return {part["path"]: part for part in table.to_pylist()}


def parts_table(parts: Iterable[PartInfo], listed: Mapping[str, dict[str, Any]]) -> pa.Table:
    """Return the list of parts, by unit and attempt; a copy of a part that was `listed` before keeps its etag."""
    rows: list[dict[str, Any]] = []
    for p in sorted(parts, key=lambda p: (p.unit.number, p.attempt)):
        identity = (p.path, p.size, p.etag, p.unit.number, p.attempt, p.unit.start, p.unit.stop)
        counts = (p.counts.written, p.counts.filtered, p.counts.failed, p.superseded)
        groups = [{"rows": r, "offset": o, "bytes": b} for r, o, b in p.row_groups]
        row = dict(zip(PARTS_SCHEMA.names, (*identity, *counts, groups), strict=True))
        before = listed.get(p.path)
        if before is not None and before | {"etag": None} == row | {"etag": None}:
            row["etag"] = before["etag"]
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=PARTS_SCHEMA)


def _schema(storage: Storage, parts: Sequence[PartInfo]) -> dict[str, str]:
    """Return the column names and types of the first part."""
    if not parts:
        return {}
    schema = pq.read_schema(storage.open(parts[0].path))
    return {f.name: str(f.type) for f in schema}
