"""Tests that need an outside program: skipped with advice, failed where CI=true, and fetched only if a test asks."""

import tomllib
from pathlib import Path

import pytest

from scripts import tools

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
CONFTEST = ROOT / "tests" / "conftest.py"

NEEDS_IT = """
import pytest

@pytest.fixture
def server():
    raise AssertionError("nothing is started where the program is missing")

@pytest.mark.needs("unobtainium")
def test_with_it(server):
    raise AssertionError("this must not run")

def test_without_it():
    pass
"""
INSTALL = "go install example.invalid/cmd/unobtainium@v1.2.3"
MISSING = ["*outside programs that are missing*", f"unobtainium (1 test): {INSTALL}"]


@pytest.fixture(autouse=True)
def unobtainium(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is on no machine."""
    tool = tools.Tool(name="unobtainium", go_package="example.invalid/cmd/unobtainium", go_version="v1.2.3")
    monkeypatch.setattr(tools, "TOOLS", {**tools.TOOLS, tool.name: tool})
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of its own that has our conftest."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading plugins is most of the time
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers = needs(tool): needs it")
    return pytester


def test_a_test_whose_program_is_missing_is_skipped_with_how_to_get_it(run: pytest.Pytester) -> None:
    run.makepyfile(NEEDS_IT)
    result = run.runpytest_inprocess("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines([*MISSING, f"*needs unobtainium, which is not here; to get it: {INSTALL}"])


def test_a_test_whose_program_is_missing_fails_where_ci_is_true(
    run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    run.makepyfile(NEEDS_IT)
    result = run.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(MISSING)


def test_e2e_tests_run_only_when_asked_for(run: pytest.Pytester) -> None:
    run.makeini("[pytest]\nmarkers =\n  needs(tool): needs it\n  e2e: on a cluster")
    run.mkdir("e2e").joinpath("test_cluster.py").write_text("def test_it(): pass")
    run.makepyfile(test_local="def test_it(): pass")
    run.runpytest_inprocess("-m", "not e2e").assert_outcomes(passed=1, deselected=1)
    run.runpytest_inprocess("-m", "e2e").assert_outcomes(passed=1, deselected=1)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "not e2e" in settings["addopts"][-1]
    assert '-m "not e2e"' in (ROOT / "Makefile").read_text()


def test_the_programs_that_tests_ask_for_are_read_from_their_marks_and_calls(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import pytest\npytestmark = pytest.mark.needs('helm', 'nginx')\n")
    (tmp_path / "test_b.py").write_text("def test(tool): tool('helm'); other.tool('hammer')\n# needs('redis-server')")
    assert tools.needed_by(tmp_path) == {"helm": ["test_a.py", "test_b.py"], "nginx": ["test_a.py"]}


class Machine:
    """Stands in for the machine on which tools are fetched: what it has, and what was done to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, programs: set[str], has: set[str], asks: str | None) -> None:
        self.done: list[str] = []
        self.programs = programs
        monkeypatch.setattr(tools, "find", lambda name: Path(f"/bin/{name}") if name in self.programs else None)
        monkeypatch.setattr(tools, "go_version_of", lambda path: tools.TOOLS[path.name].go_version)
        monkeypatch.setattr(tools.shutil, "which", lambda name: name if name in has else None)
        monkeypatch.setattr(tools, "_run", self._run)
        monkeypatch.setattr(tools.sys.stdin, "isatty", lambda: asks is not None, raising=False)
        monkeypatch.setattr(tools.sys.stdout, "isatty", lambda: asks is not None, raising=False)
        monkeypatch.setattr("builtins.input", lambda _: asks)

    def _run(self, command: list[str], **_: object) -> bool:
        line = " ".join(command)
        self.done.append(line[line.index("apt-get") :] if "apt-get" in command else line)
        return True


def test_a_go_program_of_another_version_is_replaced_and_one_of_the_right_version_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tools, "BIN", tmp_path)
    machine = Machine(monkeypatch, programs={"helm", "kubeconform"}, has={"go"}, asks=None)
    monkeypatch.setattr(tools, "go_version_of", lambda path: {"helm": "v3.0.0", "kubeconform": "v0.8.0"}[path.name])
    assert tools.fetch(["helm", "kubeconform"]) == []
    assert machine.done == ["go install helm.sh/helm/v4/cmd/helm@v4.3.1"]


@pytest.mark.parametrize(
    ("ci", "asks", "installs"),
    [("true", None, True), (None, "y", True), (None, "", False), (None, None, False), ("false", None, False)],
)
def test_the_system_s_packages_are_installed_unasked_only_where_ci_is_true(
    monkeypatch: pytest.MonkeyPatch, ci: str | None, asks: str | None, installs: bool
) -> None:
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    machine = Machine(monkeypatch, programs=set(), has={"apt-get"}, asks=asks)
    missing = tools.fetch(["nginx", "prometheus", "promtool"])
    assert [tool.name for tool in missing] == ["nginx", "prometheus", "promtool"]
    assert [line.split()[-2:] for line in machine.done] == (
        [["DPkg::Lock::Timeout=120", "update"], ["nginx", "prometheus"]] if installs else []
    )


def test_missing_programs_are_listed_with_their_installation_and_the_tests_that_need_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Machine(monkeypatch, programs=set(), has=set(), asks=None)
    monkeypatch.setattr(tools, "needed_by", lambda _: {"nginx": ["integration/test_download.py"]})
    assert tools.main(["fetch"]) == 0
    line = "missing: nginx (for integration/test_download.py); to get it: apt-get install nginx\n"
    assert capsys.readouterr().err == line
