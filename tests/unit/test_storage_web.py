"""Reading from https:// and http:// addresses."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from sdp.errors import AccessDenied, NotFound, StorageError, UserError
from sdp.storage import StorageOptions, list_source, open_source
from tests.storage_server import Answer, Request, Server, ranged, serving

CONTENT = bytes(range(251)) * 1000
OPTIONS = StorageOptions(timeout_s=30, retries=1)


def site(request: Request) -> Answer:
    path = request.path.partition("?")[0]
    if path == "/old":
        return Answer(302, b"", {"Location": "/new%20place/a%23b.parquet"})
    if path == "/signed" and "sig=a%2Fb" not in request.path:
        return Answer(403)
    if path == "/gone":
        return Answer(404)
    if path == "/whole":  # a server that knows no ranges
        return ranged(CONTENT, replace(request, headers={}))
    if path == "/empty":
        return ranged(b"", request)
    if path == "/nameless":
        return ranged(CONTENT, request, etag=None)
    return ranged(CONTENT, request)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(site) as running:
        yield running


@pytest.mark.parametrize("path", ["/x", "/a%20b/%C3%BC%25.parquet", "/signed?sig=a%2Fb&x=1", "/old", "/nameless"])
def test_a_file_is_read_from_its_address(server: Server, path: str) -> None:
    file = open_source(server.address + path, OPTIONS)
    assert file.size() == len(CONTENT)
    file.seek(1000)
    assert file.read(20) == CONTENT[1000:1020]
    file.seek(-5, 2)
    assert file.read() == CONTENT[-5:]
    assert any(request.path == path for request in server.requests)


def test_a_server_that_knows_no_ranges_is_refused(server: Server) -> None:
    with pytest.raises(StorageError, match="/whole: the server sends whole files only; download"):
        open_source(f"{server.address}/whole", OPTIONS)


def test_a_server_that_sends_more_than_was_asked_for_is_not_listened_to() -> None:
    def answer(_: Request) -> Answer:
        head = {"Content-Range": "bytes 0-999/1000", "ETag": '"v1"', "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT"}
        return Answer(206, bytes(100_000), head)

    with serving(answer) as running, pytest.raises(StorageError, match="/x: the server sends whole files only"):
        open_source(f"{running.address}/x", OPTIONS)


@pytest.mark.parametrize("path", ["/signed?sig=a%2Fb", "/b"])
def test_the_listing_of_an_address_has_its_size(server: Server, path: str) -> None:
    (file,) = list_source(server.address + path, OPTIONS)
    assert (file.uri, file.size, file.etag) == (server.address + path, len(CONTENT), '"v1"')


@pytest.mark.parametrize(
    ("path", "kind", "says"),
    [
        ("/gone?token=SECRET", NotFound, "not found (HTTP 404 Not Found)"),
        ("/signed?sig=SECRET", AccessDenied, "access denied (HTTP 403 Forbidden)"),
    ],
)
def test_an_error_names_the_address_without_its_secrets(
    server: Server, path: str, kind: type[StorageError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        open_source(server.address + path, OPTIONS)
    assert str(caught.value).startswith(f"{server.address}{path.partition('?')[0]}?…: {says}")
    assert "SECRET" not in str(caught.value)
    assert len(server.requests) == 1


def test_the_web_cannot_be_listed_and_an_empty_file_is_empty(server: Server) -> None:
    assert open_source(f"{server.address}/empty", OPTIONS).read() == b""
    server.requests.clear()
    with pytest.raises(UserError, match="name each file"):
        list_source(f"{server.address}/part-*.parquet", OPTIONS)
    assert server.requests == []
