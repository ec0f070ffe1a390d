"""URIs: a scheme, a bucket or host, and a path."""

import os.path
import posixpath
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from sdp.errors import UserError

WRITABLE = ("file", "s3", "gs")
WEB = ("https", "http")
KNOWN = "a local path, file://, s3:// and gs:// (read and write), https://, http:// and hf:// (read only)"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SLIP = re.compile(r"(file|s3|gs|https?|hf):(?:/(?!/))?(.+)", re.IGNORECASE)
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed URI. `uri` is its one normal form: absolute, without a trailing slash."""

    scheme: str
    bucket: str
    """Bucket, or host of a web address; empty for a local path."""
    path: str
    """Local: absolute. Buckets: the key without outer slashes. Web: unchanged, query included."""

    @property
    def uri(self) -> str:
        if self.scheme == "file":
            return self.path
        return f"{self.scheme}://{self.bucket}/{self.path}".rstrip("/")


def parse(uri: str) -> Location:
    """Return the location that a URI names; raise UserError where it names none."""
    if not uri:
        raise UserError(f"'': the URI is empty; give {KNOWN}")
    if CONTROL.search(uri):
        raise UserError(f"{uri!r}: the URI contains a control character; remove it")
    match = _SCHEME.match(uri)
    if not match:
        if slip := _SLIP.match(uri):
            raise UserError(f"{uri}: expected two slashes; write {slip[1]}://{slip[2]} (for a local path: ./{uri})")
        return Location("file", "", os.path.abspath(os.path.expanduser(uri)))  # noqa: PTH100, PTH111 (no resolving)
    scheme, rest = match[1].lower(), uri[match.end() :]
    if scheme == "file":
        return _file(uri)
    if scheme in WEB or scheme == "hf":
        return _web(scheme, rest)
    if scheme in WRITABLE:
        return _bucket(uri, scheme, rest)
    raise UserError(f"{uri}: unknown scheme '{scheme}'; give {KNOWN}")


def is_read_only(uri: str) -> bool:
    """Return whether files can only be read there, so that it cannot hold a dataset of sdp."""
    return parse(uri).scheme not in WRITABLE


def _file(uri: str) -> Location:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise UserError(f"{uri}: a file:// URI names this machine; write file:///{parts.netloc}{parts.path}")
    # A file name may contain "?" or "#", so nothing is cut off as query or fragment.
    rest = uri.split("://", 1)[1].removeprefix(parts.netloc)
    return Location("file", "", os.path.abspath(unquote(rest)))  # noqa: PTH100 (links stay links)


def _web(scheme: str, rest: str) -> Location:
    host, _, path = rest.partition("/")
    if not host:
        raise UserError(f"{scheme}://{rest}: the address has no host; give all of it")
    if not is_address(f"{scheme}://{rest}"):
        raise UserError(f"{scheme}://…: the address cannot be read; correct its host")
    return Location(scheme, host, path)


def is_address(uri: str) -> bool:
    """Return whether a URL has a scheme and a host that can be read."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # such as a bracket without its other one
        return False
    return bool(parts.scheme and parts.netloc)


def _bucket(uri: str, scheme: str, rest: str) -> Location:
    bucket, _, path = rest.partition("/")
    path = path.strip("/")
    if not bucket:
        raise UserError(f"{uri}: the URI has no bucket; write {scheme}://BUCKET/FOLDER")
    if path and any(segment in ("", ".", "..") for segment in path.split("/")):
        raise UserError(f"{uri}: a bucket's path has no empty, '.' or '..' segments; write the path out")
    return Location(scheme, bucket, path)


def join(uri: str, *parts: str) -> str:
    """Return the URI of a path below another URI."""
    path = "/".join(filter(None, (part.strip("/") for part in parts)))
    if not path:
        return uri
    # A bare root, "/" or "s3://", keeps its slashes.
    return f"{uri}{path}" if uri.endswith("/") else f"{uri}/{path}"


def below(uri: str, root: str) -> str:
    """Return a URI relative to a root, or as it is if it is not below the root; `join` does the reverse."""
    return uri.removeprefix(f"{root.rstrip('/')}/") if root else uri


def near(uri: str, folder: str) -> str:
    """Return a URI as a file in a folder stores it: relative (`../images`) if the two are close together.

    Folders that are moved or copied together can then still find each other; `resolved` is the inverse.
    """
    target, base = parse(uri), parse(folder)
    if target.scheme not in WRITABLE or (target.scheme, target.bucket) != (base.scheme, base.bucket):
        return uri
    path = posixpath.relpath(f"/{target.path.lstrip('/')}", f"/{base.path.lstrip('/')}")
    if not path.startswith(".."):
        return f"./{path}"
    return path if re.fullmatch(r"(\.\./){1,2}(?!\.\.(/|$)).+", path) else target.uri


def resolved(uri: str, folder: str) -> str:
    """Return the URI that `near` made relative."""
    if not uri.startswith(("./", "../")):
        return uri
    base = parse(folder)
    path = posixpath.normpath(f"/{base.path.lstrip('/')}/{uri}")
    return Location(base.scheme, base.bucket, path if base.scheme == "file" else path.lstrip("/")).uri


def shown(uri: str) -> str:
    """Return a URI for messages and logs: without user, password and query, which may hold secrets."""
    match = _SCHEME.match(uri)
    if not match or match[1].lower() not in WEB:
        return uri
    try:
        parts = urlsplit(uri)
    except ValueError:
        return f"{match[0]}…"
    query = "?…" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{query}"
