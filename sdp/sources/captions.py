"""Captions of a folder of pictures, in the forms that other tools write, for a table that `sdp process` joins."""

import csv
import json
import posixpath
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePosixPath

from sdp.console import counted
from sdp.datasets.url_tables import usual_column
from sdp.errors import NotFound, UserError
from sdp.sources.tars import PICTURES, TEXT
from sdp.storage import list_source
from sdp.storage.uri import parse

CLASS = "{class}"
"""Stands in a caption for the name of a picture's folder."""
_KOHYA = ".caption"
_EXAMPLES = 3
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_FILES = ("file_name", "filename", "file", "image", "image_path", "path", "name")
_CAPTIONS = ("caption", "text", "prompt")
"""The columns that hold a picture's name and its caption, in tables of other tools."""


@dataclass(frozen=True)
class PictureFolder:
    """The contents of a folder of pictures."""

    pictures: int
    captions: Mapping[str, str]
    """Captions by a picture's file name below the folder, those in a.txt left out."""
    sources: Counter[str]
    """The number of captions from each file or kind of file."""
    left_out: Counter[str]
    """The number of other files, by suffix."""
    examples: tuple[str, ...]
    """A few of the captions."""
    nameless: int
    """Entries of tables that name no picture."""

    def __str__(self) -> str:
        without = self.pictures - self.sources.total()
        parts = [counted(self.pictures, "picture")]
        if self.sources:
            parts.append(f"captions from {_listed(self.sources, '{} ({:,})')}")
        if without:
            parts.append(f"without caption {without:,}")
        ends = [f"left out: {_listed(self.left_out)}"] if self.left_out else []
        ends += [f"{counted(self.nameless, 'caption')} of pictures that are not there"] if self.nameless else []
        return "; ".join([", ".join(parts), *ends])


def gather(uri: str, caption: str | None = None) -> PictureFolder | None:
    """Look at a local folder and read its captions, or make them of `caption` with {class}; None without pictures."""
    root = parse(uri).uri
    try:
        names = [file.uri.removeprefix(f"{root.rstrip('/')}/") for file in list_source(uri, suffixes=("",))]
    except NotFound:  # an empty folder
        return None
    pictures = {name: None for name in names if name.lower().endswith(PICTURES)}  # a set in order
    if not pictures:
        return None
    others, sources, captions, nameless = set(names).difference(pictures), Counter[str](), dict[str, str](), 0
    stems, captioned, used = {_stem(name): name for name in pictures}, set[str](), set[str]()
    if caption is not None:
        captions = {name: caption.replace(CLASS, _folder(root, name)) for name in pictures}
        captioned, sources["--caption"] = set(pictures), len(pictures)
    for suffix in (TEXT, _KOHYA):
        own = {name: file for name in pictures if (file := f"{_stem(name)}{suffix}") in others}
        used.update(own.values())
        fresh = sorted(own.keys() - captioned)
        if suffix == _KOHYA:
            captions |= {name: _read(Path(root, own[name])).strip() for name in fresh}
        sources[suffix] += len(fresh)
        captioned |= own.keys()
    for table in sorted(others - used):
        if (entries := _entries(root, table, pictures)) is None:
            continue
        used.add(table)
        for file, text in entries:
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(table), file))
            places = [beside, posixpath.normpath(file).removeprefix(f"{root}/")]
            places += [stems[place] for place in places if place in stems]
            name = next((place for place in places if place in pictures), None)
            if name is None:
                nameless += 1
            elif text and name not in captioned:
                captions[name] = text
                captioned.add(name)
                sources[table] += 1
    left_out = Counter(PurePosixPath(name).suffix.lower() or name for name in others - used)
    captions = dict(sorted(captions.items()))
    texts = (_read(Path(root, name)).strip() for name in sorted(used) if name.endswith(TEXT))
    examples = islice(dict.fromkeys(filter(None, chain(captions.values(), islice(texts, _EXAMPLES)))), _EXAMPLES)
    return PictureFolder(len(pictures), captions, +sources, left_out, tuple(examples), nameless)


def _entries(root: str, table: str, pictures: Collection[str]) -> Iterable[tuple[str, str]] | None:
    """Return the names and captions that a table has; None if it is no table of them."""
    suffix, path = PurePosixPath(table).suffix.lower(), Path(root, table)
    if suffix == ".jsonl":
        return _objects(path)
    if suffix not in _DELIMITERS:
        return None
    rows = list(csv.reader(_read(path).splitlines(keepends=True), delimiter=_DELIMITERS[suffix]))
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    columns = usual_column(header, _FILES), usual_column(header, _CAPTIONS)
    if None not in columns:
        at, of = (header.index(str(name)) for name in columns)
        rows = rows[1:]
    elif rows and len(rows[0]) > 1 and posixpath.join(posixpath.dirname(table), rows[0][0]) in pictures:
        at, of = 0, 1  # a table without header
    else:
        return None
    return ((row[at].strip(), row[of].strip()) for row in rows if len(row) > max(at, of))


def _objects(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:  # of too many levels
            raise UserError(f"{path}:{number}: not JSON ({error}); correct it") from None
        names = list(entry) if isinstance(entry, dict) else []
        if (file := usual_column(names, _FILES)) is not None:
            text = entry.get(usual_column(names, _CAPTIONS))
            yield str(entry[file]), text.strip() if isinstance(text, str) else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _folder(root: str, name: str) -> str:
    return PurePosixPath(root, name).parent.name.replace("_", " ")


def _listed(counts: Counter[str], form: str = "{} {:,}") -> str:
    return ", ".join(
        form.format(name, count) for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )
