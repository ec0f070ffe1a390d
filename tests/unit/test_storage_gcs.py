"""Google Cloud Storage: the meaning of URIs, and the requests, tested without a real server.

The stand-in keeps one rule of the XML API: a PUT with x-goog-if-generation-match is refused with 412 unless the object
has that generation, 0 meaning that there is none.
"""

from collections.abc import Iterator
from urllib.parse import unquote

import pytest

from sdp.errors import AlreadyExists, Conflict, NotFound
from sdp.storage import Storage, StorageOptions, open_storage
from tests.storage_server import Answer, Request, Server, serving


class Bucket:
    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.generation = 100

    def __call__(self, request: Request) -> Answer:
        name = unquote(request.path.partition("?")[0])
        content, generation = self.objects.get(name, (b"", 0))
        if request.method == "PUT":
            expected = request.headers.get("x-goog-if-generation-match")
            if expected is not None and int(expected) != generation:
                return Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            self.generation += 1
            self.objects[name] = (request.body, self.generation)
            return Answer(200, b"", {"ETag": f'"e{self.generation}"', "x-goog-generation": str(self.generation)})
        if not generation:
            return Answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {
            "ETag": f'"e{generation}"',
            "x-goog-generation": str(generation),
            "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT",
            "Content-Length": str(len(content)),
        }
        return Answer(200, content, headers)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Bucket()) as running:
        yield running


@pytest.fixture
def storage(server: Server, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setenv("GOOGLE_BASE_URL", server.address)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "made-up")
    return open_storage("gs://bucket/top", StorageOptions(timeout_s=30, retries=1))


def test_objects_are_asked_for_by_bucket_and_key(storage: Storage, server: Server) -> None:
    storage.publish("a b#.bin", b"12")
    assert unquote(server.requests[-1].path) == "/bucket/top/a b#.bin"
    assert storage.read("a b#.bin") == b"12"
    with pytest.raises(NotFound):
        storage.read("other")


def test_create_requires_that_there_is_no_object(storage: Storage, server: Server) -> None:
    storage.create("k", b"1")
    assert server.requests[-1].headers["x-goog-if-generation-match"] == "0"
    with pytest.raises(AlreadyExists):
        storage.create("k", b"2")
    assert storage.read("k") == b"1"


def test_replace_names_the_generation_that_its_etag_belongs_to(storage: Storage) -> None:
    old = storage.publish("k", b"1")
    storage.replace("k", b"2", old.etag or "")
    assert storage.read("k") == b"2"
    for etag in (old.etag or "", '"never"'):
        with pytest.raises(Conflict):
            storage.replace("k", b"3", etag)
    with pytest.raises(Conflict):
        storage.replace("absent", b"3", '"e1"')
    assert storage.read("k") == b"2"
