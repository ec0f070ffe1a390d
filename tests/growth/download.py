"""Bodies, captions, URLs and robots.txt."""

import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sdp import urls
from sdp.config.download import FetchConfig, HostsConfig
from sdp.download.budgets import HostBudgets
from sdp.download.fetch import Request
from sdp.download.plan import normalised
from sdp.download.robots import MAX_BYTES, Robots
from sdp.download.slot import Buffer, Slot
from sdp.download.turnstile import Turnstile
from tests.growth import Case


def _url(pieces: int, _: Path) -> Callable[[], object]:
    url = "http://example.org/" + "%61/../" * pieces

    def read() -> None:
        with contextlib.suppress(urls.BadUrl):
            urls.parse(url)

    return read


def _host(pieces: int, _: Path) -> Callable[[], object]:
    here, location = urls.parse("http://example.org/"), "//a" + "\u0315\u0300" * pieces

    def read() -> None:
        with contextlib.suppress(urls.BadUrl):
            urls.redirected(here, location)

    return read


def _caption(text: str) -> Callable[[int, Path], Callable[[], object]]:
    return lambda pieces, _: lambda: normalised("a" + text * pieces)


def _robots(rule: str, path: str = "", agents: bool = False) -> Callable[[int, Path], Callable[[], object]]:
    """Prepare a robots.txt of different rules, and 20 URLs of its site."""

    def prepare(pieces: int, _: Path) -> Callable[[], object]:
        text = "User-agent: *\n" * (pieces if agents else 1) + "".join(rule.format(number) for number in range(pieces))

        def read() -> None:
            robots = Robots("sdp")
            robots.note("http://a.org", text.encode()[:MAX_BYTES], None, 0.0)
            for number in range(20):
                robots.refusal("http://a.org", f"http://a.org/{path}{number}.jpg")

        return read

    return prepare


def _body(pieces: int, _: Path) -> Callable[[], object]:
    request = Request(None, urls.parse("http://example.org/a.jpg"))
    slot = Slot(FetchConfig(), [], Buffer(1 << 30), deque(), None, request, 0.0, status=200)

    def read() -> None:
        for _ in range(pieces):
            assert slot.write(b"ab") is None
        b"".join(slot.pieces)

    return read


def _closed_hosts(hosts: int, _: Path) -> Callable[[], object]:
    """Prepare a request to each host, all of which ask for a long pause."""

    def read() -> None:
        turnstile: Turnstile[int] = Turnstile(HostBudgets(HostsConfig()))
        for number in range(hosts):
            turnstile.push(f"{number}.org", number)
        for number in range(hosts):
            turnstile.drain(f"{hosts - 1 - number}.org")

    return read


CASES: tuple[Case, ...] = (
    Case("URL of escapes and dots", 20_000, _url),
    Case("redirect to a host of combining marks", 4_000, _host),
    Case("caption of combining marks", 20_000, _caption("\u0315\u0300")),
    Case("caption of precomposed marks", 20_000, _caption("\u0344\u0f73")),
    Case("caption of unfinished escape sequences", 20_000, _caption("\x9d")),
    Case("robots.txt of rules", 10_000, _robots("Disallow: /{:x}\n"), full=1),
    Case("robots.txt of lengths", 250, _robots("Disallow: /{0:a<{0}}\n", "a" * 2_000), full=1),
    Case("robots.txt of wildcards", 250, _robots("Disallow: *a*{}$\n", "a" * 4_000), full=1),
    Case("robots.txt of agents", 4_500, _robots("Allow: /{}\n", agents=True), full=1),
    Case("hosts that ask for a long pause", 5_000, _closed_hosts, full=4),
    Case("body in pieces", 300_000, _body, full=4),
)
