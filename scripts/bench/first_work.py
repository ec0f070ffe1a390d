"""The time from a job's command to its first work, on a cluster where each job has run before.

    python -m scripts.bench.first_work

Two nodes of Ray on this machine stay up, as a cluster's do. A download's first work is its first request to a server.
Process has done all of its work when the part with its four rows appears, so its first is earlier. Training has done
some when its log has a line. The whole job counts from its command to its exit.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from scripts.bench._cases import exit_status, sized
from sdp.console import table
from sdp.demo import shapes

RUNS = sized(4, 1)
"""Runs of each job; the first finds the cluster new."""
GOAL_S = 5.0
ROWS = 4
_POLL_S, _TIMEOUT_S = 0.02, 300.0


class Server(ThreadingHTTPServer):
    """Serves shapes, and records that it was asked."""

    asked = False


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.asked = True
        number = int(Path(self.path).stem)
        picture, kind, _ = shapes.encode(shapes.sample(number))
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(picture)))
        self.end_headers()
        self.wfile.write(picture)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> int:
    """Start a cluster, run the jobs in turns, and print what they took."""
    from ray.cluster_utils import Cluster

    taken: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="sdp-bench-") as name, Server(("127.0.0.1", 0), _Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=2, object_store_memory=200_000_000)
            for turn in range(RUNS):
                for job, times in run(Path(name, str(turn)), server, str(cluster.address)).items():
                    taken.setdefault(job, []).append(times)
        finally:
            server.shutdown()
            cluster.shutdown()
    later = {job: times[1:] or times for job, times in taken.items()}
    rows = [
        (
            job,
            f"{times[0][0]:.1f} s",
            *(f"{statistics.median(column):.1f} s" for column in zip(*later[job], strict=True)),
        )
        for job, times in taken.items()
    ]
    print(
        f"from the command, on a cluster of two nodes (load {os.getloadavg()[0]:.1f}; medians of {RUNS - 1} later runs)"
    )
    print(table(rows, ("job", "first work, at first", "later", "whole job, later")))
    first = statistics.median(first for first, _ in later["download"])
    print(f"a download's first request within {GOAL_S:g} s: {'yes' if first <= GOAL_S else 'NO'}")
    return exit_status(first <= GOAL_S)


def run(folder: Path, server: Server, address: str) -> dict[str, tuple[float, float]]:
    """Run each job once; return the seconds to its first work and to its end."""
    shapes.write_metadata(folder / "metadata", ROWS, f"http://127.0.0.1:{server.server_address[1]}")
    images, latents, trained = (folder / name for name in ("images", "latents", "run"))
    tiny, server.asked = {"source": "builtin:tiny"}, False
    download = {
        "source": {"uri": str(folder / "metadata"), "url_column": "URL", "caption_column": "TEXT"},
        "output": {"uri": str(images)},
        "fetch": {"allow_private": True},
    }
    process = {"resolutions": [64], "model": tiny, "encode": {"use_gpu": False}}
    train = {
        "data": {"resolution": 64, "batch_size": 2}, "model": tiny, "max_steps": 2, "log": {"every_steps": 1},
        "scaling": {"num_workers": 1, "use_gpu": False},
    }  # fmt: skip
    linked: dict[str, tuple[Path, Path, dict[str, Any]]] = {
        "process": (images, latents, process),
        "train": (latents, trained, train),
    }
    seen: dict[str, Callable[[], bool]] = {
        "download": lambda: server.asked,
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
        while process.poll() is None and time.monotonic() - began < _TIMEOUT_S:
            if not first and seen():
                first = time.monotonic() - began
            time.sleep(_POLL_S)
        process.kill()
        log.seek(0)
        if process.wait() or not first:
            raise SystemExit(f"bench first_work: {job}: exit code {process.returncode}\n{log.read()[-3000:]}")
        return first, time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
