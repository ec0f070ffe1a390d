"""Servers' requests to leave images out: X-Robots-Tag, and robots.txt where a job honours it."""

from urllib.parse import urlsplit
from urllib.robotparser import RobotFileParser

from sdp.datasets.outcomes import FILTERED
from sdp.download.transfer import Failure

DIRECTIVES = frozenset({"noai", "noimageai", "noindex", "noimageindex", "noml"})
"""The directives that keep an image out of a training dataset."""

_WITH_VALUE = frozenset({"max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"})
"""Directives that contain a colon but do not begin with an agent's name."""

MAX_BYTES = 512_000
"""Bytes of a robots.txt that are read; RFC 9309 asks for at least 500 KiB."""
_VALID_S, _RETRY_S = 86_400.0, 300.0
_CACHE_BYTES, _ENTRY_BYTES = 8_000_000, 1_000
"""Bytes of all cached robots.txt, and the fewest that each counts as."""
_ABSENT = ("empty", "redirects", "http_status 4")
"""Beginnings of the failures that mean a site without rules."""


class Robots:
    """The rules of recently used sites (RFC 9309)."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._rules: dict[str, tuple[float, int, RobotFileParser | Failure]] = {}
        self._bytes = 0

    def knows(self, site: str, now: float) -> bool:
        """Return whether a site's rules are cached and still valid."""
        return site in self._rules and now < self._rules[site][0]

    def refusal(self, site: str, url: str) -> Failure | None:
        """Return the failure of a URL that a known site disallows; None for any other."""
        rules = self._rules[site][2]
        if isinstance(rules, Failure):
            return rules
        if rules.can_fetch(self._agent, url):
            return None
        return Failure("opt_out", f"{site}/robots.txt disallows it for {self._agent}", FILTERED)

    def note(self, site: str, text: bytes, failure: Failure | None, now: float) -> None:
        """Cache a site's rules: all allowed where it has no robots.txt, nothing where that cannot be read."""
        rules: RobotFileParser | Failure
        if failure is None or f"{failure.reason} {failure.detail}".startswith(_ABSENT):
            rules = RobotFileParser()
            rules.parse(text.decode("utf-8", "replace").splitlines())
        else:
            rules = Failure("not_asked", f"{site}/robots.txt cannot be read: {failure.reason}, {failure.detail}")
        size = _ENTRY_BYTES + len(text)
        self._bytes += size - self._rules.pop(site, (0.0, 0, None))[1]
        self._rules[site] = now + (_RETRY_S if isinstance(rules, Failure) else _VALID_S), size, rules
        while self._bytes > _CACHE_BYTES:
            self._bytes -= self._rules.pop(next(iter(self._rules)))[1]


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
