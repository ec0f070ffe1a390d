"""Output for people: progress lines, tables, sizes and durations in words.

All of it goes to standard error, so that standard output holds results alone. `configure` sets for the whole process
how much is shown.
"""

import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from sdp.errors import shortened

SUBMITTED_ENV = "SDP_SUBMITTED"
"""The command line by which a job was submitted to its cluster."""

_quiet = False
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that control a terminal or the direction of writing."""
_VISIBLE = {code: repr(chr(code))[1:-1] for code in _CONTROLS if chr(code) not in "\n\t"}


def configure(*, quiet: bool = False, verbose: bool = False) -> None:
    """Set what is shown from now on."""
    global _quiet
    _quiet = quiet
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # sdp itself uses no colours
    if not (quiet or verbose):
        return
    import logging

    line = "%(levelname)s %(name)s: %(message)s" if verbose else "%(message)s"
    logging.basicConfig(level="ERROR" if quiet else "WARNING", format=line, force=True)
    logging.getLogger("sdp").setLevel("DEBUG" if verbose else logging.NOTSET)


def say(line: str, level: str = "info") -> None:
    """Print a line for the person at the terminal; only errors where the process is quiet."""
    if level == "error" or not _quiet:
        print(visible(line), file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Return a text in which strangers' names and values cannot control a terminal."""
    return text.translate(_VISIBLE)


class Progress:
    """A progress line, rewritten in place on a terminal and printed now and then elsewhere.

    >>> with Progress("download", every_s=10) as progress:
    ...     progress.update("1,200 of 20,000 rows · 310/s · ETA 1:01")
    """

    def __init__(self, label: str, *, every_s: float = 10.0) -> None:
        self._label, self._every_s, self._file = label, every_s, sys.stderr
        self._terminal = self._file.isatty() and os.environ.get("TERM") != "dumb"
        self._shown_at: float | None = None
        self._last = self._shown = ""

    def __enter__(self) -> Self:
        return self

    def update(self, text: str) -> None:
        """Show the text if the last one is old enough; cheap to call often."""
        now = time.monotonic()
        self._last = text
        pause = 0.2 if self._terminal else self._every_s
        if self._shown_at is None or now - self._shown_at >= pause:
            self._shown_at = now
            self._show(text)

    def __exit__(self, *_: object) -> None:
        if self._last != self._shown and (self._terminal or _count(self._last) != _count(self._shown)):
            self._show(self._last)
        if self._terminal and self._shown and not _quiet:
            self._file.write("\n")
            self._file.flush()

    def _show(self, text: str) -> None:
        self._shown, line = text, visible(f"{self._label}: {text}")
        if _quiet:
            return
        if self._terminal:  # a wrapped line could not be overwritten
            line = shortened(line, shutil.get_terminal_size().columns - 1)
        self._file.write(f"\r\x1b[2K{line}" if self._terminal else f"{line}\n")
        self._file.flush()


@contextmanager
def starting(job: str, what: str = "loading the model", *, every_s: float = 15.0) -> Iterator[Callable[[], None]]:
    """Say at intervals what a job does before its first progress; the block gets a function that ends this."""
    begun, began = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not begun.wait(every_s):
            say(f"{job}: {what} ({duration(time.monotonic() - began)})")

    thread = threading.Thread(target=repeat, name="sdp-starting", daemon=True)
    thread.start()
    try:
        yield begun.set
    finally:
        begun.set()
        thread.join()


def _count(text: str) -> str:
    """Return the progress in a progress line, without the rates."""
    return text.partition(" · ")[0]


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return aligned columns, text to the left and numbers to the right."""
    body = [[str(cell) for cell in row] for row in rows]
    lines = [list(header), *body] if header else body
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    numeric = [bool(body) and all(_is_number(row[i]) for row in body) for i in range(len(widths))]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: 1 picture, 1,200 pictures; pass `plural` if it needs more than an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def either(words: Sequence[str]) -> str:
    """Join words: `a`, `a or b`, `a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def nearest(word: str, known: Sequence[str]) -> str | None:
    """Return the known word that is nearest to a misspelt one; None if none is near."""
    import difflib

    return next(iter(difflib.get_close_matches(word, known, 1, 0.6)), None)


def duration(seconds: float) -> str:
    """Return a duration in words: 0.4 s, 12 s, 3:05, 2:03:05, 4 d 3 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s} s"
    if total_s < 3600:
        return f"{total_s // 60}:{total_s % 60:02d}"
    if total_s < 86_400:
        return f"{total_s // 3600}:{total_s // 60 % 60:02d}:{total_s % 60:02d}"
    return f"{total_s // 86_400} d {total_s // 3600 % 24} h"


def clock(unix_s: float) -> str:
    """Return a time in words: Nov 23 04:12 UTC."""
    return time.strftime("%b %d %H:%M UTC", time.gmtime(unix_s))


def spent(seconds: float, gpu_hours: float, cost: float = 0.0) -> str:
    """Return what was spent: `3:05:00, 24.7 GPU-hours, cost 45.20`, without GPU-hours or cost if they are 0."""
    parts = [duration(seconds)]
    if gpu_hours:
        parts.append(f"{gpu_hours:,.2f} GPU-hours")
    if cost:
        parts.append(f"cost {cost:,.2f}")
    return ", ".join(parts)


def size(count: float) -> str:
    """Return bytes in words, in powers of 1000: 512 B, 8.2 kB, 256 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def _is_number(cell: str) -> bool:
    return cell.lstrip("<").replace(",", "").replace(".", "").replace("%", "").replace("-", "").strip().isdigit()


def rate(count: float) -> str:
    """Return a number a second as people read it: 812, 1,234, 0.25."""
    return f"{count:,.0f}" if count >= 10 or not count else f"{count:,.2g}"


def rerun(job: str, *more: str) -> str:
    """Return the command line that this process runs, or that submits it to its cluster, with more options."""
    words = [job]
    if sys.argv[1:2] == [job]:
        words = shlex.split(os.environ.get(SUBMITTED_ENV, ""))[1:] or sys.argv[1:]
    kept = [word for word in words if word not in ("--dry-run", "--changed")]
    return shlex.join(["sdp", *kept, *(word for word in more if word not in kept)])
