"""Train online for an hour on a cluster, kill a worker every two minutes, and tell what grew.

    .venv/bin/python -m tests.chaos.soak --minutes 60

Memory (PSS), file handles and threads of every process of the job are sampled by kind, and objects and actors of Ray
with them. Afterwards the epochs must be exact, the checkpoint readable, and no process left.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import grpc  # type: ignore[import-untyped]
from ray._private.internal_api import get_state_from_address, node_stats

from sdp.console import duration, say, table
from sdp.model.checkpoints import find_checkpoint, read_ledger
from tests.chaos.__main__ import Chaos, RayCluster, chaos_in, left_behind, processes, start_job, title_of
from tests.chaos.log import faults_in

SAMPLE_S = 10.0
WARM_UP = 0.15
"""The share of the time before growth is measured: imports, caches and the calibration of encoders."""
END_S = 180.0
Sample = dict[str, dict[str, float]]
"""The figures of each kind of process, and those of Ray."""


def figures_of(pid: int) -> dict[str, float]:
    """Return what a process holds."""
    process = Path(f"/proc/{pid}")
    rollup = dict(line.split(":", 1) for line in (process / "smaps_rollup").read_text().splitlines()[1:])
    return {
        "MB": int(rollup["Pss"].split()[0]) / 1024,
        "handles": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
    }


def sample(mark: str, address: str) -> Sample:
    """Sum up the figures of the processes of each kind, and count Ray's objects and actors."""
    sums: defaultdict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pid, kind in processes(mark):
        try:
            figures = {**figures_of(pid), "processes": 1}
            name = title_of(pid, kind)
        except OSError:  # ended meanwhile
            continue
        for key, value in figures.items():
            sums[name][key] += value
    with suppress(grpc.RpcError, RuntimeError):  # no answer on a busy machine: the next sample has it
        sums["Ray"] = defaultdict(float, _of_ray(address))
    return {name: dict(figures) for name, figures in sums.items()}


def _of_ray(address: str) -> dict[str, float]:
    state = get_state_from_address(address)  # type: ignore[no-untyped-call]
    nodes = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in state.node_table() if node["Alive"]]
    stores = [node_stats(*node, include_memory_info=False).store_stats for node in nodes]  # type: ignore[no-untyped-call]
    return {
        "objects": sum(store.num_local_objects for store in stores),
        "object MB": sum(store.object_store_bytes_used for store in stores) / 2**20,
        "actors": len(actors(address)),
    }


def actors(address: str) -> list[str]:
    """Return the classes of the actors that are alive."""
    state = get_state_from_address(address)  # type: ignore[no-untyped-call]
    return sorted(one["ActorClassName"] for one in state.actor_table(None).values() if one["State"] == "ALIVE")


def growth(samples: Sequence[tuple[float, Sample]]) -> list[tuple[str, ...]]:
    """Compare the first third of the samples with the last, by medians."""
    third = max(1, len(samples) // 3)
    rows: list[tuple[str, ...]] = []
    for name in sorted({name for _, figures in samples for name in figures}):
        before, after = (
            [figures[name] for _, figures in part if name in figures] for part in (samples[:third], samples[-third:])
        )
        for key in sorted({key for figures in [*before, *after] for key in figures}):
            first, last = (median([one.get(key, 0.0) for one in part] or [0.0]) for part in (before, after))
            if key in ("MB", "objects", "object MB", "actors", "processes") or last > first:
                rows.append((name, key, f"{first:.0f}", f"{last:.0f}", f"{last - first:+.0f}"))
    return rows


def soak(chaos: Chaos, folder: Path, minutes: float, every_s: float, seed: int) -> list[str]:
    """Run the job, and return what is wrong after it."""
    draw, mark = random.Random(seed), f"soak-{os.getpid()}"
    stage = chaos.stages["online"]
    longer: dict[str, Any] = {"max_steps": 10_000_000, "max_failures": 1_000, "checkpoint": {"every_steps": 10}}
    stage = replace(stage, config={**stage.config, **longer})
    output, log = f"{chaos.uri}/soak", folder / "soak.log"
    log.unlink(missing_ok=True)
    cluster, killed = RayCluster(mark), Counter[str]()
    samples: list[tuple[float, Sample]] = []
    cluster.start()
    try:
        began = time.monotonic()
        job = start_job(stage, folder, output, log, cluster.address, mark)
        next_kill = began + every_s
        while (elapsed := time.monotonic() - began) < 60 * minutes and job.poll() is None:
            if time.monotonic() >= next_kill:
                next_kill += every_s
                pid = draw.choice(sorted(pid for pid, kind in processes(mark) if kind == "worker"))
                name = title_of(pid, "worker")
                os.kill(pid, signal.SIGKILL)
                killed[name] += 1
                say(f"{duration(elapsed)}: killed {name}")
            samples.append((elapsed, sample(mark, cluster.address)))
            (folder / "soak.json").write_text(json.dumps(samples))
            time.sleep(SAMPLE_S)
        ended = job.poll()
        job.send_signal(signal.SIGTERM)
        code = job.wait(END_S)
        took = time.monotonic() - began
        stayed = actors(cluster.address)
    finally:
        cluster.stop()
    wrong = [] if ended is None else [f"the job ended by itself, with {ended}"]
    wrong += [f"left behind: {left}"] if (left := left_behind(mark)) else []
    wrong += faults_in(log.read_text(errors="replace"))
    ledger = read_ledger(find_checkpoint(output))
    *rows, _ = (sorted(ledger.rows(epoch)) for epoch in ledger.epochs())
    wrong += [f"epoch {index} differs from the first" for index, epoch in enumerate(rows) if epoch != rows[0]]
    measured = [one for one in samples if one[0] >= WARM_UP * 60 * minutes]
    say(table(growth(measured), ("process", "figure", "first third", "last third", "growth")))
    say(f"killed: {', '.join(f'{name} {count} x' for name, count in killed.most_common()) or 'nothing'}")
    say(f"ended with {code} after {duration(took)} and {len(rows)} whole epochs; actors that stay: {', '.join(stayed)}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=120, metavar="SECONDS", help="the time between kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(".chaos/soak"))
    options = parser.parse_args(arguments)
    with chaos_in(options.folder) as chaos:
        chaos.prepare(["online"])
        wrong = soak(chaos, options.folder, options.minutes, options.every, options.seed)
    say("; ".join(wrong) or "the epochs are exact, the log has no fault, and no process is left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
