"""A plugin for pytest: what fails only because a package is not installed is skipped, so that no list says what is.

`make lowest` uses it, in an environment without the extras. That sdp declares what it imports is tested elsewhere.
"""

import re
from collections.abc import Generator
from typing import Any

import pytest

MISSING = re.compile(r"ModuleNotFoundError: No module named \\?'(?!sdp\b|tests\b|scripts\b)([\w.]+)")


def _judged(report: Any, path: str) -> Any:
    if report.failed and (missing := MISSING.search(str(report.longrepr))):
        report.outcome = "skipped"
        report.longrepr = (path, 0, f"needs {missing[1].partition('.')[0]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _judged((yield), str(collector.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _judged((yield), str(item.path))
