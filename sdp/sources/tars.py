"""Samples of a WebDataset's tars: consecutive files with one name up to its first dot.

The standard library's reader keeps every header, recurses into those before a file, and takes quadratic time for some
extended ones. Headers are strangers' bytes, so here reading one takes time in proportion to its bytes. Global headers
say nothing about a sample and are passed over. A file with holes, whose size is its header's word alone, counts as
empty.
"""

import io
import json
import tarfile
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from typing import BinaryIO

from sdp.datasets.columns import LARGEST_CELL
from sdp.errors import DatasetError, SdpError, one_line
from sdp.storage import StorageOptions, open_source

_MEMBERS = (".png", ".jpg", ".jpeg", ".webp")
"""Suffixes of images in tars. Add none: it would renumber the samples of outputs that have been begun."""
PICTURES = (*_MEMBERS, ".bmp", ".gif", ".tif", ".tiff", ".avif")
"""Suffixes of images in folders."""
TEXT = ".txt"
"""File suffix of an image's caption, which has the image's name."""
_JSON = ".json"
LARGEST_IMAGE, LARGEST_TEXT = 1 << 28, 1 << 20
"""Bytes; of a larger file no more is read, and of a larger member of a tar nothing."""
_BLOCK, _BUFFER = tarfile.BLOCKSIZE, 1 << 20
_PLACE = 4 * _BLOCK
"""Bytes that tell a sample from another: a header with its name, however long."""
_LARGEST_HEADER = 1 << 20
"""Bytes; of a larger extended header no more is read."""
_PLACES, _DIGITS, _SHORTEST = 64, 20, len("5 a=\n")
_LONG_NAME, _EXTENDED = tarfile.GNUTYPE_LONGNAME, (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_ABOUT_OTHERS = (_LONG_NAME, *_EXTENDED, tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE)
"""Types of headers whose data is about the members after them."""

RawSample = tuple[str, bytes | None, str | None]
"""Key, image and caption."""


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    header: int
    """Offset of its first header."""
    start: int
    """Offset of its bytes."""
    size: int
    sparse: bool


def count_samples(uri: str, options: StorageOptions | None = None) -> int:
    """Return the number of images in a tar."""
    with _open(uri, options) as (file, _, offset):
        return sum(1 for _ in _samples(_files(file, offset)))


def read_samples(uri: str, caption: str, start: int, stop: int, options: StorageOptions | None) -> Iterator[RawSample]:
    """Yield some samples of a tar, with the caption from their text or from a field of their JSON."""
    with _open(uri, options, start) as (file, first, offset):
        last: dict[str, _File] = {}

        def content(member: _File | None, largest: int = LARGEST_TEXT) -> bytes | None:
            if member is None or member.sparse or member.size > largest:
                return None
            file.seek(member.start)
            return file.read(member.size)

        samples = islice(_samples(_files(file, offset)), start - first, stop - first)
        for number, (key, last) in enumerate(samples, start):  # noqa: B007 (the last one is used below)
            image = next(member for suffix, member in last.items() if suffix in _MEMBERS)
            text = content(last.get(TEXT))
            if text is None and (data := content(last.get(_JSON))) is not None:
                text = _field(data, caption)
            caption_text = None if text is None else decoded(text).strip()
            yield key, content(image, LARGEST_IMAGE), caption_text
        if last:
            offset = min(member.header for member in last.values())
            _place_in(uri)[0] = (number, offset, _bytes_at(file, offset, _PLACE))


def _samples(files: Iterator[_File]) -> Iterator[tuple[str, dict[str, _File]]]:
    """Yield the key of each sample with a picture, and its used files by suffix."""

    def key(file: _File) -> str:
        folder, _, name = file.name.rpartition("/")
        return f"{folder}/{name.partition('.')[0]}"

    for name, group in groupby(files, key):
        by_suffix = ((f".{file.name.rpartition('.')[2].lower()}", file) for file in group)
        members = {suffix: file for suffix, file in by_suffix if suffix in (*_MEMBERS, TEXT, _JSON)}
        if members.keys() & set(_MEMBERS):
            readable = name.removeprefix("/").encode(errors="replace").decode()  # a name need not be UTF-8
            yield readable[:LARGEST_CELL], members


def _files(tar: BinaryIO, at: int) -> Iterator[_File]:
    """Yield a tar's regular files, from the header at an offset on."""
    end = tar.seek(0, io.SEEK_END)
    first, fields = at, dict[str, bytes]()
    while at < end and (block := _bytes_at(tar, at, _BLOCK)).count(0) < _BLOCK:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        at += _BLOCK
        size, digits, sparse = header.size, fields.get("size", b""), header.type == tarfile.GNUTYPE_SPARSE
        more = sparse and block[482]  # blocks that list a file's holes follow
        while more and at < end:
            more, at = _bytes_at(tar, at, _BLOCK)[504], at + _BLOCK
        if header.isreg() and digits.isdigit() and len(digits) < _DIGITS:
            size = int(digits)
        elif header.type in tarfile.SUPPORTED_TYPES and header.type not in (*tarfile.REGULAR_TYPES, *_ABOUT_OTHERS):
            size = 0  # folders and links have no data, whatever their size
        after = at + -(-size // _BLOCK) * _BLOCK
        if size < 0 or after > end:
            raise tarfile.ReadError("its end is missing")
        if header.type in _ABOUT_OTHERS:
            fields = _fields(header.type, tar.read(min(size, _LARGEST_HEADER))) | fields
        else:
            if header.isreg():
                name = fields.get("path", b"").decode("utf-8", "surrogateescape") or header.name
                yield _File(name, first, at, size, sparse or "sparse" in fields)
            first, fields = after, {}
        at = after


def _fields(kind: bytes, data: bytes) -> dict[str, bytes]:
    """Return what a header's data says about the next file: its path, its size, and whether it is sparse."""
    if kind == _LONG_NAME:
        return {"path": data.partition(b"\0")[0]}
    fields, at = dict[str, bytes](), 0
    while kind in _EXTENDED and at < len(data):
        length, space, _ = data[at : at + _DIGITS].partition(b" ")  # "LENGTH KEY=VALUE\n", the length of all of it
        if not space or not length.isdigit() or int(length) < _SHORTEST:
            break
        key, _, value = data[at + len(length) + 1 : at + int(length) - 1].partition(b"=")
        if key in (b"path", b"size"):
            fields[key.decode()] = value
        elif key.startswith(b"GNU.sparse."):
            fields["sparse"] = value
        at += int(length)
    return fields


_Place = tuple[int, int, bytes]
"""A sample's number, its offset in the tar, and the bytes that are there."""


@lru_cache(maxsize=_PLACES)  # a tar's pieces are read one after another
def _place_in(uri: str) -> list[_Place]:  # noqa: ARG001 (the key of the cache)
    """Return a list of one item: the last sample read from this tar, where the next piece goes on."""
    return [(0, 0, b"")]


def _bytes_at(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)


@contextmanager
def _open(uri: str, options: StorageOptions | None, sample: int = 0) -> Iterator[tuple[BinaryIO, int, int]]:
    """Open a tar; yield it, with the number and offset of the nearest known sample at or before `sample`."""
    try:
        file = io.BufferedReader(open_source(uri, options), _BUFFER)
        if _bytes_at(file, max(0, file.seek(0, io.SEEK_END) - _BLOCK), _BLOCK).strip(b"\0"):
            raise tarfile.ReadError("its end is missing")
        first, offset, block = _place_in(uri)[0]
        if first > sample or _bytes_at(file, offset, len(block)) != block:  # the file may have been replaced
            first = offset = 0
        yield file, first, offset
    except SdpError:
        raise
    except (tarfile.TarError, OSError, ValueError) as error:
        raise DatasetError(f"{uri}: not a readable tar ({one_line(error, 160)}); make it again") from error


def decoded(text: bytes) -> str:
    """Decode a caption's file: UTF-16 where its byte-order mark says so, else UTF-8. Invalid bytes become U+FFFD."""
    return text.decode("utf-16" if text.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig", "replace")


def _field(data: bytes, name: str) -> bytes | None:
    """Return a text field of a JSON object; None if it is missing or not text."""
    try:
        value = json.loads(data)[name]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value.encode(errors="replace") if isinstance(value, str) else None
