"""Tables of URLs and captions: which columns hold them, and CSV, TSV or JSON lines as Parquet."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from sdp.errors import UserError, one_line
from sdp.storage import open_source

_URLS, _CAPTIONS = ("url", "image_url", "img_url", "link"), ("caption", "text", "alt_text", "alt", "title")
_BLOCK_BYTES = 16 << 20


def usual_column(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """Return the first of the usual columns that a table has, in any case."""
    lower = {name.lower(): name for name in reversed(names)}
    return next((lower[name] for name in usual if name in lower), None)


def url_columns(names: Sequence[str], uri: str) -> tuple[str, str | None]:
    """Return a table's columns of URLs and of captions, if it has those."""
    if (url := usual_column(names, _URLS)) is None:
        has = f"has {', '.join(names)[:200]}; rename one" if names else "is empty"
        raise UserError(f"{uri}: no column {' or '.join(_URLS)}; it {has}")
    return url, usual_column(names, _CAPTIONS)


def as_parquet(uri: str, target: Path) -> tuple[int, str, str | None]:
    """Write a table of text as Parquet, a block at a time; return its rows, and its columns of URLs and captions."""
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = 0
    try:
        reader, url, caption = _open(uri)
        with pq.ParquetWriter(target, reader.schema, compression="zstd") as writer:
            for batch in reader:
                writer.write_batch(batch)
                rows += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        target.unlink(missing_ok=True)
        raise UserError(f"{uri}: not readable after row {rows:,} ({one_line(error, 200)}); correct it") from error
    return rows, url, caption


def _open(uri: str) -> tuple[pa.RecordBatchReader, str, str | None]:
    if uri.endswith(".jsonl"):
        reader = pa_json.open_json(open_source(uri), pa_json.ReadOptions(block_size=_BLOCK_BYTES))
        return reader, *url_columns(reader.schema.names, uri)
    delimiter = "\t" if uri.endswith(".tsv") else ","
    with open_source(uri) as file:
        head = io.StringIO(file.read(_BLOCK_BYTES).decode("utf-8-sig", "replace"))
    url, caption = url_columns(next(csv.reader(head, delimiter=delimiter), []), uri)
    texts = {name: pa.string() for name in (url, caption) if name is not None}  # not numbers or dates
    reader = pa_csv.open_csv(
        open_source(uri),
        pa_csv.ReadOptions(block_size=_BLOCK_BYTES),
        pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        pa_csv.ConvertOptions(column_types=texts),
    )
    return reader, url, caption
