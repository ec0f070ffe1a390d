"""Plain Parquet files of latents, frozen when a run begins.

Such a folder has no manifest, so the run keeps a list of the files, their sizes and row groups (`_source/000.parquet`
beside its checkpoints). A row's address is its position in that list. This run does not read files that are added
later, and refuses files that have changed.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sdp.config.train import ColumnsConfig
from sdp.datasets.columns import rows_by_group
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.footers import read_new_footer
from sdp.datasets.records import reading
from sdp.errors import DatasetError, NotFound
from sdp.sources.groups import footer_of
from sdp.storage import SourceFile, Storage, StorageOptions, list_source, open_source
from sdp.storage.moved import root_of, unchanged, with_sample
from sdp.storage.uri import below, join
from sdp.train.data.columns import find_columns
from sdp.train.data.latents import LatentsDataset
from sdp.train.data.order import RowGroups

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
    """Files that are named by their URIs."""

    uri: str
    options: StorageOptions

    def open(self, path: str) -> pa.NativeFile:
        return open_source(path, self.options)

    def uri_of(self, path: str) -> str:
        return path or self.uri


def freeze(run: Storage, number: int, uri: str, options: StorageOptions, *, write: bool) -> pa.Table:
    """Return the run's list of the files of its `number`-th source.

    The first call makes the list; the driver, which has the run's lease, keeps it in the run's folder with `write`.
    """
    name = f"_source/{number:03d}.parquet"
    files = list_source(uri, options)
    root = root_of(uri, files)
    try:
        return _unchanged(_read(run, name, root), files, uri, options)
    except NotFound:
        table = _listed(files, options)
    if write:
        sink = pa.BufferOutputStream()
        paths = [below(path, root) for path in table["uri"].to_pylist()]
        pq.write_table(table.set_column(0, _SCHEMA.field(0), pa.array(paths, pa.string())), sink)
        run.create(name, sink.getvalue())
    return table


def open_plain(
    listing: pa.Table, uri: str, options: StorageOptions, resolution: int, columns: ColumnsConfig, limit: int | None
) -> LatentsDataset:
    """Open the listed files as a dataset."""
    paths = tuple(listing["uri"].to_pylist())
    row_groups = RowGroups.listed(listing["row_groups"])
    low = np.cumsum(row_groups.rows) - row_groups.rows
    if not row_groups.rows.sum():
        raise DatasetError(f"source.uri: no rows in the Parquet files of {uri}; check the URI")
    if limit is not None:
        wanted = low < limit
        row_groups = RowGroups(row_groups.part[wanted], row_groups.group[wanted], row_groups.rows[wanted])
        low = low[wanted]
    first = paths[int(row_groups.part[np.flatnonzero(row_groups.rows)[0]])]
    file = pq.ParquetFile(open_source(first, options), metadata=footer_of(first, options))
    kinds = find_columns(file, first, resolution, columns)
    return LatentsDataset(PlainFiles(uri, options), paths, row_groups, *kinds, low)


def _listed(files: list[SourceFile], options: StorageOptions) -> pa.Table:
    def groups(file: SourceFile) -> list[int]:
        return rows_by_group(read_new_footer(file.uri, options), file.uri, file.size)

    rows = [
        {"uri": file.uri, "size": file.size, "etag": with_sample(file, options).etag, "row_groups": counts}
        for file, counts in zip(files, ordered_map(groups, files), strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _unchanged(listing: pa.Table, files: list[SourceFile], uri: str, options: StorageOptions) -> pa.Table:
    """Return the list if the files still match it."""
    by_uri = {file.uri: file for file in files}
    for row in listing.select(["uri", "size", "etag"]).to_pylist():
        now = by_uri.get(row["uri"])
        if now is None or not unchanged(now, row["size"], row["etag"], options):
            became = f"{now.size} bytes, etag {now.etag}" if now else "gone"
            raise DatasetError(
                f"{row['uri']}: changed since the run began ({row['size']} bytes, etag {row['etag']}; now "
                f"{became}); restore it, or choose another output.uri for a new run on {uri}"
            )
    return listing


def _read(run: Storage, name: str, root: str) -> pa.Table:
    """Return the kept list, whose paths are relative to the source's folder, with the folder's present URI."""
    with reading(run.uri_of(name), "begin another run"):
        listing = pq.ParquetFile(pa.BufferReader(run.read(name))).read().cast(_SCHEMA)
    paths = [join(root, path) if root else path for path in listing["uri"].to_pylist()]
    return listing.set_column(0, _SCHEMA.field(0), pa.array(paths, pa.string()))
