"""The errors that sdp raises on purpose, and the exit code of each kind.

A message is one line: what was wrong, where (a dotted key, a URI, a row's address), and what to do about it.
Exit code 2 means that the user can fix it and that a retry without a change is useless; exit code 1 means that a retry
may help. A supervisor relies on the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

RESTARTED = "SDP_RESTARTED"
"""The environment variable of a job that its supervisor runs again."""


class SdpError(Exception):
    """An error that sdp reports in one line instead of a traceback."""

    exit_code = 1


class UserError(SdpError):
    """An error that the user can fix: nothing costly has been started, and a retry without a change is useless."""

    exit_code = 2


class OutOfMemory(UserError):
    """Work that does not fit into a device's memory, although smaller batches were tried."""


def one_line(text: object, most: int | None = None) -> str:
    """Return another program's text without line breaks, cut to at most this many characters."""
    return " ".join(str(text).split())[:most]


def shortened(text: str, most: int) -> str:
    """Return a text of at most this many characters; an ellipsis is in place of what is cut."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def named(error: BaseException) -> str:
    """Return the class and the message of an error that is not sdp's own, in one line."""
    return f"{type(error).__name__}: {one_line(error, 200)}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a configuration."""

    path: str
    """Dotted path of the key, e.g. `strategy.kind`."""
    expected: str
    got: str
    hint: str = ""
    """The remedy."""
    is_missing: bool = False
    """True if the key is required and not set."""
    place: str = ""
    """The beginning of the line: `train.yaml:14: ` or `--set `; empty if the key is not set."""

    def __str__(self) -> str:
        line = f"{self.place}{self.path}: expected {self.expected}, got {self.got}"
        return f"{line}; {self.hint}" if self.hint else line


class ConfigError(UserError):
    """A configuration that cannot work, with every problem on its own line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class StorageError(SdpError):
    """A storage operation that failed."""


class Unavailable(StorageError):
    """A store that did not respond in time, or cannot serve the request now: a later attempt may help."""


class NotFound(StorageError, UserError):
    """An object, folder or bucket that does not exist."""


class AccessDenied(StorageError, UserError):
    """Credentials that are missing or were refused."""


class Conflict(StorageError):
    """A conditional write that met another version than the one to replace."""


class AlreadyExists(Conflict):
    """A create-only write that lost to another writer."""


class LeaseHeld(UserError):
    """An output that another job is writing."""


class LeaseLost(SdpError):
    """A lease that another job has taken over, so this one must stop writing."""


class DatasetError(UserError):
    """A dataset that cannot be used: of the wrong kind, incomplete, corrupt, or of another configuration."""


class ModelError(UserError):
    """A model source that is missing, changed or of another architecture."""
