"""Sizes of benchmarks, and cases that run in processes of their own.

A case hands its figures back in a file, or on a standard output that no library can reach.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

TIMEOUT_S = 7200.0

FIGURES = "figures: "
"""Begins a line on a benchmark's standard output that holds a case's figures, for gpu_first_hour."""

SMALL = "SDP_BENCH_SMALL"
"""The environment variable that asks for the smallest sizes: does a benchmark still run?"""
T = TypeVar("T")


def sized(full: T, small: T) -> T:
    """Return a size: the full one, unless the smallest is asked for."""
    return small if os.environ.get(SMALL) else full


def exit_status(met: bool) -> int:
    """Return 1 for goals that were missed; small sizes have no goals."""
    return 0 if met or os.environ.get(SMALL) else 1


def hand_over(case: str, **figures: Any) -> None:
    """Print a case's figures, or the reason why there are none, as soon as they are known."""
    print(FIGURES + json.dumps({"case": case, **figures}), flush=True)


def run_case(module: str, case: str, folder: Path) -> Any:
    """Run a case of a module in a process of its own, and return its figures."""
    command = [sys.executable, "-m", module, case, str(folder)]
    subprocess.run(command, stdout=sys.stderr, check=True, timeout=TIMEOUT_S)
    return json.loads(_file(folder, case).read_text(encoding="utf-8"))


def main(report: Callable[[], int], cases: Mapping[str, Callable[[Path], Any]]) -> int:
    """Run the case that the command line names, or else the whole benchmark; return the exit status."""
    if len(sys.argv) != 3 or sys.argv[1] not in cases:
        return report()
    case, folder = sys.argv[1], Path(sys.argv[2])
    _file(folder, case).write_text(json.dumps(cases[case](folder)), encoding="utf-8")
    return 0


def start_ray(**options: Any) -> None:
    """Start a Ray of this machine, without a dashboard."""
    import ray

    if os.environ.get(SMALL):  # only what a job's local Ray has, too
        from sdp.ray.internals import spare_processes

        spare_processes()
        os.environ |= {"RAY_prestart_worker_first_driver": "0"}
    ray.init("local", include_dashboard=False, log_to_driver=False, ignore_reinit_error=True, **options)


def take_stdout() -> TextIO:
    """Return standard output, and send whatever else writes there, such as a library, to standard error."""
    sys.stdout.flush()
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return output


def _file(folder: Path, case: str) -> Path:
    return folder / f"{case}.figures.json"
