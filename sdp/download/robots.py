"""What a server asks of those who fetch its images: X-Robots-Tag, and robots.txt where a job honours it."""

from collections.abc import Collection
from urllib.parse import urlsplit
from urllib.robotparser import RobotFileParser

from sdp.datasets.outcomes import FILTERED
from sdp.download.transfer import Failure

DIRECTIVES = frozenset({"noai", "noimageai", "noindex", "noimageindex", "noml"})
"""What keeps an image out of a dataset for training."""

_WITH_VALUE = frozenset({"max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"})
"""Directives that have a colon themselves, and so are not the name of an agent."""

MAX_BYTES = 512_000
"""Of a robots.txt that are read; RFC 9309 asks for 500 KiB at least."""
_VALID_S, _RETRY_S = 86_400.0, 300.0
_CACHE_BYTES, _ENTRY_BYTES = 8_000_000, 1_000
"""Of all robots.txt that are kept, and the least that one counts."""
_ABSENT = frozenset({"empty", "redirects"})
"""Failures that mean a site without rules, besides all 4xx."""


class Robots:
    """The rules of the sites that have been asked lately (RFC 9309)."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._rules: dict[str, tuple[float, int, RobotFileParser | Failure]] = {}
        self._bytes = 0

    def knows(self, site: str, now: float) -> bool:
        """Return whether a site's rules are here and still valid."""
        return site in self._rules and now < self._rules[site][0]

    def refusal(self, site: str, url: str) -> Failure | None:
        """Return why a URL of a known site is not fetched, if it is not."""
        rules = self._rules[site][2]
        if isinstance(rules, Failure):
            return rules
        if rules.can_fetch(self._agent, url):
            return None
        return Failure("opt_out", f"{site}/robots.txt disallows it for {self._agent}", FILTERED)

    def note(self, site: str, text: bytes, failure: Failure | None, now: float) -> None:
        """Keep a site's rules: none where it has no robots.txt, and no access where that cannot be read."""
        rules: RobotFileParser | Failure
        if failure is None or failure.reason in _ABSENT or _is_4xx(failure):
            rules = RobotFileParser()
            rules.parse(text.decode("utf-8", "replace").splitlines())
        else:
            rules = Failure("not_asked", f"{site}/robots.txt cannot be read: {failure.reason}, {failure.detail}")
        size = _ENTRY_BYTES + len(text)
        self._bytes += size - self._rules.pop(site, (0.0, 0, None))[1]
        self._rules[site] = now + (_RETRY_S if isinstance(rules, Failure) else _VALID_S), size, rules
        while self._bytes > _CACHE_BYTES:
            self._bytes -= self._rules.pop(next(iter(self._rules)))[1]


def _is_4xx(failure: Failure) -> bool:
    return failure.reason == "http_status" and failure.detail.startswith("4")


def site_of(url: str) -> str:
    """Return the scheme, host and port that a robots.txt holds for."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def opt_out(value: str, agent: str, directives: Collection[str] = DIRECTIVES) -> str | None:
    """The directive in one X-Robots-Tag header that asks us to leave the image, if any.

    A header may be for everybody (`noai, noindex`) or for one agent by name (`somebot: noai`); a name holds until the
    next name in the same header. `agent` is the name that we go by.
    """
    ours = True
    for item in value.lower().split(","):
        name, colon, rest = item.partition(":")
        if colon and name.strip() not in _WITH_VALUE:
            ours = name.strip() in (agent.lower(), "*")
            item = rest
        directive = item.strip()
        if ours and directive in directives:
            return directive
        if ours and directive == "none" and "noindex" in directives:
            return directive
    return None
