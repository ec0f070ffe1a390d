"""Latents datasets for tests, small and quick to make."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sdp.datasets.manifest import Dataset, finish
from sdp.datasets.outcomes import FAILED, WRITTEN, Outcome, account_table
from sdp.datasets.output import Head, Output, open_output, read_output
from sdp.datasets.parts import Layout, write_part
from sdp.datasets.source import freeze_source
from sdp.encode.transform import bucket_shapes
from sdp.storage import list_source, open_storage
from sdp.train.data.latents import WeightedDataset
from sdp.train.data.mixture import MixturePlan
from sdp.train.data.order import Shuffle
from sdp.train.data.reader import Reader
from sdp.train.data.stored import StoredRows
from tests.kit import write_source

SHUFFLE = Shuffle(lanes=3, units=2, row_groups=2)


def make_latents(
    root: Path,
    rows: int,
    *,
    unit_rows: int = 40,
    group_rows: int = 8,
    resolution: int = 64,
    failed: int = 0,
    vocabulary: int = 1000,
    uri: str | None = None,
    text_width: int | None = None,
    buckets: bool = False,
) -> Dataset:
    """Make a complete dataset of noise, in which every `failed`-th row failed. A latent's first bytes are its row.
    With a width its captions are embeddings; with buckets its latents have several shapes."""
    write_source(root / "source", [("a.parquet", rows)])
    storage = open_storage(uri or str(root / "latents"))
    output = open_output(storage, Head("latents", unit_rows, False, {"resolutions": [resolution]}))
    how = {"resolution": resolution, "vocabulary": vocabulary, "text_width": text_width, "buckets": buckets}
    return _complete(root, output, group_rows, failed, **how)


def grow_latents(root: Path, rows: int, *, first: int, group_rows: int, vocabulary: int) -> Dataset:
    """The same with a further file of rows upstream: its next version."""
    write_source(root / "source", [(f"more-{first}.parquet", rows)], first)
    output = read_output(open_storage(str(root / "latents")))
    return _complete(root, output, group_rows, resolution=64, vocabulary=vocabulary)


def _complete(root: Path, output: Output, group_rows: int, failed: int = 0, **table: Any) -> Dataset:
    """Write the parts that are missing, with tables like these."""
    storage = output.storage
    output = freeze_source(output, list_source(str(root / "source")), ["URL"])
    for work in output.pending():
        addresses = range(work.unit.start, work.unit.stop)
        outcomes = [
            Outcome(row, FAILED, "undecodable") if failed and row % failed == 0 else Outcome(row, WRITTEN)
            for row in addresses
        ]
        kept = np.array([o.row for o in outcomes if o.outcome == WRITTEN], np.int64)
        rows, layout = latents_table(kept, **table), Layout(row_group_rows=group_rows)
        write_part(storage, "latents", work, rows, account_table(outcomes), layout=layout)
    return finish(output, input={"uri": str(root / "source")})


def latents_table(
    rows: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    resolution: int,
    vocabulary: int = 1000,
    text_width: int | None = None,
    *,
    buckets: bool = False,
) -> pa.Table:
    side = resolution // 8
    latents = np.stack([latent_of(int(row), side) for row in rows] or [np.zeros((4, side, side), np.float16)])
    tokens = np.stack([tokens_of(int(row), vocabulary) for row in rows] or [np.zeros(77, np.uint16)])
    columns = {
        "row": (pa.array(rows), None),
        f"latents_{resolution}": _fixed(latents[: len(rows)], (4, side, side)),
        "token_ids": _fixed(tokens[: len(rows)], (77,)),
    }
    if text_width is not None:
        del columns["token_ids"]
        text = np.stack([np.random.default_rng([int(row), 2]).standard_normal((77, text_width)) for row in rows])
        columns["text_embedding"] = _fixed(text.astype(np.float16), (77, text_width))
    if buckets:
        shapes = [(4, tall // 8, wide // 8) for wide, tall in bucket_shapes(resolution)]
        cells = [latent_in_bucket(int(row), side).tobytes() for row in rows]
        columns[f"latents_{resolution}"] = (
            pa.array(cells, pa.binary()), {"shapes": json.dumps(shapes), "dtype": "float16"},
        )  # fmt: skip
        columns["bucket"] = (pa.array([bucket_of(int(row)) for row in rows], pa.int16()), None)
    schema = pa.schema([pa.field(n, a.type, nullable=False, metadata=m) for n, (a, m) in columns.items()])
    return pa.table([a for a, _ in columns.values()], schema=schema)


def latent_of(row: int, side: int) -> "np.ndarray[tuple[int, int, int], np.dtype[np.float16]]":
    return np.random.default_rng(row).standard_normal((4, side, side)).astype(np.float16)


def bucket_of(row: int) -> int:
    """The bucket of a row's crop: mostly the square."""
    return (4, 4, 4, 2, 2, 6, 0)[row % 7]


def latent_in_bucket(row: int, side: int) -> "np.ndarray[tuple[int, int, int], np.dtype[np.float16]]":
    wide, tall = bucket_shapes(8 * side)[bucket_of(row)]
    return np.random.default_rng(row).standard_normal((4, tall // 8, wide // 8)).astype(np.float16)


def tokens_of(row: int, vocabulary: int) -> "np.ndarray[tuple[int], np.dtype[np.uint16]]":
    return np.random.default_rng([row, 1]).integers(0, vocabulary, 77).astype(np.uint16)


def _fixed(values: "np.ndarray[Any, Any]", shape: tuple[int, ...]) -> tuple[pa.Array, dict[str, str]]:
    width = int(np.prod(shape)) * values.itemsize
    data = pa.py_buffer(np.ascontiguousarray(values).tobytes())
    array = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(values), [None, data])
    return array, {"shape": json.dumps(shape), "dtype": values.dtype.name}


def split_address(address: int) -> tuple[int, int]:
    """Return the number of a mixture's dataset, and the address in it."""
    return address >> 40, address & ((1 << 40) - 1)


def latents_reader(*datasets: WeightedDataset, rank: int = 0, world: int = 1) -> Reader:
    """A reader of latents that mixes them narrowly."""
    groups, weights = (tuple(each) for each in zip(*((d.dataset.row_groups, d.weight) for d in datasets), strict=True))
    plan = MixturePlan(groups, 5, SHUFFLE, weights)
    return Reader(plan, StoredRows(datasets, mixed=len(datasets) > 1), rank, world)
