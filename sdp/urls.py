"""URLs as they stand in crawled tables: put in order, or refused with a reason."""

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

MAX_LENGTH = 8_000
"""Characters; servers refuse longer ones anyway."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
_EDGES = "".join(map(chr, range(33))) + "\x7f\u00a0\u200b\ufeff"
"""Blanks and control characters that stick to the ends of a URL in a table."""
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_UNSAFE = re.compile(r"[^A-Za-z0-9\-._~:/?\[\]@!$&'()*+,;=%]")
_BARE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_INSIDE = re.compile(r"[\t\r\n]")


class BadUrl(ValueError):
    """Not a URL that can be fetched; the message says why."""


@dataclass(frozen=True, slots=True)
class Url:
    """A URL in its one normal form."""

    text: str
    """ASCII throughout, without fragment, default port or credentials."""
    host: str
    """In lower case; an IPv6 address in brackets."""


def parse(text: object) -> Url:
    """The URL that a cell of the table means; BadUrl if there is none to fetch."""
    if not isinstance(text, str):
        raise BadUrl("no URL" if text is None else f"not text but {type(text).__name__}")
    text = _INSIDE.sub("", text.strip(_EDGES))
    if not text:
        raise BadUrl("no URL")
    if len(text) > MAX_LENGTH:
        raise BadUrl(f"{len(text)} characters, at most {MAX_LENGTH} are taken")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise BadUrl(str(error)) from None
    scheme = parts.scheme.lower()
    if scheme not in _DEFAULT_PORTS:
        raise BadUrl(f"{f'scheme {scheme[:20]!r}' if scheme else 'no scheme'}, http or https is needed")
    if "@" in parts.netloc:
        raise BadUrl("it carries a user name or password")
    host = _host(parts.hostname or "")
    if port == 0:
        raise BadUrl("port 0")
    where = host if port in (None, _DEFAULT_PORTS[scheme]) else f"{host}:{port}"
    path = _escaped(parts.path) or "/"
    query = f"?{_escaped(parts.query)}" if parts.query else ""
    return Url(f"{scheme}://{where}{path}{query}", host)


def redirected(url: Url, location: str) -> Url:
    """Where a redirect leads."""
    try:
        return parse(urljoin(url.text, location.strip(_EDGES)))
    except ValueError as error:
        raise BadUrl(f"redirect to {location[:80]!r}: {error}") from None


def key64(text: str) -> int:
    """64 bits that stand for a URL (two of two billion share theirs with a chance of one in nine)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def parents(host: str) -> list[str]:
    """A host and the domains that it belongs to: a.b.example.org, b.example.org, example.org, org."""
    labels = host.split(".")
    return [".".join(labels[at:]) for at in range(len(labels))]


def _host(name: str) -> str:
    name = name.lower().removesuffix(".")
    if ":" in name:  # what urlsplit leaves of [::1]; it has checked that it is an address
        if "%" in name:
            raise BadUrl("an address with a zone")
        return f"[{name}]"
    if not name.isascii():
        try:
            name = name.encode("idna").decode("ascii").lower()
        except UnicodeError:
            raise BadUrl(f"host {name[:60]!r} is no domain name") from None
    if not _HOST.fullmatch(name) or len(name) > 253:
        raise BadUrl(f"host {name[:60]!r} is no domain name" if name else "no host")
    return name


def _escaped(text: str) -> str:
    """With everything escaped that may not stand in a URL, and what is escaped already left alone."""
    if _UNSAFE.search(text):
        text = _UNSAFE.sub(lambda m: quote(m[0].encode("utf-8", "replace"), safe=""), text)
    return _BARE_PERCENT.sub("%25", text) if "%" in text else text
