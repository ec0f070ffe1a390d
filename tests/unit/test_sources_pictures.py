"""Pictures from wherever they come: what each row is, and what cannot be a source."""

import codecs
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.config.process import JoinedTable
from sdp.datasets.manifest import finish
from sdp.datasets.outcomes import WRITTEN, Outcome, account_table
from sdp.datasets.output import Head, open_output
from sdp.datasets.parts import Layout, write_part
from sdp.datasets.source import freeze_source
from sdp.datasets.units import Unit, Work
from sdp.errors import DatasetError, UserError
from sdp.sources.groups import RowGroup
from sdp.sources.pictures import Selection, open_pictures
from sdp.sources.pieces import Piece
from sdp.sources.reading import Columns, SourceRow, read_piece
from sdp.sources.tars import read_samples
from sdp.storage import StorageOptions, list_source, open_storage
from tests.kit import write_files
from tests.process_kit import picture

OPTIONS = StorageOptions()
UNIT = 4


def rows_of(uri: Path, out: Path, **settings: Any) -> list[SourceRow]:
    """All rows, read unit by unit in pieces of at most three."""
    pictures = open_pictures("source", str(uri), OPTIONS, Selection(required=True, **settings))
    head = Head("latents", UNIT, pictures.dataset is not None, {})
    output = pictures.freeze(open_output(open_storage(str(out)), head), None)
    planner = pictures.planner(output, 3, OPTIONS)
    rows = []
    for work in output.pending():
        for piece in planner(work):
            rows += list(read_piece(piece, pictures.columns, options=OPTIONS))
    return rows


def fields_of(rows: list[SourceRow]) -> list[tuple[int, str, bytes, str | None]]:
    return [(row.row, row.key, bytes(row.image or b""), row.caption) for row in rows]


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_a_folder_of_files_is_a_row_for_each_picture_with_the_text_beside_it(tmp_path: Path) -> None:
    names = ["a.jpg", "b.JPEG", "c.png", "deep/d.webp", "deep/e.v2.jpg", "f.jpg"]
    write_files(tmp_path / "pictures", {name: picture(number) for number, name in enumerate(names)})
    for number, name in enumerate(names[:-1]):
        (tmp_path / "pictures" / name).with_suffix(".txt").write_text(f" number {number}\n")
    keys = ["a", "b", "c", "d", "e.v2", "f"]
    captions = [*(f"number {number}" for number in range(5)), None]
    rows = fields_of(rows_of(tmp_path / "pictures", tmp_path / "out"))
    assert rows == [(n, keys[n], picture(n), captions[n]) for n in range(6)]
    same = fields_of(rows_of(tmp_path / "pictures", tmp_path / "same", text="a photo of unqtkn cat"))
    assert [row[3] for row in same] == ["a photo of unqtkn cat"] * 6


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("tar", [False, True])
def test_a_caption_has_no_byte_order_mark_whatever_its_coding(tmp_path: Path, coding: str, tar: bool) -> None:
    mark = codecs.BOM_UTF16_LE if coding == "utf-16-le" else codecs.BOM_UTF16_BE if coding == "utf-16-be" else b""
    files = {"a.jpg": picture(0), "a.txt": mark + "a café\n".encode(coding)}
    if tar:
        write_tar(tmp_path / "source/a.tar", files)
    else:
        write_files(tmp_path / "source", files)
    (row,) = rows_of(tmp_path / "source", tmp_path / "out")
    assert row.caption == "a café"


def test_a_picture_draws_one_line_of_its_text_by_the_seed_and_its_address(tmp_path: Path) -> None:
    for name, content in (("jpg", ""), ("txt", "one\r\n\n two \nthree")):
        write_files(tmp_path / "pictures", {f"{number:02d}.{name}": content for number in range(30)})
    drawn = [row.caption for row in rows_of(tmp_path / "pictures", tmp_path / "out")]
    assert {*drawn} == {"one", "two", "three"}
    assert drawn == [row.caption for row in rows_of(tmp_path / "pictures", tmp_path / "same")]


def test_tars_of_webdataset_are_a_row_for_each_sample(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "tars/000.tar",
        {f"{n:05d}.{end}": data for n in range(6) for end, data in (("jpg", picture(n)), ("txt", b"text %d" % n))}
        | {"00006.json": b'{"caption": "no picture"}'},
    )
    write_tar(tmp_path / "tars/001.tar", {})
    write_tar(
        tmp_path / "tars/002.tar",
        {
            "part/x.cls": b"7",
            "part/x.png": picture(6),
            "part/x.json": json.dumps({"caption": "told", "alt": "other"}).encode(),
            "part/y.seg.webp": picture(7),
            "part/y.json": b"no json",
        },
    )
    expected = [(n, f"{n:05d}", picture(n), f"text {n}") for n in range(6)]
    expected += [(6, "part/x", picture(6), "told"), (7, "part/y", picture(7), None)]
    assert fields_of(rows_of(tmp_path / "tars", tmp_path / "out")) == expected
    assert fields_of(rows_of(tmp_path / "tars", tmp_path / "other", caption="alt"))[6][3] == "other"


def test_odd_samples_of_a_tar_keep_their_good_pictures(tmp_path: Path) -> None:
    odd = {
        "surrogate": rb'{"caption": "a \ud800 cat"}',
        "deep": b"[" * 100_000,
        "wide": b'{"caption": "%s"}' % (b"a" * 100_000),
        "long": b'{"caption": "%s"}' % (b"a" * (1 << 20)),
    }
    members = {
        f"{name}.{end}": data for name, text in odd.items() for end, data in (("jpg", picture(0)), ("json", text))
    }
    write_tar(tmp_path / "a.tar", {**members, "caf\udce9.jpg": picture(1), "last.jpg": picture(2)})
    rows = fields_of(rows_of(tmp_path / "a.tar", tmp_path / "out"))
    assert rows == [
        (0, "surrogate", picture(0), "a ? cat"),
        (1, "deep", picture(0), None),
        (2, "wide", picture(0), "a" * 65_536),
        (3, "long", picture(0), None),
        (4, "caf?", picture(1), None),
        (5, "last", picture(2), None),
    ]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_is_read_on_from_where_the_last_piece_ended(
    tmp_path: Path, form: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tarfile, "DEFAULT_FORMAT", form)
    names = [f"{'long ' * 40}{row:02}" for row in range(12)]
    write_tar(tmp_path / "a.tar", {f"{name}.{end}": name.encode() for name in names for end in ("cls", "jpg", "txt")})

    def keys(*pieces: tuple[int, int]) -> list[str]:
        samples = [read_samples(str(tmp_path / "a.tar"), "caption", *piece, None) for piece in pieces]
        return [key for piece in samples for key, *_ in piece]

    assert keys((0, 4), (4, 5), (8, 12), (2, 4), (3, 6)) == [*names[:5], *names[8:], *names[2:4], *names[3:6]]
    headers = []
    read = tarfile.TarInfo.frombuf
    monkeypatch.setattr(tarfile.TarInfo, "frombuf", classmethod(lambda _, *args: headers.append(1) or read(*args)))
    assert keys((6, 7)) == names[6:7]
    assert len(headers) < 20, "not those of the samples before"
    write_tar(tmp_path / "a.tar", {f"{name}.jpg": b"" for name in reversed(names)})
    assert keys((7, 9)) == names[4:2:-1], "another file"


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def pax(data: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header("pax", len(data), kind) + data + bytes(-len(data) % 512)


def old_sparse(name: str) -> bytes:
    """A header of GNU tar's old form: 500 MB of holes, and two blocks that list them."""
    block = bytearray(header(name, kind=tarfile.GNUTYPE_SPARSE))
    block[482:495] = b"\1" + b"%011o\0" % 500_000_000
    block[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(block[:148] + b" " * 8 + block[156:]))[0]
    return bytes(block) + bytes(504) + b"\1" + bytes(7) + bytes(512)


HOSTILE = {
    "long names": header("././@LongLink", kind=tarfile.GNUTYPE_LONGNAME) * 5_000,
    "records": pax(b"2 " * 500_000 + b"=\n"),
    "digits": pax(b"1" * 1_000_000),
    "a charset": pax(b"9" * 5_000 + b" hdrcharset=BINARY\n"),
    "global headers": pax(b"".join(b"17 %06d=%06d\n" % (n, n) for n in range(20_000)), tarfile.XGLTYPE),
    "old sparse": old_sparse("0.jpg") + header("1.png", 3) + b"odd" + bytes(509),
    "sparse": pax(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n33 GNU.sparse.realsize=100000000\n"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_of_a_tar_cost_at_most_one_row(tmp_path: Path, name: str) -> None:
    data = picture(0)
    good = [header(f"{row}.jpg", len(data)) + data + bytes(-len(data) % 512) for row in range(8)]
    (tmp_path / "a.tar").write_bytes(HOSTILE[name] + b"".join(good) + bytes(10_240))
    images = [row.image and bytes(row.image) for row in rows_of(tmp_path / "a.tar", tmp_path / "out")]
    expected = {"sparse": [None, *[data] * 7], "old sparse": [None, b"odd", *[data] * 8]}
    assert images == expected.get(name, [data] * 8)


@pytest.mark.parametrize("size", [-512, 1 << 40])
def test_a_tar_whose_header_claims_an_impossible_size_is_refused_in_one_line(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.tar").write_bytes(header("0.jpg", size) + bytes(10_240))
    with pytest.raises(DatasetError, match=r"a.tar: not a readable tar .*; make it again"):
        rows_of(tmp_path / "a.tar", tmp_path / "out")


def test_a_piece_of_large_samples_is_never_in_memory_whole(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {f"{row}.jpg": b"x" * (20 << 20) for row in range(6)})
    piece = Piece(Work(Unit(0, 0, 6)), 0, (RowGroup(str(tmp_path / "a.tar"), 0, 6, 0),), 0, 6)
    before = pa.total_allocated_bytes()
    peaks = [pa.total_allocated_bytes() - before for row in read_piece(piece, Columns(), options=OPTIONS)]
    assert len(peaks) == 6
    assert max(peaks) < 100 << 20, "of 120"


def test_a_table_is_joined_to_image_files_by_their_names_below_the_folder(tmp_path: Path) -> None:
    names = ["cat/1.jpg", "cat/1.png", "dog/1.bmp"]
    write_files(tmp_path / "pictures", dict.fromkeys(names, picture(0)))
    captions = {"file": names, "caption": ["one", "two", "three"]}
    pq.write_table(pa.table(captions), tmp_path / "captions.parquet")
    tables = [JoinedTable(uri=str(tmp_path / "captions.parquet"), by="file")]
    for uri in ("pictures", "pictures/*/*"):
        rows = rows_of(tmp_path / uri, tmp_path / "out" / uri.replace("*", "all"), tables=tables)
        assert [row.caption for row in rows] == ["one", "two", "three"]


IMG2DATASET = [
    {"key": "000000000", "caption": "number 0", "status": "success", "error_message": None},
    {"key": "000000001", "caption": "1", "status": "failed_to_download", "error_message": "HTTP Error 404: gone"},
    {"key": "000000002", "caption": "number 2", "status": "success", "error_message": None},
]
"""Two images and a failure, as the writers of img2dataset 1.47 list them."""
STATS = {"00000_stats.json": '{"count": 3, "successes": 2}'}


def test_tars_of_img2dataset_are_a_source_by_a_pattern(tmp_path: Path) -> None:
    members = dict[str, bytes]()
    for number in (0, 2):
        listed = IMG2DATASET[number]
        form = {"jpg": picture(number), "txt": b"number %d" % number, "json": json.dumps(listed).encode()}
        members |= {f"{listed['key']}.{end}": data for end, data in form.items()}
    write_tar(write_files(tmp_path / "old", STATS) / "00000.tar", members)
    pq.write_table(pa.Table.from_pylist(IMG2DATASET), tmp_path / "old/00000.parquet")
    rows = fields_of(rows_of(tmp_path / "old/*.tar", tmp_path / "out"))
    assert rows == [(0, "000000000", picture(0), "number 0"), (1, "000000002", picture(2), "number 2")]
    with pytest.raises(UserError, match=r"both .* and Parquet files; name a folder or a pattern of one kind"):
        rows_of(tmp_path / "old", tmp_path / "both")


def test_parquet_of_img2dataset_has_a_row_for_each_failure_too(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(IMG2DATASET).append_column("jpg", [[picture(0), None, picture(2)]])
    pq.write_table(table, write_files(tmp_path / "old", STATS) / "0.parquet")
    rows = rows_of(tmp_path / "old", tmp_path / "out", image="jpg")
    assert fields_of(rows) == [
        (0, "000000000", picture(0), "number 0"),
        (1, "000000001", b"", "1"),
        (2, "000000002", picture(2), "number 2"),
    ]


def test_drawn_samples_are_rows_with_their_prompts_and_addresses(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [f"p{n}" for n in range(6)]}), tmp_path / "prompts.parquet")
    storage = open_storage(str(tmp_path / "samples"))
    output = open_output(storage, Head("samples", 3, False, {}))
    output = freeze_source(output, list_source(str(tmp_path / "prompts.parquet")), ["prompt"])
    for work in output.pending():
        rows = list(range(work.unit.start, work.unit.stop))
        columns = {"row": rows, "prompt": [f"p{n}" for n in rows], "image": [picture(n) for n in rows]}
        account = account_table([Outcome(row, WRITTEN) for row in rows])
        write_part(storage, "samples", work, pa.table(columns), account, layout=Layout(row_group_rows=8))
    finish(output, input={})
    rows = rows_of(tmp_path / "samples", tmp_path / "out")
    assert fields_of(rows) == [(n, f"{n:012d}", picture(n), f"p{n}") for n in range(6)]


def test_parquet_without_captions_takes_one_for_all(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [picture(n) for n in range(5)]}), tmp_path / "a.parquet")
    rows = rows_of(tmp_path / "a.parquet", tmp_path / "out", text="a cat")
    assert fields_of(rows) == [(n, f"{n:012d}", picture(n), "a cat") for n in range(5)]
    with pytest.raises(DatasetError, match=r"source.caption_column: no column caption"):
        rows_of(tmp_path / "a.parquet", tmp_path / "other")


def test_an_invalid_source_of_pictures_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "pictures", {"a.jpg": picture(0)})
    with pytest.raises(UserError, match=r"^source.caption: the pictures at .* have no captions beside them"):
        rows_of(folder, tmp_path / "out")
    write_tar(folder / "b.tar", {"a.jpg": picture(0)})
    with pytest.raises(UserError, match=r"both pictures and tars; name a folder or a pattern of one kind"):
        rows_of(folder, tmp_path / "out")
    (folder / "b.tar").write_bytes(np.random.default_rng(0).bytes(4096))
    with pytest.raises(DatasetError, match=r"b.tar: not a readable tar .*; make it again"):
        rows_of(folder / "b.tar", tmp_path / "out")
    (folder / "b.tar.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"^source.uri: .*b.tar.gz: tars are read uncompressed"):
        rows_of(folder / "b.tar.gz", tmp_path / "out")
    columns = [pa.array([picture(0)]), pa.array(["a"]), pa.array(["k"]), pa.array([1])]
    pq.write_table(pa.table(columns, ["image", "caption", "key", "key"]), folder / "b.parquet")
    with pytest.raises(DatasetError, match=r"^source.uri: .*b.parquet has 2 columns key"):
        rows_of(folder / "b.parquet", tmp_path / "out")
    write_tar(folder / "b.tar", {"a.txt": b"no picture"})
    with pytest.raises(DatasetError, match=r"1 file without any row"):
        rows_of(folder / "b.tar", tmp_path / "out")
