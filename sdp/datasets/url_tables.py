"""Tables of URLs and captions: which columns hold them, and CSV, TSV or JSON lines as Parquet."""

import csv
import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from sdp.errors import UserError, one_line
from sdp.storage import open_source

_URLS, _CAPTIONS = ("url", "image_url", "img_url", "link"), ("caption", "text", "alt_text", "alt", "title")
_BLOCK_BYTES = 16 << 20
_SHALLOW_BYTES = 4096
"""A line of JSON up to this size has no more levels than pyarrow can read; 20,000 are too many."""


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
        return _open_json(uri)
    delimiter = "\t" if uri.endswith(".tsv") else ","
    with open_source(uri) as file:
        head = io.StringIO(file.read(_BLOCK_BYTES).decode("utf-8-sig", "replace"))
    url, caption = url_columns(next(csv.reader(head, delimiter=delimiter), []), uri)
    how = pa_csv.ReadOptions(block_size=_BLOCK_BYTES)
    form = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    texts = pa_csv.ConvertOptions(column_types=_texts(url, caption))
    return pa_csv.open_csv(open_source(uri), how, form, texts), url, caption


def _open_json(uri: str) -> tuple[pa.RecordBatchReader, str, str | None]:
    _refuse_deep(uri)
    how = pa_json.ReadOptions(block_size=_BLOCK_BYTES)
    url, caption = url_columns(pa_json.open_json(open_source(uri), how).schema.names, uri)
    texts = pa_json.ParseOptions(explicit_schema=pa.schema(_texts(url, caption)))
    return pa_json.open_json(open_source(uri), how, texts), url, caption


def _texts(*columns: str | None) -> dict[str, pa.DataType]:
    """Return the type of the columns of URLs and captions, whose values are not to be taken for numbers or dates."""
    return {name: pa.string() for name in columns if name is not None}


def _refuse_deep(uri: str) -> None:
    """Raise UserError for a line of JSON with so many levels that pyarrow's reader would end the process."""
    with open_source(uri) as source:
        lines = io.BufferedReader(source, 1 << 20)
        for number, line in enumerate(iter(partial(lines.readline, _BLOCK_BYTES), b""), 1):
            if len(line) > _SHALLOW_BYTES:
                try:
                    json.loads(line)
                except RecursionError:
                    raise UserError(f"{uri}:{number}: a value in too many others; remove the line") from None
                except ValueError:  # pyarrow says what is wrong
                    continue
