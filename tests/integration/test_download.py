"""The download stage end to end, in this process and on a Ray of this machine."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from scripts.demo import shapes
from sdp.cli import main
from sdp.datasets import tombstones
from sdp.datasets.manifest import part_infos
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN
from sdp.datasets.parts import read_account
from sdp.datasets.tombstones import Takedown
from sdp.download import job
from sdp.errors import DatasetError, SdpError
from sdp.storage import open_storage
from tests.download_kit import check_exactly_once, config_for, outcomes, plain_urls, write_urls, written_rows
from tests.kit import make_images, not_none
from tests.local_ray import one_node
from tests.misbehaving.server import ImageServer


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """From then on the jobs of this process are Ray's: tests that use it come last."""
    with one_node(cpus=2):
        yield


def test_a_download_writes_the_servers_images_and_a_rerun_does_nothing(server: ImageServer, tmp_path: Path) -> None:
    note = pa.array([b"no UTF-8: \xff" if number % 10 == 3 else b"note" for number in range(90)], pa.binary())
    types = {"url": pa.dictionary(pa.int32(), pa.string()), "caption": pa.string_view()}
    source = write_urls(
        tmp_path / "meta", plain_urls(server, 90), files=3, types=types, note=note.cast(pa.string(), safe=False)
    )
    config = config_for(source, tmp_path / "out", source={"columns": ["note"]})
    dataset = not_none(job.run(config)).dataset
    rows = check_exactly_once(dataset, range(90))
    assert len(rows) == 90
    assert server.stats.requests == 90
    for number, row in rows.items():
        assert row["caption"] == f"caption {number}"
        assert row["url"] == server.image_url(number)
        assert row["note"] == ("no UTF-8: \ufffd" if number % 10 == 3 else "note")
        drawn = shapes.sample(number % 40)
        assert (row["original_width"], row["original_height"]) == (drawn.width, drawn.height)
        with Image.open(io.BytesIO(row["image"])) as image:
            image.load()
            assert (image.size, image.format) == ((64, 64), "JPEG")
            assert shapes.dominant_shape_color(image, drawn.background) == drawn.color

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "parts").iterdir()}
    second = not_none(job.run(config)).dataset
    assert second.digest == dataset.digest
    assert server.stats.requests == 90
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "parts").iterdir()} == before


def test_a_redirect_is_held_to_the_lists_as_the_first_url_is(server: ImageServer, tmp_path: Path) -> None:
    other_host = server.image_url(1).replace("127.0.0.1", "localhost")
    targets = [server.image_url(0), other_host, server.image_url(2), server.image_url(3)]
    targets.append(other_host.replace("localhost", "ＬＯcal%68ost."))
    for name, entry in (("domains", "localhost"), ("urls", targets[2])):
        (tmp_path / name).write_text(entry)
    urls = [server.image_url(row, "redirect", to=target) for row, target in enumerate(targets)]
    lists = {name: [str(tmp_path / name)] for name in ("domains", "urls")}
    config = config_for(write_urls(tmp_path / "meta", urls), tmp_path / "out", blocklists=lists)
    (tmp_path / "out").mkdir()
    tombstones.add(make_images(tmp_path / "other").storage, [Takedown("url", targets[3])])
    (tmp_path / "other/images/_tombstones").rename(tmp_path / "out/_tombstones")
    dataset = not_none(job.run(config)).dataset
    reasons = {row: reason for row, (_, reason, _) in outcomes(dataset).items()}
    assert reasons == {0: None, 1: "blocked_domain", 2: "blocked_url", 3: "tombstone", 4: "blocked_domain"}
    assert server.stats.requests == 6, "five redirects and the one that was followed"


def test_a_caption_that_is_cut_holds_nothing_up_and_its_row_says_so(server: ImageServer, tmp_path: Path) -> None:
    captions = ["a" + "\u0315\u0300" * 750_000, *(f"caption {row}" for row in range(1, 20))]
    source = write_urls(tmp_path / "meta", plain_urls(server, 20), caption=captions)
    dataset = not_none(job.run(config_for(source, tmp_path / "out"))).dataset
    rows = check_exactly_once(dataset, range(20))
    assert rows[0]["caption"] == "à" + "\u0300" * 14 + "\u0315" * 15
    (info,) = part_infos(dataset.storage)
    details = read_account(dataset.storage, info.path)["detail"].to_pylist()
    assert details == ["column caption: more than 65,536 bytes, cut", *[None] * 19]


def test_a_retry_requests_only_failed_rows(
    server: ImageServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = plain_urls(server, 40)
    urls[7], urls[30] = server.image_url(7, "500", times=1), server.image_url(30, "404")
    source = write_urls(tmp_path / "meta", urls)
    config = config_for(source, tmp_path / "out", fetch={"retries": 0})
    job.run(config)
    asked = server.stats.requests
    later = write_urls(tmp_path / "more", [server.image_url(number) for number in range(100, 130)])
    (later / "00000.parquet").rename(source / "00001.parquet")

    part = tmp_path / "out" / "parts" / "000000001.parquet"
    part.rename(tmp_path / "away")
    with pytest.raises(DatasetError, match="1 part not downloaded yet; run the job without"):
        job.run(config, only_failed=True)
    (tmp_path / "away").rename(part)

    capsys.readouterr()
    assert job.run(config, only_failed=True, dry_run=True) is None
    assert "to do: 2 parts with 2 rows" in capsys.readouterr().err
    dataset = not_none(job.run(config, only_failed=True)).dataset
    said = capsys.readouterr().err
    check_exactly_once(dataset, range(40))
    assert server.stats.requests == asked + 2
    assert dataset.manifest.counts.failed == 1
    assert "download: 2 of 2 rows" in said
    assert "this run: 2 rows in " in said
    assert ", 1 of them written, 2 requests, " in said

    assert job.run(config.model_copy(update={"limit": 10}), dry_run=True) is None
    said = capsys.readouterr().err
    assert "limit: 10 is less than the 40 rows that already have addresses" in said
    assert "to do: 0 parts with 0 rows" in said
    assert job.run(config, dry_run=True) is None
    assert "to do: 2 parts with 30 rows" in capsys.readouterr().err


def test_a_download_without_any_image_ends_with_an_error(server: ImageServer, tmp_path: Path) -> None:
    source = write_urls(tmp_path / "meta", [server.image_url(0, "404"), server.image_url(1, "zero"), "no url"])
    config = config_for(source, tmp_path / "out")
    said = r"no row was written, 3 failed .* \(bad_url 1, empty 1, http_status 1\); .* with --only-failed$"
    with pytest.raises(DatasetError, match=said):
        job.run(config)
    assert server.stats.requests == 2
    with pytest.raises(DatasetError, match=said):
        job.run(config)  # nothing has been repaired
    assert server.stats.requests == 2
    closed = config_for(source, tmp_path / "closed")
    closed = closed.model_copy(update={"fetch": closed.fetch.model_copy(update={"allow_networks": ()})})
    with pytest.raises(DatasetError, match=r"private_address 2.*allow_networks allows some: '\[127\.0\.0\.0/8\]'"):
        job.run(closed)


def test_rows_taken_down_during_a_download_are_left_out_and_not_fetched_again(
    server: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = plain_urls(server, 40)
    source = write_urls(tmp_path / "meta", urls)
    storage = open_storage(str(tmp_path / "out"))
    write_pending = job._write_pending

    def meanwhile(*arguments: Any) -> Any:
        added = tombstones.add(storage, [Takedown("url", f"{urls[27]}#by-mail")])
        assert added.rows == []
        return write_pending(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(job, "_write_pending", meanwhile)
        dataset = not_none(job.run(config_for(source, tmp_path / "out"))).dataset
    assert outcomes(dataset)[27][0] == "written"
    assert "1 written row has been taken down in the meantime" in capsys.readouterr().err
    assert list(tombstones.load(storage).rows) == [27]
    digest = written_rows(dataset)[28]["sha256"]
    assert tombstones.add(storage, [Takedown("sha256", digest)]).rows == [28]
    assert main(["audit", storage.uri, "--url", urls[27]]) == 0
    assert "row 27, taken down\n" in capsys.readouterr().out

    # A download that begins now knows of it.
    asked = server.stats.requests
    source = write_urls(tmp_path / "again", [urls[27], urls[28], urls[29]])
    (tmp_path / "new" / "_tombstones").mkdir(parents=True)
    for name in storage.names("_tombstones/"):
        if "looked" not in name:
            (tmp_path / "new" / name).write_bytes(storage.read(name))
    dataset = not_none(job.run(config_for(source, tmp_path / "new"))).dataset
    assert [outcomes(dataset)[row][:2] for row in (0, 1)] == [("filtered", "tombstone")] * 2
    assert server.stats.requests == asked + 2
    capsys.readouterr()
    assert main(["audit", dataset.storage.uri, "--sha256", digest]) == 0
    assert capsys.readouterr().out.startswith("row 1, taken down\n")


# --- on Ray -----------------------------------------------------------------------------------------------------------


TROUBLE: dict[str, tuple[str, str | None]] = {
    "": (WRITTEN, None),
    "redirect&hops=3": (WRITTEN, None),
    "500&times=1": (WRITTEN, None),
    "404": (FAILED, "http_status"),
    "redirect&loop=1": (FAILED, "redirects"),
    "html": (FAILED, "not_an_image"),
    "garbage": (FAILED, "not_an_image"),
    "truncate": (FAILED, "broken_transfer"),
    "stall": (FAILED, "timeout"),
    "huge-pixels": (FAILED, "too_many_pixels"),
    "endless": (FAILED, "too_big"),
    "gzip": (FAILED, "not_an_image"),
    "robots&value=noai": (FILTERED, "opt_out"),
}


@pytest.mark.usefixtures("local_ray")
def test_each_misbehaviour_ends_with_its_reason_and_none_delays_the_others(server: ImageServer, tmp_path: Path) -> None:
    urls: list[str | None] = []
    expected = {}
    for number, (query, outcome) in enumerate(TROUBLE.items()):
        name, _, parameters = query.partition("&")
        url = server.image_url(2 * number, name)
        urls += [f"{url}&{parameters}" if parameters else url, server.image_url(2 * number + 1)]
        expected[2 * number], expected[2 * number + 1] = outcome, (WRITTEN, None)
    urls += ["not a url", None, "ftp://example.org/x.jpg", urls[0]]
    expected |= {len(urls) - 4 + n: (FAILED, "bad_url") for n in range(3)}
    expected[len(urls) - 1] = (FILTERED, "duplicate_url")
    config = config_for(
        write_urls(tmp_path / "meta", urls), tmp_path / "out", fetch={"max_bytes": 3_000_000, "timeout_s": 12.0}
    )
    dataset = not_none(job.run(config)).dataset
    check_exactly_once(dataset, range(len(urls)))
    assert {row: actual[:2] for row, actual in outcomes(dataset).items()} == expected


@pytest.mark.usefixtures("local_ray")
def test_the_lowest_of_several_identical_urls_and_images_is_kept(
    server: ImageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdp.datasets.repeated.PIECE_ROWS", 20)  # of such small ones several tasks look
    monkeypatch.setattr("sdp.datasets.repeated._PARTITION_ROWS", 40)
    source = write_urls(tmp_path / "meta", [*plain_urls(server, 90), *plain_urls(server, 5)])
    config = config_for(source, tmp_path / "out", dedup={"content": True})
    dataset = not_none(job.run(config)).dataset
    counts = dataset.manifest.counts
    assert (counts.input, counts.written, counts.filtered) == (95, 40, 55)
    assert counts.reasons == {"duplicate_content": 50, "duplicate_url": 5}
    reasons = {row: reason for row, (_, reason, _) in outcomes(dataset).items()}
    assert [row for row, reason in reasons.items() if reason] == list(range(90, 95))
    repeated = not_none(dataset.repeated_rows)
    assert [row for row in range(95) if row in repeated] == list(range(40, 90))
    rerun = not_none(job.run(config)).dataset
    assert rerun.digest == dataset.digest


@pytest.mark.usefixtures("local_ray")
def test_the_error_that_stops_a_worker_is_reported_unchanged(server: ImageServer, tmp_path: Path) -> None:
    source = write_urls(tmp_path / "meta", plain_urls(server, 40))
    file = next(source.iterdir())
    damaged = bytearray(file.read_bytes())
    damaged[8:200] = bytes(192)  # pages; the footer is whole
    file.write_bytes(damaged)
    config = config_for(source, tmp_path / "out", dedup={"urls": False})  # else the search meets the error first
    with pytest.raises(SdpError, match=f"^{re.escape(str(file))}: "):
        job.run(config)
