"""Servers' requests to leave images out: X-Robots-Tag, and robots.txt where a job honours it."""

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from urllib.parse import unquote, urlsplit

from sdp.datasets.outcomes import FILTERED
from sdp.download.transfer import Failure

DIRECTIVES = frozenset({"noai", "noimageai", "noindex", "noimageindex", "noml"})
"""The directives that keep an image out of a training dataset."""

_WITH_VALUE = frozenset({"max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"})
"""Directives that contain a colon but do not begin with an agent's name."""

MAX_BYTES = 512_000
"""Bytes of a robots.txt that are read; RFC 9309 asks for at least 500 KiB."""
_VALID_S, _RETRY_S = 86_400.0, 300.0
_CACHE_BYTES, _SITE_BYTES, _RULE_BYTES = 32_000_000, 1_000, 60
"""Memory for the rules of all sites, and what a site and a rule take of it beside the rule's text."""
_MOST_PIECES = 3_000
"""Pieces between the wildcards of a robots.txt: each is searched for in each URL, and MAX_BYTES can hold 500,000."""
_ABSENT = re.compile(r"empty|redirects|http_status 4(?!08|25|29)")
"""The beginning of a failure that means a site without rules, unlike that of a busy site."""
_FIELDS = {
    **dict.fromkeys(("user-agent", "useragent", "user agent"), "agent"),
    **dict.fromkeys(("disallow", "dissallow", "dissalow", "disalow", "diasllow", "disallaw"), "disallow"),
    "allow": "allow",
}
"""The lines of a robots.txt that count, with the slips that Google's parser forgives."""
_LINES = re.compile(r"\r\n|\r|\n")
_NAME = re.compile(r"\*(?!\S)|[^\s/*]+")
"""An agent's name, up to a version or a blank."""
_INDEX = "/index.html"
_SLASH = re.compile("%2f", re.IGNORECASE)


class Robots:
    """The rules of recently used sites (RFC 9309)."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._rules: dict[str, tuple[float, int, _Rules | Failure]] = {}
        self._bytes = 0

    def knows(self, site: str, now: float) -> bool:
        """Return whether a site's rules are cached and still valid."""
        return site in self._rules and now < self._rules[site][0]

    def refusal(self, site: str, url: str) -> Failure | None:
        """Return the failure of a URL that a known site disallows; None for any other."""
        rules = self._rules[site][2]
        if isinstance(rules, Failure):
            return rules
        if rules.allow(_plain(url.removeprefix(site))):
            return None
        return Failure("opt_out", f"{site}/robots.txt disallows it for {self._agent}", FILTERED)

    def note(self, site: str, text: bytes, failure: Failure | None, now: float) -> None:
        """Cache a site's rules: all allowed where it has no robots.txt, nothing where that cannot be read."""
        rules: _Rules | Failure
        size = _SITE_BYTES
        if failure is None and b"\0" in text:
            failure = Failure("broken_transfer", "compressed, or not in UTF-8")
        if failure is None or _ABSENT.match(f"{failure.reason} {failure.detail}"):
            rules = _Rules(_patterns(text.decode("utf-8-sig", "replace"), self._agent))
            size += rules.size
            if rules.pieces > _MOST_PIECES:
                size, rules = _SITE_BYTES, Failure("not_asked", f"{site}/robots.txt has too many wildcards")
        else:
            rules = Failure("not_asked", f"{site}/robots.txt cannot be read: {failure.reason}, {failure.detail}")
        self._bytes += size - self._rules.pop(site, (0.0, 0, None))[1]
        self._rules[site] = now + (_RETRY_S if isinstance(rules, Failure) else _VALID_S), size, rules
        while self._bytes > _CACHE_BYTES:
            self._bytes -= self._rules.pop(next(iter(self._rules)))[1]


class _Rules:
    """The patterns that apply to one agent. The longest match decides; if two are equally long, the one that allows."""

    def __init__(self, patterns: Mapping[str, bool]) -> None:
        self._prefixes: dict[str, bool] = {}
        self._wild: list[tuple[int, bool, list[str]]] = []
        """The length of each pattern with wildcards, whether it allows, and its pieces; the last one is the end."""
        for pattern, allows in patterns.items():
            pieces = (pattern[:-1] if pattern.endswith("$") else f"{pattern}*").split("*")
            if pieces[1:] == [""]:
                self._prefixes[_plain(pieces[0])] = allows
            else:
                self._wild.append((len(_plain(pattern)), allows, list(map(_plain, pieces))))
        self._lengths = sorted(set(map(len, self._prefixes)), reverse=True)
        """At most a thousand, since a robots.txt is limited to MAX_BYTES."""
        self.pieces = sum(len(pieces) for _, _, pieces in self._wild)

    @property
    def size(self) -> int:
        """The memory that they take, in bytes."""
        texts = chain(self._prefixes, *(pieces for _, _, pieces in self._wild))
        return sum(sys.getsizeof(text) + _RULE_BYTES for text in texts)

    def allow(self, target: str) -> bool:
        """Return whether a path with its query may be requested."""
        prefixes = (target[:length] for length in self._lengths if length <= len(target))
        fitting = ((len(prefix), self._prefixes[prefix]) for prefix in prefixes if prefix in self._prefixes)
        best = next(fitting, (0, True))
        for length, allows, pieces in self._wild:
            if (length, allows) > best and _fits(pieces, target):
                best = length, allows
        return best[1]


def _patterns(text: str, agent: str) -> dict[str, bool]:
    """Return the patterns of the groups that name an agent, or else of those for all, and whether each allows."""
    token, groups = agent.partition("/")[0].lower(), dict[str, dict[str, bool]]()
    names: set[str] = set()
    in_rules = True
    for line in _LINES.split(text.lstrip("\ufffd")):  # of a damaged byte-order mark
        key, colon, value = (item.strip() for item in line.partition("#")[0].partition(":"))
        if not colon and len(words := key.split()) == 2:
            key, value = words
        field = _FIELDS.get(key.lower())
        if field == "agent":
            names = set() if in_rules else names
            in_rules = False
            if (match := _NAME.match(value)) and (name := match[0].lower()) in ("*", token):
                names.add(name)
                groups.setdefault(name, {})
        elif field is not None:
            in_rules = True
            allows = field == "allow"
            patterns = [value] if value else []
            if allows and value.endswith(_INDEX):  # its folder, too
                patterns.append(f"{value.removesuffix(_INDEX)}/$")
            for name in names:
                for pattern in patterns:
                    groups[name][pattern] = groups[name].get(pattern, False) or allows
    return groups.get(token, groups.get("*", {}))


def _plain(text: str) -> str:
    """Decode a path's or pattern's escapes, except %2F, which is no separator."""
    return "%2F".join(map(unquote, _SLASH.split(text)))


def _fits(pieces: Sequence[str], target: str) -> bool:
    """Return whether a path is made of these pieces with any text between them."""
    first, *rest = pieces
    if not rest:
        return target == first
    if not target.startswith(first):
        return False
    at = len(first)
    for piece in rest[:-1]:
        at = target.find(piece, at) + len(piece)
        if at < len(piece):
            return False
    return target.endswith(rest[-1], at)


def site_of(url: str) -> str:
    """Return the scheme, host and port that a robots.txt applies to."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def opt_out(value: str, agent: str) -> str | None:
    """Return the directive in an X-Robots-Tag header that asks `agent` to leave the image out, if any.

    A header may apply to all agents (`noai, noindex`) or to one (`somebot: noai`); a name applies up to the next name.
    """
    applies = True
    for item in value.lower().split(","):
        name, colon, rest = item.partition(":")
        if colon and name.strip() not in _WITH_VALUE:
            applies = name.strip() in (agent.lower(), "*")
            item = rest
        directive = item.strip()
        if applies and (directive in DIRECTIVES or directive == "none"):
            return directive
    return None
