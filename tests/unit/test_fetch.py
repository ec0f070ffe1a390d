"""Fetching, against an image server and everything that it can do wrong."""

import gzip
import os
import select
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from unittest import mock

import pycurl
import pytest

from sdp.config.download import FetchConfig, HostsConfig
from sdp.datasets.outcomes import FAILED, FILTERED
from sdp.download.fetch import Fetcher, Request
from sdp.download.robots import Robots
from sdp.download.slot import Buffer, Slot
from sdp.download.transfer import Failure, retry_after_s
from sdp.urls import parse
from tests.misbehaving.server import ImageServer
from tests.storage_server import Answer, serving
from tests.storage_server import Request as Asked

OPTIONS = FetchConfig(connections=32, timeout_s=1.2, retries=1, max_bytes=3_000_000, allow_networks=("127.0.0.0/8",))
IMAGES = 40


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a host that is up answer on a busy machine although the deadline of an image is short."""
    monkeypatch.setattr("sdp.config.download.SILENCE_SHARE", 0.5)
    monkeypatch.setattr("sdp.config.download.CONNECT_SHARE", 0.8)
    monkeypatch.setattr("sdp.download.fetch.LONGEST_WAIT_S", 5.0)


def replace(options: FetchConfig, **changes: object) -> FetchConfig:
    return options.model_copy(update=changes)


@pytest.fixture(scope="module")
def shared() -> Iterator[ImageServer]:
    with ImageServer(images=1000, distinct=IMAGES, hosts=("127.0.0.1", "127.0.0.2")) as server:
        server.warm()
        yield server


@pytest.fixture
def server(shared: ImageServer) -> ImageServer:
    shared.reset()
    return shared


@pytest.fixture(scope="module")
def refused() -> Iterator[str]:
    """A base URL whose port refuses connections."""
    with socket.socket() as plug:
        plug.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{plug.getsockname()[1]}"


@pytest.fixture
def deaf() -> Iterator[str]:
    """A base URL whose port completes no connection, as behind a silent firewall: its queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        with suppress(TimeoutError):
            for _ in range(16):
                client = stack.enter_context(socket.socket())
                client.settimeout(0.05)
                client.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@dataclass
class Basket:
    """The delivered results, which a test can wait for."""

    buffer: Buffer
    release: bool = True
    results: dict[int, Request[int]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, fetched: Request[int]) -> None:
        with self.changed:
            assert fetched.token not in self.results, f"{fetched.token} was delivered twice"
            self.results[fetched.token] = fetched
            self.order.append(fetched.token)
            self.changed.notify_all()
        if self.release:
            self.buffer.release(fetched.size)

    def wait_for(self, count: int, deadline_s: float = 30.0) -> list[Request[int]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.results) >= count, deadline_s), (
                f"{count - len(self.results)} of {count} did not come"
            )
            return [self.results[token] for token in sorted(self.results)]


PLENTY = HostsConfig(at_once=1000, per_second=None)


@contextmanager
def fetching(
    options: FetchConfig = OPTIONS,
    limits: HostsConfig = PLENTY,
    buffer_bytes: int = 1 << 28,
    release: bool = True,
    kind: type[Fetcher[int]] = Fetcher,
) -> Iterator[tuple[Any, Basket]]:
    """Run a fetcher that delivers into a basket, which releases the memory of results unless a test does."""
    basket = Basket(Buffer(buffer_bytes), release)
    fetcher = kind(options, limits, basket.buffer, basket)
    try:
        yield fetcher, basket
    finally:
        fetcher.close()
    assert fetcher.error is None


def fetch(
    urls: Sequence[str],
    options: FetchConfig = OPTIONS,
    limits: HostsConfig = PLENTY,
    buffer_bytes: int = 1 << 28,
    give_up_host_after: int = 20,
) -> list[Request[int]]:
    """Fetch some URLs at once; the results in their order."""
    with (
        mock.patch("sdp.download.fetch.GIVE_UP_AFTER", give_up_host_after),
        fetching(options, limits, buffer_bytes) as (fetcher, basket),
    ):
        fetcher.submit((number, parse(url)) for number, url in enumerate(urls))
        results = basket.wait_for(len(urls))
    assert basket.buffer.used == 0, "what was reserved has been given back"
    return results


def body(fetched: Request[int]) -> bytes:
    assert fetched.failure is None, fetched.failure
    assert fetched.body is not None
    assert sum(map(len, fetched.body)) == fetched.size
    return b"".join(fetched.body)


def failure_of(fetched: Request[int]) -> Failure:
    assert fetched.failure is not None
    return fetched.failure


def expected(index: int) -> bytes:
    from scripts.demo import shapes

    return shapes.encode(shapes.sample(index % IMAGES))[0]


COMES = [
    "plain", "delay&s=0.2", "chunked", "until-close", "early-hints", "trickle&bps=400000",
    "trickle-head&bps=1000", "drop", "overrun", "wrong-type", "wrong-type&type=", "robots&value=all",
    "redirect&hops=4", "redirect&status=301&style=relative", "redirect&status=307&style=network",
    "redirect&status=308", "limit&rps=100",
    "500&times=1", "502&times=1", "503&times=1", "504&times=1", "429&times=1", "408&times=1",
    "429&times=1&after=1", "503&times=1&date=1", "reset&times=1", "reset&at=head&times=1", "hangup&times=1",
    "truncate&times=1", "truncate&chunked=1&times=1", "bad-chunk&times=1", "not-http&times=1",
    "stall&times=1", "stall-head&times=1",
]  # fmt: skip

FAILS = {
    "404": ("http_status", "404"),
    "204": ("http_status", "204"),
    "304": ("http_status", "304"),
    "500": ("http_status", "500"),
    "503": ("http_status", "503"),
    "429&after=1": ("http_status", "429, Retry-After 1 s"),
    "redirect&loop=1": ("redirects", "more than 5"),
    "redirect&to=": ("redirects", "302 without a Location"),
    "redirect&to=ftp://example.org/": ("redirects", "scheme 'ftp'"),
    "redirect&to=file:///etc/passwd": ("redirects", "scheme 'file'"),
    "redirect&to=http://10.0.0.1/": ("private_address", "10.0.0.1"),
    "redirect&to=http://[::ffff:169.254.169.254]/": ("private_address", "169.254.169.254"),
    "redirect&to=http://0xa9fea9fe/": ("private_address", "169.254.169.254"),
    "zero": ("empty", "0 bytes"),
    "endless": ("too_big", ""),
    "endless&length=100000000": ("too_big", ""),
    "truncate": ("broken_transfer", ""),
    "truncate&chunked=1": ("broken_transfer", ""),
    "bad-chunk": ("broken_transfer", ""),
    "reset": ("broken_transfer", ""),
    "reset&at=head": ("broken_transfer", ""),
    "hangup": ("broken_transfer", ""),
    "not-http": ("broken_transfer", ""),
    "endless-head": ("broken_transfer", ""),
    "stall": ("timeout", ""),
    "stall-head": ("timeout", ""),
    "stall-body": ("timeout", ""),
    "trickle&bps=100": ("timeout", "not whole after 1.2 s"),
    "trickle-head&bps=10": ("timeout", ""),
}


def test_an_image_that_comes_in_the_end_comes_whole(server: ImageServer) -> None:
    urls = [f"{server.image_url(index, 'plain').partition('?')[0]}?do={query}" for index, query in enumerate(COMES)]
    patient = replace(OPTIONS, timeout_s=10.0)
    for index, fetched in enumerate(fetch(urls, patient)):
        assert body(fetched) == expected(index), COMES[index]


def test_each_failure_has_its_reason(server: ImageServer, refused: str, deaf: str) -> None:
    urls = [f"{server.image_url(index, 'plain').partition('?')[0]}?do={query}" for index, query in enumerate(FAILS)]
    urls += [f"{refused}/images/1.jpg", f"{deaf}/images/1.jpg", "http://nobody.invalid/1.jpg"]
    expectations = [*FAILS.values(), ("connect", ""), ("connect", ""), ("dns", "nobody.invalid")]
    for fetched, (reason, detail), url in zip(fetch(urls), expectations, urls, strict=True):
        failure = failure_of(fetched)
        assert (failure.outcome, failure.reason) == (FAILED, reason), url
        assert detail in failure.detail, url
        assert fetched.body is None


@pytest.mark.parametrize(
    ("query", "attempts"),
    [
        *((query, 1) for query in ("plain", "redirect&hops=3", "404", "robots")),
        ("500&times=1", 2),
        *((query, 3) for query in ("429&times=2", "503", "hangup")),
    ],
)
def test_temporary_failures_are_retried_and_permanent_ones_are_not(
    server: ImageServer, query: str, attempts: int
) -> None:
    url = f"{server.image_url(7).partition('?')[0]}?do={query}"
    (fetched,) = fetch([url], replace(OPTIONS, retries=2, timeout_s=20.0))
    assert fetched.attempts == attempts
    if "redirect" not in query:
        assert server.stats.requests == attempts


def test_nothing_is_sent_to_an_address_of_our_own_network_however_it_is_written(server: ImageServer) -> None:
    names = ("127.0.0.1", "[::ffff:127.0.0.1]", "localhost")
    numbers = ("2130706433", "0x7f.1", "0177.0.0.1", "127.1")
    urls = [f"http://{host}:{server.port}/images/1.jpg" for host in (*names, *numbers)]
    results = fetch(urls, replace(OPTIONS, allow_networks=("10.0.0.0/8",)))
    reasons = [result.failure and result.failure.reason for result in results]
    assert reasons[:3] == ["private_address"] * 3
    assert set(reasons[3:]) <= {"private_address", "dns", "bad_url"}
    assert {result.attempts for result in results[:3]} == {1}
    assert server.stats.connections == 0


def test_a_proxy_of_the_environment_is_not_asked(server: ImageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    (fetched,) = fetch([server.image_url(1)])
    assert body(fetched) == expected(1)
    (fetched,) = fetch([server.image_url(1)], replace(OPTIONS, use_proxy=True, retries=0))
    assert failure_of(fetched).reason == "connect"


@pytest.mark.parametrize(
    ("query", "options", "reason", "attempts"),
    [
        ("value=nofollow&value=noimageindex", {}, "opt_out", 1),
        ("value=otherbot:noai", {}, None, 1),
        ("value=otherbot:noai", {"user_agent": "otherbot/1.0 (pictures)"}, "opt_out", 1),
        ("value=noai", {"respect_opt_out": False}, None, 1),
        ("value=noindex&status=404", {}, "http_status", 1),
        ("value=noindex&status=503", {}, "http_status", 2),
    ],
)
def test_an_image_whose_header_opts_out_is_filtered(
    server: ImageServer, query: str, options: dict[str, Any], reason: str | None, attempts: int
) -> None:
    (fetched,) = fetch([f"{server.image_url(1, 'robots')}&{query}"], replace(OPTIONS, **options))
    assert (fetched.failure and fetched.failure.reason, fetched.attempts) == (reason, attempts)
    if fetched.failure is not None:
        assert fetched.failure.outcome == (FILTERED if reason == "opt_out" else FAILED)


@contextmanager
def site(robots: bytes, status: int = 200, location: str = "") -> Iterator[tuple[str, list[str]]]:
    """Serve one page under every path, and a robots.txt; yield the site's URL and the requested paths."""
    asked: list[str] = []

    def answer(request: Asked) -> Answer:
        asked.append(request.path)
        if request.path != "/robots.txt":
            return Answer(200, b"an image")
        return Answer(status, robots, {"X-Robots-Tag": "noindex", "Location": location})

    with serving(answer) as running:
        yield running.address, asked


PATIENT = replace(OPTIONS, retries=0, timeout_s=40.0, connections=4)
HONOUR = replace(PATIENT, robots="honour")
SOME = b"User-agent: sdp\nDisallow: /private\n\nUser-agent: *\nDisallow: /\n"


def test_urls_disallowed_by_robots_txt_are_skipped_and_it_is_fetched_once() -> None:
    with site(SOME) as (url, asked):
        results = fetch([f"{url}/{folder}/{number}" for number in range(20) for folder in ("private", "open")], HONOUR)
    assert asked.count("/robots.txt") == 1
    assert sum(path.startswith("/private") for path in asked) == 0
    assert [fetched.failure for fetched in results[1::2]] == [None] * 20
    refused = Failure("opt_out", f"{url}/robots.txt disallows it for sdp", FILTERED)
    assert [fetched.failure for fetched in results[::2]] == [refused] * 20


@pytest.mark.parametrize(
    ("robots", "status", "location", "reason"),
    [
        (b"<html>none here</html>", 404, "", None),
        (b"", 200, "", None),
        (SOME, 503, "", "not_asked"),
        (SOME, 429, "", "not_asked"),
        (SOME, 425, "", "not_asked"),
        (gzip.compress(SOME), 200, "", "not_asked"),
        ("User-agent: *".encode("utf-16"), 200, "", "not_asked"),
        (b"", 302, "http://10.0.0.1/robots.txt", "not_asked"),
        (b"User-agent: *\nDisallow: /\n" + b"# more\n" * 200_000, 200, "", "opt_out"),
    ],
    ids=(
        *("none", "empty", "unreadable", "too many requests", "too early", "packed", "UTF-16"),
        *("led into a private network", "endless"),
    ),
)
def test_a_robots_txt_that_is_missing_allows_all_and_one_that_cannot_be_read_nothing(
    robots: bytes, status: int, location: str, reason: str | None
) -> None:
    with site(robots, status, location) as (url, _):
        (fetched,) = fetch([f"{url}/image"], HONOUR)
    assert (fetched.failure and fetched.failure.reason) == reason


@pytest.mark.parametrize("coding", ["gzip", "gzip;q=1", "br, gzip", "other"])
def test_a_robots_txt_that_comes_compressed_is_one_that_cannot_be_read(coding: str) -> None:
    def answer(request: Asked) -> Answer:
        packed = gzip.compress(b"User-agent: *\nDisallow: /")
        return Answer(200, packed if request.path == "/robots.txt" else b"an image", {"Content-Encoding": coding})

    with serving(answer) as running:
        (fetched,) = fetch([f"{running.address}/image"], HONOUR)
    assert failure_of(fetched).reason == "not_asked"
    assert "compressed, although not asked for" in failure_of(fetched).detail


def test_robots_txt_is_not_asked_for_by_default() -> None:
    with site(SOME) as (url, asked):
        (fetched,) = fetch([f"{url}/private/1"], PATIENT)
    assert (asked, fetched.failure) == (["/private/1"], None)


def test_the_rules_of_sites_are_kept_within_a_bound_and_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.download.robots._CACHE_BYTES", 3_200_000)
    robots, text = Robots("sdp"), b"".join(b"Disallow: /%x\n" % number for number in range(3_600))
    tracemalloc.start()
    for number in range(16):
        robots.note(f"http://{number}", b"User-agent: *\n" + text, None, now=0.0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    kept = [number for number in range(16) if robots.knows(f"http://{number}", now=1.0)]
    assert kept == list(range(16 - len(kept), 16))
    assert 2 < len(kept) < 16
    assert 1.6e6 < held < 3.2e6
    assert not robots.knows("http://15", now=86_401.0)


@pytest.mark.parametrize(
    ("text", "disallowed"),
    [
        ("user-agent sdp\rdisallow /a\rdisallow some /b", ["/a"]),
        ("User-agent: sdp\nDisallow: /a\x0bAllow: /a", []),
        ("User-agent: *\nDisallow: /x" + "*" * 3_000, ["/a", "/b", "/c"]),
    ],
    ids=["no colon", "one line", "wildcards"],
)
def test_odd_lines_of_a_robots_txt_count_as_they_are_meant_or_not_at_all(text: str, disallowed: list[str]) -> None:
    robots = Robots("sdp")
    robots.note("http://a.org", text.encode(), None, now=0.0)
    assert [path for path in ("/a", "/b", "/c") if robots.refusal("http://a.org", f"http://a.org{path}")] == disallowed


def test_requests_name_the_user_agent(server: ImageServer) -> None:
    fetch([server.image_url(1)], replace(OPTIONS, user_agent="somebody (mailto:a@example.org)"))
    assert [visit.user_agent for visit in server.stats.visits] == ["somebody (mailto:a@example.org)"]


@pytest.mark.parametrize(("connections", "at_once", "most"), [(4, 1000, 4), (64, 40, 40)])
def test_connections_are_used_again(server: ImageServer, connections: int, at_once: int, most: int) -> None:
    urls = [server.image_url(index, "delay", s=0.05) for index in range(200)]
    fetch(urls, replace(PATIENT, connections=connections), HostsConfig(at_once=at_once, per_second=None))
    assert server.stats.requests == 200
    assert server.stats.connections <= most


def test_a_host_gets_no_more_at_once_than_it_bears_and_others_do_not_wait_for_it(server: ImageServer) -> None:
    urls = [server.image_url(index, "delay", s=0.1) for index in range(20)]
    urls += [server.image_url(index, host="127.0.0.2") for index in range(20)]
    results = fetch(urls, limits=HostsConfig(at_once=2, per_second=None))
    assert all(result.failure is None for result in results)
    assert server.stats.at("127.0.0.1").most_at_once <= 2
    last_quick = max(visit.ended or 0 for visit in server.stats.visits if visit.host == "127.0.0.2")
    last_slow = max(visit.began for visit in server.stats.visits if visit.host == "127.0.0.1")
    assert last_quick < last_slow


def test_a_host_that_says_429_is_asked_less_until_it_does_not(server: ImageServer) -> None:
    urls = [server.image_url(index, "limit", rps=20, at_once=4, after="") for index in range(40)]
    results = fetch(urls, replace(OPTIONS, retries=8, timeout_s=20.0), HostsConfig(at_once=32, per_second=None))
    assert all(result.failure is None for result in results)
    assert 0 < sum(visit.status == 429 for visit in server.stats.visits) < 3 * 40


def test_a_host_that_wants_too_long_a_pause_is_left_alone(server: ImageServer) -> None:
    urls = [server.image_url(0, "429", after=3600)] + [server.image_url(index) for index in range(1, 30)]
    urls.append(server.image_url(31, host="127.0.0.2"))
    results = fetch(urls, replace(OPTIONS, connections=1))
    assert results[-1].failure is None, "another host has nothing to do with it"
    refused = results[:-1]
    asked = [result for result in refused if result.attempts]
    assert {result.failure and result.failure.reason for result in asked} == {"http_status"}
    assert {result.failure and result.failure.reason for result in refused if not result.attempts} == {"not_asked"}
    detail = results[-2].failure and results[-2].failure.detail
    assert detail == "127.0.0.1 is left alone for 3600 s: it answered 429, Retry-After 3600 s"
    assert sum(result.attempts for result in refused) < 5
    assert server.stats.at("127.0.0.1").requests < 5


@pytest.mark.parametrize("reason", ["connect", "timeout"])
def test_a_host_that_cannot_be_reached_or_answers_nothing_is_given_up(
    server: ImageServer, refused: str, reason: str
) -> None:
    urls = [f"{refused}/images/{n}.jpg" if reason == "connect" else server.image_url(n, "stall") for n in range(60)]
    results = fetch(urls, replace(OPTIONS, connections=4, retries=0), give_up_host_after=3)
    assert {result.failure and result.failure.reason for result in results if result.attempts} == {reason}
    assert {result.failure and result.failure.reason for result in results if not result.attempts} == {"not_asked"}
    assert 3 <= sum(result.attempts for result in results) < 10
    assert "given up" in (results[-1].failure.detail if results[-1].failure else "")


def test_images_that_stall_in_a_row_do_not_condemn_a_host_that_serves(server: ImageServer) -> None:
    urls = [server.image_url(index, "" if index < 4 else "stall") for index in range(24)]
    urls += [server.image_url(index) for index in range(30, 40)]
    results = fetch(urls, replace(OPTIONS, connections=4, retries=0), give_up_host_after=3)
    served = {result.token for result in results if result.failure is None}
    assert served == {*range(4), *range(24, 34)}
    assert all(result.attempts == 1 for result in results)


def test_requests_before_a_host_was_given_up_have_their_own_reason(server: ImageServer) -> None:
    urls = [server.image_url(0, "500"), server.image_url(1, "429", after=3600)]
    broken, _ = fetch(urls, replace(OPTIONS, connections=1, retries=1))
    assert (failure_of(broken).reason, broken.attempts) == ("http_status", 1)
    assert failure_of(broken).detail.startswith("500; not asked again: 127.0.0.1 is left alone for 3600 s: ")


def test_only_so_many_bytes_are_held_and_everything_still_comes(server: ImageServer) -> None:
    with fetching(replace(OPTIONS, timeout_s=3.0), buffer_bytes=400_000, release=False) as (fetcher, basket):
        fetcher.submit((index, parse(server.image_url(index))) for index in range(40))
        most = 0
        for given_back in range(40):
            basket.wait_for(given_back + 1)
            # Each image may be larger than what is left, but only one of them at a time is.
            most = max(most, basket.buffer.used)
            basket.buffer.release(basket.results[basket.order[given_back]].size)
    assert all(result.failure is None for result in basket.results.values())
    assert basket.buffer.used == 0
    assert most <= 400_000 + max(len(expected(index)) for index in range(40))


def test_a_transfer_that_fails_when_it_goes_on_after_a_pause_fails_alone(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume = Slot.resume

    def refuse(slot: Any, now: float) -> None:
        resume(slot, now)
        if slot.request.token % 2:
            raise pycurl.error(pycurl.E_FILESIZE_EXCEEDED, "Maximum file size exceeded")

    monkeypatch.setattr(Slot, "resume", refuse)
    patient = replace(OPTIONS, timeout_s=60.0)
    results = fetch([server.image_url(index) for index in range(24)], patient, buffer_bytes=1)
    assert {result.failure and result.failure.reason for result in results[1::2]} == {"too_big"}
    assert {result.failure for result in results[::2]} == {None}


class Unwieldy(Fetcher[int]):
    """A fetcher that now and then cannot watch a socket, which makes libcurl drop all transfers."""

    watched = 0

    def _watch(self, multi: Any, what: int, fd: int, *rest: object) -> None:
        self.watched += 1
        if self.watched in (5, 15, 25):
            raise OSError("no room for another socket")
        super()._watch(multi, what, fd, *rest)


def test_requests_dropped_by_libcurl_are_repeated_and_the_thread_continues(server: ImageServer) -> None:
    options = replace(OPTIONS, retries=3, timeout_s=20.0, connections=8)
    with fetching(options, kind=Unwieldy) as (fetcher, basket):
        fetcher.submit((index, parse(server.image_url(index))) for index in range(40))
        results = basket.wait_for(40)
    assert fetcher.watched > 25
    assert [result.failure for result in results] == [None] * 40
    assert max(result.attempts for result in results) > 1


def test_time_spent_waiting_for_memory_is_not_the_servers_fault(server: ImageServer) -> None:
    with fetching(buffer_bytes=1, release=False) as (fetcher, basket):
        fetcher.submit((index, parse(server.image_url(index))) for index in range(2))
        first = basket.wait_for(1)[0]
        time.sleep(OPTIONS.timeout_s + 0.5)  # longer than a request may take
        basket.buffer.release(first.size)
        assert all(result.failure is None for result in basket.wait_for(2))


def test_closing_while_requests_are_under_way_takes_no_time(server: ImageServer) -> None:
    with fetching() as (fetcher, _):
        fetcher.submit((index, parse(server.image_url(index, "stall"))) for index in range(10))
        server.wait_for(lambda stats: stats.in_flight == 10)
        began = time.monotonic()
    assert time.monotonic() - began < 3
    server.wait_for(lambda stats: stats.in_flight == 0)


def test_the_next_unit_is_requested_when_all_requests_have_begun(server: ImageServer) -> None:
    with fetching(replace(OPTIONS, connections=4)) as (fetcher, basket):
        fetcher.wait_for_room()
        fetcher.submit((index, parse(server.image_url(index, "delay", s=0.2))) for index in range(12))
        server.wait_for(lambda seen: seen.requests >= 4)  # until a connection is in use, it counts as free
        fetcher.wait_for_room()
        assert 8 <= server.stats.requests <= 12
        assert len(basket.results) < 12, "it did not wait for the last one"
        basket.wait_for(12)


def test_https_is_checked_against_the_certificates() -> None:
    with ImageServer(images=3, tls=True) as server:
        url = server.image_url(1)
        (refused,) = fetch([url])
        assert (failure_of(refused).reason, refused.attempts) == ("tls", 1)
        with mock.patch.dict("os.environ", {"SSL_CERT_FILE": str(server.certificate)}):
            (trusted,) = fetch([url])
        assert body(trusted) == expected(1)


@contextmanager
def replying(reply: bytes) -> Iterator[str]:
    """Answer one request with these bytes; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        thread.join()


ODD_HEADS = {
    b"HTTP/1.1 200 OK\r\nContent-Length:" + b" " * 30 + b"4\r\n\r\nJPEG": None,
    b"HTTP/1.1 200 OK\r\nContent-Length: 000000000000000000000004\r\n\r\nJPEG": None,
    b"HTTP/1.1 " + b"9" * 5000 + b" x\r\nContent-Length: 4\r\n\r\nJPEG": "http_status",
}


def test_odd_numbers_in_a_head_end_no_more_than_their_transfer(capfd: pytest.CaptureFixture[str]) -> None:
    for head, reason in ODD_HEADS.items():
        with replying(head) as url:
            (fetched,) = fetch([url], PATIENT)
        assert (fetched.failure and fetched.failure.reason) == reason
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("order", [("Date", "Retry-After"), ("Retry-After", "Date")])
def test_a_date_to_come_back_at_counts_by_the_clock_of_the_server(order: tuple[str, str]) -> None:
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    dates = {"Date": hour_ago, "Retry-After": hour_ago + timedelta(seconds=5)}
    lines = [f"{name}: {format_datetime(dates[name], usegmt=True)}\r\n" for name in order]
    with replying(f"HTTP/1.1 503 Busy\r\n{''.join(lines)}Content-Length: 0\r\n\r\n".encode()) as url:
        (fetched,) = fetch([url], PATIENT)
    assert failure_of(fetched).detail == "503, Retry-After 5 s"


NOON = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 0 ", 0.0),
        *((value, None) for value in ("-5", "1.5", "soon", "", "٣")),
        *((value, 86_400.0) for value in ("999999999", "9" * 400, "Fri, 31 Dec 9999 23:59:59 -2359")),
        ("Thu, 01 Jan 2026 12:01:30 GMT", 90.0),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0.0),
        ("Thu, 01 Jan 2026 12:00:05 -0000", 5.0),
    ],
)
def test_retry_after_is_a_number_of_seconds_or_a_date_of_at_most_a_day(value: str, seconds: float | None) -> None:
    assert retry_after_s(value, NOON) == seconds


def test_an_image_that_is_released_after_the_end_wakes_nothing_else() -> None:
    buffer = Buffer(1)
    fetcher: Fetcher[int] = Fetcher(FetchConfig(), HostsConfig(), buffer, lambda _: None)
    fetcher.close()
    with ExitStack() as opened:  # as many as may get the numbers of files that were closed
        others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(100)]
        for other in others:
            opened.callback(os.close, other)
        buffer.release(1)
        assert not select.select(others, [], [], 0)[0]


def test_queueing_requests_stops_for_transfers_in_between() -> None:
    fetcher: Fetcher[int] = Fetcher(FetchConfig(), HostsConfig(), Buffer(1), lambda _: None)
    fetcher.close()
    fetcher._incoming.extend(Request(number, parse("http://a.org/")) for number in range(100))
    with mock.patch.object(fetcher, "_queue", side_effect=lambda *_, **__: time.sleep(0.01)):
        fetcher._queue_new(time.monotonic())
    assert len(fetcher._incoming) > 50
