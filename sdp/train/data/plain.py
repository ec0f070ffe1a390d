"""Plain Parquet files of latents, such as the reference writes: what is there is frozen when a run begins.

Nothing in such a folder says what belongs to it, so the run writes a list down (`_source/000.parquet` beside its
checkpoints): the files, their sizes and row groups. A row's address is its position in that list. Files that come later
are not read by this run; one that has changed is refused.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sdp.config.train import ColumnsConfig
from sdp.datasets.concurrently import ordered_map
from sdp.errors import AlreadyExists, DatasetError, NotFound, one_line
from sdp.storage import SourceFile, Storage, StorageOptions, list_source, open_source
from sdp.storage.moved import root_of, unchanged, with_sample
from sdp.storage.uri import join
from sdp.train.data.latents import LatentsDataset, find_columns
from sdp.train.data.order import Blocks

_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("etag", pa.string()),
        pa.field("row_groups", pa.list_(pa.int64()), nullable=False),
    ]
)


@dataclass(frozen=True)
class PlainFiles:
    """Files by their URIs."""

    uri: str
    options: StorageOptions

    def open(self, path: str) -> pa.NativeFile:
        return open_source(path, self.options)

    def uri_of(self, path: str) -> str:
        return path or self.uri


def freeze(run: Storage, number: int, uri: str, options: StorageOptions, *, write: bool) -> pa.Table:
    """The run's list of the files of its `number`-th source; made if there is none yet, and then kept with `write`."""
    name = f"_source/{number:03d}.parquet"
    found = list_source(uri, options)
    root = root_of(uri, found)
    try:
        return _unchanged(_moved(_read(run, name), root), found, uri, options)
    except NotFound:
        table = _listed(found, options)
    if write:
        sink = pa.BufferOutputStream()
        below = [path.removeprefix(f"{root}/") if root else path for path in table["uri"].to_pylist()]
        pq.write_table(table.set_column(0, _SCHEMA.field(0), pa.array(below, pa.string())), sink)
        try:
            run.create(name, sink.getvalue())
        except AlreadyExists:
            return _unchanged(_moved(_read(run, name), root), found, uri, options)  # another worker was first
    return table


def open_plain(
    listing: pa.Table, uri: str, options: StorageOptions, resolution: int, columns: ColumnsConfig, limit: int | None
) -> LatentsDataset:
    """The listed files as a dataset."""
    groups: list[list[int]] = listing["row_groups"].to_pylist()
    paths = tuple(listing["uri"].to_pylist())
    blocks = Blocks.of(groups)
    low = np.cumsum(blocks.rows) - blocks.rows
    if not blocks.rows.sum():
        raise DatasetError(f"source.uri: no row in the Parquet files of {uri}; check the address")
    if limit is not None:
        wanted = low < limit
        blocks = Blocks(blocks.part[wanted], blocks.group[wanted], blocks.rows[wanted])
        low = low[wanted]
    first = paths[int(blocks.part[np.flatnonzero(blocks.rows)[0]])]
    found = find_columns(_footer(first, options), first, resolution, columns)
    return LatentsDataset(PlainFiles(uri, options), paths, blocks, *found, low, low + blocks.rows, addressed=False)


def _listed(found: list[SourceFile], options: StorageOptions) -> pa.Table:
    def groups(file: SourceFile) -> list[int]:
        footer = _footer(file.uri, options).metadata
        return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]

    rows = [
        {"uri": file.uri, "size": file.size, "etag": with_sample(file, options).etag, "row_groups": counts}
        for file, counts in zip(found, ordered_map(groups, found), strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _moved(listing: pa.Table, root: str) -> pa.Table:
    """The list with the files where the source is now; it is kept with names that count from the source's folder."""
    paths = [join(root, path) if root else path for path in listing["uri"].to_pylist()]
    return listing.set_column(0, _SCHEMA.field(0), pa.array(paths, pa.string()))


def _unchanged(listing: pa.Table, found: list[SourceFile], uri: str, options: StorageOptions) -> pa.Table:
    there = {file.uri: file for file in found}
    for row in listing.select(["uri", "size", "etag"]).to_pylist():
        now = there.get(row["uri"])
        if now is None or not unchanged(now, row["size"], row["etag"], options):
            became = f"{now.size} bytes, etag {now.etag}" if now else "gone"
            raise DatasetError(
                f"{row['uri']}: has changed since the run began ({row['size']} bytes, etag {row['etag']}; now "
                f"{became}); restore it, or choose another output.uri to begin anew with {uri} as it is"
            )
    return listing


def _footer(uri: str, options: StorageOptions) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(open_source(uri, options))
    except pa.ArrowException as error:
        cause = one_line(error, 160)
        raise DatasetError(f"{uri}: not a Parquet file ({cause}); remove it from source.uri or mend it") from error


def _read(run: Storage, name: str) -> pa.Table:
    return pq.ParquetFile(pa.BufferReader(run.read(name))).read().cast(_SCHEMA)
