"""Captions of a folder of pictures, in the forms that other tools write, for a table that `sdp process` joins."""

import csv
import io
import json
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path, PurePosixPath

from sdp.console import counted
from sdp.datasets.url_tables import usual_column
from sdp.errors import NotFound, UserError
from sdp.sources.reading import captions_in, stem_of
from sdp.sources.tars import PICTURES, TEXT
from sdp.storage import list_source
from sdp.storage.uri import below, parse

CLASS = "{class}"
"""Stands in a caption for the name of a picture's folder."""
_KOHYA = ".caption"
_REPEATS = re.compile(r"(\d{1,3})_(?=.)")
"""The number of repeats before the name of a folder, in the form of kohya's scripts."""
_EXAMPLES = 3
_SHOWN = 20
"""Texts that are not UTF-8, in one message."""
_LOOKED_AT = 10_000
"""Texts beside pictures to look into."""
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
    nameless: Sequence[str]
    """Entries of tables that name no picture."""
    several: int = 0
    """Captions of several lines."""
    repeats: Mapping[str, int] = field(default_factory=dict)
    """The number of repeats of each folder, if all pictures are in folders that have one."""

    @property
    def weighted(self) -> Mapping[str, int]:
        """The folders and their repeats; all of this one, once, where these are alike."""
        return self.repeats if len(set(self.repeats.values())) > 1 else {"": 1}

    def __str__(self) -> str:
        without = self.pictures - self.sources.total()
        parts = [counted(self.pictures, "picture")]
        if self.sources:
            parts.append(f"captions from {_listed(self.sources, '{} ({:,})')}")
        if without:
            parts.append(f"without caption {without:,}, left out by process unless --caption-with describes them")
        ends = [f"left out: {_listed(self.left_out)}"] if self.left_out else []
        if self.several:
            ends.append(f"{counted(self.several, 'caption')} of several lines, of which each picture takes one")
        if self.repeats:
            numbers = ", ".join(sorted(self.repeats))
            meaning = "are weights in training" if len(self.weighted) > 1 else "change nothing, since sdp counts steps"
            ends.append(f"the numbers before {numbers} are repeats, and {meaning}")
        if self.nameless:
            several = counted(len(self.nameless), "caption")
            ends += [f"{several} of pictures that are not there, such as {self.nameless[0]}"]
        return "; ".join([", ".join(parts), *ends])


def gather(uri: str, caption: str | None = None) -> PictureFolder | None:
    """Look at a local folder and read its captions, or make them of `caption` with {class}; None without pictures."""
    root = parse(uri).uri
    try:
        names = [below(file.uri, root) for file in list_source(uri, suffixes=("",))]
    except NotFound:  # an empty folder
        return None
    if odd := next((name for name in names if len(name.splitlines()) > 1), None):
        raise UserError(f"{uri}: the name of {odd!r} has a line break; rename it")
    pictures = {name: None for name in names if name.lower().endswith(PICTURES)}  # a set in order
    if not pictures:
        return None
    others, sources, captions = set(names).difference(pictures), Counter[str](), dict[str, str]()
    stems, captioned, used = {stem_of(name): name for name in pictures}, set[str](), set[str]()
    several, texts, errors, nameless = 0, list[str](), list[str](), list[str]()
    if caption is not None:
        captions = {name: caption.replace(CLASS, _folder(root, name)) for name in pictures}
        captioned, sources["--caption"] = set(pictures), len(pictures)
    for suffix in (TEXT, TEXT.upper(), _KOHYA):
        own = {name: file for name in pictures if (file := f"{stem_of(name)}{suffix}") in others}
        used.update(own.values())
        fresh = sorted(own.keys() - captioned)
        sources[suffix] += len(fresh)
        examined = fresh[:_LOOKED_AT] if suffix == TEXT else fresh  # process reads the others from a table
        for picture in examined:
            try:
                lines = captions_in(_read(Path(root, own[picture])))
            except UserError as error:
                errors.append(str(error))
                continue
            if len(lines) > 1:
                several += 1
            if not lines:
                sources[suffix] -= 1
            if suffix == TEXT:
                texts += lines[:1]
            else:
                captions[picture] = (lines or [""])[0]
        captioned |= own.keys()
    if errors:
        more = [f"and {len(errors) - _SHOWN:,} more"] if len(errors) > _SHOWN else []
        raise UserError("\n".join([*errors[:_SHOWN], *more]))
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
                nameless.append(file)
            elif text and name not in captioned:
                captions[name] = text
                captioned.add(name)
                sources[table] += 1
    left_out = Counter(PurePosixPath(name).suffix.lower() or name for name in others - used)
    captions = dict(sorted(captions.items()))
    examples = tuple(islice(dict.fromkeys(filter(None, chain(captions.values(), texts))), _EXAMPLES))
    folders = {name.partition("/")[0] if "/" in name else "" for name in pictures}
    numbers = {folder: int(match[1]) for folder in sorted(folders) if (match := _REPEATS.match(folder))}
    repeats = numbers if numbers.keys() == folders else {}
    return PictureFolder(len(pictures), captions, +sources, left_out, examples, nameless, several, repeats)


def _entries(root: str, table: str, pictures: Collection[str]) -> Iterable[tuple[str, str]] | None:
    """Return the names and captions that a table has; None if it is no table of them."""
    suffix, path = PurePosixPath(table).suffix.lower(), Path(root, table)
    if suffix == ".jsonl":
        return _objects(path)
    if suffix not in _DELIMITERS:
        return None
    reader = csv.reader(io.StringIO(_read(path)), delimiter=_DELIMITERS[suffix])
    try:
        rows = list(reader)
    except csv.Error as error:  # such as a cell of 128 kB, after a quote that nothing closes
        raise UserError(f"{path}:{reader.line_num}: not a table ({error}); correct it") from None
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
            yield _utf8(str(entry[file])), _utf8(text).strip() if isinstance(text, str) else ""


def _utf8(text: str) -> str:
    """Return the text without halves of surrogate pairs, which JSON's escapes may write."""
    return text.encode(errors="replace").decode()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None


def _folder(root: str, name: str) -> str:
    return _REPEATS.sub("", PurePosixPath(root, name).parent.name, count=1).replace("_", " ")


def _listed(counts: Counter[str], form: str = "{} {:,}") -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(form.format(name, count) for name, count in ordered)
