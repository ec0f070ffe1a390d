"""The report in a real browser."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sdp.report.sections import write_report
from tests.unit.test_report import make_pictures, make_run

pytestmark = pytest.mark.needs("chromium")

QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1200,2400",
)


def opened(chromium: Path, file: Path, profile: Path, shot: Path) -> list[str]:
    """Open a page, keep its picture; returns what it wrote to the browser's console."""
    command = [str(chromium), *QUIET, f"--user-data-dir={profile}", f"--screenshot={shot}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shot.exists(), done.stderr[-2000:]
    return [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_the_page_opens_without_a_word_on_the_console(tmp_path: Path, tool: Callable[[str], Path]) -> None:
    make_pictures(tmp_path)
    make_run(tmp_path)
    write_report([str(tmp_path / "images"), str(tmp_path / "run")], tmp_path / "report.html")
    shot = tmp_path / "report.png"
    assert opened(tool("chromium"), tmp_path / "report.html", tmp_path / "profile", shot) == []

    from PIL import Image

    with Image.open(shot) as picture:
        colours = picture.convert("RGB").getcolors(1 << 22) or []
    assert {colour: count for count, colour in colours}.get((255, 0, 0), 0) > 10_000, "the red pictures are seen"


def test_a_page_with_something_wrong_would_be_noticed(tmp_path: Path, tool: Callable[[str], Path]) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<!doctype html><title>bad</title><script>throw new Error('seen')</script>")
    said = opened(tool("chromium"), page, tmp_path / "profile", tmp_path / "bad.png")
    assert any("seen" in line for line in said)
