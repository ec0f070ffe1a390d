"""Files that a person names: replaced as a whole."""

import os
from pathlib import Path

import pytest

from sdp.cli import main
from sdp.storage.named import written_for
from tests.kit import make_images


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "page"
    file.write_bytes(b"before")
    with pytest.raises(ZeroDivisionError), written_for("--out", file) as sink:
        sink.write(b"half" * (1 // (sink.write(b"half") - 4)))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("page", b"before")]
    with written_for("--out", file) as sink:
        sink.write(b"whole")
        assert file.read_bytes() == b"before"
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("page", b"whole")]


def test_a_links_target_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "page")
    with written_for("--out", tmp_path / "link") as sink:
        sink.write(b"whole")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page").read_bytes() == b"whole"


@pytest.mark.parametrize("kind", ["folder", "device", "pipe"])
def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    images, path = make_images(tmp_path).storage.uri, tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/null")  # through a link, so that what is wrong here would not break this machine
    else:
        os.mkfifo(path)
    before = path.stat()
    assert main(["inspect", images, "--account", str(path)]) == 2
    assert f"inspect: --account: {path}: not a file" in capsys.readouterr().err
    assert path.stat() == before
    assert not list(tmp_path.glob("*.part"))
