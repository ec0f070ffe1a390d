"""The number and duration of a storage's retries, against a server that counts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sdp.errors import AccessDenied, AlreadyExists, NotFound, StorageError, Unavailable
from sdp.storage import Storage, StorageOptions, open_storage
from sdp.storage import retry as retry_module
from sdp.train.callbacks.watchdog import WATCHDOG_S
from tests.storage_server import Answer, Request, Server, ranged, serving

DATE = {"Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT", "ETag": '"v1"'}


def bucket(request: Request) -> Answer:
    """An S3 server with one object, "k", of b"content"."""
    if request.method == "PUT":
        return Answer(200, b"", {"ETag": '"v2"'})
    answer = ranged(b"content", request)
    return Answer(answer.status, answer.body, {**DATE, **answer.headers})


def error(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>says the server.</Message></Error>".encode())


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(bucket) as running:
        yield running


@pytest.fixture
def storage(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Storage:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setattr(retry_module, "_FIRST_PAUSE_S", 0.01)
    return open_storage("s3://bucket/top", StorageOptions(endpoint=server.address, timeout_s=30, retries=3))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "SlowDown"),
        (500, "InternalError"),
        (502, ""),
        (504, ""),
        (429, "TooManyRequests"),
        (400, "RequestTimeout"),
    ],
)
def test_a_transient_failure_is_retried(storage: Storage, server: Server, status: int, code: str) -> None:
    server.queue.extend([error(status, code)] * 3)
    assert storage.read("k") == b"content"
    assert len(server.requests) == 4
    server.queue.extend([error(status, code)] * 3)
    assert storage.create("new", b"1").etag == '"v2"'


def test_a_lasting_failure_is_retried_as_often_as_the_options_allow(storage: Storage, server: Server) -> None:
    server.queue.extend([error(503, "SlowDown")] * 10)
    with pytest.raises(Unavailable) as caught:
        storage.read("k")
    assert len(server.requests) == 4
    text = str(caught.value)
    assert text.startswith(f"s3://bucket/top/k: SlowDown: says the server at {server.address} (4 attempts in ")
    assert "\n" not in text


def test_before_a_store_s_first_answer_few_attempts_are_made_and_later_only_the_deadline_ends_them(
    storage: Storage, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_module, "_answered", {"another server"})
    monkeypatch.setattr(retry_module, "_LONGEST_PAUSE_S", 0.01)
    patient = storage.with_options(retries=None)
    server.queue.extend([error(503, "SlowDown")] * 6)
    with pytest.raises(Unavailable, match=r"\(6 attempts in "):
        patient.read("k")
    assert patient.read("k") == b"content"
    server.queue.extend([error(503, "SlowDown")] * 50)
    assert patient.read("k") == b"content"
    server.queue.extend([error(503, "SlowDown")] * 100_000)
    with pytest.raises(Unavailable):
        patient.with_options(timeout_s=0.5).read("k")
    server.queue.clear()


def test_a_store_may_be_away_for_five_minutes_and_less_than_a_trainer_may_stand_still() -> None:
    assert StorageOptions().timeout_s > 300 + 2 * (retry_module._ATTEMPT_S + retry_module._LONGEST_PAUSE_S)
    assert StorageOptions().timeout_s + 2 * retry_module._ATTEMPT_S < WATCHDOG_S / 3


def test_a_long_wait_is_announced_now_and_then(
    storage: Storage, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retry_module, "_SILENT_S", 0.3)
    monkeypatch.setattr(retry_module, "_LONGEST_PAUSE_S", 0.01)
    storage.read("k")
    server.queue.extend([error(503, "SlowDown")] * 100_000)
    with pytest.raises(Unavailable):
        storage.with_options(timeout_s=0.5, retries=None).read("k")
    server.queue.clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"retrying: s3://bucket/top/k: SlowDown: says the server at {server.address} (")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "AccessDenied", AccessDenied),
        (401, "", AccessDenied),
        (400, "ExpiredToken", AccessDenied),
        (400, "AuthorizationHeaderMalformed", AccessDenied),
        (301, "PermanentRedirect", AccessDenied),
        (404, "NoSuchKey", NotFound),
        (404, "NoSuchBucket", NotFound),
        (400, "InvalidArgument", StorageError),
        (409, "InvalidBucketState", StorageError),
    ],
)
def test_a_refusal_is_final(storage: Storage, server: Server, status: int, code: str, kind: type[StorageError]) -> None:
    for call in (lambda: storage.read("k"), lambda: storage.publish("k", b"1"), lambda: storage.read_range("k", 0, 1)):
        server.requests.clear()
        server.queue.append(error(status, code))
        with pytest.raises(StorageError) as caught:
            call()
        assert type(caught.value) is kind
        assert len(server.requests) == 1
        assert caught.value.__cause__ is None


def test_a_conflict_between_two_conditional_writes_is_tried_again(storage: Storage, server: Server) -> None:
    server.queue.append(error(409, "ConditionalRequestConflict"))
    assert storage.create("k", b"1").etag == '"v2"'
    assert [request.headers["if-none-match"] for request in server.requests] == ["*", "*"]


def test_create_that_finds_something_reads_it_only_after_an_attempt_of_its_own(
    storage: Storage, server: Server
) -> None:
    server.queue.append(error(412, "PreconditionFailed"))
    with pytest.raises(AlreadyExists):
        storage.create("k", b"content")
    assert len(server.requests) == 1
    # The same content after a lost answer: the first attempt wrote it.
    server.queue.extend([error(500, "InternalError"), error(412, "PreconditionFailed")])
    assert storage.create("k", b"content").etag == '"v1"'
    # Other content of the same length: it was not.
    server.queue.extend([error(500, "InternalError"), error(412, "PreconditionFailed")])
    with pytest.raises(AlreadyExists):
        storage.create("k", b"CONTENT")
