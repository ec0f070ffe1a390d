"""Where the metrics of a training run lie, to those who write them and those who read them.

    metrics/000003-000055000.jsonl    the third file; it tells what came after step 55,000

Object stores cannot append, so that the newest file is written anew until it is full, and the others are never touched
again. A job that goes on from a checkpoint begins a file after that step: what older files tell of later steps was done
again, and is void. Runs of older versions have all in one metrics.jsonl, which counts as the oldest file.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from sdp.storage import Storage

FOLDER, ONE = "metrics/", "metrics.jsonl"
FILE_LINES = 1000
"""Of a full file: some 800 kB."""

_NAME = re.compile(rf"{FOLDER}(\d{{6,}})-(\d{{9,}})\.jsonl", re.ASCII)


def file_name(number: int, after: int) -> str:
    return f"{FOLDER}{number:06d}-{after:09d}.jsonl"


def files_in(run: Storage) -> list[tuple[int, int, str]]:
    """The files of a run, from the oldest: the number of each, after which step it tells, its name."""
    found = (_NAME.fullmatch(name) for name in run.names(FOLDER))
    return [(0, 0, ONE), *sorted((int(match[1]), int(match[2]), match[0]) for match in found if match)]


def joined(files: Iterable[tuple[int, Sequence[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """What holds, of each file's lines and the step after which it tells, from the oldest; every line has a `step`."""
    lines: list[dict[str, Any]] = []
    for after, some in files:
        while lines and lines[-1]["step"] > after:
            lines.pop()
        lines += some
    return lines
