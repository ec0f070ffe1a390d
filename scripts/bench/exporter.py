"""Duration and cost of a scrape of the GPU exporter, and leaks over ten thousand scrapes.

The driver is tests/nvml's fake: 8 GPUs with 2 processes each, whose PCIe measurement takes 20 ms in each direction, as
the real one's does. Unlike a real driver's, its other calls return at once, so this measures only the exporter. Scrapes
come one after another over HTTP, as from Prometheus.
"""

import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from scripts.bench._cases import exit_status, sized
from tests import nvml
from tests.exporter_kit import Exporter, exporting

SCRAPES = sized(10_000, 20)
WARM_UP = sized(500, 5)
GPUS, PROCESSES = 8, 16
GOAL_S = 0.050
GOAL_BYTES = 40e6
GOAL_GROWTH = 2e6
"""Bytes that the resident set may grow over all scrapes until malloc settles: 200 per scrape, less than any object."""
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """The exporter's resources, from /proc."""

    resident: int
    private: int
    cpu_s: float
    threads: int
    files: int


def usage(pid: int) -> Usage:
    """Return the present resources of a process."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    rollup = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    private = sum(int(rollup[key].split()[0]) for key in ("Private_Clean", "Private_Dirty"))
    return Usage(
        resident=int(status["VmRSS"].split()[0]) * 1024,
        private=private * 1024,
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICK,
        threads=int(status["Threads"]),
        files=len(list((folder / "fd").iterdir())),
    )


def scrape(exporter: Exporter, headers: dict[str, str]) -> tuple[float, int]:
    """Scrape the exporter; return the seconds taken and the size of the response in bytes."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection(urlsplit(exporter.url).netloc, timeout=30)
    connection.request("GET", "/metrics", headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    if response.status != 200:
        raise SystemExit(f"a scrape failed with {response.status}: {body[:200]!r}")
    return time.perf_counter() - began, len(body)


def sleepers(stack: ExitStack) -> Iterator[int]:
    """Start processes for the GPUs, and yield their pids."""
    for _ in range(PROCESSES):
        process = stack.enter_context(subprocess.Popen(["sleep", "3600"]))
        stack.callback(process.kill)
        yield process.pid


def main() -> int:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        lines = nvml.a100s(GPUS)
        for number, pid in enumerate(sleepers(stack)):
            lines[f"gpu.{number % GPUS}.process.{number // GPUS}"] = f"C {pid} {nvml.GIB}"
        scenario = nvml.Scenario(folder / "gpus", lines)
        environment = {
            **scenario.environment(nvml.build(folder / "lib")),
            "MALLOC_ARENA_MAX": "2",
        }  # as images/exporter
        exporter = stack.enter_context(exporting(environment))
        pid = exporter.process.pid
        for _ in range(WARM_UP):
            scrape(exporter, {})
        before = usage(pid)
        took: list[float] = []
        sizes: set[int] = set()
        for _ in range(SCRAPES):
            seconds, size = scrape(exporter, {"Accept": ACCEPT})
            took.append(seconds)
            sizes.add(size)
        after = usage(pid)
        compressed = [scrape(exporter, {"Accept": ACCEPT, "Accept-Encoding": "gzip"}) for _ in range(sized(200, 5))]
        inside = exporter.scrape().value("sdp_exporter_read_seconds")
    return report(before, after, took, sizes, compressed, inside)


def report(
    before: Usage, after: Usage, took: list[float], sizes: set[int], compressed: list[tuple[float, int]], inside: float
) -> int:
    """Print the figures; return 1 if a goal is missed."""
    took.sort()
    median, worst = statistics.median(took), took[int(len(took) * 0.99)]
    print(f"{GPUS} GPUs, {PROCESSES} processes, {SCRAPES:,} scrapes one after another (load {os.getloadavg()[0]:.1f})")
    print(
        f"a scrape     median {median * 1e3:.1f} ms, 99th percentile {worst * 1e3:.1f} ms, longest {took[-1] * 1e3:.0f} ms"
    )
    print(f"  reading    {inside * 1e3:.1f} ms of one sampled scrape; the rest is formatting and HTTP")
    print(f"  CPU        {(after.cpu_s - before.cpu_s) / len(took) * 1e3:.1f} ms, including the fake driver's own")
    print(
        f"  response   {max(sizes):,} bytes; {max(size for _, size in compressed):,} by gzip, in {statistics.median(s for s, _ in compressed) * 1e3:.1f} ms"
    )
    print(
        f"resident     {before.resident / 1e6:.1f} MB after {WARM_UP}, {after.resident / 1e6:.1f} MB after {SCRAPES + WARM_UP:,} (private {after.private / 1e6:.1f} MB)"
    )
    print(f"threads      {before.threads} and {after.threads}")
    print(f"files        {before.files} and {after.files}")
    goals = {
        f"median under {GOAL_S * 1e3:.0f} ms": median < GOAL_S,
        f"resident under {GOAL_BYTES / 1e6:.0f} MB": after.resident < GOAL_BYTES,
        f"growth under {GOAL_GROWTH / 1e6:.0f} MB": after.resident - before.resident < GOAL_GROWTH,
        "no new threads": after.threads <= before.threads,
        "no new files": after.files <= before.files,
    }
    print("; ".join(f"{goal}: {'yes' if met else 'NO'}" for goal, met in goals.items()))
    return exit_status(all(goals.values()))


if __name__ == "__main__":
    sys.exit(main())
