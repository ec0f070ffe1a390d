"""The repository's promises to newcomers: commands, links, licence, version, and a complete package."""

import ast
import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sdp
from tests.programs import ended

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "KUBECONFIG"))}
    return ended(["make", *arguments], cwd=ROOT, env=surroundings | environment, stdin=subprocess.DEVNULL)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_and_picture_of_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        linked = (page.parent / path) if path else page
        if not linked.exists() or (anchor and anchor not in anchors_of(linked)):
            broken.append(target)
    assert broken == []


def anchors_of(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_make_command_that_a_page_names_exists(page: Path) -> None:
    code = re.findall(r"```.*?```|`[^`]+`", page.read_text(), re.DOTALL)
    commands = {command for block in code for command in re.findall(r"\bmake ([a-z0-9]+)\b", block)}
    assert commands - TARGETS == set()


def test_make_without_arguments_lists_every_command_with_its_purpose() -> None:
    listed = re.findall(r"^  make ([a-z0-9]+) +\S+ \S+", make().stdout, re.MULTILINE)
    assert set(listed) == TARGETS - {"e2e-cluster"}
    assert {"venv", "demo", "test", "check", "bench", "e2e", "lock", "help", "clean"} <= set(listed)


def test_the_readme_gives_the_commands_that_ci_runs() -> None:
    commands = re.findall(r"^(?:within \d+ )?make (\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {"check", "test"} <= set(commands)
    readme = (ROOT / "README.md").read_text().replace("\n", " ")
    assert [command for command in commands if f"make {command} " not in readme] == []


def test_the_readme_names_all_commands_and_no_others() -> None:
    asked = ended([sys.executable, "-m", "sdp", "--help"], cwd=ROOT, check=True)
    exist = set(re.findall(r"^  ((?!sdp )[a-z]+(?: [a-z]+)*)  +[A-Z]", asked.stdout, re.MULTILINE))
    prose = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    code = " ".join(re.findall(r"`[^`]+`", prose))
    named = {command for command in exist if f"sdp {command}" in code}
    assert named == exist
    assert set(re.findall(r"`sdp ([a-z]+)", code)) <= {command.split()[0] for command in exist}


def test_make_e2e_without_a_cluster_names_the_missing_setting_in_one_line() -> None:
    done = make("e2e")
    assert done.returncode == 2
    first, *rest = done.stderr.splitlines()
    assert first.startswith("make e2e: set KUBECONFIG")
    assert all("***" in line for line in rest)  # make's own


def test_make_bench_with_an_unknown_name_lists_the_known_ones() -> None:
    done = ended([sys.executable, "-m", "scripts.benchmarks", "no-such"], cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout.startswith("make bench: no benchmark called no-such; there are: ")


@pytest.mark.parametrize("script", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"], ids=named)
def test_every_shell_script_can_be_parsed_by_the_shell_it_names(script: Path) -> None:
    shell = script.read_text().partition("\n")[0].removeprefix("#!").split()
    assert subprocess.run([*shell, "-n", str(script)], check=False).returncode == 0


def test_the_licence_is_the_unaltered_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_bytes()
    # What git calls this text in every repository that carries it.
    assert hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest() == "d645695673349e3947e8e5ae42332d0ac3164cd7"
    assert PYPROJECT["license"] == "Apache-2.0"


def test_the_version_is_the_same_everywhere_and_the_changelog_is_open_for_more() -> None:
    assert sdp.__version__ == PYPROJECT["version"]
    versions = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions[1:])


def test_tests_lie_in_the_six_folders_and_their_names_are_sentences() -> None:
    folders = {"unit", "contract", "integration", "hosts", "outside", "e2e"}
    astray, mumbled = [], []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.relative_to(ROOT / "tests").parts[0] not in folders:
            astray.append(named(path))
        for function in ast.parse(path.read_text()).body:
            name = getattr(function, "name", "")
            if name.startswith("test_") and len(name.split("_")) < 4:
                mumbled.append(f"{named(path)}: {name}")
    assert astray == []
    assert mumbled == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that this tree builds, without a download."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = ended(build, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_all_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = [path for path in (ROOT / "sdp").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    package = {named(path) for path in files}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == package


def test_the_wheel_is_installed_in_three_ways_of_which_the_base_needs_no_torch_and_no_ray(
    wheel: zipfile.ZipFile,
) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = HeaderParser().parsestr(wheel.read(name).decode())
    assert set(metadata.get_all("Provides-Extra", [])) == {"worker", "exporter"}
    wanted: dict[str, set[str]] = {}
    for extra in ("", "worker", "exporter"):
        requirements = map(Requirement, metadata.get_all("Requires-Dist", []))
        wanted[extra] = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})}
    assert {"pydantic", "pyarrow", "pyyaml"} <= wanted[""]
    assert not {"torch", "ray", "pillow", "diffusers"} & (wanted[""] | wanted["exporter"])
    assert {"torch", "ray", "pillow", "diffusers", "transformers"} <= wanted["worker"]
    assert {"nvidia-ml-py", "prometheus-client"} <= wanted["exporter"]


def test_the_wheel_brings_one_console_script(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    assert wheel.read(name).decode().split() == ["[console_scripts]", "sdp", "=", "sdp.__main__:main"]
