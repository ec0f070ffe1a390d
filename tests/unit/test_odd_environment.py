"""The command line without a home, without a user's name, and under locales other than UTF-8."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sdp.cli import main
from sdp.cli.command import LOOK, Command
from tests.programs import ended

ROOT = Path(__file__).parents[2]
NOBODY = """
import pwd

def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = getpwuid
"""
COMMANDS = (
    ("--version",),
    ("config", "show", "train"),
    ("inspect", "nothing-here"),
    ("submit", "train", "--dry-run"),
    ("status",),
    ("export", "nothing-here", "out"),
    ("inspect", "s3://bucket/nothing", "--json"),
)


def sdp(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    usual = {"PATH": os.defpath, "PYTHONPATH": f"{folder}:{ROOT}", "AWS_EC2_METADATA_DISABLED": "true"}
    return ended([sys.executable, "-m", "sdp", *arguments], cwd=folder, env=usual | environment, timeout=300)


@pytest.mark.parametrize("home", [{}, {"HOME": "/dev/null"}], ids=["no home", "a home that takes no file"])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_user_without_a_home_and_without_a_name_gets_a_result_or_one_line(
    tmp_path: Path, arguments: tuple[str, ...], home: dict[str, str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOBODY)
    done = sdp(tmp_path, home, *arguments)
    assert done.returncode in (0, 2), done.stderr
    assert len(done.stderr.splitlines()) <= 1
    assert "Traceback" not in done.stderr


def test_a_file_that_may_not_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/home/you/.cache")

    command = Command("go", LOOK, "Does it.", lambda _: None, refuse)
    assert main(["go"], [command]) == 2
    hint = "change its permissions, or set HOME to a folder that is yours"
    assert capsys.readouterr().err == f"sdp: /home/you/.cache: Permission denied; {hint}\n"


def test_ray_starts_without_a_home_and_without_a_user(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOBODY)
    code = "from sdp import cli; from sdp.ray import cluster; cli.prepare_process(); print(cluster.connect(num_cpus=1))"
    environment = {"PATH": os.defpath, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = ended([sys.executable, "-c", code], cwd=tmp_path, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "'CPU': 1.0" in done.stdout


def test_text_of_any_script_goes_through_under_a_latin_1_locale(tmp_path: Path) -> None:
    if shutil.which("localedef") is None or not Path("/usr/share/i18n/charmaps/ISO-8859-1.gz").exists():
        pytest.skip("no localedef, or no charmap of ISO-8859-1, to make the locale from")
    made = ["localedef", "--no-archive", "-i", "en_US", "-f", "ISO-8859-1", str(tmp_path / "en_US.ISO-8859-1")]
    ended(made, check=True)
    uri = "/data/bilder-ä-日本"
    (tmp_path / "train.yaml").write_text(f"output: {{uri: '{uri}'}}\n", encoding="utf-8")
    environment = {"LOCPATH": str(tmp_path), "LC_ALL": "en_US.ISO-8859-1"}
    program = "import sys; print(sys.getfilesystemencoding())"
    assert ended([sys.executable, "-c", program], env=environment, check=True).stdout == "iso8859-1\n"
    shown = sdp(tmp_path, environment, "config", "show", "train", "--config", "train.yaml")
    assert (shown.returncode, f'uri: "{uri}"' in shown.stdout) == (0, True), shown.stderr
    refused = sdp(tmp_path, environment, "config", "show", "train", "--set", f"seed={uri}")
    assert (refused.returncode, uri in refused.stderr) == (2, True)


def test_output_that_its_encoding_cannot_hold_is_escaped(tmp_path: Path) -> None:
    done = sdp(tmp_path, {"PYTHONIOENCODING": "latin-1"}, "config", "show", "train", "--set", "output.uri=/data/日")
    assert (done.returncode, 'uri: "/data/\\u65e5"' in done.stdout) == (0, True), done.stderr
