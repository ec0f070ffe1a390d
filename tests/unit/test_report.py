"""Reports: their content for datasets and runs, and pages without dependencies."""

import io
import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image

from sdp import charts
from sdp.charts import Line
from sdp.cli import main
from sdp.console import visible
from sdp.datasets import tombstones
from sdp.datasets.manifest import finish
from sdp.datasets.outcomes import FAILED, WRITTEN, Outcome, account_table
from sdp.datasets.parts import write_part
from sdp.datasets.tombstones import Takedown
from sdp.errors import DatasetError
from sdp.report import page
from sdp.report.data import small
from sdp.report.sections import _default_file, gather, write_report
from sdp.storage import open_storage
from tests.kit import LAYOUT, begin_images, make_images, make_latents
from tests.unit.test_inspect_run import make_run, publish


def picture(colour: str, side: int = 8) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(sink, "PNG")
    return sink.getvalue()


def make_pictures(root: Path, caption: str = "a red square") -> None:
    """An images dataset with real pictures, whose every fifth row has failed."""
    output = begin_images(root, files=[("a.parquet", 40)])
    for work in output.pending():
        outcomes = [
            Outcome(row, FAILED, "http_status", f"404 of {row}", attempts=2) if row % 5 == 0 else Outcome(row, WRITTEN)
            for row in range(work.unit.start, work.unit.stop)
        ]
        rows = [outcome.row for outcome in outcomes if outcome.outcome == WRITTEN]
        table = pa.table(
            {
                "row": pa.array(rows, pa.int64()),
                "caption": [f"{caption} {row}" for row in rows],
                "image": pa.array([picture("red")] * len(rows), pa.binary()),
                "width": pa.array([8] * len(rows), pa.int32()),
                "height": pa.array([8] * len(rows), pa.int32()),
            }
        )
        write_part(output.storage, "images", work, table, account_table(outcomes), layout=LAYOUT)
    finish(output, input={"uri": str(root / "source")})


def pictures_of(section: page.PageSection) -> page.Gallery:
    (pictures,) = [block for block in section.blocks if isinstance(block, page.Gallery)]
    return pictures


def test_a_report_has_each_subject_and_what_it_was_made_from_once(tmp_path: Path) -> None:
    make_images(tmp_path)
    make_latents(tmp_path)
    make_run(tmp_path)
    for names in (["run"], ["latents", "run", "images"]):
        sections = gather([str(tmp_path / name) for name in names], pictures=0)
        assert [section.title for section in sections] == ["Training", "Images", "Latents"]
    assert sections[0].verdict == "At step 8, after 1 recovery; not ended; no job holds its lease."
    assert dict(sections[0].figures)["img/s"] == "90"


def test_a_source_that_has_been_moved_away_is_left_out(tmp_path: Path) -> None:
    make_images(tmp_path)
    make_latents(tmp_path)
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    assert [section.title for section in gather([str(tmp_path / "latents")], pictures=0)] == ["Latents"]


def test_pictures_come_with_caption_and_address_and_failures_with_their_detail(tmp_path: Path) -> None:
    make_pictures(tmp_path)
    (section,) = gather([str(tmp_path / "images")], pictures=10)
    ((_, tiles),) = pictures_of(section).rows
    assert len(tiles) == 10
    for tile in tiles:
        row = int(tile.caption.split()[-1])
        assert tile.note == f"row {row}: 8 × 8"
        assert tile.data == picture("red")
    (reasons,) = [block for block in section.blocks if block.title == "Filtered and failed rows"]
    assert isinstance(reasons, page.Table)
    ((reason, count, _, _, examples),) = reasons.rows
    assert (reason, count, examples) == ("http_status", 8, "row 0 404 of 0; row 5 404 of 5; row 10 404 of 10")


def test_pictures_taken_down_are_not_shown_but_counted(tmp_path: Path) -> None:
    make_pictures(tmp_path)
    gone = [row for row in range(40) if row % 5 and row not in (1, 17)]
    tombstones.add(open_storage(str(tmp_path / "images")), [Takedown("row", str(row)) for row in [*gone, 999]])
    (section,) = gather([str(tmp_path / "images")], pictures=40)
    ((_, tiles),) = pictures_of(section).rows
    assert {tile.note.partition(":")[0] for tile in tiles} <= {"row 1", "row 17"}
    assert pictures_of(section).title == f"{len(tiles)} pictures from the whole dataset; not shown: 30 taken down"


def test_no_picture_is_shown_where_it_is_not_known_which_are_taken_down(tmp_path: Path) -> None:
    make_pictures(tmp_path)
    open_storage(str(tmp_path / "images")).publish("_tombstones/000000.pq", b"damaged")
    (section,) = gather([str(tmp_path / "images")], pictures=40)
    assert not [block for block in section.blocks if isinstance(block, page.Gallery)]
    (table,) = [block for block in section.blocks if isinstance(block, page.Table) and block.title == "Pictures"]
    assert "the takedowns cannot be read" in str(table.rows[0][0])


def test_a_damaged_page_is_named_and_its_pictures_are_not_shown(tmp_path: Path) -> None:
    make_pictures(tmp_path)
    for part in (tmp_path / "images" / "parts").iterdir():
        data = bytearray(part.read_bytes())
        at = data.index(picture("red")[:20]) + 30
        data[at] ^= 4
        part.write_bytes(data)
    (section,) = gather([str(tmp_path / "images")], pictures=40)
    assert not section.good
    assert all(any(f"00000000{n}.parquet" in line for line in section.problems) for n in range(4))
    assert pictures_of(section).rows == []


def test_a_picture_keeps_the_size_of_a_model_and_a_larger_one_is_made_smaller() -> None:
    for size, expected in (((600, 400), (600, 400)), ((1500, 1000), (1024, 683))):
        noise = io.BytesIO()
        Image.effect_noise(size, 90).save(noise, "PNG")
        with Image.open(io.BytesIO(small(noise.getvalue(), "x.png"))) as opened:
            assert (opened.size, opened.format) == (expected, "JPEG")


def test_a_picture_that_cannot_be_decoded_is_a_problem_and_the_others_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path)
    run = open_storage(str(tmp_path / "run"))
    publish(run, "samples/step-000000004/prompts.json", {"000.png": "a", "001.png": "b"})
    run.publish("samples/step-000000004/000.png", b"\x89PNG\r\n\x1a\n" + b"x" * 50_000)
    run.publish("samples/step-000000004/001.png", picture("red"))
    run.publish("drawn/x.png", b"y" * 50_000)
    run.publish("profile/summary.txt", b"\xff")
    (section,) = gather([str(tmp_path / "run")], pictures=10)
    damaged = [line for line in section.problems if "not a picture that sdp decodes" in line]
    files = ["samples/step-000000004/000.png", "drawn/x.png"]
    assert [line.split(": ")[0] for line in damaged] == [run.uri_of(file) for file in files]
    galleries = [block for block in section.blocks if isinstance(block, page.Gallery)]
    assert [gallery.rows for gallery in galleries] == [[("b", [page.Tile(picture("red"), "b", "step 4", "")])], []]


def test_nothing_in_a_page_comes_from_elsewhere_or_is_taken_for_markup(tmp_path: Path) -> None:
    make_pictures(tmp_path, caption='<script>alert(1)</script> & "quotes" \x1b]0;a\x07\x9b2J\u202e' + "word " * 100_000)
    make_run(tmp_path)
    _, count = write_report([str(tmp_path / "images"), str(tmp_path / "run")], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert count == 2
    assert "<script" not in text
    links = re.findall(r'(?:src|href)="([^"]{0,20})', text) + re.findall(r"url\(([^)]{0,20})", text)
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert len(text) < 100_000, "captions are cut"
    assert "quotes&#34; \\x1b]0;a\\x07\\x9b2J\\u202eword" in text
    assert text == visible(text)


def test_without_a_name_the_page_is_written_beside_its_subject(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pictures(tmp_path)
    make_run(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["report", "../images", str(tmp_path / "run"), "--pictures", "3"]) == 0
    assert f"wrote {tmp_path}/images-report.html: 2 sections;" in capsys.readouterr().err
    assert (tmp_path / "images-report.html").read_text().count("<img ") == 3
    assert main(["report", str(tmp_path / "run/checkpoints/latest")]) == 0
    assert (tmp_path / "run-report.html").is_file()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert _default_file("s3://bucket/runs/sd2/checkpoints/latest").name == "sd2-report.html"
    for options, message in (
        (["--pictures", "-1"], "--pictures: expected 0 or more, got -1"),
        (["--out", "no/r.html"], "--out: expected a file in an existing folder, got 'no/r.html'"),
        (["--out", "."], "--out: .: cannot be written (Is a directory); choose another path"),
    ):
        assert main(["report", "../images", *options]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (1234.0, 1236.0, [1234.0, 1234.5, 1235.0, 1235.5, 1236.0]),
    ],
)
def test_an_axis_has_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_a_curve_leaves_out_what_is_no_number() -> None:
    svg = charts.lines([Line("", range(6), [1.0, 2.0, None, 3.0, float("nan"), 1.0])], x_name="step")
    (points,) = re.findall(r'<polyline points="([^"]*)"', svg)
    assert len(dict.fromkeys(points.split())) == 4
    assert "<polyline" in charts.lines([Line("", [1, 2], [0.0, 0.0])], x_name="step")
    assert "no data yet" in charts.lines([Line("", [1, 2], [None, float("inf")])], x_name="step")


def test_shares_are_of_the_whole() -> None:
    bar = page.Bar("Time", [("a", 1.0, "one"), ("b", 3.0, "three"), ("c", 0.0, "none")])
    section = page.PageSection("s", "uri", "good", blocks=[bar])
    text = page.page_of("t", [section]).decode()
    assert 'style="flex:0.25000;background:var(--a)" title="a 25.0% (one)"' in text
    assert 'style="flex:0.75000;background:var(--b)" title="b 75.0% (three)"' in text
    assert text.count('<i style="flex') == 2
    assert "c 0.0% (none)</li>" in text
    assert page.text_of(section).endswith("Time\na  25.0% (one)\nb  75.0% (three)\nc  0.0% (none)")


def test_pictures_of_a_prompt_stand_in_a_row_of_their_own(tmp_path: Path) -> None:
    output = begin_images(tmp_path, files=[("a.parquet", 8)])
    (work,) = output.pending()
    table = pa.table(
        {
            "row": pa.array(range(8), pa.int64()),
            "prompt": [f"prompt {row // 4}" for row in range(8)],
            "image": pa.array([picture("red")] * 8, pa.binary()),
            "seed": pa.array(range(8), pa.int64()),
        }
    )
    account = account_table([Outcome(row, WRITTEN) for row in range(8)])
    write_part(output.storage, "images", work, table, account, layout=LAYOUT)
    finish(output)
    (section,) = gather([output.storage.uri], pictures=8)
    assert [(prompt, [tile.note for tile in tiles]) for prompt, tiles in pictures_of(section).rows] == [
        ("prompt 0", [f"row {row} · seed {row}" for row in (0, 1, 2, 3)]),
        ("prompt 1", [f"row {row} · seed {row}" for row in (4, 5, 6, 7)]),
    ]
    assert page.page_of("t", [section]).count(b"<img ") == 8


def test_a_run_of_two_phases_has_a_section_for_each_and_a_checkpoint_means_its_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    undamaged = tmp_path / "whole"
    for phase in ("phase-1", "phase-2"):
        shutil.copytree(tmp_path / "run", undamaged / phase)
    sections = gather([str(undamaged), str(undamaged / "phase-2" / "checkpoints" / "latest")])
    assert [section.title for section in sections] == ["Training, phase 1", "Training, phase 2"]


def text_between(text: str, start: str, end: str) -> str:
    return text[text.index(start) : text.index(end, text.index(start))]


def test_pictures_come_first_and_columns_sources_and_settings_are_folded(tmp_path: Path) -> None:
    make_pictures(tmp_path)
    make_latents(tmp_path)
    samples = make_run(tmp_path).child("samples/step-000000004")
    samples.publish("000.png", picture("red"))
    samples.publish("prompts.json", json.dumps({"000.png": "a red square"}).encode())
    open_storage(str(tmp_path / "run")).publish("drawn/a-cat-step-000000004-0.png", picture("blue"))
    text = page.page_of("t", gather([str(tmp_path / "run")], pictures=20)).decode()
    run, images = text_between(text, 'id="s0"', "</section>"), text_between(text, 'id="s1"', "</section>")
    assert re.findall(r"<(?:h3|figcaption)>([^<]*)<", run.partition("Details: ")[0]) == [
        "Drawn during training", "Drawn on request", "Loss", "History", "Bad rows",
    ]  # fmt: skip
    assert "a-cat-step-000000004-0.png" in run.partition("Details: ")[0]
    assert run.index("Details: Checkpoints, Made from, Settings, Configuration") < run.index("<h3>Made from</h3>")
    assert images.index("<img ") < images.index("Filtered and failed rows") < images.index("404 of 0")
    assert images.index("Details: ") < images.index("<h3>Columns</h3>")
    shown, more = images.split("<summary>8 more</summary>")
    assert (shown.count("<img "), more.count("<img ")) == (12, 8)
    digest = re.search(r"<summary>([0-9a-f]{12})</summary>\1[0-9a-f]{52}</details>", run)
    assert digest, "a digest is cut, with a click for the rest"


def test_the_steps_of_a_prompt_go_from_left_to_right_in_a_row_that_begins_at_its_end() -> None:
    tiles = [page.Tile(picture("red"), "a prompt", f"step {step}") for step in (1, 2, 3)]
    text = page.page_of("t", [page.PageSection("s", "uri", "good", blocks=[page.Gallery("g", [("p", tiles)])])])
    assert re.findall(rb"<small>step (\d)", text) == [b"3", b"2", b"1"]
    assert b"flex-direction: row-reverse" in text
    assert b".strip img { min-width: 256px; max-width: calc(100vw - 58px) }" in text, "a phone shows it whole"


INFINITE = b'{"step":1,"samples":1,"epoch":0,"workers":1,"epoch_done":NaN,"samples_per_s":1e999,"seconds":1}'
STEP = "step-000000010"
METRICS = "metrics/000001-000000000.jsonl"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (METRICS, b"\xff\xfe{{{\n[]\n3\n{}\n" + b"[" * 100_000 + b"\n"),
        (METRICS, json.dumps({"step": "10", "samples": 1, "epoch": 0, "workers": 1}).encode()),
        (METRICS, INFINITE),
        ("events.jsonl", b'{"event": "end", "time": "2026"}\n{"event": 3}\n{"time": null}\ntorn of'),
        (f"samples/{STEP}/prompts.json", b'["../../x"]'),
        (f"samples/{STEP}/prompts.json", b'{"000.png": 3}'),
        (f"checkpoints/{STEP}/complete.json", b'{"format": 1}'),
        (f"checkpoints/{STEP}/complete.json", b'{"format": 1, "state": {"samples": -1}}'),
    ],
)
def test_a_damaged_file_of_a_run_is_named_and_the_rest_is_shown(tmp_path: Path, name: str, content: bytes) -> None:
    make_run(tmp_path)
    run = open_storage(str(tmp_path / "run"))
    run.publish("checkpoints/step-000000010/tensors.json", b"")
    run.publish(name, content)
    (section,) = gather([run.uri])
    assert not section.good
    assert all(run.uri_of(name) in line or "step-000000010" in line for line in section.problems)
    page.page_of("t", [section])


def test_a_damaged_thing_has_a_section_that_says_so_beside_those_that_are_whole(tmp_path: Path) -> None:
    make_images(tmp_path)
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "evaluation.json").write_text('{"fid": 3, "generated": {}}')
    sections = gather([str(tmp_path / "evaluation"), str(tmp_path / "images")], pictures=0)
    assert [section.title for section in sections] == ["Images", "Damaged"]
    assert "evaluation.json: malformed" in sections[1].verdict
    assert not sections[1].good
    with pytest.raises(DatasetError, match=r"evaluation\.json: malformed .*; evaluate again"):
        gather([str(tmp_path / "evaluation")])
