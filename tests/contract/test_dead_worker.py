"""A test that ends its process is the only one that fails; the run goes on and ends."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"
DIES = "import os\ndef test_before(): pass\ndef test_that_dies(): os._exit(1)\ndef test_after(): pass"
ONE = "def test_one(): pass"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_run_goes_on_after_a_worker_has_died(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(test_a=DIES, **{f"test_{name}": ONE for name in "bcde"})
    arguments = ("-p", "xdist", "-n", workers, "--dist", "loadfile", "--no-loadscope-reorder")
    result = pytester.runpytest_subprocess(*arguments, timeout=60)
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["FAILED test_a.py::test_that_dies*"])
