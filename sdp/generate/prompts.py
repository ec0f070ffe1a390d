"""Prompts and their addresses: picture k of prompt p always has the address p · images_per_prompt + k.

The prompts are frozen beside the output (`_prompts/<digest>.pq`), and the output's index lists those files.
Prompts may be added at the end later; a changed one is refused.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from sdp.config.generate import GenerateConfig
from sdp.datasets import index as index_files
from sdp.datasets import tombstones
from sdp.datasets.columns import iter_tables, kind_of, open_parquet, parquet_bytes, readable
from sdp.datasets.footers import read_new_footer
from sdp.datasets.index import Index, Version, files_table
from sdp.datasets.output import HEAD, Output
from sdp.datasets.units import Extent
from sdp.errors import DatasetError, UserError, one_line, shortened
from sdp.storage import SourceFile, Storage, StorageOptions, is_read_only, list_source, open_source, open_storage

FOLDER = "_prompts/"

Prompt = str | None
"""None for a missing or blank caption, whose addresses get no pictures."""

_MAGIC = b"PAR1"
_LINE_END = re.compile(r"\r\n|\n|\r")
_PART = re.compile(r"/parts/[^/]*\.parquet$")
"""A part of a dataset; the URI before it is the dataset's."""
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a job, in order."""

    texts: list[Prompt]
    taken_down: frozenset[int] = frozenset()
    """Numbers of prompts that are captions of images taken down from a dataset of sdp. They keep their addresses, so
    that no other prompt's change; no picture is drawn for them."""


def read_prompts(config: GenerateConfig) -> Prompts:
    """Return a job's prompts, at most `limit`."""
    if config.source.uri is None:
        return Prompts([_clean(prompt) for prompt in config.prompts[: config.limit]])
    uri, options = config.source.uri, config.storage.options()
    files = list_source(uri, options, suffixes=(".parquet", ".txt"))
    taken_down = cache(lambda root: _taken_down_rows(root, options))
    read = [*islice(chain.from_iterable(_read_file(file, config, taken_down) for file in files), config.limit)]
    texts = [prompt for prompt, _ in read]
    if not any(texts):
        raise UserError(f"source.uri: {uri}: no prompts; expected one per line, or Parquet with a caption column")
    return Prompts(texts, frozenset(number for number, (_, is_taken_down) in enumerate(read) if is_taken_down))


def _taken_down_rows(root: str, options: StorageOptions) -> BitMap64:
    """Return the addresses taken down from the dataset at a URI, if there is one."""
    if is_read_only(root) or not (storage := open_storage(root, options)).exists(HEAD):
        return BitMap64()
    return tombstones.load(storage).rows


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
    data = parquet_bytes(pa.table({"prompt": pa.array(fresh, pa.string())}))
    digest = hashlib.sha256(data).hexdigest()
    name = f"{FOLDER}{digest[:16]}.pq"  # so that no other job's prompts can replace these
    rows = len(fresh) * config.images_per_prompt
    files = files_table([(name, len(data), digest, index.listed_rows, rows, rows, 0)])
    version = Version(len(index.versions), files, Extent(index.rows, index.rows + rows))
    if not output.writes:
        return output.with_index(Index((*index.versions, version), index.unit_rows))
    output.storage.publish(name, data)  # before the index names it
    return output.with_index(index_files.append(output.storage, index, version))


def _refuse_changed(known: Sequence[Prompt], prompts: Sequence[Prompt], limit: int | None) -> None:
    for number, was in enumerate(known[:limit]):
        if number >= len(prompts) or prompts[number] != was:
            now = f"is {_shown(prompts[number])} now" if number < len(prompts) else "is missing now"
            raise DatasetError(
                f"prompt {number}: was {_shown(was)} when this output began, {now}; restore it (prompts may only be "
                "added at the end), or choose another output.uri"
            )


def _read_file(
    file: SourceFile, config: GenerateConfig, taken_down: Callable[[str], BitMap64]
) -> Iterator[tuple[Prompt, bool]]:
    """Yield a file's prompts, and whether the image that each describes has been taken down."""
    options = config.storage.options()
    with open_source(file.uri, options) as data:
        beginning = data.read(len(_MAGIC))
        if beginning != _MAGIC:
            return ((prompt, False) for prompt in _text(file.uri, beginning + data.read()))
    gone = taken_down(_PART.sub("", file.uri)) if _PART.search(file.uri) else BitMap64()
    return _parquet(file.uri, options, config.source.caption_column, gone)


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


def _parquet(uri: str, options: StorageOptions, column: str, taken_down: BitMap64) -> Iterator[tuple[Prompt, bool]]:
    """Yield the prompts in a column, and whether the image that each describes has been taken down."""
    try:
        footer = read_new_footer(uri, options)
        schema = footer.schema.to_arrow_schema()
        names = schema.names
        if column not in names:
            raise UserError(f"source.caption_column: {uri}: no column {column}; it has {', '.join(names)}")
        kind = schema.field(column).type
        if kind_of(kind) != "text":
            raise UserError(f"source.caption_column: {uri}: expected text in {column}, got {kind}; name another column")
        columns = [column, "row"] if taken_down else [column]
        for table in iter_tables(open_parquet(uri, options, columns, footer), columns):
            is_gone = [row in taken_down for row in table["row"].to_pylist()] if taken_down else [False] * len(table)
            yield from zip(map(_clean, readable(table[column]).to_pylist()), is_gone, strict=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        cause = one_line(error, 120)
        raise UserError(f"source.uri: {uri}: not readable as Parquet ({cause}); fix or remove it") from error


def _clean(prompt: object) -> Prompt:
    return (prompt.strip() or None) if isinstance(prompt, str) else None


def _shown(prompt: Prompt) -> str:
    return shortened(repr(prompt), _SHOWN)
