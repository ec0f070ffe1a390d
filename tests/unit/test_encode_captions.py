"""Several captions of an image: which of them a row draws."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sdp.datasets.output import Head, open_output
from sdp.encode.pictures import Selection, open_pictures
from sdp.encode.reading import read_piece
from sdp.encode.recipe import draw
from sdp.errors import ConfigError, DatasetError, UserError
from sdp.storage import StorageOptions, open_storage
from tests.process_kit import config_of, picture

OPTIONS = StorageOptions()


def write_source(folder: Path, columns: dict[str, list[str | None]], group: int = 8) -> Path:
    """A plain source whose images are not looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = len(next(iter(columns.values())))
    table = pa.table({"image": pa.array([b"image"] * rows, pa.binary()), **columns})
    pq.write_table(table, folder / "p.parquet", row_group_size=group)
    return folder


def captions_of(source: Path, out: Path, caption: Any, *, piece: int = 5, seed: int = 0, unit: int = 20) -> list[Any]:
    pictures = open_pictures("source", str(source), OPTIONS, Selection(caption=caption, required=True))
    output = pictures.freeze(open_output(open_storage(str(out)), Head("latents", unit, False, {})), None, OPTIONS)
    planner = pictures.planner(output, piece, OPTIONS)
    pieces = [planned for work in output.pending() for planned in planner(work)]
    return [
        row.caption for planned in pieces for row in read_piece(planned, pictures.columns, options=OPTIONS, seed=seed)
    ]


def test_rows_draw_in_proportion_to_the_weights() -> None:
    drawn = Counter(draw(3, row, [1.0, 3.0, 0.0]) for row in range(8000))
    assert set(drawn) == {0, 1}
    assert abs(drawn[1] / 8000 - 0.75) < 0.02
    assert {draw(3, row, [0.0, 0.0]) for row in range(50)} == {0}, "zeros: the first"
    assert [draw(3, row, [1, 1]) for row in range(64)] != [draw(4, row, [1, 1]) for row in range(64)]


def test_a_row_draws_the_same_caption_however_the_source_is_cut(tmp_path: Path) -> None:
    columns: dict[str, list[str | None]] = {name: [f"{name}{row}" for row in range(60)] for name in ("alt", "caption")}
    source = write_source(tmp_path / "source", columns)
    drawn = captions_of(source, tmp_path / "out", {"caption": 1, "alt": 1})
    assert 15 < sum(text.startswith("alt") for text in drawn) < 45
    assert [int(text.lstrip("altcpion")) for text in drawn] == list(range(60)), "each row's own"
    turned = write_source(tmp_path / "turned", dict(reversed(columns.items())), group=60)
    same = captions_of(turned, tmp_path / "other", {"alt": 1, "caption": 1}, piece=60, unit=13)
    assert same == drawn, "neither pieces, units, row groups nor the order of columns matter"
    assert captions_of(source, tmp_path / "out", {"caption": 1, "alt": 1}, seed=9) != drawn


def test_empty_and_missing_captions_are_never_drawn(tmp_path: Path) -> None:
    own: list[str | None] = ["own", None, "", " ", None, "own"]
    synthetic: list[str | None] = ["new", "new", "new", "new", None, ""]
    source = write_source(tmp_path / "source", {"caption": own, "synthetic": synthetic})
    drawn = captions_of(source, tmp_path / "out", {"caption": 1, "synthetic": 0})
    assert drawn == ["own", "new", "new", "new", None, "own"], "a weight of 0 is for rows that have no other caption"
    drawn = captions_of(source, tmp_path / "out", {"caption": 1, "synthetic": 1000})
    assert drawn[1:] == ["new", "new", "new", None, "own"]


def test_columns_that_cannot_hold_captions_are_refused_before_anything_begins(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", {"caption": ["a"]})
    with pytest.raises(DatasetError, match=r"source\.caption_column: no column synthetic in .*; it has image, caption"):
        captions_of(source, tmp_path / "out", {"caption": 1, "synthetic": 1})
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.jpg").write_bytes(picture(0))
    (tmp_path / "files/a.txt").write_text("a")
    with pytest.raises(UserError, match=r"source\.caption_column: pictures have one caption; remove synthetic"):
        captions_of(tmp_path / "files", tmp_path / "out", {"caption": 1, "synthetic": 1})
    for wrong in ("{}", "{caption: -1}", "{image: 1}", "[caption]"):
        with pytest.raises(ConfigError, match=r"source\.caption_column: expected"):
            config_of(source, tmp_path / "out", "builtin:tiny", f"source.caption_column={wrong}")
