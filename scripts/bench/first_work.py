"""The time from a job's command to its first work, on a cluster where each job has run before.

    python -m scripts.bench.first_work

Two nodes of Ray on this machine stay up, as a cluster's do. A download's first work is its first request to a server.
Of process it is the part with all four rows, and of training the first line of its metrics: upper limits, since work has
begun before. The whole job is the time from its command to its exit.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench._cases import exit_status, sized, spare_ray
from scripts.demo import shapes
from sdp.console import table
from tests.misbehaving.server import ImageServer

RUNS = sized(4, 1)
"""Runs of each job, of which the first finds the cluster new."""
GOAL_S = 5.0
ROWS = 4
_POLL_S, _TIMEOUT_S = 0.02, 300.0


def main() -> int:
    """Start a cluster, run the jobs in turns, and print what they took."""
    from ray.cluster_utils import Cluster

    taken: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="sdp-bench-") as name, ImageServer(images=ROWS) as server:
        spare_ray()
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(sized(2, 1)):
                cluster.add_node(num_cpus=2, object_store_memory=200_000_000)
            for turn in range(RUNS):
                for job, times in run(Path(name, str(turn)), server, str(cluster.address)).items():
                    taken.setdefault(job, []).append(times)
        finally:
            cluster.shutdown()
    later = {
        job: [statistics.median(column) for column in zip(*(times[1:] or times), strict=True)]
        for job, times in taken.items()
    }
    rows = [(job, *(f"{seconds:.1f} s" for seconds in (times[0][0], *later[job]))) for job, times in taken.items()]
    print(
        f"from the command, on a cluster of two nodes (load {os.getloadavg()[0]:.1f}; later: median of the other runs)"
    )
    print(table(rows, ("job", "first work, first run", "later", "whole job, later")))
    first = later["download"][0]
    print(f"a download's first request within {GOAL_S:g} s: {'yes' if first <= GOAL_S else 'NO'}")
    return exit_status(first <= GOAL_S)


def run(folder: Path, server: ImageServer, address: str) -> dict[str, tuple[float, float]]:
    """Run each job once; return the seconds to its first work and to its end."""
    shapes.write_metadata(folder / "metadata", ROWS, server.url)
    images, latents, trained = (folder / name for name in ("images", "latents", "run"))
    tiny = {"source": "builtin:tiny"}
    server.reset()
    download = {
        "source": {"uri": str(folder / "metadata"), "url_column": "URL", "caption_column": "TEXT"},
        "output": {"uri": str(images)},
        "fetch": {"allow_networks": ["127.0.0.0/8"]},
    }
    process = {"resolutions": [64], "model": tiny, "encode": {"accelerator": "cpu"}}
    train = {
        "data": {"resolution": 64, "batch_size": 2}, "model": tiny, "max_steps": 2, "log": {"every_steps": 1},
        "scaling": {"num_workers": 1, "accelerator": "cpu"},
    }  # fmt: skip
    linked: dict[str, tuple[Path, Path, dict[str, Any]]] = {
        "process": (images, latents, process),
        "train": (latents, trained, train),
    }
    seen: dict[str, Callable[[], bool]] = {
        "download": lambda: server.stats.requests > 0,
        "process": lambda: any(latents.glob("parts/*.parquet")),
        "train": lambda: any(trained.glob("metrics*")),
    }
    configs = {"download": download} | {
        job: {"source": {"uri": str(source)}, "output": {"uri": str(output)}, **more}
        for job, (source, output, more) in linked.items()
    }
    return {job: _time(folder / f"{job}.json", job, config, seen[job], address) for job, config in configs.items()}


def _time(file: Path, job: str, config: dict[str, Any], seen: Callable[[], bool], address: str) -> tuple[float, float]:
    file.write_text(json.dumps(config), encoding="utf-8")
    with file.with_suffix(".log").open("w+") as log:
        began, first = time.monotonic(), 0.0
        command = [sys.executable, "-m", "sdp", job, "--config", str(file)]
        process = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": address}, stdout=log, stderr=log)
        while time.monotonic() - began < _TIMEOUT_S:
            ended = process.poll() is not None  # before the last look
            if not first and seen():
                first = time.monotonic() - began
            if ended:
                break
            time.sleep(_POLL_S)
        process.kill()
        log.seek(0)
        if process.wait() or not first:
            raise SystemExit(f"bench first_work: {job}: exit code {process.returncode}\n{log.read()[-3000:]}")
        return first, time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
