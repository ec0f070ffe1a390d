"""The names and order of a training run's metrics files.

    metrics/000003-000055000.jsonl    the third file, for the steps after 55,000

Object stores cannot append, so the newest file is rewritten until it is full and older files never change. A job that
resumes from a checkpoint starts a new file after that step. Lines of older files about later steps are then void, since
those steps are done again. Runs of older versions have one metrics.jsonl, which counts as the oldest file.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from sdp.storage import Storage

FOLDER, ONE = "metrics/", "metrics.jsonl"
FILE_LINES = 1000
"""Lines of a full file, which has about 800 kB."""

_NAME = re.compile(rf"{FOLDER}(\d{{6,}})-(\d{{9,}})\.jsonl", re.ASCII)


def file_name(number: int, after: int) -> str:
    """Return the name of a run's file by its number and the step that it begins after."""
    return f"{FOLDER}{number:06d}-{after:09d}.jsonl"


def files_in(run: Storage) -> list[tuple[int, int, str]]:
    """Return (number, step that it begins after, name) of each file of a run, from the oldest."""
    matches = (_NAME.fullmatch(name) for name in run.names(FOLDER))
    return [(0, 0, ONE), *sorted((int(match[1]), int(match[2]), match[0]) for match in matches if match)]


def joined(files: Iterable[tuple[int, Sequence[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return the valid lines of files, each given as the step that it begins after and its lines, from the oldest."""
    lines: list[dict[str, Any]] = []
    for after, new in files:
        while lines and lines[-1]["step"] > after:
            lines.pop()
        lines += new
    return lines
