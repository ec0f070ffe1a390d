"""The control plane with up to 64 trainers and 512 encoders, without their work: CPU time, memory and messages.

    python -m scripts.bench.control [--only online,checkpoint]

Each size of a case runs the code of the jobs in a process of its own, with stand-ins only for the work; a case's
docstring names them. Figures are CPU time, because the machine may do other work.
"""

import argparse
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench import _cases
from scripts.bench._cases import run_case, sized
from sdp.console import table

Figures = dict[str, float]
_TICK = os.sysconf("SC_CLK_TCK")
_ROLES = {"ray::Pool": "pool", "ray::Desk": "desk", "ray::Trainers": "trainers", "gcs_server": "gcs"}


@dataclass(frozen=True)
class Case:
    """A part of the control plane, at some sizes."""

    what: str
    measure: Callable[..., Figures]
    sizes: Sequence[tuple[int, ...]]
    """Arguments of `measure`."""
    of: str
    """The names of a size's numbers."""


# --- online -----------------------------------------------------------------------------------------------------------


def online(folder: Path, trainers: int, encoders: int) -> Figures:
    """Send slices through the real pool, desk, Ray Data and actors on one Ray, as fast as they pass.

    Stood in: transforms and encoders return at once, trainers are threads of one actor.
    """
    import ray

    from scripts.bench import _players
    from scripts.bench.online_pool import make_images
    from sdp import cluster
    from sdp.cluster import worker_environment
    from sdp.encode.placement import Placement
    from sdp.train import online

    ray.init(
        "local", num_cpus=4, object_store_memory=400_000_000, include_dashboard=False, log_to_driver=False,
        runtime_env=worker_environment(),
    )  # fmt: skip
    online.EncoderPool = _players.Pool  # type: ignore[misc]
    placement = Placement(encoders, encoders, None, 0.0, 0.001, 1.0, 600.0, {}, 4, "bench")
    pool = online.start_pool(make_images(str(folder), "token_ids"), placement)
    ahead = 16 + math.ceil(4 * encoders / trainers)
    players = ray.remote(num_cpus=0)(_players.Trainers).options(scheduling_strategy=cluster.this_node())
    playing = players.remote(pool, trainers, ahead)

    def taken() -> int:
        return int(ray.get(playing.taken.remote()))

    _players.wait_until(lambda: ray.get(pool.status.remote())[0]["encoders"], encoders)
    _players.wait_until(taken, WARM_PIECES)
    scheduling = ray.get(pool.scheduler_s.remote())
    before, first, began = cpu_by_role(), taken(), time.monotonic()
    time.sleep(WINDOW_S)
    after, last, seconds = cpu_by_role(), taken(), time.monotonic() - began
    pieces = last - first
    scheduling, asked = ray.get(pool.scheduler_s.remote()) - scheduling, time.monotonic()
    ray.get(pool.status.remote())
    figures = {"open": trainers * (ahead + 1), "status s": time.monotonic() - asked, "pieces/s here": pieces / seconds}
    figures["scheduling ms"] = 1e3 * scheduling / pieces
    return figures | {f"{role} ms": 1e3 * (after[role] - before.get(role, 0.0)) / pieces for role in after}


def cpu_by_role() -> dict[str, float]:
    """Return the CPU seconds of this process's descendants, by what they are."""
    parents, seconds, roles = dict[int, int](), dict[int, float](), dict[int, str]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            title = (stat.parent / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended
        pid = int(stat.parent.name)
        parents[pid], seconds[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICK
        roles[pid] = next((role for name, role in _ROLES.items() if name in title[:200]), "")
        roles[pid] = roles[pid] or ("raylet" if "/raylet/raylet" in title[:300] else "others")
    own = {os.getpid()}
    for _ in range(8):
        own |= {pid for pid, parent in parents.items() if parent in own}
    totals = dict[str, float]()
    for pid in own - {os.getpid()}:
        totals[roles[pid]] = totals.get(roles[pid], 0.0) + seconds[pid]
    return totals


WARM_PIECES, WINDOW_S = sized(300, 20), sized(20.0, 1.0)
CASES = {
    "online": Case(
        "slices through the pool on Ray", online, sized([(1, 1), (8, 8), (64, 8), (8, 64), (64, 64)], [(2, 1)]),
        "trainers × encoders",
    ),
}  # fmt: skip


# --- running and printing ---------------------------------------------------------------------------------------------


def report(arguments: Sequence[str] = ()) -> int:
    """Measure and print the cases."""
    parser = argparse.ArgumentParser(prog="control")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES))
    for name in parser.parse_args(arguments).only:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as scratch:
            figures = [run_case("scripts.bench.control", key(name, size), Path(scratch)) for size in case.sizes]
        names = list(dict.fromkeys(figure for each in figures for figure in each))
        rows = [
            (" × ".join(map(str, size)), *(f"{each[figure]:,.4g}" if figure in each else "" for figure in names))
            for size, each in zip(case.sizes, figures, strict=True)
        ]
        print(f"{name}: {case.what}\n{table(rows, (case.of, *names))}\n", flush=True)
    return 0


def key(name: str, size: Sequence[int]) -> str:
    """Return the name of a size of a case on the command line."""
    return ":".join([name, *map(str, size)])


def run_size(name: str, size: Sequence[int], folder: Path) -> Figures:
    """Measure a size of a case, and the memory of this process."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    return {**CASES[name].measure(folder, *size), "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


if __name__ == "__main__":
    sizes = {key(name, size): partial(run_size, name, size) for name, case in CASES.items() for size in case.sizes}
    sys.exit(_cases.main(partial(report, sys.argv[1:]), sizes))
