"""Kill whatever a job consists of, at random times, and prove that its output is that of an undisturbed run.

    make chaos ROUNDS=100                            seeds 1 to 100
    .venv/bin/python -m tests.chaos --seed 17        one round again

A seed decides the stage, whether the job starts a Ray of its own or runs on a cluster of three nodes, and how often,
when and whom to kill: the driver, its supervisor, a worker, a raylet, the GCS, an agent, a node, the S3 server. A job
that ends is submitted again, as a RayJob's retries do. Afterwards its parts have the same bytes, its checkpoint the
same weights and rows, its output no other objects, and no process is left.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from ray.cluster_utils import Cluster

from scripts.tools import find
from sdp.console import duration, say, table
from sdp.demo.server import serve
from sdp.demo.shapes import write_metadata
from tests.chaos.stages import IMAGES, Stage, fingerprint, names, stages
from tests.integration.s3 import Gateway, running_gateway

MARK = "SDP_CHAOS"
"""An environment variable that every process of a job inherits."""
SUBMISSIONS = 4
"""The limit on failures of a job, which is submitted again after each."""
LONGEST_S = 900.0
LEFT_S = 60.0
"""By then every process of a job that has ended is gone."""
_STORE = {"object_store_memory": 150_000_000}
KINDS = {
    "gcs": b"gcs_server",
    "raylet": b"raylet/raylet",
    "agent": b"agent.py",
    "worker": b"ray::",
    "driver": b"-m\0sdp\0",
    "supervisor": b"sdp.supervisor",
}
"""Parts of the command lines of a job's processes."""


@dataclass
class Round:
    """A round: the choices made by its seed, and its result."""

    seed: int
    stage: Stage
    clustered: bool
    kills: list[tuple[float, str]]
    """Shares of an undisturbed run's seconds, and targets."""
    killed: list[str] = field(default_factory=list)
    submissions: int = 0
    seconds: float = 0.0
    verdict: str = "?"


def plan_round(seed: int, every: Sequence[Stage]) -> Round:
    """Draw a round."""
    draw = random.Random(seed)
    clustered = draw.random() < 0.4
    targets = ["driver", "supervisor", "worker", "worker", "agent", "s3", "gcs", "node" if clustered else "raylet"]
    kills = sorted((draw.uniform(0.0, 1.3), draw.choice(targets)) for _ in range(draw.randint(1, 3)))
    return Round(seed, draw.choice(every), clustered, kills)


def processes(mark: str) -> Iterator[tuple[int, str]]:
    """Yield the pid and kind of every process that carries a mark."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            line = (folder / "cmdline").read_bytes()
            if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                yield int(folder.name), next((kind for kind, text in KINDS.items() if text in line), "other")
        except OSError:  # it has ended
            continue


class RayCluster:
    """A head without CPUs and two nodes, replaced when it has lost its head."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    @property
    def address(self) -> str:
        assert self._cluster is not None
        return str(self._cluster.address)

    def start(self, mark: str) -> None:
        os.environ[MARK] = mark  # for the processes that it starts
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **_STORE})
        for _ in range(2):
            self._cluster.add_node(num_cpus=2, **_STORE)

    def lose(self, target: str, draw: random.Random) -> bool:
        """Lose a node and get another one, or lose the head."""
        assert self._cluster is not None
        if target == "gcs":
            self._cluster.head_node.kill_gcs_server(check_alive=False)
            return True
        nodes = list(self._cluster.worker_nodes)
        if not nodes:
            return False
        self._cluster.remove_node(draw.choice(nodes), allow_graceful=False)
        self._cluster.add_node(num_cpus=2, **_STORE)
        return True

    def mend(self, mark: str) -> None:
        """Start a new cluster if the head is lost."""
        assert self._cluster is not None
        head = self._cluster.head_node
        if head.dead_processes():
            self.stop()
            self.start(mark)

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None
        os.environ.pop(MARK, None)


class Chaos:
    """Rounds on one S3 server, against references that were made there without being disturbed."""

    def __init__(self, folder: Path, gateway: Gateway) -> None:
        self._folder, self._gateway = folder, gateway
        self._stages = stages(f"{gateway.uri}/reference")
        self._references: dict[str, Any] = {}
        self._names: dict[str, set[str]] = {}
        self._took: dict[str, float] = {}

    def prepare(self, wanted: Sequence[str]) -> None:
        """Run each stage undisturbed, up to the last one that is wanted."""
        last = max(list(self._stages).index(name) for name in wanted)
        first = self._stages["download"]
        # The image server fails for some images once; a first download takes these failures.
        self._start(first, f"{self._gateway.uri}/failures", "reference", None).wait()
        for stage in list(self._stages.values())[: last + 1]:
            output = f"{self._gateway.uri}/reference/{stage.name}"
            began = time.monotonic()
            code = self._start(stage, output, "reference", None).wait()
            if code:
                raise SystemExit(f"chaos: the undisturbed {stage.name} ended with {code}: {self._folder}/reference.log")
            self._took[stage.name] = time.monotonic() - began
            self._references[stage.name], self._names[stage.name] = fingerprint(stage, output), names(output)
            say(f"undisturbed {stage.name}: {duration(self._took[stage.name])}")

    def run(self, seed: int, wanted: Sequence[str]) -> Round:
        """Run one round; its verdict is "same", or what differs."""
        plan = plan_round(seed, [self._stages[name] for name in wanted])
        output = f"{self._gateway.uri}/rounds/{seed}"
        mark, cluster, began = f"{seed}-{uuid4().hex[:8]}", RayCluster(), time.monotonic()
        try:
            if plan.clustered:
                cluster.start(mark)
            code = self._disturbed(plan, output, mark, cluster if plan.clustered else None)
            plan.verdict = f"ended with {code}" if code else self._judge(plan.stage, output)
        finally:
            cluster.stop()
        plan.seconds = time.monotonic() - began
        left = self._left(mark)
        if left and plan.verdict == "same":
            plan.verdict = f"left behind: {left}"
        if plan.verdict == "same":
            shutil.rmtree(self._gateway.root / self._gateway.bucket / "rounds" / str(seed))
        return plan

    def _disturbed(self, plan: Round, output: str, mark: str, cluster: RayCluster | None) -> int:
        draw, began, kills, code = random.Random(plan.seed), time.monotonic(), list(plan.kills), -1
        took = self._took[plan.stage.name]
        while plan.submissions < SUBMISSIONS:
            if cluster is not None:
                cluster.mend(mark)
            job = self._start(plan.stage, output, str(plan.seed), cluster.address if cluster else None, mark)
            plan.submissions += 1
            while job.poll() is None:
                if time.monotonic() - began > LONGEST_S:
                    self._end(mark)
                    return 124
                if kills and time.monotonic() - began > kills[0][0] * took:
                    at, target = kills.pop(0)
                    if self._kill(target, mark, cluster, draw):
                        plan.killed.append(f"{target} at {at * took:.0f} s")
                time.sleep(0.02)  # kills come by the clock
            code = job.returncode
            if code == 0:
                break
            if cluster is None:
                self._end(mark)  # what a pod's end takes with it
        return code

    def _start(
        self, stage: Stage, output: str, log: str, address: str | None, mark: str = "reference"
    ) -> "subprocess.Popen[bytes]":
        file = stage.write(self._folder, output)
        environment = {**os.environ, MARK: mark, **({"RAY_ADDRESS": address} if address else {})}
        with (self._folder / f"{log}.log").open("ab") as sink:
            command = [sys.executable, "-m", "sdp.supervisor", stage.job, "--config", str(file)]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment)

    def _kill(self, target: str, mark: str, cluster: RayCluster | None, draw: random.Random) -> bool:
        if target == "s3":
            self._gateway.kill()
            time.sleep(draw.uniform(0, 4))  # how long the server is away
            self._gateway.start()
            return True
        if cluster is not None and target in ("node", "gcs"):
            return cluster.lose(target, draw)
        pids = sorted(pid for pid, kind in processes(mark) if kind == target)
        if pids:
            os.kill(draw.choice(pids), signal.SIGKILL)
        return bool(pids)

    def _judge(self, stage: Stage, output: str) -> str:
        try:
            result = fingerprint(stage, output)
        except Exception as error:  # noqa: BLE001 (the verdict)
            return f"unreadable: {error}"
        reference = self._references[stage.name]
        if different := [key for key in reference if result[key] != reference[key]]:
            return f"differs in {', '.join(different)}"
        extra = names(output) ^ self._names[stage.name]
        return f"other objects: {', '.join(sorted(extra)[:5])}" if extra else "same"

    def _left(self, mark: str) -> dict[str, int]:
        deadline = time.monotonic() + LEFT_S
        while (left := Counter(kind for _, kind in processes(mark))) and time.monotonic() < deadline:
            time.sleep(0.2)
        self._end(mark)
        return dict(left)

    def _end(self, mark: str) -> None:
        for pid, _ in processes(mark):
            os.kill(pid, signal.SIGKILL)


def _server() -> Path:
    program = find("versitygw")
    if program is None:
        raise SystemExit("chaos: no versitygw; `python -m scripts.tools fetch versitygw` gets it")
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds, print a line for each and a table of those that failed; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="the first round's seed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--stages", nargs="+", default=["download", "process", "train", "online", "generate"])
    parser.add_argument("--folder", type=Path, default=Path(".chaos"), help="logs, and what failed rounds have left")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no round after so long")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(options.folder)
    options.folder.mkdir(parents=True)
    failed = []
    with ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(_server(), options.folder / "s3"))
        os.environ.update(gateway.env)
        port = stack.enter_context(serve(IMAGES))
        where = gateway.root / gateway.bucket / "reference" / "metadata"
        write_metadata(where, IMAGES, [f"http://127.0.0.1:{port}"], files=3)
        chaos = Chaos(options.folder, gateway)
        chaos.prepare(options.stages)
        for seed in range(options.seed, options.seed + options.rounds):
            if time.monotonic() - began > 60 * options.minutes:
                say(f"stopped before seed {seed}")
                break
            done = chaos.run(seed, options.stages)
            where_run = "cluster" if done.clustered else "own Ray"
            say(
                f"seed {seed}: {done.stage.name} ({where_run}), killed {', '.join(done.killed) or 'nothing'}, "
                f"submitted {done.submissions} x, {duration(done.seconds)}: {done.verdict}"
            )
            if done.verdict != "same":
                failed.append((f"{seed}", done.stage.name, done.verdict))
    say("\n" + (table(failed, ("seed", "stage", "verdict")) if failed else "all outputs are those of undisturbed runs"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
