"""Where pictures come from: a dataset of sdp, Parquet files, or a folder of picture files; and the reading of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc

from sdp.config.evaluate import PictureSource
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.output import HEAD, Output
from sdp.datasets.source import freeze_files, freeze_source, freeze_upstream
from sdp.datasets.units import Work
from sdp.encode.reading import Columns, Piece, Planner, footer_of, read_piece
from sdp.errors import DatasetError
from sdp.storage import SourceFile, StorageOptions, is_read_only, list_source, open_source, open_storage

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_TEXT = ".txt"
"""A picture's caption lies beside it in a folder, under the same name."""
_CAPTIONS = {"samples": "prompt", "images": "caption"}
"""By kind of dataset."""
_PIECE_ROWS = 256


@dataclass(frozen=True)
class Pictures:
    """A set of pictures, and how they are read."""

    uri: str
    columns: Columns
    captioned: bool
    dataset: Dataset | None = None
    files: tuple[SourceFile, ...] = ()
    """Else these: Parquet, or one picture each."""
    texts: frozenset[str] | None = None
    """Of a folder of pictures the files with captions; None of anything else."""

    @property
    def input(self) -> dict[str, Any]:
        """What is told of them as what something was made from."""
        return self.dataset.lineage if self.dataset else {"uri": self.uri}

    @property
    def count(self) -> int | None:
        """How many there are, where that is known without reading."""
        if self.dataset is not None:
            return self.dataset.manifest.counts.written
        return len(self.files) if self.texts is not None else None

    def freeze(self, output: Output, limit: int | None, options: StorageOptions) -> Output:
        """Give them their addresses: those that they have in a dataset, else by the order of names and rows."""
        if self.dataset is not None:
            return freeze_upstream(output, self.dataset, limit=limit)
        if self.texts is not None:
            return freeze_files(output, self.files, limit=limit)
        return freeze_source(output, self.files, [self.columns.image], limit=limit, options=options)

    def tasks(self, output: Output, pending: list[Work], options: StorageOptions) -> "list[Task]":
        """What is to be read for each work."""
        if self.texts is not None:
            return [Task(work, files=self._named(output, work, self.texts)) for work in pending]
        planner = Planner(output.index, self.dataset, _PIECE_ROWS, options)
        return [Task(work, pieces=tuple(planner(work)), columns=self.columns) for work in pending]

    @staticmethod
    def _named(output: Output, work: Work, texts: frozenset[str]) -> "tuple[Named, ...]":
        slices = output.index.slices(work.unit.start, work.unit.stop)
        named = [(each.first_row, each.path, f"{each.path.rpartition('.')[0]}{_TEXT}") for each in slices]
        return tuple(Named(row, uri, text if text in texts else None) for row, uri, text in named)


@dataclass(frozen=True, slots=True)
class Named:
    """A picture that is a file."""

    row: int
    uri: str
    caption_uri: str | None


@dataclass(frozen=True, slots=True)
class Task:
    """A work, and what is to be read for it."""

    work: Work
    pieces: tuple[Piece, ...] = ()
    columns: Columns = field(default_factory=Columns)
    files: tuple[Named, ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture, encoded."""

    row: int
    data: bytes | memoryview | None
    caption: str | None


def open_pictures(told: PictureSource, key: str, options: StorageOptions) -> Pictures:
    """The pictures that a section of this name speaks of, looked at as far as that takes little."""
    assert told.uri is not None
    folder = None if is_read_only(told.uri) else open_storage(told.uri, options)
    if folder is not None and "*" not in told.uri and folder.exists(HEAD):
        dataset = open_dataset(folder)
        if dataset.manifest.kind not in _CAPTIONS:
            raise DatasetError(
                f"{key}.uri: {folder.uri}: a dataset of {dataset.manifest.kind}, where pictures are needed; check it"
            )
        written = dataset.parts.filter(pc.field("written") > 0)["path"].to_pylist()
        if not written:
            raise DatasetError(f"{key}.uri: {folder.uri}: no picture was written into it; choose another dataset")
        caption = told.caption_column or _CAPTIONS[dataset.manifest.kind]
        columns, captioned = _columns(told, key, caption, folder.uri_of(written[0]), options)
        return Pictures(folder.uri, columns, captioned, dataset)
    files = list_source(told.uri, options, suffixes=(".parquet", *SUFFIXES, _TEXT))
    pictures = tuple(file for file in files if file.uri.lower().endswith(SUFFIXES))
    tables = tuple(file for file in files if file.uri.lower().endswith(".parquet"))
    if pictures and tables:
        raise DatasetError(f"{key}.uri: {told.uri}: both pictures and Parquet files; name a folder with one of them")
    if pictures:
        texts = frozenset(file.uri for file in files if file.uri.endswith(_TEXT))
        return Pictures(told.uri, Columns(), bool(texts), files=pictures, texts=texts)
    if not tables:
        raise DatasetError(f"{key}.uri: {told.uri}: neither pictures nor Parquet files there; check the address")
    columns, captioned = _columns(told, key, told.caption_column or "caption", tables[0].uri, options)
    return Pictures(told.uri, columns, captioned, files=tables)


def _columns(told: PictureSource, key: str, caption: str, uri: str, options: StorageOptions) -> tuple[Columns, bool]:
    """The columns by what the first file has, and whether that of captions is among them."""
    there = footer_of(uri, options).schema.to_arrow_schema().names
    for name, column in (("image_column", told.image_column), ("caption_column", told.caption_column)):
        if column is not None and column not in there:
            raise DatasetError(f"{key}.{name}: no column {column} in {uri}; it has {', '.join(there)}")
    return Columns(told.image_column, caption), caption in there


def read_pictures(task: Task, options: StorageOptions) -> Iterator[Picture]:
    """The pictures of a task."""
    for piece in task.pieces:
        for row in read_piece(piece, task.columns, options=options):
            yield Picture(row.row, row.image, row.caption)
    for file in task.files:
        caption = None
        if file.caption_uri is not None:
            caption = open_source(file.caption_uri, options).read().decode("utf-8", "replace").strip()
        yield Picture(file.row, open_source(file.uri, options).read(), caption)
