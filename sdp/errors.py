"""The errors that sdp raises on purpose, and the exit code of each kind.

A message is one line: what was wrong, where (a dotted path, a URI, a row address), what to do about it.
Exit code 2 says that the user can mend it and that trying again unchanged is useless; exit code 1 says that
trying again may help. A supervisor relies on the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class SdpError(Exception):
    """Anything that sdp reports in one line instead of a traceback."""

    exit_code = 1


class UserError(SdpError):
    """Something the user can mend: nothing costly has been started, and a retry without a change is useless."""

    exit_code = 2


def one_line(said: object, most: int | None = None) -> str:
    """What another program said, fit for our line: without its line breaks, and at most so long."""
    return " ".join(str(said).split())[:most]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a configuration."""

    path: str
    """Dotted path of the key, e.g. `strategy.kind`."""
    expected: str
    got: str
    hint: str = ""
    """What to do."""

    def __str__(self) -> str:
        line = f"{self.path}: expected {self.expected}, got {self.got}"
        return f"{line}; {self.hint}" if self.hint else line


class ConfigError(UserError):
    """A configuration that cannot work: every problem of it, one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class StorageError(SdpError):
    """A store that did not do what was asked."""


class Unavailable(StorageError):
    """The store did not answer in time, or answered that it cannot now: trying later may help."""


class NotFound(StorageError, UserError):
    """No such object, folder or bucket."""

    exit_code = 2


class AccessDenied(StorageError, UserError):
    """The store refused these credentials, or there are none."""

    exit_code = 2


class AlreadyExists(StorageError):
    """A create-only write found something there: somebody else was first."""


class Conflict(StorageError):
    """A conditional write found another version than the one it was to replace."""


class LeaseHeld(UserError):
    """Another job is writing this output."""


class LeaseLost(SdpError):
    """This job was taken for dead and another one has taken over: stop writing."""


class DatasetError(UserError):
    """A dataset that is not what it should be: wrong kind, incomplete, corrupt, of another configuration."""


class ModelError(UserError):
    """A model source that is missing, changed or of another architecture."""
