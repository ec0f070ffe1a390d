"""Files that a person names: replaced when they are files, written to when they are none."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
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


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    with written_for("--out", pipe) as sink:
        sink.write(b"x" * 200_000)
        sink.seek(0)
        sink.write(b"y")
    reader.join(30)
    assert read == [b"y" + b"x" * 199_999]
    assert pipe.is_fifo()


def test_a_device_is_written_to_and_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = make_images(tmp_path).storage.uri
    for name, code in (("null", 0), ("full", 2)):
        # Through links, so that what is wrong here would not break this machine.
        (tmp_path / name).symlink_to(f"/dev/{name}")
        assert main(["inspect", images, "--account", str(tmp_path / name)]) == code
        assert (tmp_path / name).is_char_device()
        assert (tmp_path / name).is_symlink()
        assert ("No space left" in capsys.readouterr().err) == (code == 2)
    assert not list(tmp_path.glob("*.part"))


def test_output_to_stdout_comes_before_later_prints(tmp_path: Path) -> None:
    images = make_images(tmp_path).storage.uri
    command = [sys.executable, "-m", "sdp", "inspect", images, "--account", "/dev/stdout"]
    with (tmp_path / "out").open("wb") as out:
        subprocess.run(command, stdout=out, check=True, timeout=120)
    account, _, description = (tmp_path / "out").read_bytes().rpartition(b"PAR1")
    assert pq.read_table(pa.BufferReader(account + b"PAR1")).num_rows == 42
    assert description.decode().startswith(f"Images: {images}\n")


def test_an_account_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = make_images(tmp_path).storage.uri
    (tmp_path / "folder").mkdir()
    assert main(["inspect", images, "--account", str(tmp_path / "folder")]) == 2
    assert "inspect: --account: " in capsys.readouterr().err
