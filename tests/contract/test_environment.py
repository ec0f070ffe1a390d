"""scripts/venv.sh: .venv is built, rebuilt, repaired or left alone, and failures are reported."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]

FAKE_UV = """#!/bin/sh
[ "$1" = --version ] && exit ${FAKE_UV_IS_BROKEN:-0}
echo "$1 $2" | sed 's/venv .*/venv/' >>"$FAKE_LOG"
[ "$1 $2" != "python find" ] || echo "$FAKE_FOUND"
if [ "$1" = venv ]; then
    mkdir -p .venv/bin && ln -s "$FAKE_PYTHON" .venv/bin/python
    touch .venv/begun
    for _ in $(seq 600); do # a minute at most
        [ -n "${FAKE_GO:-}" ] && [ ! -e "$FAKE_GO" ] || break
        sleep 0.1
    done
fi
[ -z "${FAKE_SLOW:-}" ] || for _ in $(seq 600); do [ "$1 $2" = "pip sync" ] && [ ! -e "$FAKE_SLOW" ] && sleep 0.1; done
[ "$1 $2" != "pip ${FAKE_FAILURE:-nothing}" ]
"""

FAKE_PYTHON = """#!/bin/sh
echo "python $1" >>"$FAKE_LOG"
case "$*" in
    *ensurepip* | "-m pip --version") exit 1 ;;
    --version) echo "Python $FAKE_VERSION" ;;
    *version_info*) [ "$FAKE_VERSION" != 3.9.2 ] ;;
    *) exec "$FAKE_PYTHON" "$@" ;;
esac
"""


class Project:
    """A copy of what scripts/venv.sh works on, with a uv and a Python that only write down what they are asked."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("scripts/venv.sh", "scripts/uv.sh", "scripts/uv.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "requirements.lock").write_text("one==1\n")
        self.log = folder / "log"
        bin_ = folder / "bin"
        bin_.mkdir()
        for name in ("uv", "python3", "python3.11", "python3.12", "python3.13", "python3.14"):
            (bin_ / name).write_text(FAKE_UV if name == "uv" else FAKE_PYTHON)
            (bin_ / name).chmod(0o755)
        self.environment = {
            "PATH": f"{bin_}:/usr/bin:/bin",
            "HOME": str(folder),
            "FAKE_LOG": str(self.log),
            "FAKE_PYTHON": sys.executable,
            "FAKE_VERSION": "3.12.1",
        }

    def start(self, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", str(self.root / "scripts" / "venv.sh")],
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def make(self, **environment: str) -> tuple[int, str]:
        """Run it; return its exit code and output. `did` then returns the requests."""
        self.log.write_text("")
        process = self.start(**environment)
        _, output = process.communicate(timeout=60)
        return process.returncode, output

    @property
    def did(self) -> list[str]:
        """Return the arguments that uv was called with."""
        return [line for line in self.log.read_text().splitlines() if not line.startswith("python -")]


ANEW = ["venv", "pip sync", "pip install"]
MENDED = ["pip sync", "pip install"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_missing_environment_is_made(project: Project) -> None:
    assert project.make()[0] == 0
    assert project.did == ANEW


def test_a_second_call_starts_neither_python_nor_uv(project: Project) -> None:
    project.make()
    assert project.make() == (0, "")
    assert project.log.read_text() == ""


def test_a_changed_lock_mends_the_environment_in_place(project: Project) -> None:
    project.make()
    (project.root / "requirements.lock").write_text("one==2\n")
    project.make()
    assert project.did == MENDED
    project.make()
    assert project.did == []


@pytest.mark.parametrize("step", ["sync", "install"])
def test_an_incomplete_environment_is_rebuilt(project: Project, step: str) -> None:
    assert project.make(FAKE_FAILURE=step)[0] != 0
    (project.root / ".venv" / "left-over").touch()
    assert project.make()[0] == 0
    assert project.did == ANEW
    assert not (project.root / ".venv" / "left-over").exists()


def test_an_environment_whose_build_was_killed_is_rebuilt(project: Project, tmp_path: Path) -> None:
    process = project.start(FAKE_GO=str(tmp_path / "go"))
    until((project.root / ".venv" / "begun").exists, "uv has begun", 30)
    process.kill()
    process.wait(timeout=60)
    (tmp_path / "go").touch()  # the uv that it leaves behind ends by itself, and only then the lock is free
    assert project.make()[0] == 0
    assert project.did[-3:] == ANEW


def test_a_moved_project_gets_an_environment_of_its_own(project: Project) -> None:
    project.make()
    project.root = project.root.rename(project.root.with_name("elsewhere"))
    project.make()
    assert project.did == ANEW


def test_two_at_once_make_it_once(project: Project, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = project.start(FAKE_GO=str(go))
    until((project.root / ".venv" / "begun").exists, "uv has begun", 30)
    second = project.start(FAKE_GO=str(go))
    assert second.stderr is not None
    assert "another make is preparing .venv" in second.stderr.readline()
    go.touch()
    first.communicate(timeout=60)
    second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0)
    assert project.did == ANEW


def test_an_old_python_is_one_line_that_says_which_are_supported(project: Project) -> None:
    code, output = project.make(FAKE_VERSION="3.9.2", PYTHON="python3")
    assert code == 2
    assert output.splitlines() == [
        "make venv: sdp needs Python 3.11 to 3.14, and python3 is Python 3.9.2: install one, or name it "
        "(make venv PYTHON=/path/to/python3.12)"
    ]
    assert project.did == []


def test_where_no_python_fits_uv_downloads_one(project: Project) -> None:
    code, output = project.make(FAKE_VERSION="3.9.2", FAKE_FOUND=sys.executable)
    assert code == 0
    assert output.splitlines()[0] == "sdp needs Python 3.11 to 3.14, and python3 is Python 3.9.2: uv downloads 3.13"
    assert project.did == ["python install", "python find", *ANEW]


def test_a_newer_python_beside_an_old_python3_is_taken(project: Project, tmp_path: Path) -> None:
    old = tmp_path / "bin" / "python3"
    old.write_text(FAKE_PYTHON.replace("$FAKE_VERSION", "3.9.2"))
    assert project.make()[0] == 0
    assert project.did == ANEW


def test_a_python_without_ensurepip_and_pip_is_reported_in_one_line_with_the_package_to_install(
    project: Project,
) -> None:
    code, output = project.make(FAKE_UV_IS_BROKEN="1")
    assert code == 2
    (line,) = [line for line in output.splitlines() if "make venv:" in line]
    assert "apt-get install python3-venv" in line
    assert project.did == []
