"""Fixtures for all tests: outside programs, by mark or fixture; tests/e2e runs only when asked for (`-m e2e`).

`@pytest.mark.needs("versitygw")` on a test that needs a program, `tool("versitygw")` for its path. Where it is missing,
the test is skipped and the run ends with how to get it; where CI=true, it fails.
"""

import multiprocessing
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

from scripts import tools

OUTSIDE = Path(__file__).parent / "outside"
E2E = Path(__file__).parent / "e2e"
LONGEST = (
    "test_docs_examples.py", "test_bench_small.py", "test_monitoring_proof.py", "test_train_job.py",
    "test_train_online.py", "test_download_killing.py", "test_bench_fake_gpu.py", "test_download.py",
    "test_growth.py", "test_train_ahead.py", "test_placement.py", "test_nodes.py", "test_chaos.py",
    "test_train_survival.py", "test_train_workers.py", "test_process.py", "test_process_trouble.py",
    "test_s3_faults.py", "test_score.py", "test_kube_commands.py",
)  # fmt: skip
"""The files of tests/integration that take longest, the longest first, after one with the most to do in its time."""
hypothesis.settings.register_profile("sdp", deadline=None)  # an example may take long on a busy machine
hypothesis.settings.load_profile("sdp")
MISSED = re.compile(r"^(?:Skipped: )?needs (\S+), which is not here; to get it: (.*)$", re.MULTILINE)


def pytest_configure() -> None:
    """Give processes that tests start this `tests`, since a library installs one of that name, and SIGINT.

    A script's background commands ignore SIGINT, and so would all that the tests start.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@pytest.fixture(scope="session")
def tool() -> Callable[[str], Path]:
    """Gives the path of an outside program by its name in scripts/tools.py."""

    def path_of(name: str) -> Path:
        return tools.find(name) or _miss(name)

    return path_of


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep e2e tests from a KUBECONFIG's cluster unless `make e2e` asks for them; mark those with others' programs."""
    if E2E in item.path.parents:
        item.add_marker(pytest.mark.e2e)
    if OUTSIDE in item.path.parents:
        item.add_marker(pytest.mark.outside)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the files that take longest first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: _turn(item.path))


def _turn(path: Path) -> int:
    in_integration = path.parent.name == "integration"
    if in_integration and path.name in LONGEST:
        return LONGEST.index(path.name)
    return len(LONGEST) + (not in_integration)


class Files(LoadFileScheduling):
    """Deals out files so that the run goes on after a worker has died.

    xdist 3.8 waits for ever then: it gives out what was done, and the test that killed the worker, and gives a new
    worker one test, while that one waits to hear whether it is the last (its issues 1327, 1371 and 1378).
    """

    def remove_node(self, node: Any) -> str | None:
        units = self.assigned_work.pop(node)
        left = [(scope, test) for scope, unit in units.items() for test, done in unit.items() if not done]
        for scope, test in left[1:]:
            self.workqueue.setdefault(scope, {})[test] = False
        if left:
            for other in self.nodes:
                self._reschedule(other)
        return left[0][1] if left else None

    def _reschedule(self, node: Any) -> None:
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files | None:
    return Files(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let a test compile from the beginning, and set back what it sets."""
    import torch

    with torch._dynamo.config.patch(), torch._inductor.config.patch():
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Make PyTorch compute in one thread: on tiny networks more are slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test in a child of its own where it asks for one."""
    if pyfuncitem.get_closest_marker("own_process") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    child = multiprocessing.get_context("fork").Process(target=pyfuncitem.obj, kwargs=arguments)
    child.start()
    child.join()
    assert child.exitcode == 0, "its traceback is on standard error"
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose programs are missing, before any fixture starts something."""
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if tools.find(name) is None:
                _miss(name)


def _miss(name: str) -> NoReturn:
    line = f"needs {name}, which is not here; to get it: {tools.TOOLS[name].how}"
    if os.environ.get("CI") == "true":
        pytest.fail(line, pytrace=False)
    pytest.skip(line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print last which programs were missing and how to install them."""
    missed: Counter[tuple[str, str]] = Counter()
    for outcome in ("skipped", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if match := MISSED.search(reason):
                missed[match[1], match[2]] += 1
    if missed:
        terminalreporter.section("outside programs that are missing")
        for (name, how), count in sorted(missed.items()):
            terminalreporter.line(f"{name} ({count} test{'s' if count > 1 else ''}): {how}")
