"""Parts written again without the content of rows that are taken down, since other readers and copies of them go on.

A blank row keeps its address, its outcome and the columns by which it is found, so that no count changes. Its address
is listed as a takedown of its own first: a blank row must never be used, even if the list that named it is withdrawn.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sdp.datasets import repeated, tombstones
from sdp.datasets.columns import kind_of
from sdp.datasets.manifest import MANIFEST, PARTS_SCHEMA, Dataset, finish, open_dataset, refuse_foreign
from sdp.datasets.output import read_output
from sdp.datasets.parts import read_footer, read_layout, read_rows, serialise
from sdp.datasets.tombstones import Takedown
from sdp.datasets.units import PARTS, parse_part_name
from sdp.storage import Storage

_KEPT = ("row", "key", "url", "sha256")


def blank(storage: Storage, check: Callable[[], None]) -> tuple[int, int]:
    """Blank all rows that are taken down, and complete the dataset again; `check` checks the lease.

    Return the number of parts that were written again, and of their rows that are blank now.
    """
    dataset = open_dataset(storage) if storage.exists(MANIFEST) else None
    taken = np.array(tombstones.load(storage).rows.to_array(), np.int64)
    output = read_output(storage)
    works, units = output.index.works_by_part(), output.index.units
    listed = dataset.parts if dataset is not None else PARTS_SCHEMA.empty_table()
    etags = dict(zip(listed["path"].to_pylist(), listed["etag"].to_pylist(), strict=True))
    taken = taken[(taken >= units.start) & (taken < units.stop)]
    tombstones.add(storage, [Takedown("row", str(row)) for row in taken.tolist()])
    affected = set(units.of_rows(taken).tolist())
    parts = rows = 0
    for file in storage.list(PARTS):
        part = parse_part_name(file.path)
        if part not in works or part[0] not in affected:
            continue
        info, account = read_footer(storage, file)
        refuse_foreign(storage, info, works, output.head.kind)
        table = read_rows(storage, file.path)
        mask = np.isin(table["row"].to_numpy(), taken)
        blanked = _blanked(table, mask)
        if blanked is table:
            continue
        check()
        replaced = [*info.replaced, (file.size, etags.get(file.path, file.etag))]
        data = serialise(
            info.kind, info.work, blanked, account,
            layout=read_layout(storage, file.path), retried=info.retried, replaced=replaced,
        )  # fmt: skip
        storage.swap(file.path, data, file.etag)
        parts, rows = parts + 1, rows + int(mask.sum())
    if dataset is not None and affected:  # also where an earlier call ended before the manifest
        before = dataset.manifest
        finish(
            output, config=before.config, models=before.models, input=before.input, check=check,
            find_repeated=lambda _, digest: _keep_repeated(dataset, digest, check),
        )  # fmt: skip
    return parts, rows


def _blanked(table: pa.Table, mask: NDArray[np.bool_]) -> pa.Table:
    """Return the table with empty text, zero bytes and null for nested values in some rows; itself if none changes."""
    chosen = pa.array(mask)
    for at, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        kind = kind_of(column.type)
        if name in _KEPT or kind == "numbers":
            continue
        if kind in ("text", "bytes"):
            cells = column.filter(chosen).to_pylist()
            blank_cells = ["" if kind == "text" else bytes(len(cell or b"")) for cell in cells]
            blanked = pc.replace_with_mask(column, chosen, pa.array(blank_cells, column.type))
        else:
            blanked = pc.if_else(chosen, pa.scalar(None, column.type), column)
        if not blanked.equals(column):
            table = table.set_column(at, table.field(at), blanked)
    return table


def _keep_repeated(dataset: Dataset, digest: str, check: Callable[[], None]) -> int:
    """Store the dataset's repeated rows for its new list of parts; return their number."""
    if (rows := dataset.repeated_rows) is None:
        return 0
    return repeated.keep(dataset.storage, digest, [np.array(rows.rows.to_array(), np.int64)], check)
