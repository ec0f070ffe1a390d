"""A job that is suspended at one of its storage operations, while another job takes its lease over.

The suspended job runs in a thread of the test. It reaches its folder through a link, by which its operations are known:
all of them wait, the heartbeat's too, from the n-th one until it goes on.
"""

import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sdp.errors import SdpError
from sdp.lease import TTL_S, Lease
from sdp.storage import Storage
from sdp.storage.local import LocalStorage

OPERATIONS = ("list", "names", "stat", "exists", "read", "open", "publish", "create", "replace", "delete")
ROUNDS = 1000
"""More operations than any of these jobs has."""


class Suspension:
    """One run of a job that is suspended before its n-th operation."""

    def __init__(self, root: Path, number: int, job: Callable[[Path], object]) -> None:
        self.at = ""
        self.error: SdpError | None = None
        """The error that it ended with."""
        self._number, self._job = number, job
        self._root = root.with_name(f"{root.name}-link")
        if not self._root.is_symlink():
            self._root.symlink_to(root)
        self._turns, self._stopped, self._may_go = count(1), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> bool:
        """Run the job up to the operation; return False if it ends before."""
        self._thread.start()
        while self._thread.is_alive() and not self._stopped.wait(0.001):
            pass
        return self._stopped.is_set()

    def go_on(self) -> None:
        """Let the job go on to its end."""
        self._may_go.set()
        self._thread.join()

    def before(self, operation: str, uri: str) -> None:
        """Suspend the job, if this is its operation."""
        if not uri.startswith(str(self._root)):
            return
        if next(self._turns) == self._number:
            self.at = f"{operation} {uri.removeprefix(str(self._root))}"
            self._stopped.set()
        if self._stopped.is_set():
            self._may_go.wait()

    def _run(self) -> None:
        try:
            self._job(self._root)
        except SdpError as error:
            self.error = error


def suspensions(
    monkeypatch: pytest.MonkeyPatch, fresh: Callable[[int], Path], job: Callable[[Path], object]
) -> Iterator[tuple[Path, Suspension]]:
    """Yield a folder with a suspended job for each operation of the job, until it has no more."""
    present: list[Suspension] = []
    for name in OPERATIONS:
        monkeypatch.setattr(LocalStorage, name, _watched(name, getattr(LocalStorage, name), present))
    for number in range(1, ROUNDS):
        root = fresh(number)
        present[:] = [Suspension(root, number, job)]
        if not present[0].begin():
            assert present[0].error is None
            return
        yield root, present[0]
    pytest.fail("the job has no end")


def take_over(storage: Storage) -> Lease:
    """Acquire the lease of a suspended job, whose time to live is over by this clock."""
    return Lease.acquire(storage, "other", clock=count(step=TTL_S + 1).__next__)


def _watched(name: str, operation: Any, present: list[Suspension]) -> Any:
    def call(self: LocalStorage, path: str = "", *rest: Any, **more: Any) -> Any:
        for suspension in present:
            suspension.before(name, f"{self.uri}/{path}")
        return operation(self, path, *rest, **more)

    return call
