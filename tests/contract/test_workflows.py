"""The workflows call commands that exist, with actions pinned to commits; a release has notes and one version."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import release_notes
from tests.kit import write_files

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_to_a_commit(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_commands_of_a_workflow_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    script = "\n".join(step.get("run", "") for step in steps(path))
    assert set(re.findall(r"\bmake ([a-z0-9]+)", script)) <= targets
    files = re.findall(r"\b((?:scripts|charts|manifests|images)/[\w./-]*\w)", script)
    assert [file for file in files if not (ROOT / file).exists()] == []
    modules = re.findall(r"-m (scripts\.\w+)", script)
    assert [module for module in modules if not (ROOT / f"{module.replace('.', '/')}.py").exists()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_write_only_where_it_says_so(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A repository in which everything has version 1.2.3, with notes."""
    charts = {f"charts/{chart}/Chart.yaml": "version: 1.2.3\n" for chart in ("one", "two")}
    changes = "# C\n\n## [Unreleased]\n\n- x\n\n## [1.2.3] - 2026-01-01\n\n- y\n\n## [1.2.2]\n\n- z\n"
    files = {"pyproject.toml": '[project]\nversion = "1.2.3"\n', "CHANGELOG.md": changes}
    return write_files(tmp_path, files | charts)


def test_a_release_takes_its_own_section_of_the_changelog(release: Path) -> None:
    assert release_notes.problems("1.2.3", release) == []
    assert release_notes.notes((release / "CHANGELOG.md").read_text(), "1.2.3") == "- y"


def test_a_release_whose_parts_have_other_versions_is_refused_part_by_part(release: Path) -> None:
    (release / "charts" / "two" / "Chart.yaml").write_text("version: 1.2.2\n")
    assert release_notes.problems("1.2.3", release) == ["charts/two/Chart.yaml has version 1.2.2, not 1.2.3"]
    shutil.rmtree(release / "charts")
    assert release_notes.problems("1.3.0", release) == [
        "pyproject.toml has version 1.2.3, not 1.3.0",
        "CHANGELOG.md has no section [1.3.0]",
    ]


def test_this_repository_is_of_one_version() -> None:
    version = yaml.safe_load((ROOT / "charts" / "sdp-cluster" / "Chart.yaml").read_text())["version"]
    assert release_notes.problems(version) == []
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("manifests/*.yaml"), *ROOT.glob("images/*/Dockerfile")]
    tags = {
        tag for page in pages for tag in re.findall(r"(?:ray|exporter|\$image):(\d+\.\d+\.\d+)\b", page.read_text())
    }
    assert tags == {version}, "the images that pages and manifests name"
