"""Random access through ranged reads: it reads what a file would, and asks for little."""

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp.errors import AccessDenied, Conflict, Unavailable
from sdp.storage import StorageOptions, reader
from sdp.storage.reader import RangeFile, web_file
from tests.storage_server import Answer, Request, Server, ranged, serving

CONTENT = bytes(range(251)) * 8000  # 2 MB, nowhere the same at multiples of a power of two


class Memory:
    """A source for RangeFile without a server."""

    def __init__(self, content: bytes, tail: int) -> None:
        self._content = content
        self.size = len(content)
        self.tail = content[max(0, len(content) - tail) :]
        self.fetched: list[tuple[int, int]] = []

    def fetch(self, start: int, length: int) -> bytes:
        assert length > 0
        assert start + length <= self.size
        self.fetched.append((start, length))
        return self._content[start : start + length]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.one_of(st.none(), st.integers(-1, 700))),
        st.tuples(st.just("seek"), st.integers(0, 700)),
        st.tuples(st.just("end"), st.integers(-700, 0)),
        st.tuples(st.just("on"), st.integers(-50, 50)),
    ),
    max_size=20,
)


@given(st.integers(0, 600), st.integers(0, 100), steps)
def test_it_reads_like_a_file(size: int, tail: int, script: list[tuple[str, int | None]]) -> None:
    content = CONTENT[:size]
    actual, expected = RangeFile(Memory(content, tail)), io.BytesIO(content)  # type: ignore[arg-type]
    for what, number in script:
        if what == "read":
            assert actual.read(number) == expected.read(number)
        else:
            whence = {"seek": io.SEEK_SET, "end": io.SEEK_END, "on": io.SEEK_CUR}[what]
            offset = number or 0
            if whence == io.SEEK_CUR:  # BytesIO refuses to go before the beginning, we stop there
                offset, whence = max(0, expected.tell() + offset), io.SEEK_SET
            assert actual.seek(offset, whence) == expected.seek(offset, whence)
        assert actual.tell() == expected.tell()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(lambda request: ranged(CONTENT, request)) as running:
        yield running


OPTIONS = StorageOptions(timeout_s=30, retries=2)


def test_a_large_read_goes_out_in_pieces(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PIECE", 300_000)
    file = web_file(f"{server.address}/x", OPTIONS).open()
    server.requests.clear()
    file.seek(10)
    assert file.read(1_500_000) == CONTENT[10:1_500_010]
    wanted = sorted(request.headers["range"] for request in server.requests)
    assert wanted == sorted(f"bytes={10 + n * 300_000}-{9 + (n + 1) * 300_000}" for n in range(5))


def test_a_piece_that_fails_is_fetched_again_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PIECE", 300_000)
    file = web_file(f"{server.address}/x", OPTIONS).open()
    server.requests.clear()
    server.queue.append(Answer(503))
    assert file.read(1_500_000) == CONTENT[:1_500_000]
    assert len(server.requests) == 6
    server.queue.extend([Answer(503)] * 50)
    with pytest.raises(Unavailable) as caught:
        file.read(500_000)
    assert "\n" not in str(caught.value)


def test_parts_of_two_versions_are_never_mixed() -> None:
    etag = '"v1"'

    def changing(request: Request) -> Answer:
        return ranged(CONTENT, request, etag)

    with serving(changing) as server:
        file = web_file(f"{server.address}/x", OPTIONS).open()
        assert file.read(10) == CONTENT[:10]
        etag = '"v2"'
        with pytest.raises(Conflict, match="changed or deleted meanwhile"):
            file.read(1_000_000)


def test_parquet_through_ranges_takes_few_requests() -> None:
    table = pa.table({"row": range(20_000), "wide": ["x" * 50] * 20_000, "other": [n * 0.5 for n in range(20_000)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=5000, compression="none", use_dictionary=False)
    content = sink.getvalue().to_pybytes()
    assert len(content) > 1_000_000
    with serving(lambda request: ranged(content, request)) as own:
        file = pq.ParquetFile(web_file(f"{own.address}/t.parquet", OPTIONS).open(), pre_buffer=True)
        assert len(own.requests) == 1  # size, version and footer in one
        assert file.read(["row"]).equals(table.select(["row"]))
        assert len(own.requests) <= 5  # a row group each, at most
        assert file.read().equals(table)


def test_a_machine_without_ca_certificates_is_an_error_that_the_user_can_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(name, "/nowhere")
    with pytest.raises(AccessDenied, match=r"^https://host/x\.parquet\S*: this .* install the package ca-certificates"):
        web_file("https://host/x.parquet?signature=secret", OPTIONS)
