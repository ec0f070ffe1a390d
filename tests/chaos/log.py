"""Lines that the log of a disturbed job must not show."""

import re
from collections.abc import Iterator

_ENDED = re.compile(r"supervisor: the job (failed with exit code \d+|was killed by signal (?!9\b)\d+)")
_LATE = "Ray ended it"
_NOTICES = ("Lease ID", "(raylet)", "RAY_", "core_worker", "ray::", "*** SIG", "Fatal Python error", "StackTrace")
"""Texts of Ray's own notices."""


def faults_in(log: str) -> list[str]:
    """Return a line for each kind of fault: a traceback, an end without a reason, a notice of Ray's."""
    return sorted(set(_faults(log.splitlines())))


def _faults(lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            yield "a traceback"
        if not line.startswith("sdp: ") and any(notice in line for notice in _NOTICES):
            yield f"a notice of Ray's: {line[:120]}"
        # A driver that Ray's core has ended leaves its last line to another process, which may come second.
        before, after = lines[max(0, number - 1)], "".join(lines[number + 1 : number + 2])
        if _ENDED.match(line) and not (before.startswith("sdp: ") or _LATE in after):
            yield f"no reason before {line!r}"
