"""Parquet footers and strings, tables, tars and JSON."""

import io
import json
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sdp.config.download import DownloadSource, FiltersConfig
from sdp.datasets.output import Head, open_output
from sdp.datasets.source import freeze_source
from sdp.datasets.units import Unit, Work
from sdp.download.plan import Rules, plan
from sdp.download.spans import read_span, spans
from sdp.errors import SdpError
from sdp.sources.groups import RowGroup
from sdp.sources.pieces import Piece, Planner
from sdp.sources.reading import Columns, read_piece
from sdp.sources.tars import count_samples
from sdp.storage import list_source, open_storage
from tests.growth import Case
from tests.growth.forged import claim_rows, repeat_text


def _download(folder: Path) -> Callable[[], object]:
    """Return a call that plans a download of a folder's files."""
    rules = Rules(DownloadSource(uri="in", columns=("note",)), FiltersConfig())

    def read() -> None:
        output = open_output(open_storage(str(folder / "out")), Head("images", 10_000, False, {}))
        output = freeze_source(output, list_source(str(folder)), rules.columns(), carried=["note"])
        for span in spans(output.index, output.pending(), workers=1):
            for task in read_span(span, rules.columns(), output.storage):
                plan(task.table, task.rows, rules)

    return read


def _footer(rows: int, folder: Path) -> Callable[[], object]:
    path = folder / "in.parquet"
    pq.write_table(pa.table(dict.fromkeys(("url", "caption", "note"), pa.nulls(250, pa.string()))), path)
    claim_rows(path, 250, rows**2)
    return _download(folder)


def _strings(length: int, folder: Path) -> Callable[[], object]:
    """Repeat one text of 5 kB for each piece in a row for each piece."""
    at = [0] * length
    repeat_text(folder / "in.parquet", ["x" * 5_000 * length], url=at, caption=at, note=at)
    return _download(folder)


def _lists(length: int, folder: Path) -> Callable[[], object]:
    """Repeat one text of 5 kB for each piece in a row for each piece, each alone in lists and a map."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * length, pa.int32()), pa.array(["x" * 5_000 * length]))
    bounds = pa.array(range(length + 1), pa.int32())
    lists = [
        pa.ListArray.from_arrays(bounds, texts),
        pa.FixedSizeListArray.from_arrays(texts, 1),
        pa.MapArray.from_arrays(bounds, pa.array(map(str, range(length))), texts),
    ]
    plain = dict.fromkeys(("url", "caption"), pa.array(["x"] * length))
    note = pa.StructArray.from_arrays(lists, ["list", "pair", "map"])
    pq.write_table(pa.table({**plain, "note": note}), folder / "in.parquet", compression="zstd")
    return _download(folder)


def _fixed(length: int, folder: Path) -> Callable[[], object]:
    """Repeat bytes of one length, 5 kB for each piece, in a row for each piece."""
    text = b"x" * 5_000 * length
    values = pa.array([text], pa.binary(len(text))).take(pa.array([0] * length))
    return _read_twice(folder, values, dictionary_pagesize_limit=1 << 30)


def _numbers(length: int, folder: Path) -> Callable[[], object]:
    """Repeat a number in a list of one row, 200 times the square of the pieces."""
    values = pa.array(np.zeros(200 * length**2, np.int64))
    note = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    pq.write_table(pa.table({"url": ["x"], "caption": ["x"], "note": note}), folder / "in.parquet", compression="zstd")
    return _download(folder)


def _images(length: int, folder: Path) -> Callable[[], object]:
    """Repeat one image of 5 kB for each piece in a row for each piece."""
    at = [0] * length
    path = repeat_text(folder / "in.parquet", ["x" * 5_000 * length], image=at, caption=at)
    return _process(RowGroup(str(path), 0, length, 0))


def _differing(length: int, folder: Path) -> Callable[[], object]:
    """Give 100 rows a text of their own, of 5 kB for each piece."""
    texts = [f"{row}" + "x" * 5_000 * length for row in range(100)]
    return _read_twice(folder, texts)


def _read_twice(folder: Path, values: object, **options: int) -> Callable[[], object]:
    """Write every column with these values; return a function that reads them for encoding and for a download."""
    table = pa.table(dict.fromkeys(("url", "caption", "note", "image"), values))
    pq.write_table(table, folder / "in.parquet", compression="zstd", **options)
    download = _download(folder)

    def read() -> None:
        with suppress(SdpError):
            _read_whole(folder)
        download()

    return read


def _one_group(rows: int, folder: Path) -> Callable[[], object]:
    """Write a row for each piece into one row group, which units and pieces share."""
    empty = pa.array([b""], pa.binary()).take(pa.array([0] * rows))
    pq.write_table(pa.table({"image": empty, "caption": pa.nulls(rows, pa.string())}), folder / "in.parquet")
    return lambda: _read_whole(folder)


def _read_whole(folder: Path) -> None:
    """Read the pieces of a folder's files, as process does."""
    output = open_output(open_storage(str(folder / "encoded")), Head("latents", 5_000, False, {}))
    output = freeze_source(output, list_source(str(folder)), ["image", "caption"])
    planner = Planner(output.index, None, 100)
    for work in output.pending():
        for piece in planner(work):
            for _ in read_piece(piece, Columns()):
                pass


def _process(group: RowGroup) -> Callable[[], object]:
    piece = Piece(Work(Unit(0, 0, group.rows)), 0, (group,), 0, group.rows)
    return lambda: list(read_piece(piece, Columns()))


def _tar(samples: int, folder: Path) -> Callable[[], object]:
    """Write a picture for each piece, each with the same JSON."""
    captions = json.dumps({"caption": "a"}).encode()
    return _process_tar(
        folder, [(f"{n}.{kind}", data) for n in range(samples) for kind, data in (("jpg", b"x"), ("json", captions))]
    )


def _json(keys: int, folder: Path) -> Callable[[], object]:
    data = json.dumps({f"key {number}": [number] for number in range(keys)} | {"caption": "a"}).encode()
    return _process_tar(folder, [("0.jpg", b"x"), ("0.json", data)])


def _headers(records: int, folder: Path) -> Callable[[], object]:
    """Give a member's extended header a record for each piece."""
    return _process_tar(folder, [("0.jpg", b"x")], {f"key{number}": "v" for number in range(records)})


def _global_headers(records: int, folder: Path) -> Callable[[], object]:
    """Precede a picture for every ten pieces with a global header of as many records, and give each one of its own."""
    path, samples = folder / "in.tar", records // 10
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={f"{n}": "v" for n in range(records)}) as tar:
        for number in range(samples):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.pax_headers = {"key": "v"}
            tar.addfile(member)
    read = _process(RowGroup(str(path), 0, samples, 0))
    return lambda: (count_samples(str(path)), read())


def _sparse(samples: int, folder: Path) -> Callable[[], object]:
    """Write empty pictures that claim 250 MB of holes."""
    headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": f"{250_000_000}"}
    return _process_tar(folder, [(f"{n}.jpg", b"") for n in range(samples)], headers)


def _process_tar(
    folder: Path, members: list[tuple[str, bytes]], headers: dict[str, str] | None = None
) -> Callable[[], object]:
    path = folder / "in.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = len(data), headers or {}
            tar.addfile(member, io.BytesIO(data))
    samples = sum(name.endswith(".jpg") for name, _ in members)
    read = _process(RowGroup(str(path), 0, samples, 0))
    return lambda: (count_samples(str(path)), read())


CASES: tuple[Case, ...] = (
    Case("Parquet footer", 30_000, _footer, full=1),
    Case("Parquet strings", 100, _strings, full=3),
    Case("Parquet lists", 100, _lists, full=3),
    Case("Parquet bytes of one length", 50, _fixed, full=6),
    Case("Parquet numbers", 100, _numbers, full=1),
    Case("Parquet images", 100, _images, full=3),
    Case("Parquet strings that differ", 50, _differing, full=3),
    Case("Parquet row group", 20_000, _one_group),
    Case("tar", 500, _tar),
    Case("tar header", 10_000, _headers, full=16),
    Case("tar of global headers", 5_000, _global_headers, full=4),
    Case("sparse tar", 500, _sparse),
    Case("JSON in a tar", 20_000, _json),
)
