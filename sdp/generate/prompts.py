"""Prompts and their addresses: picture k of prompt p always has the address p · images_per_prompt + k.

The prompts are frozen beside the output (`_prompts/000000.parquet`, …), and the output's index lists those files.
Prompts may be added at the end later; a changed one is refused.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from sdp.config.generate import GenerateConfig, PromptSource
from sdp.datasets import index as index_files
from sdp.datasets import tombstones
from sdp.datasets.index import Index, Version, files_table
from sdp.datasets.output import HEAD, Output
from sdp.datasets.units import Extent
from sdp.errors import DatasetError, UserError, one_line
from sdp.storage import SourceFile, Storage, StorageOptions, is_read_only, list_source, open_source, open_storage

FOLDER = "_prompts/"

Prompt = str | None
"""None for a missing or blank caption, whose addresses get no pictures."""

_MAGIC = b"PAR1"
_LINE_END = re.compile(r"\r\n|\n|\r")
_PART = re.compile(r"/parts/[^/]*\.parquet$")
"""A part of a dataset; the URI before it is the dataset's."""
_SHOWN = 60


def read_prompts(config: GenerateConfig) -> list[Prompt]:
    """Return a job's prompts in order, at most `limit`."""
    if config.source.uri is None:
        return [_clean(prompt) for prompt in config.prompts[: config.limit]]
    uri, options = config.source.uri, config.storage.options()
    files = list_source(uri, options, suffixes=(".parquet", ".txt"))
    prompts = list(islice(_read_files(files, config.source, options), config.limit))
    if not any(prompts):
        raise UserError(f"source.uri: {uri}: no prompts; expected one per line, or Parquet with a caption column")
    return prompts


def taken_down(config: GenerateConfig) -> frozenset[int]:
    """Return the numbers of prompts that are captions of images taken down from a dataset of sdp.

    They keep their addresses, so that no other prompt's change; no picture is drawn for them.
    """
    uri, options = config.source.uri, config.storage.options()
    if uri is None or is_read_only(uri):
        return frozenset()
    files = list_source(uri, options, suffixes=(".parquet", ".txt"))
    roots = {file.uri: _PART.sub("", file.uri) for file in files if _PART.search(file.uri)}
    rows_of = {root: _taken_down_rows(open_storage(root, options)) for root in set(roots.values())}
    if not any(rows_of.values()):
        return frozenset()
    numbers, first = set[int](), 0
    for file in files:
        if (rows := rows_of.get(roots.get(file.uri, ""))) is not None:
            addresses = _addresses(file.uri, options)
            numbers.update(first + place for place, row in enumerate(addresses) if row in rows)
            first += len(addresses)
        else:
            first += sum(1 for _ in _read_files([file], config.source, options))
    return frozenset(number for number in numbers if config.limit is None or number < config.limit)


def _taken_down_rows(root: Storage) -> BitMap64:
    return tombstones.load(root).rows if root.exists(HEAD) else BitMap64()


def _addresses(uri: str, options: StorageOptions) -> list[int]:
    try:
        rows: list[int] = pq.ParquetFile(open_source(uri, options)).read(["row"])["row"].to_pylist()
    except (pa.ArrowException, OSError, KeyError) as error:
        cause = one_line(error, 120)
        raise UserError(f"source.uri: {uri}: its addresses cannot be read ({cause}); fix or remove it") from error
    return rows


def frozen_prompts(storage: Storage, index: Index) -> list[Prompt]:
    """Return the prompts that already have addresses."""
    prompts: list[Prompt] = []
    for path, etag in zip(index.files["path"].to_pylist(), index.files["etag"].to_pylist(), strict=True):
        data = storage.read(path)
        if hashlib.sha256(data).hexdigest() != etag:
            raise DatasetError(f"{storage.uri_of(path)}: has changed; restore it, or choose another output.uri")
        prompts += pq.ParquetFile(pa.BufferReader(data)).read()["prompt"].to_pylist()
    return prompts


def freeze(output: Output, prompts: Sequence[Prompt], config: GenerateConfig) -> Output:
    """Assign addresses to the prompts."""
    index, known = output.index, frozen_prompts(output.storage, output.index)
    _refuse_changed(known, prompts, config.limit)
    fresh = prompts[len(known) :]
    if not fresh:
        return output
    data = _serialise(fresh)
    name = f"{FOLDER}{len(index.versions):06d}.parquet"
    rows = len(fresh) * config.images_per_prompt
    files = files_table([(name, len(data), hashlib.sha256(data).hexdigest(), index.listed_rows, rows, rows, 0)])
    version = Version(len(index.versions), files, Extent(index.rows, index.rows + rows))
    if not output.writes:
        return output.with_index(Index((*index.versions, version), index.unit_rows))
    output.storage.publish(name, data)  # before the index names it
    return output.with_index(index_files.append(output.storage, index, version))


def _refuse_changed(known: Sequence[Prompt], prompts: Sequence[Prompt], limit: int | None) -> None:
    for number, (was, now) in enumerate(zip(known, prompts, strict=False)):
        if was != now:
            raise DatasetError(
                f"prompt {number}: was {_shown(was)} when this output began, is {_shown(now)} now; restore it (prompts "
                "may only be added at the end), or choose another output.uri"
            )
    if len(prompts) < (len(known) if limit is None else min(len(known), limit)):
        raise DatasetError(
            f"prompt {len(prompts)}: was {_shown(known[len(prompts)])} when this output began, is missing now; restore "
            "it, or choose another output.uri"
        )


def _read_files(files: Sequence[SourceFile], source: PromptSource, options: StorageOptions) -> Iterator[Prompt]:
    for file in files:
        data = open_source(file.uri, options)
        is_parquet = data.read(len(_MAGIC)) == _MAGIC
        data.seek(0)
        yield from _parquet(file.uri, data, source.caption_column) if is_parquet else _text(file.uri, data.read())


def _text(uri: str, data: bytes) -> Iterator[Prompt]:
    """Return one prompt per line that is not blank."""
    try:
        lines = _LINE_END.split(data.decode("utf-8-sig"))  # splitlines splits at more characters than editors do
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(
            f"source.uri: {uri}: line {line} is not UTF-8 text; save the file as UTF-8, or use Parquet"
        ) from error
    return (line.strip() for line in lines if line.strip())


def _parquet(uri: str, data: pa.NativeFile, column: str) -> Iterator[Prompt]:
    try:
        file = pq.ParquetFile(data, pre_buffer=True)
        names = file.schema_arrow.names
        if column not in names:
            raise UserError(f"source.caption_column: {uri}: no column {column}; it has {', '.join(names)}")
        if not _is_text(file.schema_arrow.field(column).type):
            kind = file.schema_arrow.field(column).type
            raise UserError(f"source.caption_column: {uri}: expected text in {column}, got {kind}; name another column")
        for batch in file.iter_batches(columns=[column]):
            yield from (_clean(prompt) for prompt in batch.column(0).to_pylist())
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        cause = one_line(error, 120)
        raise UserError(f"source.uri: {uri}: not readable as Parquet ({cause}); fix or remove it") from error


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _clean(prompt: object) -> Prompt:
    return (prompt.strip() or None) if isinstance(prompt, str) else None


def _serialise(prompts: Sequence[Prompt]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": pa.array(prompts, pa.string())}), sink, compression="zstd")
    return bytes(sink.getvalue())


def _shown(prompt: Prompt) -> str:
    text = repr(prompt)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
