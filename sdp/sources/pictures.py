"""Sources of pictures: a dataset of sdp, Parquet files, WebDataset tars, or a folder of image files."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow.compute as pc

from sdp.config.process import JoinedTable, ProcessSource
from sdp.datasets.footers import read_new_footer
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.output import HEAD, Output
from sdp.datasets.scores import Score
from sdp.datasets.source import freeze_files, freeze_source, freeze_upstream
from sdp.errors import DatasetError, UserError
from sdp.sources.groups import footer_of
from sdp.sources.joined import check_column, open_tables
from sdp.sources.pieces import TAR, Planner
from sdp.sources.reading import FILE, Columns
from sdp.sources.tars import PICTURES, TEXT, count_samples
from sdp.storage import SourceFile, StorageOptions, is_read_only, list_source, open_storage
from sdp.storage.opening import split_pattern
from sdp.storage.uri import parse

_CAPTIONS = {"samples": "prompt", "images": "caption"}
"""The captions' column, by kind of dataset."""
_PACKED = re.compile(r"\.(tgz|tar\.\w+)$")
_PART_MARK = b"sdp.part"
"""Metadata in the footer of every part of a dataset."""


@dataclass(frozen=True)
class Pictures:
    """A set of pictures, and the columns to read."""

    uri: str
    columns: Columns
    captions: tuple[str, ...]
    """The columns of captions that the first file has."""
    others: tuple[str, ...] = ()
    """The columns of its own that tables are joined by, or that are filtered by."""
    dataset: Dataset | None = None
    files: tuple[SourceFile, ...] = ()
    """Files of one kind, if there is no dataset."""
    texts: tuple[SourceFile, ...] = ()
    """The captions beside pictures in a folder."""
    kind: str = "Parquet files"

    @property
    def input(self) -> dict[str, Any]:
        """The manifest's entry for this input."""
        return self.dataset.lineage if self.dataset else {"uri": self.uri}

    @property
    def size(self) -> str:
        """The number of pictures or files, without reading any."""
        if self.dataset is not None:
            return f"{self.dataset.manifest.counts.written:,} pictures, {self.dataset.head.kind}"
        return f"{len(self.files):,} {self.kind}"

    def freeze(self, output: Output, limit: int | None, renewed: Collection[str] | None = None) -> Output:
        """Assign addresses: a dataset's own, or else the order of file names and rows.

        With `renewed`, captions beside pictures are listed, and changes are accepted: these files get new addresses.
        """
        if self.dataset is not None:
            return freeze_upstream(output, self.dataset, limit=limit)
        if self.kind == "Parquet files":
            columns = list(dict.fromkeys([self.columns.image, *self.captions, *self.others]))
            return freeze_source(output, self.files, columns, uri=self.uri, limit=limit)
        files = self.files if renewed is None else (*self.files, *self.texts)
        count = _rows_of if self.kind == "pictures" else partial(count_samples, options=output.storage.options)
        return freeze_files(output, files, uri=self.uri, limit=limit, count=count, renewed=renewed)

    def planner(self, output: Output, piece_rows: int, options: StorageOptions) -> Planner:
        """Return the planner that cuts units into pieces."""
        return Planner(output.index, self.dataset, piece_rows, options)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The columns that a configuration's section names."""

    image: str = "image"
    caption: str | Mapping[str, float] | None = None
    """The captions' column, or the field in a tar's JSON, or several columns with the weights for drawing one."""
    text: str | None = None
    """One caption for all pictures."""
    required: bool = False
    """True if the pictures must have captions, even where `caption` does not name them."""
    tables: Sequence[JoinedTable] = ()
    """Tables whose columns count as the pictures' own."""
    scores: Sequence[Score] = ()

    @property
    def needs_captions(self) -> bool:
        return self.text is None and (self.required or self.caption is not None)

    def columns(self, key: str, usual: str, options: StorageOptions) -> Columns:
        """Return the columns to read, with captions in the `usual` one if none is named."""
        several = self.caption if isinstance(self.caption, Mapping) else {}
        caption = self.caption if isinstance(self.caption, str) else usual
        plain = Columns(self.image, caption, self.text, several, scores=tuple(self.scores))
        texts = plain.captions if self.text is None else ()
        numbers = [score.column for score in self.scores]
        columns = replace(plain, tables=open_tables(f"{key}.tables", self.tables, texts, numbers, options))
        own = [name for name in columns.captions if name not in columns.joined]
        # A text beside a picture or in a tar is the one caption, whatever the column's name.
        return replace(columns, caption=(own or columns.captions)[0])


def open_pictures(
    key: str, uri: str, options: StorageOptions, selection: Selection = Selection(), dataset: Dataset | None = None
) -> Pictures:
    """Open the pictures of a configuration section; errors name it by `key`. Reads one footer at most.

    `dataset` is the one at `uri`, if it is open already.
    """
    if dataset is None and not is_read_only(uri) and "*" not in uri:
        folder = open_storage(uri, options)
        dataset = open_dataset(folder) if folder.exists(HEAD) else None
    if dataset is None:
        return _open_files(key, uri, options, selection)
    folder, kind = dataset.storage, dataset.manifest.kind
    if kind not in _CAPTIONS:
        raise DatasetError(f"{key}.uri: {folder.uri}: expected a dataset of pictures, got one of {kind}; check it")
    written = dataset.parts.filter(pc.field("written") > 0)["path"].to_pylist()
    if not written:
        raise DatasetError(f"{key}.uri: {folder.uri}: the dataset holds no pictures; choose another one")
    columns = selection.columns(key, _CAPTIONS[kind], options)
    captions, others = _check_columns(key, columns, folder.uri_of(written[0]), options, selection.needs_captions)
    return Pictures(folder.uri, columns, captions, others, dataset)


def open_section(
    section: ProcessSource, options: StorageOptions, *, required: bool = False, scores: Sequence[Score] = ()
) -> Pictures:
    """Open the pictures of a job's section `source`."""
    selection = Selection(
        image=section.image_column, caption=section.caption_column, text=section.caption, required=required,
        tables=section.tables, scores=scores,
    )  # fmt: skip
    return open_pictures("source", section.uri, options, selection)


def _open_files(key: str, uri: str, options: StorageOptions, selection: Selection) -> Pictures:
    columns, needed = selection.columns(key, "caption", options), selection.needs_captions
    listed = list_source(uri, options, suffixes=(".parquet", TAR, *PICTURES, TEXT))
    kind, files = _one_kind(key, uri, listed)
    beside = kind == "tars" or any(file.uri.endswith(TEXT) for file in listed)
    captions: tuple[str, ...] = (columns.caption,) if beside else ()
    others: tuple[str, ...] = ()
    if kind == "Parquet files":
        captions, others = _check_columns(key, columns, files[0].uri, options, needed, plain=True)
    elif several := set(columns.captions) - {columns.caption} - columns.joined:
        raise UserError(f"{key}.caption_column: {kind} have one caption; remove {', '.join(sorted(several))}")
    elif lacking := [
        *set(columns.keys) - {"key", FILE if kind == "pictures" else "key"},
        *(name for name in columns.numbers if name not in columns.joined),
    ]:
        raise UserError(
            f"{key}.uri: {kind} have no column {lacking[0]}; "
            "put the column into a table of source.tables, or convert the pictures to Parquet"
        )
    elif needed and not captions and columns.joined.isdisjoint(columns.captions):
        raise UserError(
            f"{key}.caption: the pictures at {uri} have no captions beside them (a.jpg, a.txt); `sdp init FOLDER "
            "--pictures` gathers those of a.caption, metadata.jsonl, CSV and folder names; or set one for all"
        )
    if kind == "pictures":
        columns = replace(columns, folder=parse(split_pattern(uri)[0]).uri)
    texts = tuple(file for file in listed if file.uri.endswith(TEXT)) if kind == "pictures" and needed else ()
    return Pictures(uri, columns, captions, others, files=files, texts=texts, kind=kind)


def _rows_of(file: str) -> int:
    """Return the rows of a picture or, none, of a caption beside it."""
    return 0 if file.endswith(TEXT) else 1


def _one_kind(key: str, uri: str, files: Sequence[SourceFile]) -> tuple[str, tuple[SourceFile, ...]]:
    """Return the kind of a source's files, and those of that kind; refuse several kinds."""
    if packed := next((file.uri for file in files if _PACKED.search(file.uri.lower())), None):
        raise UserError(f"{key}.uri: {packed}: tars are read uncompressed; unpack it with gunzip or the like")
    kinds = {
        "pictures": tuple(file for file in files if file.uri.lower().endswith(PICTURES)),
        "tars": tuple(file for file in files if file.uri.lower().endswith(TAR)),
    }
    no_parquet = (TAR, TEXT, ".json", *PICTURES)  # a pattern may match the JSON beside pictures, too
    kinds["Parquet files"] = tuple(file for file in files if not file.uri.lower().endswith(no_parquet))
    present = [kind for kind, members in kinds.items() if members]
    if not present:
        raise UserError(f"{key}.uri: no pictures, uncompressed tars or Parquet files at {uri}; check the URI")
    if len(present) > 1:
        raise UserError(f"{key}.uri: {uri}: both {' and '.join(present)}; name a folder or a pattern of one kind")
    return present[0], kinds[present[0]]


def _check_columns(
    key: str, columns: Columns, uri: str, options: StorageOptions, captions: bool, *, plain: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Refuse a misspelt column before anything is written; return the first file's columns of captions, and others."""
    footer = read_new_footer(uri, options) if plain else footer_of(uri, options)
    if plain and _PART_MARK in (footer.metadata or {}):
        raise DatasetError(
            f"{key}.uri: {uri} is a part of a dataset of sdp; name the dataset's folder, with its _dataset.json, so "
            "that its takedowns and its account apply"
        )
    schema = footer.schema.to_arrow_schema()
    elsewhere = columns.joined

    def own(names: Sequence[str], *, required: bool = True) -> tuple[str, ...]:
        """Return those that the file has, or must have."""
        return tuple(name for name in names if name in schema.names or (required and name not in elsewhere))

    texts, others = own(columns.captions, required=captions), own(columns.numbers)
    checks = [(f"{key}.image_column", columns.image, "bytes")]
    checks += [(f"{key}.caption_column", name, "text") for name in texts]
    checks += [(f"{key}.tables", name, "text") for name in columns.keys]
    checks += [(f"filters.{name}", name, "numbers") for name in others]
    if schema.names.count("key") > 1:  # one is read; several are refused
        checks.append((f"{key}.uri", "key", "text"))
    for path, name, content in checks:
        check_column(path, name, content, schema, uri)
    return texts, (*columns.keys, *others)
