"""Sources of pictures: a dataset of sdp, Parquet files, WebDataset tars, or a folder of image files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow.compute as pc

from sdp.config.process import Bounds, JoinedTable
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.outcomes import SCORE
from sdp.datasets.output import HEAD, Output
from sdp.datasets.scores import Score
from sdp.datasets.source import freeze_files, freeze_source, freeze_upstream
from sdp.encode.joined import check_column, open_tables
from sdp.encode.reading import PICTURES, TAR, TEXT, Columns, Planner, count_samples, footer_of
from sdp.errors import DatasetError, UserError
from sdp.storage import SourceFile, StorageOptions, is_read_only, list_source, open_storage

_CAPTIONS = {"samples": "prompt", "images": "caption"}
"""The captions' column, by kind of dataset."""
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
    kind: str = "Parquet files"

    @property
    def captioned(self) -> bool:
        """True if the first file has captions."""
        return bool(self.captions)

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

    def freeze(self, output: Output, limit: int | None, options: StorageOptions) -> Output:
        """Assign addresses: a dataset's own, or else the order of file names and rows."""
        if self.dataset is not None:
            return freeze_upstream(output, self.dataset, limit=limit)
        if self.kind == "pictures":
            return freeze_files(output, self.files, uri=self.uri, limit=limit, options=options)
        if self.kind == "tars":
            count = partial(count_samples, options=options)
            return freeze_files(output, self.files, uri=self.uri, limit=limit, options=options, count=count)
        columns = list(dict.fromkeys([self.columns.image, *self.captions, *self.others]))
        return freeze_source(output, self.files, columns, uri=self.uri, limit=limit, options=options)

    def planner(self, output: Output, piece_rows: int, options: StorageOptions) -> Planner:
        """Return the planner that cuts units into pieces."""
        return Planner(output.index, self.dataset, piece_rows, options)


def open_pictures(
    key: str,
    uri: str,
    options: StorageOptions,
    *,
    image: str = "image",
    caption: str | Mapping[str, float] | None = None,
    text: str | None = None,
    required: bool = False,
    tables: Sequence[JoinedTable] = (),
    scores: Sequence[Score] = (),
    dataset: Dataset | None = None,
) -> Pictures:
    """Open the pictures of a configuration section; errors name it by `key`. Reads one footer at most.

    `caption` names the captions' column, or the field in a tar's JSON, or several columns with the weights by which
    rows draw one; `text` is one caption for all pictures. The columns of `tables` count as the pictures' own.
    `dataset` is the one at `uri`, if it is open already.
    """

    def columns_of(usual: str) -> Columns:
        several = caption if isinstance(caption, Mapping) else {}
        plain = Columns(image, caption if isinstance(caption, str) else usual, text, several, scores=tuple(scores))
        texts, numbers = plain.captions if text is None else (), [score.column for score in scores]
        columns = replace(plain, tables=open_tables(f"{key}.tables", tables, texts, numbers, options))
        own = [name for name in columns.captions if name not in columns.joined]
        # What is beside a picture or in a tar is one caption, whatever its name.
        return replace(columns, caption=(own or columns.captions)[0])

    needed = text is None and (required or caption is not None)
    if dataset is None and not is_read_only(uri) and "*" not in uri:
        folder = open_storage(uri, options)
        dataset = open_dataset(folder) if folder.exists(HEAD) else None
    if dataset is not None:
        folder, kind = dataset.storage, dataset.manifest.kind
        if kind not in _CAPTIONS:
            raise DatasetError(f"{key}.uri: {folder.uri}: expected a dataset of pictures, got one of {kind}; check it")
        written = dataset.parts.filter(pc.field("written") > 0)["path"].to_pylist()
        if not written:
            raise DatasetError(f"{key}.uri: {folder.uri}: the dataset holds no pictures; choose another one")
        columns = columns_of(_CAPTIONS[kind])
        captions, others = _check_columns(key, columns, folder.uri_of(written[0]), options, needed)
        return Pictures(folder.uri, columns, captions, others, dataset)
    columns = columns_of("caption")
    files = list_source(uri, options, suffixes=(".parquet", TAR, *PICTURES, TEXT))
    kinds = {
        "pictures": tuple(file for file in files if file.uri.lower().endswith(PICTURES)),
        "tars": tuple(file for file in files if file.uri.lower().endswith(TAR)),
    }
    no_parquet = (TAR, TEXT, ".json", *PICTURES)  # a pattern may match the JSON beside pictures, too
    kinds["Parquet files"] = tuple(file for file in files if not file.uri.lower().endswith(no_parquet))
    present = [kind for kind, members in kinds.items() if members]
    if not present:
        raise UserError(f"{key}.uri: no pictures, tars or Parquet files at {uri}; check the URI")
    if len(present) > 1:
        raise UserError(f"{key}.uri: {uri}: both {' and '.join(present)}; name a folder or a pattern of one kind")
    (kind,) = present
    beside = kind == "tars" or any(file.uri.endswith(TEXT) for file in files)
    captions, others = (columns.caption,) if beside else (), ()
    if kind == "Parquet files":
        captions, others = _check_columns(key, columns, kinds[kind][0].uri, options, needed, plain=True)
    elif several := set(columns.captions) - {columns.caption} - columns.joined:
        raise UserError(f"{key}.caption_column: {kind} have one caption; remove {', '.join(sorted(several))}")
    elif lacking := [*set(columns.keys) - {"key"}, *(name for name in columns.numbers if name not in columns.joined)]:
        raise UserError(
            f"{key}.uri: {kind} have no column {lacking[0]}; "
            "put the column into a table of source.tables, or convert the pictures to Parquet"
        )
    elif needed and not captions and columns.joined.isdisjoint(columns.captions):
        raise UserError(
            f"{key}.caption: the pictures at {uri} have no captions beside them (a.jpg, a.txt); set one for all"
        )
    return Pictures(uri, columns, captions, others, files=kinds[kind], kind=kind)


def scores_of(filters: Mapping[str, Bounds]) -> list[Score]:
    """Return the bounds of a configuration."""
    return [
        Score(f"{SCORE}:{column}", column, bounds.min, bounds.max, bounds.keep_unknown)
        for column, bounds in sorted(filters.items())
    ]


def _check_columns(
    key: str, columns: Columns, uri: str, options: StorageOptions, captions: bool, *, plain: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Refuse a misspelt column before anything is written; return the first file's columns of captions, and others."""
    footer = footer_of(uri, options)
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
    if columns.image in texts:
        raise DatasetError(
            f"{key}.caption_column: expected a column of text, got {columns.image}, which holds the images"
        )
    checks = [(f"{key}.image_column", columns.image, "bytes")]
    checks += [(f"{key}.caption_column", name, "text") for name in texts]
    checks += [(f"{key}.tables", name, "text") for name in columns.keys]
    checks += [(f"filters.{name}", name, "numbers") for name in others]
    for path, name, content in checks:
        check_column(path, name, content, schema, uri)
    return texts, (*columns.keys, *others)
