"""The board between driver and workers. It has its own file, so that its actor loads nothing else."""

from dataclasses import dataclass, field
from typing import Any

from sdp.errors import LeaseLost

RESIZE = "there is room for more trainers"
"""The reason of a stop after which training continues with more trainers."""


@dataclass(slots=True)
class WorkerReport:
    """The attempts of a job and their failures, as reported by the workers."""

    attempts: int = 0
    failures: list[str] = field(default_factory=list)
    fatal: Exception | None = None
    reason: str = ""
    """The reason why the newest attempt ended, unless it failed."""

    @property
    def resizing(self) -> bool:
        """True if the newest attempt ended in order to continue with more workers."""
        return self.reason.endswith(RESIZE)


class Board:
    """An actor between driver and workers: figures and failures one way, stop requests the other."""

    def __init__(self) -> None:
        self._report = WorkerReport()
        self._line: dict[str, Any] | None = None
        self._messages: list[str] = []
        self._stop: str | LeaseLost | None = None
        self._workers: list[str] = []
        """The workers of the newest attempt, once they train."""
        self._training = self._begun = False
        self._failures_before = 0
        """The number of failures before the newest attempt."""

    def begin(self, rank: int) -> WorkerReport:
        """Record that a worker starts; worker 0 begins a new attempt. Return the report of earlier attempts."""
        self._begun = True
        if rank == 0:
            report = self._report
            if report.resizing:
                report.reason = ""
                self._stop = None if self._stop == RESIZE else self._stop
            else:
                report.attempts += 1
        return self._report

    def train(self, workers: list[str]) -> WorkerReport:
        """Record that all workers begin to train; return the report."""
        self._workers, self._training = workers, True
        return self._report

    def push(self, line: dict[str, Any]) -> None:
        """Set the newest line of metrics."""
        self._line = line

    def announce(self, message: str) -> None:
        """Add a message for the user."""
        self._messages.append(message)

    def failed(self, rank: int, error: str, fatal: Exception | None) -> None:
        """Record a worker's failure; a `fatal` one ends the job."""
        self._report.failures.append(f"worker {rank}: {error}")
        self._report.fatal = self._report.fatal or fatal

    def ended(self, reason: str) -> None:
        """Record why training ended."""
        self._report.reason = reason

    def request(self) -> str | LeaseLost | None:
        """Return the reason to stop, if there is one."""
        return self._stop

    def stop(self, reason: str | LeaseLost) -> bool:
        """Request that training stops; return whether workers train, so that there is something to save.

        Training saves a checkpoint first, unless another job holds the lease.
        """
        if not isinstance(self._stop, LeaseLost):  # nothing may be written any more
            self._stop = reason
        return self._training

    def progress(self) -> tuple[dict[str, Any] | None, list[str], bool]:
        """Return the newest line of metrics, new messages for the user, and whether a worker of the attempt runs."""
        messages, self._messages = self._messages, []
        return self._line, messages, self._begun

    def report(self, cause: str | None = None) -> WorkerReport:
        """Return the report after an attempt, and discard the attempt's line of metrics.

        Ray's `cause` of a failed attempt counts if no worker reported one: a killed process cannot.
        """
        if cause is not None and len(self._report.failures) == self._failures_before:
            workers = ", ".join(self._workers) or "the workers ended before training began"
            self._report.failures.append(f"{workers}: none reported why ({cause})")
        self._failures_before = len(self._report.failures)
        self._workers, self._line, self._training, self._begun = [], None, False, False
        return self._report
