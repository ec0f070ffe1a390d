"""Reading from the Hugging Face Hub, against a fake of its API at HF_ENDPOINT."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from sdp.errors import AccessDenied, NotFound, Unavailable, UserError
from sdp.storage import StorageOptions, list_source, open_source
from sdp.storage.hub import HubPath
from tests.storage_server import Answer, Request, Server, ranged, serving

CONTENT = bytes(range(251)) * 1000
TOKEN = "hf_madeup"
FILES = {
    "README.md": {"oid": "blob-readme"},
    "data/train-0.parquet": {"oid": "p0", "lfs": {"oid": "sha-0", "size": len(CONTENT), "pointerSize": 134}},
    "data/train 1%.parquet": {"oid": "p1", "lfs": {"oid": "sha-1", "size": len(CONTENT), "pointerSize": 134}},
    "data/deep/x.parquet": {"oid": "blob-x"},
}
OPTIONS = StorageOptions(timeout_s=30, retries=1)


class Hub:
    """The repository "o/n" with the revision "main" and one with slashes in its name; files are on another server."""

    def __init__(self) -> None:
        self.revisions = ["main", "refs/convert/parquet"]
        self.cdn: Server | None = None
        self.address = ""

    def __call__(self, request: Request) -> Answer:
        path, _, query = request.path.partition("?")
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return Answer(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        if path.startswith("/api/datasets/o/n/tree/"):
            return self.tree(path.removeprefix("/api/datasets/o/n/tree/"), query)
        if path.startswith("/datasets/o/n/resolve/"):
            revision, _, name = path.removeprefix("/datasets/o/n/resolve/").partition("/")
            if unquote(revision) in self.revisions and unquote(name) in FILES and self.cdn:
                return Answer(302, b"", {"Location": f"{self.cdn.address}/{name}?signed=1"})
            return Answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        return Answer(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"})

    def tree(self, rest: str, query: str) -> Answer:
        revision, _, folder = rest.partition("/")
        revision, folder = unquote(revision), unquote(folder)
        if revision not in self.revisions:
            return Answer(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no"})
        inside = f"{folder}/" if folder else ""
        names = [name for name in FILES if name.startswith(inside)]
        if "recursive=true" not in query.lower():
            names = [name for name in names if "/" not in name[len(inside) :]]
        if not names:
            return Answer(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no"})
        entries = [{"type": "file", "path": name, "size": len(CONTENT), **FILES[name]} for name in names]
        if "cursor=2" not in query and len(entries) > 2:  # in two pages
            link = f'<{self.address}/api/datasets/o/n/tree/{rest}?{query}&cursor=2>; rel="next"'
            return Answer(200, json.dumps(entries[:2]).encode(), {"Link": link, "Content-Type": "application/json"})
        return Answer(200, json.dumps(entries[2:] if "cursor=2" in query else entries).encode())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    answers = Hub()
    with serving(answers) as server, serving(lambda request: ranged(CONTENT, request)) as cdn:
        answers.cdn, answers.address = cdn, server.address
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        server.cdn = cdn  # type: ignore[attr-defined]
        yield server


@pytest.mark.usefixtures("hub")
def test_files_are_found_by_folder_pattern_and_name() -> None:
    top = "hf://datasets/o/n"
    assert [file.uri for file in list_source(top, OPTIONS)] == [
        f"{top}/data/deep/x.parquet",
        f"{top}/data/train 1%.parquet",
        f"{top}/data/train-0.parquet",
    ]
    files = list_source(f"{top}@main/data/train*", OPTIONS)
    assert [(file.uri, file.size, file.etag) for file in files] == [
        (f"{top}@main/data/train 1%.parquet", len(CONTENT), "sha-1"),
        (f"{top}@main/data/train-0.parquet", len(CONTENT), "sha-0"),
    ]
    assert [file.etag for file in list_source(f"{top}@refs/convert/parquet/data/deep", OPTIONS)] == ["blob-x"]
    assert [file.etag for file in list_source(f"{top}/data/train-0.parquet", OPTIONS)] == ["sha-0"]
    assert [file.etag for file in list_source(f"{top}/README.md", OPTIONS)] == ["blob-readme"]


def test_a_file_is_read_by_ranges_and_the_token_stays_with_the_hub(hub: Server) -> None:
    for path in ("/data/train 1%.parquet", "@refs/convert/parquet/data/train-0.parquet"):
        file = open_source(f"hf://datasets/o/n{path}", OPTIONS)
        assert file.size() == len(CONTENT)
        file.seek(1000)
        assert file.read(10) == CONTENT[1000:1010]
    assert all(request.headers["authorization"] == f"Bearer {TOKEN}" for request in hub.requests)
    elsewhere = hub.cdn.requests  # type: ignore[attr-defined]
    assert elsewhere
    assert not any("authorization" in request.headers for request in elsewhere)


@pytest.mark.usefixtures("hub")
def test_without_the_right_token_it_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    for call in (list_source, open_source):
        with pytest.raises(AccessDenied) as caught:
            call("hf://datasets/o/n/data/train-0.parquet", OPTIONS)
        assert str(caught.value).startswith("hf://datasets/o/n/")
        assert "token" in str(caught.value).lower()
        assert "hf_other" not in str(caught.value)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("hf://datasets/o/other", "no such dataset"),
        ("hf://datasets/o/n@v9/data", "no such revision"),
        ("hf://datasets/o/n/nothing", "no such file"),
        ("hf://datasets/o/n/*.csv", "no file matches"),
    ],
)
def test_missing_names_are_not_listed(uri: str, says: str) -> None:
    with pytest.raises(NotFound, match=says) as caught:
        list_source(uri, OPTIONS)
    assert str(caught.value).startswith(uri)
    assert "\n" not in str(caught.value)


def test_a_hub_in_trouble_is_unavailable_by_the_deadline(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.queue.extend([Answer(500)] * 20)
    start = time.monotonic()
    with pytest.raises(Unavailable):
        list_source("hf://datasets/o/n", OPTIONS)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="cannot reach the Hub"):
        list_source("hf://datasets/o/n", OPTIONS)
    assert time.monotonic() - start < 2 * OPTIONS.timeout_s


@pytest.mark.parametrize(
    ("uri", "parsed"),
    [
        ("hf://datasets/o/n", ("o/n", "main", "", "hf://datasets/o/n")),
        ("hf://datasets/o/n/", ("o/n", "main", "", "hf://datasets/o/n")),
        ("hf://datasets/o/n@v1/a/b", ("o/n", "v1", "a/b", "hf://datasets/o/n@v1")),
        ("hf://datasets/o/n@refs/pr/3/a", ("o/n", "refs/pr/3", "a", "hf://datasets/o/n@refs/pr/3")),
        ("hf://datasets/o/n@refs%2Fpr%2F3/a", ("o/n", "refs/pr/3", "a", "hf://datasets/o/n@refs%2Fpr%2F3")),
    ],
)
def test_an_address_has_repository_revision_and_path(uri: str, parsed: tuple[str, ...]) -> None:
    at = HubPath.parse(uri)
    assert (at.repo, at.revision, at.path, at.root) == parsed


@pytest.mark.parametrize("uri", ["hf://o/n/x", "hf://datasets/o", "hf://models/o/n", "hf://datasets/o/n"])
def test_another_address_than_a_datasets_file_is_refused_with_the_form(uri: str) -> None:
    with pytest.raises(UserError, match=r"write hf://datasets/OWNER/NAME\[@REVISION\]/path"):
        open_source(uri, OPTIONS)
