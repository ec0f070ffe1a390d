"""Growth of the cost of a stranger's input, and of what a dataset has many of: four times the pieces may cost at most
five times as much, at one of two sizes at least.

`python -m tests.growth [NAME] [SIZE]` runs one case or all of them in a fresh process, which forks for each reading.
Each room lists its entry points in a module of this folder. `make fuzz` runs all of them at their full size, the tests
at a size that takes a second.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.programs import peak_bytes

MOST = 5.0
"""Times as much CPU time and memory for four times the input."""
FLOOR_S, FLOOR_BYTES = 0.05, 16 << 20
"""Costs below these are noise and count as these."""
LIMIT_S = 120
"""CPU seconds after which a reading is ended and counts as unbounded."""
_MEMORY = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 1 << 30 else None
"""A folder without a disk, which takes milliseconds to make each of thousands of files."""


@dataclass(frozen=True)
class Case:
    """An entry point, and an input of any size."""

    name: str
    size: int
    """Pieces (bytes, code points, rows, rules) of the smaller input in the tests; four times as many in the larger."""
    prepare: Callable[[int, Path], Callable[[], object]]
    """Make an input of that many pieces, with a folder for files; return a call that reads it.

    The call may raise an SdpError or RowError: a refusal is a result. Preparing is not measured."""
    full: int = 8
    """Times `size` in `make fuzz`."""


@dataclass(frozen=True)
class Cost:
    """CPU time and memory of one reading, in a process of its own."""

    cpu_s: float
    peak_bytes: int
    """Memory at its peak beyond what the process held before."""
    failure: str = ""
    """A traceback of an unexpected exception, or the signal that ended the process."""


def problem(case: Case, size: int) -> str:
    """Return why a case breaks the promise at this size, or an empty string.

    A busy machine and overflowing caches make one dearer; more than linear work, all.
    """
    return _step(case, size) and _step(case, size) and _step(case, 4 * size)


def _step(case: Case, size: int) -> str:
    small, large = (cost(case, pieces) for pieces in (size, 4 * size))
    for pieces, result in ((size, small), (4 * size, large)):
        if result.failure:
            return f"{case.name}, {pieces:,} pieces: {result.failure}"
    time_ratio = max(large.cpu_s, FLOOR_S) / max(small.cpu_s, FLOOR_S)
    memory_ratio = max(large.peak_bytes, FLOOR_BYTES) / max(small.peak_bytes, FLOOR_BYTES)
    if max(time_ratio, memory_ratio) <= MOST:
        return ""
    return (
        f"{case.name}: from {size:,} to {4 * size:,} pieces CPU time grew from {small.cpu_s:.2f} to {large.cpu_s:.2f} s"
        f" and memory from {small.peak_bytes / 1e6:.0f} to {large.peak_bytes / 1e6:.0f} MB; at most {MOST:g} times"
    )


def cost(case: Case, pieces: int) -> Cost:
    """Read an input once in a forked process, and return the CPU time and memory that this took."""
    with tempfile.TemporaryDirectory(prefix="sdp-growth-", dir=_MEMORY) as folder:
        answer, question = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(answer)
            try:
                result = _measured(case.prepare(pieces, Path(folder)))
            except BaseException:  # noqa: BLE001 (whatever it is, it is the result)
                result = Cost(0.0, 0, traceback.format_exc())
            with os.fdopen(question, "wb") as pipe:
                pickle.dump(result, pipe)
            os._exit(0)
        os.close(question)
        with os.fdopen(answer, "rb") as pipe:
            reply = pipe.read()
        _, status = os.waitpid(pid, 0)
    if not reply:
        return Cost(0.0, 0, f"ended by {signal.Signals(os.WTERMSIG(status)).name}")
    result = pickle.loads(reply)
    assert isinstance(result, Cost)
    return result


def _measured(read: Callable[[], object]) -> Cost:
    import pyarrow as pa

    from sdp.errors import SdpError
    from sdp.imaging import RowError

    gc.collect()
    pa.default_memory_pool().release_unused()  # memory that preparing has left would hide what reading takes
    ctypes.CDLL(None).malloc_trim(0)
    gc.disable()  # collections come in steps, which a figure may or may not reach
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + LIMIT_S, used + LIMIT_S + 1))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    held, began = peak_bytes(), _cpu_s()
    with contextlib.suppress(SdpError, RowError):
        read()
    return Cost(_cpu_s() - began, peak_bytes() - held)


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children, living ones too."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(_cpu_of(pid) for pid in _children())


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children() -> list[int]:
    return [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]


def cases() -> list[Case]:
    """Return the entry points of all rooms."""
    import pandas  # noqa: F401 (pyarrow would in each fork: 0.25 s and 55 MB, which hide what a reading takes)

    from tests.growth import datasets, download, images, model, scale

    gc.freeze()  # or each fork's collection would copy, as it walks, what this process holds
    return [*download.CASES, *datasets.CASES, *images.CASES, *model.CASES, *scale.CASES]
