"""Assignment of permanent addresses to the rows of a source."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sdp.console import counted
from sdp.datasets import index as index_files
from sdp.datasets.columns import common_type
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.footers import read_new_footer
from sdp.datasets.index import Index, Version, files_table
from sdp.datasets.manifest import Dataset
from sdp.datasets.output import Output
from sdp.datasets.parts import failed_before, read_info
from sdp.datasets.units import Extent, Work
from sdp.errors import DatasetError
from sdp.storage import SourceFile, StorageOptions
from sdp.storage.moved import root_of, unchanged, with_sample

_FileVersions = dict[str, tuple[int, str | None]]
"""Size and etag by path."""
_GROUP = 256


def freeze_source(
    output: Output,
    files: Sequence[SourceFile],
    columns: Sequence[str],
    *,
    carried: Sequence[str] = (),
    uri: str = "",
    limit: int | None = None,
) -> Output:
    """Assign addresses to the rows of Parquet files, at most to the first `limit`.

    Rows keep their addresses. Files that are new since the last run are appended; a changed file is refused. The source
    may have moved to another `uri`, with all its files. The first run fixes the types in which parts have the `carried`
    columns. What a dry run returns can be written by `publish_plan`.
    """
    if not files:
        raise DatasetError("source.uri: no Parquet files; check the URI")
    index, root = _follow_move(output.index, files, uri)
    options = output.storage.options
    fresh = _new_files(index, files, options)
    rows, listed, begun = index.listed_rows, [], bool(index.versions)
    fixed = index.columns.names
    types = pa.schema([*index.columns, *((name, pa.null()) for name in dict.fromkeys(columns) if name not in fixed)])
    for start in range(0, len(fresh), _GROUP):  # in groups, so that a small limit opens few files
        if limit is not None and rows >= limit:
            break
        group = fresh[start : start + _GROUP]
        for file, footer in zip(group, ordered_map(lambda f: _footer(f, columns, options), group), strict=True):
            types = _widened(file, footer, types, fixed)
            if limit is not None and rows >= limit:
                continue  # its types count already, so that a first run with a limit fits the later ones
            count = footer.num_rows
            listed.append((file.uri, file.size, with_sample(file, options).etag, rows, count, count, 0))
            rows += count
    if rows == 0:
        raise DatasetError(f"source.uri: {len(files)} Parquet files without any row; check the URI")
    if nested := [name for name in carried if pa.types.is_nested(types.field(name).type)]:
        raise DatasetError(
            f"source.columns: {nested[0]} holds {types.field(nested[0]).type}, but only text, bytes, numbers, booleans "
            "and times are carried; leave it out"
        )
    extent, table = _next_extent(index, rows, limit), files_table(listed)
    moved = index is not output.index
    kept = pa.schema([] if begun else [types.field(name) for name in dict.fromkeys(carried)])
    version = Version(len(index.versions), table, extent, root=root, columns=kept)
    return _append(output.with_index(index), version, moved=moved)


def freeze_files(
    output: Output,
    files: Sequence[SourceFile],
    *,
    uri: str = "",
    limit: int | None = None,
    count: Callable[[str], int] | None = None,
    renewed: Collection[str] | None = None,
) -> Output:
    """Assign an address to each file, such as a picture, or to each row that `count` counts in it.

    As with Parquet files, rows keep their addresses, new files are appended, and a changed file is refused; with
    `renewed` it is not: these files get further addresses.
    """
    index, root = _follow_move(output.index, files, uri)
    options = output.storage.options
    fresh = list(ordered_map(lambda file: with_sample(file, options), _new_files(index, files, options, renewed)))
    counts = list(ordered_map(lambda file: count(file.uri), fresh)) if count else [1] * len(fresh)
    stops = list(accumulate(counts, initial=index.listed_rows))
    if not stops[-1]:
        raise DatasetError(f"source.uri: {counted(len(files), 'file')} without any row; check the URI")
    spans = zip(fresh, counts, stops[1:], strict=True)
    table = files_table((file.uri, file.size, file.etag, stop - rows, rows, rows, 0) for file, rows, stop in spans)
    moved, extent = index is not output.index, _next_extent(index, stops[-1], limit)
    return _append(output.with_index(index), Version(0, table, extent, root=root), moved=moved)


def publish_plan(output: Output, planned: Output) -> Output:
    """Write the index versions that `planned` has and the output lacks."""
    for version in planned.index.versions[len(output.index.versions) :]:
        output = _append(output.with_index(output.index.moved(version.root)), version, moved=True)
    return output


def freeze_upstream(output: Output, upstream: Dataset, *, limit: int | None = None) -> Output:
    """Adopt the addresses of another dataset; append those that are new since the last run.

    New addresses become new units. Rows that a retry upstream has written become another attempt at their units.
    """
    index = output.index
    parts = upstream.parts
    table = files_table(
        (p["path"], p["size"], p["etag"], p["start"], p["stop"] - p["start"], p["written"], p["attempt"])
        for p in parts.select(["path", "size", "etag", "start", "stop", "written", "attempt"]).to_pylist()
    ).sort_by([("attempt", "ascending"), ("first_row", "ascending")])
    known = known_files(index)
    for path, now in _versions_of(table).items():
        before = known.get(path, now)
        if not _same_file(now, before) and not any(_same_file(was, before) for was in _replaced(upstream, path)):
            raise _changed_file_error(f"{upstream.storage.uri}/{path}", before, now)
    fresh = table.filter(pc.invert(pc.is_in(table["path"], pa.array(list(known), pa.string()))))

    rescued = fresh.filter((pc.field("attempt") > 0) & (pc.field("first_row") < index.rows) & (pc.field("written") > 0))
    if rescued.num_rows:
        output = _append_attempt(output, rescued, _units_of(index, rescued))

    extent = _next_extent(output.index, upstream.rows, limit)
    if extent is None:
        return output
    first_attempts = fresh.filter((pc.field("attempt") == 0) & (pc.field("first_row") < extent.stop))
    stops = pc.add(table["first_row"], table["rows"])
    touches = pc.and_(pc.less(table["first_row"], extent.stop), pc.greater(stops, extent.start))
    retries = table.filter(pc.and_(touches, pc.greater(table["attempt"], 0)))
    return _append(output, Version(0, pa.concat_tables([first_attempts, retries]), extent))


def _same_file(file: tuple[int, str | None], other: tuple[int, str | None]) -> bool:
    """Return whether sizes and etags are of one file, as far as both are known."""
    return file[0] == other[0] and (file[1] == other[1] or None in (file[1], other[1]))


def _replaced(upstream: Dataset, path: str) -> tuple[tuple[int, str | None], ...]:
    """Return the size and etag of the files that a part upstream has replaced."""
    return read_info(upstream.storage, upstream.storage.stat(path)).replaced


def order_retry(output: Output, dataset: Dataset, files: Sequence[SourceFile] = ()) -> Output:
    """Request another attempt at every unit with failures; continue a retry that the manifest does not list instead.

    A changed file of the source's `files` is recorded if its only row had failed before, and refused otherwise.
    """
    repaired = _repaired(output, files)
    retries = [version for version in output.index.versions if version.units]
    listed = set(zip(*(dataset.parts[name].to_pylist() for name in ("unit", "attempt")), strict=True))
    if retries and any((unit, retries[-1].attempt) not in listed for unit in retries[-1].units):
        return _append_attempt(output, repaired, (), retries[-1].attempt)
    units = sorted(dataset.failures())
    return _append_attempt(output, repaired, units) if units else output


def _repaired(output: Output, files: Sequence[SourceFile]) -> pa.Table:
    """Return the files that were replaced after their only row had failed; refuse other changes."""
    index, known, options = output.index, known_files(output.index), output.storage.options
    changed = {f.uri: f for f in files if f.uri in known and not unchanged(f, *known[f.uri], options)}
    table = index.files.filter(pc.is_in(index.files["path"], pa.array(list(changed), pa.string())))
    attempt = _next_attempt(index)
    units = _units_of(index, table.filter(pc.field("first_row") < index.rows))
    retries = [Work(index.units[unit], attempt) for unit in units]
    failed = {row for work in retries for row in failed_before(output.storage, work)[0].tolist()}
    rows = []
    for row in {row["path"]: row for row in table.to_pylist()}.values():  # the last address of a file that has several
        file = with_sample(changed[row["path"]], options)
        if row["rows"] > 1 or row["first_row"] not in failed:
            raise _changed_file_error(file.uri, known[file.uri], (file.size, file.etag))
        rows.append((file.uri, file.size, file.etag, row["first_row"], 1, 1, 0))
    return files_table(rows)


def _append_attempt(output: Output, files: pa.Table, units: Sequence[int], attempt: int | None = None) -> Output:
    root = output.index.root if files.num_rows else ""
    attempt = attempt or _next_attempt(output.index)
    return _append(output, Version(0, files, attempt=attempt, units=tuple(units), root=root))


def _next_attempt(index: Index) -> int:
    return 1 + max((version.attempt for version in index.versions), default=0)


def _append(output: Output, version: Version, *, moved: bool = False) -> Output:
    """Publish the next version of the index, if it says anything new."""
    if version.extent is None and not version.files.num_rows and not version.units and not moved:
        return output
    if not output.writes:
        version = replace(version, number=len(output.index.versions))
        return output.with_index(Index((*output.index.versions, version), output.index.unit_rows))
    return output.with_index(index_files.append(output.storage, output.index, version))


def _next_extent(index: Index, available: int, limit: int | None) -> Extent | None:
    stop = available if limit is None else min(available, limit)
    return Extent(index.rows, stop) if stop > index.rows else None


def _new_files(
    index: Index, files: Sequence[SourceFile], options: StorageOptions | None, renewed: Collection[str] | None = None
) -> list[SourceFile]:
    """Return the files that are not in the index or are `renewed`, by URI; if that is None, refuse changed files."""
    known = known_files(index)
    if renewed is None:
        for file in files:
            if (before := known.get(file.uri)) is not None and not unchanged(file, *before, options):
                raise _changed_file_error(file.uri, before, (file.size, file.etag))
        renewed = ()
    return sorted((f for f in files if f.uri not in known or f.uri in renewed), key=lambda file: file.uri)


def known_files(index: Index) -> _FileVersions:
    """Return the files in the index."""
    return {path: now for version in index.versions for path, now in _versions_of(version.files).items()}


def _changed_file_error(uri: str, before: tuple[int, str | None], now: tuple[int, str | None]) -> DatasetError:
    return DatasetError(
        f"source.uri: {uri} has changed since its rows got their addresses (from {before[0]} bytes, etag "
        f"{before[1]}, to {now[0]} bytes, etag {now[1]}); restore it, or choose a new output.uri"
    )


def _follow_move(index: Index, files: Sequence[SourceFile], uri: str) -> tuple[Index, str]:
    """Return the index with its files at the present source, and the root that their names are relative to.

    A moved source must have every file that has addresses; otherwise it is another source and is refused.
    """
    root = root_of(uri, files) if uri else ""
    if not root or index.root in ("", root):
        return index, root
    moved = index.moved(root)
    if missing := sorted(known_files(moved).keys() - {file.uri for file in files}):
        raise DatasetError(
            f"source.uri: {uri} is another source than this output was begun with, which was at {index.root} "
            f"({missing[0]} is not there); set it back, or begin a new output.uri"
        )
    return moved, root


def _versions_of(files: pa.Table) -> _FileVersions:
    columns = (files[name].to_pylist() for name in ("path", "size", "etag"))
    return {path: (size, etag) for path, size, etag in zip(*columns, strict=True)}


def _units_of(index: Index, files: pa.Table) -> list[int]:
    """Return the units of the index that hold addresses of these files."""
    units: set[int] = set()
    for first, rows in zip(files["first_row"].to_pylist(), files["rows"].to_pylist(), strict=True):
        start, last = index.units.of_rows(np.array([first, min(first + rows, index.rows) - 1]))
        units.update(range(int(start), int(last) + 1))
    return sorted(units)


def _footer(file: SourceFile, columns: Sequence[str], options: StorageOptions | None) -> pq.FileMetaData:
    footer = read_new_footer(file.uri, options)
    names = footer.schema.to_arrow_schema().names
    if missing := [column for column in columns if column not in names]:
        raise DatasetError(
            f"{file.uri}: no column {', '.join(missing)}; it has {', '.join(names)}; set the source's column names"
        )
    if repeated := [column for column in columns if names.count(column) > 1]:
        raise DatasetError(
            f"{file.uri}: {names.count(repeated[0])} columns are named {repeated[0]}; rename all but one"
        )
    return footer


def _widened(file: SourceFile, footer: pq.FileMetaData, types: pa.Schema, fixed: Sequence[str]) -> pa.Schema:
    """Return the types that hold this file's values, too; refuse a file for which there are none, or `fixed` ones."""
    schema = footer.schema.to_arrow_schema()
    for at, column in enumerate(types):
        own = schema.field(column.name).type
        common = common_type(column.type, own)
        if common is None or (column.name in fixed and common != column.type):
            held = "no value" if pa.types.is_null(column.type) else column.type
            alternative = ", or choose a new output.uri" if column.name in fixed else " or leave the column out"
            raise DatasetError(
                f"{file.uri}: column {column.name} holds {own}, but {held} in this dataset's other files; "
                f"convert this file{alternative}"
            )
        types = types.set(at, pa.field(column.name, common))
    return types
