"""The storage against a real S3 server that goes away, stalls, or loses its answers, in the middle of everything."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from sdp.errors import AlreadyExists, Conflict, Unavailable
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.storage import remote as remote_module
from tests.integration.s3 import (  # noqa: F401 (fixtures)
    Gateway,
    Proxy,
    gateway_fixture,
    proxy_fixture,
    running_gateway,
    s3_env_fixture,
)
from tests.storage_contract import OPERATIONS

pytestmark = pytest.mark.needs("versitygw")

TIMEOUT_S = 30.0  # where something is to succeed on a busy machine, or retries are what ends it
IMPATIENT_S = 2.0  # where the deadline ends it
SLACK_S = 5.0
BIG = bytes(range(256)) * 50_000  # 12.8 MB: does not fit into any buffer on the way
OLD = b"the version before"


@pytest.fixture
def storage(s3_env: Gateway, proxy: Proxy, request: pytest.FixtureRequest) -> Storage:
    """Through the proxy."""
    name = re.sub(r"\W", "-", request.node.name)
    return open_storage(f"{s3_env.uri}/{name}", StorageOptions(endpoint=proxy.endpoint, timeout_s=TIMEOUT_S))


@pytest.fixture
def hasty(storage: Storage) -> Storage:
    """The same, and two attempts are enough for it."""
    return storage.with_options(retries=1)


@pytest.fixture
def direct(storage: Storage, s3_env: Gateway) -> Storage:
    """The same folder, without the proxy."""
    return open_storage(storage.uri, StorageOptions(endpoint=s3_env.endpoint))


def unavailable(call: Callable[[], object], uri: str, timeout_s: float = TIMEOUT_S) -> str:
    """The message with which an operation gives up, in time."""
    start = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        call()
    assert time.monotonic() - start < timeout_s + SLACK_S
    text = str(caught.value)
    assert text.startswith(uri)
    assert not re.search(r"\n|Debug|kind:", text), text
    return text


WRITES: dict[str, Callable[[Storage], object]] = {
    "publish": lambda storage: storage.publish("k", BIG),
    "create": lambda storage: storage.create("k", BIG),
    "replace": lambda storage: storage.replace("k", BIG, storage.stat("k").etag or ""),
}


def all_unavailable(storage: Storage) -> dict[str, str]:
    """The message of every operation, all begun at the same time."""

    def attempt(name: str) -> str:
        return unavailable(lambda: OPERATIONS[name](storage), storage.uri, storage.options.timeout_s)

    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        return dict(zip(OPERATIONS, pool.map(attempt, OPERATIONS), strict=True))


@pytest.mark.parametrize(
    ("fault", "says"), [(Proxy.stall, "no response in time"), (Proxy.refuse, "connection refused at http://127")]
)
def test_a_server_that_stalls_or_is_gone_is_unavailable_by_the_deadline(
    storage: Storage, proxy: Proxy, fault: Callable[[Proxy], None], says: str
) -> None:
    fault(proxy)
    for name, text in all_unavailable(storage.with_options(timeout_s=IMPATIENT_S)).items():
        assert says in text, name
        # A stalled connection is given up for a fresh one before the deadline.
        assert re.search(r"\([2-9] attempts in ", text), name


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_is_always_cut_leaves_nothing_of_itself(
    hasty: Storage, direct: Storage, proxy: Proxy, name: str
) -> None:
    direct.publish("other", OLD)
    before = ["other"]
    if name == "replace":
        direct.publish("k", OLD)
        before = ["k", "other"]
    proxy.cut(up=5_000_000)
    unavailable(lambda: WRITES[name](hasty), hasty.uri_of("k"))
    assert proxy.connections > 1
    assert direct.names() == before
    if name == "replace":
        assert direct.read("k") == OLD


def test_an_answer_lost_once_does_not_make_a_writer_lose_against_itself(
    storage: Storage, direct: Storage, proxy: Proxy
) -> None:
    proxy.cut(down=0, times=1)
    created = storage.create("k", b"mine")
    assert proxy.connections > 1  # it did happen
    assert direct.stat("k").etag == created.etag
    proxy.cut(down=0, times=1)
    replaced = storage.replace("k", b"mine too", created.etag or "")
    assert direct.stat("k").etag == replaced.etag
    assert direct.read("k") == b"mine too"


def test_an_answer_lost_does_not_make_a_loser_win(storage: Storage, direct: Storage, proxy: Proxy) -> None:
    direct.create("k", b"theirs")
    proxy.cut(down=0, times=1)
    with pytest.raises(AlreadyExists):
        storage.create("k", b"mine")
    old = direct.stat("k").etag or ""
    direct.publish("k", b"theirs again")
    proxy.cut(down=0, times=1)
    with pytest.raises(Conflict):
        storage.replace("k", b"mine", old)
    assert direct.read("k") == b"theirs again"


def test_a_read_cut_once_is_read_again_and_never_short(
    storage: Storage, hasty: Storage, direct: Storage, proxy: Proxy
) -> None:
    direct.publish("k", BIG)
    proxy.cut(down=5_000_000, times=1)
    assert storage.read("k") == BIG
    file = storage.open("k")
    proxy.cut(down=3_000_000, times=2)
    assert file.read() == BIG
    proxy.cut(down=5_000_000)
    unavailable(lambda: hasty.read("k"), hasty.uri_of("k"))
    file = hasty.open("k")
    unavailable(lambda: file.read(), hasty.uri_of("k"))


def test_a_listing_interrupted_between_pages_continues(
    storage: Storage, direct: Storage, proxy: Proxy, s3_env: Gateway
) -> None:
    direct.publish("parts/0", b"")
    folder = next(path for path in (s3_env.root / s3_env.bucket).rglob("parts") if path.is_dir())
    for number in range(2500):
        (folder / f"{number:09d}").touch()
    expected = direct.names()
    assert len(expected) == 2501
    assert storage.names() == expected
    whole = proxy.bytes_down
    a_page = whole * 1000 // 2501
    proxy.refuse()  # so that the next connection is a new one
    proxy.pass_on()
    proxy.cut(down=a_page + a_page // 3, times=1)  # in the second page
    connections, passed = proxy.connections, proxy.bytes_down
    assert storage.names() == expected
    assert proxy.connections - connections > 1
    # What was lost is a third of a page; the first page was not asked for again.
    assert proxy.bytes_down - passed < whole + a_page // 2


def test_an_interrupt_in_the_middle_of_a_write_writes_nothing(storage: Storage, direct: Storage, proxy: Proxy) -> None:
    proxy.stall(after=5_000_000)

    def interrupt() -> None:
        proxy.wait_until_stalled()
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        storage.publish("k", BIG)
    other.join()
    proxy.pass_on()
    assert direct.names() == []


def test_a_multipart_upload_is_one_object_whose_parts_are_sent_again(
    storage: Storage, direct: Storage, proxy: Proxy, s3_env: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "MULTIPART", 1)
    monkeypatch.setattr(remote_module, "_PART", 5 * 1024 * 1024)
    before = s3_env.pending_uploads()  # of jobs that other tests have killed
    proxy.cut(up=2_000_000, times=1)
    storage.publish("k", BIG)
    assert direct.read("k") == BIG
    assert "-" in (direct.stat("k").etag or "")  # S3's mark of an upload in parts
    assert s3_env.pending_uploads() == before
    # A failed upload may stay pending: a part that is under way when obstore aborts it begins it again on this server.
    proxy.cut(up=2_000_000, times=1)
    unavailable(lambda: storage.with_options(retries=0).publish("failed", BIG), storage.uri_of("failed"))
    assert direct.names() == ["k"]
