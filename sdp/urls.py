"""URLs from crawled tables: normalised, or refused with a reason."""

import hashlib
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

MAX_LENGTH = 8_000
"""Characters of the longest URL; servers refuse longer ones anyway."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
_EDGES = "".join(map(chr, range(33))) + "\x7f\u00a0\u200b\ufeff"
"""Blanks and control characters to strip from the ends of a URL."""
_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*")
_NUMBER_END = re.compile(r"(?:^|\.)(?:[0-9]+|0x[0-9a-f]*)\Z")
"""The end of a host that is an IPv4 address, however it is spelt."""
_NUMBER = re.compile(r"0x(?P<hex>[0-9a-f]*)|0(?P<octal>[0-7]*)|(?P<decimal>[1-9][0-9]*)")
_LAST_DIGITS = frozenset("0123456789abcdefx")
_JOINERS = "\u200c\u200d"
_UNSAFE = re.compile(r"[^A-Za-z0-9\-._~:/?\[\]@!$&'()*+,;=%]")
_BARE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_DOTS = re.compile(r"/(\.|%2e){1,2}(?=/|$)", re.IGNORECASE)
_INSIDE = re.compile(r"[\t\r\n]")
_LONG_HOST = re.compile(r"(?:[^/?#]*:)?//[^/?#]{301}")
"""A host whose normal form (NFKC) urllib would compute, in a time that grows with the square of its length."""


class BadUrl(ValueError):
    """A URL that cannot be fetched; the message says why."""


@dataclass(frozen=True, slots=True)
class Url:
    """A URL in its one normal form."""

    text: str
    """The URL in ASCII, without fragment, default port or credentials."""
    host: str
    """The host in lower case; an IPv6 address in brackets."""


def parse(text: object) -> Url:
    """Parse a table's cell; raise BadUrl if it holds no URL that can be fetched."""
    if not isinstance(text, str):
        raise BadUrl("no URL" if text is None else f"not text but {type(text).__name__}")
    text = _trimmed(text)
    if not text:
        raise BadUrl("no URL")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise BadUrl(str(error)) from None
    scheme = parts.scheme.lower()
    if scheme not in _DEFAULT_PORTS:
        raise BadUrl(f"{f'scheme {scheme[:20]!r}' if scheme else 'no scheme'}, http or https is needed")
    if "@" in parts.netloc:
        raise BadUrl("it has a user name or password")
    host = _host(parts)
    if port == 0:
        raise BadUrl("port 0")
    netloc = host if port in (None, _DEFAULT_PORTS[scheme]) else f"{host}:{port}"
    path = _escaped(parts.path) or "/"
    path = _without_dots(path) if _DOTS.search(path) else path
    query = f"?{_escaped(parts.query)}" if parts.query else ""
    return Url(f"{scheme}://{netloc}{path}{query}", host)


def redirected(url: Url, location: str) -> Url:
    """Return the URL that a redirect leads to."""
    try:
        return parse(urljoin(url.text, _trimmed(location)))
    except ValueError as error:
        raise BadUrl(f"redirect to {location[:80]!r}: {error}") from None


def key64(text: str) -> int:
    """Hash a URL to 64 bits. Among two billion, the chance that any two collide is one in nine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def parents(host: str) -> list[str]:
    """Return a host and the domains above it: a.b.example.org, b.example.org, example.org, org."""
    labels = host.split(".")
    return [".".join(labels[at:]) for at in range(len(labels))]


def _trimmed(text: str) -> str:
    """Return a URL or a part of one without stray blanks; refuse one that is too long."""
    text = text.strip(_EDGES)
    if len(text) > MAX_LENGTH:
        raise BadUrl(f"{len(text)} characters, more than {MAX_LENGTH}")
    text = _INSIDE.sub("", text)
    if _LONG_HOST.match(text):
        raise BadUrl("a host of more than 300 characters is not a domain name")
    return text


def _host(parts: SplitResult) -> str:
    """Return the one form of a URL's host, by the host parser of WHATWG's URL standard.

    So lists, robots.txt and budgets apply to every spelling. A final dot is left out, and an IPv6 address that stands
    for an IPv4 one becomes that. Names in punycode stay as they are, since they have no other spelling.
    """
    name = parts.hostname or ""
    if ":" in name:  # an IPv6 address, which urlsplit has stripped of its brackets, and of what follows them
        return _ipv6(name if parts.netloc.partition("]")[2][:1] in ("", ":") else parts.netloc)
    if "%" in name or not name.isascii():
        name = _to_ascii(parts.netloc.partition(":")[0])  # as written: Python's lower case is not that of UTS 46
    name = name.removesuffix(".")
    if not _HOST.fullmatch(name) or len(name) > 253:
        raise BadUrl(f"host {name[:60]!r} is not a domain name" if name else "no host")
    return _ipv4(name) if name[-1] in _LAST_DIGITS and _NUMBER_END.search(name) else name


def _to_ascii(name: str) -> str:
    """Decode a host's escapes, and return it in ASCII by UTS 46, non-transitional, as browsers do."""
    from idna import IDNAError, check_bidi, check_initial_combiner, uts46_remap, valid_contextj

    def label_to_ascii(label: str) -> str:
        if label.isascii():
            return label
        check_initial_combiner(label)
        check_bidi(label)
        if label.startswith("xn--") or not all(valid_contextj(label, n) for n, c in enumerate(label) if c in _JOINERS):
            raise IDNAError
        return f"xn--{label.encode('punycode').decode()}"

    try:
        return ".".join(map(label_to_ascii, uts46_remap(unquote(name), std3_rules=False).split(".")))
    except UnicodeError:
        raise BadUrl(f"host {name[:60]!r} is not a domain name") from None


def _ipv4(name: str) -> str:
    """Return an IPv4 address in decimal: of one to four numbers, decimal, octal (017) or hexadecimal (0xf)."""
    numbers = []
    for part in name.split("."):
        if (match := _NUMBER.fullmatch(part)) is None:
            raise BadUrl(f"host {name[:60]!r} is not an IP address")
        base = {"hex": 16, "octal": 8, "decimal": 10}[str(match.lastgroup)]
        numbers.append(int(match[str(match.lastgroup)] or "0", base))
    *high, last = numbers
    if len(high) > 3 or max(high, default=0) > 255 or last >= 256 ** (4 - len(high)):
        raise BadUrl(f"host {name[:60]!r} is not an IP address")
    return str(IPv4Address(last + sum(number << 24 - 8 * place for place, number in enumerate(high))))


def _ipv6(name: str) -> str:
    if "%" in name:
        raise BadUrl("an address with a zone")
    try:
        address = IPv6Address(name)
    except ValueError:
        raise BadUrl(f"host {name[:60]!r} is not an IP address") from None
    return str(address.ipv4_mapped or f"[{address}]")


def _without_dots(path: str) -> str:
    """Resolve the segments `.` and `..`, as libcurl does: lists and robots.txt must judge the path that it requests."""
    kept: list[str] = []
    for segment in path.split("/")[1:]:
        dots = re.sub("%2e", ".", segment, flags=re.IGNORECASE)
        if dots == "..":
            del kept[-1:]
        elif dots != ".":
            kept.append(segment)
    if dots in (".", ".."):  # the last segment: the path ends in a slash
        kept.append("")
    return "/" + "/".join(kept)


def _escaped(text: str) -> str:
    """Escape each character that a URL may not contain; escapes stay as they are."""
    if _UNSAFE.search(text):
        text = _UNSAFE.sub(lambda m: quote(m[0].encode("utf-8", "replace"), safe=""), text)
    return _BARE_PERCENT.sub("%25", text) if "%" in text else text
