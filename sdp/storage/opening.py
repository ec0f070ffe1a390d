"""Storages and source files, opened by URI: local, in a bucket, on the web or on the Hub."""

import os.path
import re
from collections.abc import Iterable
from dataclasses import replace

from sdp.errors import NotFound, UserError
from sdp.storage.base import OpenFile, SourceFile, Storage, StorageOptions
from sdp.storage.uri import WEB, WRITABLE, below, parse, shown

_GLOB = re.compile(r"[*?]")


def open_storage(uri: str, options: StorageOptions | None = None) -> Storage:
    """Return the storage at a local path, file://, s3:// or gs:// URI; nothing is contacted yet."""
    location, options = parse(uri), options or StorageOptions()
    if location.scheme == "file":
        from sdp.storage.local import LocalStorage

        return LocalStorage(location, options)
    if location.scheme in WRITABLE:
        from sdp.storage.remote import ObjectStorage

        return ObjectStorage(location, options)
    remedy = "use a local path, s3:// or gs:// here"
    raise UserError(f"{shown(uri)}: {location.scheme}:// can only be read, as a source; {remedy}")


def list_source(
    uri: str, options: StorageOptions | None = None, *, suffixes: tuple[str, ...] = (".parquet",)
) -> list[SourceFile]:
    """Return the files that a URI names, sorted.

    A URI is of a file, a folder or a pattern. A folder means all files below it with one of these suffixes, except
    names and folders that begin with '.' or '_'. In a pattern, * and ? match within a name, ** across folders. Web
    servers have no folders. Raise NotFound if there is no such file.
    """
    files = sorted(_files_of(uri, options or StorageOptions(), suffixes), key=lambda file: file.uri)
    for file in files:
        if (name := file.uri.encode("utf-8", "replace").decode()) != file.uri:
            raise UserError(f"{name}: the file's name is not UTF-8; rename it")
    return files


def open_source(uri: str, options: StorageOptions | None = None) -> OpenFile:
    """Open a source file for random access."""
    options, location = options or StorageOptions(), parse(uri)
    if location.scheme in WEB:
        from sdp.storage.reader import web_file

        return web_file(uri, options).open()
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
        if files := [file for path, file in _below(base, options) if match.fullmatch(path)]:
            return files
        raise NotFound(f"{uri}: no file matches; check the pattern")
    looks_like_a_file = uri.lower().endswith(suffixes)
    if looks_like_a_file and (file := _file_at(uri, options)):
        return [file]
    files = [file for path, file in _below(uri, options) if path.lower().endswith(suffixes) and not _is_hidden(path)]
    if not files and not looks_like_a_file and (file := _file_at(uri, options)):
        return [file]
    if not files:
        raise NotFound(f"{uri}: no such file, and no folder with {' or '.join(suffixes)} files; check the URI")
    return files


def split_pattern(uri: str) -> tuple[str, str]:
    """Return the folder above the first wildcard, and the pattern below it.

    The pattern is "" if there is no wildcard, or where a local file has just this name.
    """
    wildcard = _GLOB.search(uri)
    if not wildcard or (parse(uri).scheme == "file" and os.path.lexists(parse(uri).path)):
        return uri, ""
    cut = uri.rfind("/", 0, wildcard.start())
    if uri[: cut + 1].endswith("://"):
        raise UserError(f"{uri}: a bucket cannot be a wildcard; name it")
    base = (uri[:cut] or "/") if cut >= 0 else "."
    return base, uri[cut + 1 :]


def translate(pattern: str) -> re.Pattern[str]:
    """Translate a pattern over paths into a regular expression: * and ? match within a name, ** across folders."""
    parts = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|.", pattern)
    return re.compile("".join(parts.get(token) or re.escape(token) for token in tokens))


def _is_hidden(path: str) -> bool:
    """Return whether a name in the path marks it as not data: _SUCCESS, _temporary/, .crc."""
    return any(segment.startswith((".", "_")) for segment in path.split("/"))


def _below(uri: str, options: StorageOptions) -> Iterable[tuple[str, SourceFile]]:
    """Yield every file below a folder, with its path from there."""
    if parse(uri).scheme == "hf":
        from sdp.storage.hub import HubPath, list_hub

        folder = HubPath.parse(uri)
        for file in list_hub(folder, options):
            yield below(file.uri, folder.uri_of(folder.path)), file
        return
    storage = open_storage(uri, options)
    for info in storage.list():
        yield info.path, SourceFile(storage.uri_of(info.path), info.size, _portable_etag(uri, info.etag))


def _file_at(uri: str, options: StorageOptions) -> SourceFile | None:
    """Return the file at exactly this URI, if there is one."""
    if parse(uri).scheme == "hf":
        from sdp.storage.hub import HubPath, list_hub

        file = HubPath.parse(uri)
        beside = list_hub(replace(file, path=file.path.rpartition("/")[0]), options, recursive=False)
        return next((other for other in beside if other.uri == file.uri_of(file.path)), None)
    location = parse(uri)
    above, _, name = location.uri.rpartition("/")
    if not location.path.strip("/"):
        return None
    info = open_storage(above or "/", options).find(name)
    return SourceFile(location.uri, info.size, _portable_etag(uri, info.etag)) if info else None


def _portable_etag(uri: str, etag: str | None) -> str | None:
    """Return a local etag without its inode, which differs once the file is copied or mounted elsewhere."""
    return etag.partition("-")[2] if etag and parse(uri).scheme == "file" else etag


def _on_the_web(uri: str, options: StorageOptions) -> SourceFile:
    from sdp.storage.reader import web_file

    if "*" in uri.partition("?")[0]:
        raise UserError(f"{shown(uri)}: a web server cannot be listed; name each file")
    file = web_file(uri, options)
    return SourceFile(uri, file.size, file.etag)
