"""Finding and reading the files of a source, wherever they are: local, in a bucket, on the web, on the Hub."""

import hashlib
import os.path
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sdp.errors import NotFound, UserError
from sdp.storage.base import StorageOptions
from sdp.storage.opening import open_storage
from sdp.storage.uri import WEB, join, parse, shown

if TYPE_CHECKING:
    import pyarrow as pa

_SAMPLES, _SAMPLE = 16, 65_536
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class SourceFile:
    uri: str
    size: int
    etag: str | None
    """Changes when the content does, as far as the server tells; None where it does not."""


def list_source(
    uri: str | Sequence[str],
    options: StorageOptions | None = None,
    *,
    suffixes: tuple[str, ...] = (".parquet",),
) -> list[SourceFile]:
    """The files that one or several URIs mean, sorted by URI, each once.

    A URI is a file, a folder (all files below it with one of these suffixes, but nothing whose name, or whose folder's,
    begins with '.' or '_'), or a pattern: * and ? match within a name, ** across folders. The web has no folders.
    NotFound where a URI means no file at all.
    """
    found: dict[str, SourceFile] = {}
    for each in [uri] if isinstance(uri, str) else uri:
        found.update((file.uri, file) for file in _files_of(each, options or StorageOptions(), suffixes))
    return sorted(found.values(), key=lambda file: file.uri)


def root_of(uri: str, files: Sequence[SourceFile]) -> str:
    """The folder from which the names of a source's files count; empty where they are listed under another address."""
    root = parse(split_pattern(uri)[0]).uri
    if any(file.uri == root for file in files):
        root = root.rpartition("/")[0]
    return root if all(file.uri.startswith(f"{root}/") for file in files) else ""


def with_sample(file: SourceFile, options: StorageOptions | None = None) -> SourceFile:
    """A local file with a digest of samples of its content in its etag, which by itself is a time and a size."""
    if file.etag is None or parse(file.uri).scheme != "file":
        return file
    return replace(file, etag=f"{file.etag}-{_sample(file, options)}")


def unchanged(file: SourceFile, size: int, etag: str | None, options: StorageOptions | None = None) -> bool:
    """Whether a file has the content that it had, by size and etag; a copy is compared by what it holds."""
    if file.size != size:
        return False
    if None in (etag, file.etag) or etag == file.etag or str(etag).startswith(f"{file.etag}-"):
        return True
    if len(parts := str(etag).split("-")) == 3:  # as `with_sample` makes it
        return _sample(file, options) == parts[2]
    if re.fullmatch("[0-9a-f]{32}", str(etag).strip('"')):  # what most buckets call a small object: its MD5
        return hashlib.md5(open_source(file.uri, options).read(), usedforsecurity=False).hexdigest() in str(etag)
    return False


def _sample(file: SourceFile, options: StorageOptions | None) -> str:
    """The digest of a file of up to a mebibyte, or of sixteen pieces of a larger one, its first and last included."""
    with open_source(file.uri, options) as opened:
        if file.size <= _SAMPLES * _SAMPLE:
            return hashlib.sha256(opened.read()).hexdigest()[:32]
        digest = hashlib.sha256()
        for number in range(_SAMPLES):
            opened.seek(number * (file.size - _SAMPLE) // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()[:32]


def open_source(uri: str, options: StorageOptions | None = None) -> "pa.NativeFile":
    """A file of a source, for random access."""
    options, location = options or StorageOptions(), parse(uri)
    if location.scheme in WEB:
        from sdp.storage.web import WebFile

        return WebFile(uri, options).open()
    if location.scheme == "hf":
        from sdp.storage.hub import open_hub

        return open_hub(uri, options).open()
    folder, _, name = location.uri.rpartition("/")
    if not name or not location.path:
        raise UserError(f"{uri}: names a folder, not a file; name a file in it")
    return open_storage(folder or "/", options).open(name)


def _files_of(uri: str, options: StorageOptions, suffixes: tuple[str, ...]) -> Iterable[SourceFile]:
    if parse(uri).scheme in WEB:
        return [_on_the_web(uri, options)]
    base, pattern = split_pattern(uri)
    if pattern:
        match = translate(pattern)
        found = [file for path, file in _below(base, options) if match.fullmatch(path)]
        if not found:
            raise NotFound(f"{uri}: no file matches; check the pattern")
        return found
    looks_like_a_file = uri.lower().endswith(suffixes)
    if looks_like_a_file and (file := _file_at(uri, options)):
        return [file]
    found = [file for path, file in _below(uri, options) if path.lower().endswith(suffixes) and not _aside(path)]
    if not found and not looks_like_a_file and (file := _file_at(uri, options)):
        return [file]
    if not found:
        raise NotFound(f"{uri}: no such file, and no folder with {' or '.join(suffixes)} files; check the URI")
    return found


def split_pattern(uri: str) -> tuple[str, str]:
    """The folder above the first wildcard, and the rest: "" where there is none, or where a local file is called so."""
    wildcard = _GLOB.search(uri)
    if not wildcard or (parse(uri).scheme == "file" and os.path.lexists(parse(uri).path)):
        return uri, ""
    cut = uri.rfind("/", 0, wildcard.start())
    if uri[: cut + 1].endswith("://"):
        raise UserError(f"{uri}: a wildcard cannot stand for a bucket; name it")
    return (uri[:cut] or "/") if cut >= 0 else ".", uri[cut + 1 :]


def translate(pattern: str) -> re.Pattern[str]:
    """A pattern over paths as a regular expression: * ? [abc] [!abc] within a name, ** across folders."""
    parts = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    out = ""
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^]/]*\]|.", pattern):
        if token in parts:
            out += parts[token]
        elif len(token) > 1:
            inner = token[1:-1].replace("\\", r"\\").replace("^", r"\^").replace("[", r"\[")
            out += f"(?!/)[{'^' + inner[1:] if inner.startswith('!') else inner}]"
        else:
            out += re.escape(token)
    try:
        return re.compile(out)
    except re.error as error:
        raise UserError(f"{pattern}: not a pattern ({error.msg}); correct what stands in brackets") from None


def _aside(path: str) -> bool:
    """Whether the name, or a folder's on the way, marks it as not data: _SUCCESS, _temporary/, .crc."""
    return any(segment.startswith((".", "_")) for segment in path.split("/"))


def _below(uri: str, options: StorageOptions) -> Iterable[tuple[str, SourceFile]]:
    """Every file below a folder, with its path from there."""
    if parse(uri).scheme == "hf":
        from sdp.storage.hub import HubPath, list_hub

        folder = HubPath.parse(uri)
        above = f"{folder.path}/" if folder.path else ""
        for entry in list_hub(folder, options):
            yield entry.path[len(above) :], SourceFile(join(folder.root, entry.path), entry.size, entry.etag)
        return
    storage = open_storage(uri, options)
    for info in storage.list():
        yield info.path, SourceFile(storage.uri_of(info.path), info.size, _lasting(uri, info.etag))


def _file_at(uri: str, options: StorageOptions) -> SourceFile | None:
    """The file at exactly this URI, if there is one."""
    if parse(uri).scheme == "hf":
        from sdp.storage.hub import HubPath, list_hub

        file = HubPath.parse(uri)
        folder = HubPath(file.repo, file.revision, file.path.rpartition("/")[0], file.root)
        for entry in list_hub(folder, options, recursive=False):
            if entry.path == file.path:
                return SourceFile(join(file.root, entry.path), entry.size, entry.etag)
        return None
    location = parse(uri)
    above, _, name = location.uri.rpartition("/")
    if not location.path.strip("/"):
        return None
    storage = open_storage(above or "/", options)
    try:
        info = storage.stat(name)
    except NotFound:
        if not storage.exists(name):  # and the bucket is there: a missing one is raised again
            return None
        raise
    return SourceFile(location.uri, info.size, _lasting(uri, info.etag))


def _lasting(uri: str, etag: str | None) -> str | None:
    """A local etag without its inode, which says nothing once the file has been copied or mounted elsewhere."""
    return etag.partition("-")[2] if etag and parse(uri).scheme == "file" else etag


def _on_the_web(uri: str, options: StorageOptions) -> SourceFile:
    from sdp.storage.web import WebFile

    path = uri.partition("?")[0]
    if "*" in path or "[" in path:
        raise UserError(f"{shown(uri)}: a web server cannot be listed; name each file")
    file = WebFile(uri, options)
    return SourceFile(uri, file.size, file.etag)
