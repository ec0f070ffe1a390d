"""The storage against a real S3 server that behaves."""

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from sdp.errors import AccessDenied, NotFound, SdpError, StorageError
from sdp.storage import Storage, list_source, open_storage
from tests.integration.s3 import Gateway, gateway_fixture, s3_env_fixture  # noqa: F401 (fixtures)
from tests.programs import ROOT, ended
from tests.storage_contract import (  # noqa: F401 (tests)
    OPERATIONS,
    test_listings_are_sorted_recursive_and_by_folder,
    test_published_content_is_read_back_unchanged,
    test_replace_wants_the_version_that_was_read,
)

pytestmark = pytest.mark.needs("versitygw")

NASTY = ["a b/c%20d#e=f/ü€😀.parquet", "q?x&y+z", "a\\b", "#1", "x{y}[z]|^`<>\"'~!*()", "part=1/.hidden", " lead"]


@pytest.fixture
def storage(s3_env: Gateway, request: pytest.FixtureRequest) -> Storage:
    return open_storage(f"{s3_env.uri}/{request.node.name}/pre fix%20#")


def one_line(error: BaseException) -> str:
    text = str(error)
    assert not re.search(r"\n|Debug|kind:", text), text
    assert len(text) < 600, text
    return text


@pytest.mark.parametrize("name", NASTY)
def test_every_name_makes_the_round_trip(storage: Storage, s3_env: Gateway, name: str) -> None:
    storage.publish(name, name.encode())
    assert storage.names() == [name]
    assert [info.path for info in storage.list()] == [name]
    assert storage.read(name) == name.encode()
    assert storage.open(name).read() == name.encode()
    # The server has it under exactly that name, so other tools find it too.
    assert any(path.endswith(f"pre fix%20#/{name}") for path in s3_env.objects())
    storage.delete(name)
    assert storage.names() == []


def test_markers_of_folders_are_not_objects(storage: Storage, s3_env: Gateway) -> None:
    import boto3

    key = storage.uri_of("made/by/a/console").removeprefix(f"{s3_env.uri}/") + "/"
    boto3.client("s3", endpoint_url=s3_env.endpoint).put_object(Bucket=s3_env.bucket, Key=key, Body=b"")
    storage.publish("made/by/a/console/file", b"1")
    storage.publish("made/empty", b"")
    assert storage.read("made/empty") == storage.open("made/empty").read() == b""
    assert storage.names() == ["made/by/a/console/file", "made/empty"]
    assert storage.names("made/by/a/console") == ["made/by/a/console/file"]


ENDING = """
import sys, threading, time
from asyncio.selector_events import BaseSelectorEventLoop as Loop
from sdp.storage import open_storage
storage, wake = open_storage(sys.argv[1]), Loop._write_to_self
def wake_slowly(loop):  # keeps obstore's threads in Python code, waiting for the interpreter
    wake(loop)
    if threading.current_thread() is not threading.main_thread(): time.sleep(0.02)
Loop._write_to_self = wake_slowly
def repeat(call):
    while True: call()
reads = [lambda: storage.read("x"), lambda: storage.open("x"), storage.list]
for call in [lambda: storage.publish("x", bytes(500_000)), *reads]:
    threading.Thread(target=repeat, args=[call], daemon=True).start()
time.sleep(0.05)
"""


def test_a_process_may_end_with_requests_under_way(storage: Storage) -> None:
    storage.publish("x", b"1")
    for _ in range(3):
        program = ended([sys.executable, "-c", ENDING, storage.uri], cwd=ROOT)
        assert (program.returncode, program.stderr) == (0, "")


def test_a_forked_child_of_a_process_that_used_a_store_is_refused_at_once(storage: Storage) -> None:
    storage.publish("x", b"1")
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool, pytest.raises(StorageError) as caught:
        pool.submit(storage.read, "x").result(timeout=30)
    assert "spawn or forkserver" in one_line(caught.value)


def test_sources_are_found_by_file_folder_and_pattern(storage: Storage) -> None:
    for name in ("m/a.parquet", "m/b.parquet", "m/c.txt", "m/_tmp/x.parquet", "m/deep/d.parquet"):
        storage.publish(name, b"12345")
    top = storage.uri_of("m")

    def files_at(uri: str) -> list[str]:
        files = list_source(uri)
        assert all(file.size == 5 and file.etag for file in files)
        return [file.uri.removeprefix(top) for file in files]

    assert files_at(top) == ["/a.parquet", "/b.parquet", "/deep/d.parquet"]
    assert files_at(f"{top}/b.parquet") == ["/b.parquet"]
    assert files_at(f"{top}/c.txt") == ["/c.txt"]
    assert files_at(f"{top}/*.parquet") == ["/a.parquet", "/b.parquet"]
    assert files_at(f"{top}/**/d*") == ["/deep/d.parquet"]
    with pytest.raises(NotFound, match="no file matches"):
        list_source(f"{top}/*.csv")
    with pytest.raises(NotFound, match="no such file"):
        list_source(f"{top}/zzz.parquet")


def every_error(storage: Storage) -> Iterator[tuple[str, SdpError]]:
    """Yield the error that each operation raises."""
    for name, call in OPERATIONS.items():
        with pytest.raises(SdpError) as caught:
            call(storage)
        yield name, caught.value


@pytest.mark.usefixtures("s3_env")
def test_a_missing_bucket_is_called_by_its_name() -> None:
    for name, error in every_error(open_storage("s3://no-such-bucket/data")):
        assert isinstance(error, NotFound), name
        assert one_line(error).startswith("s3://no-such-bucket/data"), name
        assert "no bucket 'no-such-bucket'" in str(error), name


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_denied_at_once(s3_env: Gateway, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "wrong")
    for name, error in every_error(open_storage(f"{s3_env.uri}/data")):
        assert isinstance(error, AccessDenied), (name, error)
        text = one_line(error)
        assert text.startswith(f"{s3_env.uri}/data")
        assert "credentials" in text
        assert s3_env.secret_key not in text
        assert s3_env.access_key not in text
