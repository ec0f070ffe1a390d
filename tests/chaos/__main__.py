"""Kill whatever a job consists of, at random times, and prove that its output is that of an undisturbed run.

    make chaos ROUNDS=100                                 seeds 1 to 100
    .venv/bin/python -m tests.chaos --seed 17             one round again
    .venv/bin/python -m tests.chaos --directed            the listed cases, in place of random ones
    .venv/bin/python -m tests.chaos --stopped download    a job stopped at each write, in place of kills (stopped.py)

A seed decides the stage, whether the job starts a Ray of its own or runs on a cluster of three nodes, and how often,
when and whom to kill: the driver, its supervisor, a worker, a raylet, the GCS, an agent, a node, the S3 server. A job
that ends is submitted again, as a RayJob's retries do. Afterwards its parts have the same bytes, its checkpoint the
same weights and rows, its output no other objects; its log has no traceback, and a line for each end; no process is
left.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from uuid import uuid4

from ray.cluster_utils import Cluster

from scripts.demo.shapes import failure_of, sample, write_metadata
from scripts.tools import find
from sdp.console import duration, say, table
from tests.chaos.directed import DIRECTED, WHOLE, Case, Kill
from tests.chaos.log import faults_in
from tests.chaos.stages import IMAGES, Stage, fingerprint, names, stages
from tests.integration.s3 import Gateway, free_port, running_gateway
from tests.misbehaving.server import ImageServer

MARK = "SDP_CHAOS"
"""An environment variable that every process of a job inherits."""
SUBMISSIONS = 4
"""The limit on failures of a job, which is submitted again after each."""
LONGEST_S = 600.0
LEFT_S = 90.0
"""By then every process of an ended job is gone: Ray's agents take 60 s to give up on a GCS that is gone too."""
HEADLESS_S = 5.0
"""Time for the job to say that the head's raylet was lost, before its container is gone too."""
_STORE = {"object_store_memory": 150_000_000}
KINDS = {
    "gcs": b"gcs_server",
    "raylet": b"raylet/raylet",
    "dashboard agent": b"ray::DashboardAgent",
    "environment agent": b"ray::RuntimeEnvAgent",
    "worker": b"ray::",
    "driver": b"-m\0sdp\0",
    "supervisor": b"sdp.supervisor",
}
"""Parts of the command lines of a job's processes; the first that fits names the process."""
AGENTS = ("dashboard agent", "environment agent")


@dataclass
class Round:
    """A case, and its result."""

    name: str
    case: Case
    stage: Stage
    killed: list[str] = field(default_factory=list)
    submissions: int = 0
    seconds: float = 0.0
    verdict: str = "?"

    def __str__(self) -> str:
        where = "cluster" if self.case.clustered else "own Ray" if self.case.on_ray else "alone"
        return (
            f"{self.name}: {self.stage.name} ({where}), killed {', '.join(self.killed) or 'nothing'}, submitted "
            f"{self.submissions} x, {duration(self.seconds)}: {self.verdict}"
        )


def draw_case(seed: int, wanted: Sequence[str]) -> Case:
    """Draw a round."""
    draw = random.Random(seed)
    clustered = draw.random() < 0.4
    targets = ["driver", "supervisor", "worker", "worker", *AGENTS, "s3", "gcs", "node" if clustered else "raylet"]
    kills = sorted((draw.uniform(0.0, 1.3), draw.choice(targets)) for _ in range(draw.randint(1, 3)))
    return Case(draw.choice(wanted), clustered, tuple(Kill(target, at) for at, target in kills))


_known: defaultdict[str, set[tuple[int, str]]] = defaultdict(set)
"""Processes by mark, as pid and start time. Ray's agents wipe their environment: they are known by their parents."""


def processes(mark: str) -> Iterator[tuple[int, str]]:
    """Yield the pid and kind of every process that carries a mark, or whose parent does."""
    wanted, known = f"{MARK}={mark}".encode(), _known[mark]
    lines: dict[tuple[int, str], bytes] = {}
    children: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit():
                continue
            state, parent, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
            process = int(folder.name), fields[17]
            if state == "Z":
                continue
            lines[process] = (folder / "cmdline").read_bytes()
            children[int(parent)].append(process)
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                known.add(process)
        except OSError:  # ended meanwhile
            continue
    ahead = [process for process in lines if process in known]
    while ahead:
        process = ahead.pop()
        known.add(process)
        yield process[0], next((kind for kind, text in KINDS.items() if text in lines[process]), "other")
        ahead += [child for child in children[process[0]] if child not in known]


def title_of(pid: int, kind: str) -> str:
    """Return the name of a process: `ray::` and its actor's class, if it is a worker."""
    if kind != "worker" and kind in KINDS:
        return kind
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has ended
        return kind
    if line.startswith("ray::"):
        name = line.split()[0].split(".")[0]
        return name if name.startswith("ray::MapBatches(") else name.split("(")[0]  # tasks of Ray Data
    return "dashboard" if "dashboard" in line else "other"


class RayCluster:
    """A head without CPUs and two nodes, replaced when it has lost its head."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._cluster: Cluster | None = None
        self._has_gcs = False

    @property
    def has_head(self) -> bool:
        """True while the head's processes live. In a pod, the end of either ends the head's container, and all jobs."""
        return self._has_gcs and self.has_head_raylet

    @property
    def has_head_raylet(self) -> bool:
        assert self._cluster is not None
        # Without a GCS the raylet ends after a minute; by then the job must have ended by itself.
        return not self._has_gcs or "raylet" not in {kind for kind, _ in self._cluster.head_node.dead_processes()}

    @property
    def address(self) -> str:
        assert self._cluster is not None
        return str(self._cluster.address)

    def start(self) -> None:
        os.environ[MARK] = self._mark  # for the processes that it starts
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **_STORE}
        )
        self._has_gcs = True
        for _ in range(2):
            self._cluster.add_node(num_cpus=2, **_STORE)

    def lose(self, target: str, draw: random.Random) -> bool:
        """Lose a node and get another one, or lose the head."""
        assert self._cluster is not None
        if target == "gcs":
            self._cluster.head_node.kill_gcs_server(check_alive=False)
            self._has_gcs = False
            return True
        nodes = list(self._cluster.worker_nodes)
        if not nodes:
            return False
        self._cluster.remove_node(draw.choice(nodes), allow_graceful=False)
        self._cluster.add_node(num_cpus=2, **_STORE)
        return True

    def replace_lost_nodes(self) -> None:
        """Replace nodes whose raylet has ended, as with one of its agents: Kubernetes would restart the container."""
        assert self._cluster is not None
        for node in list(self._cluster.worker_nodes):
            if "raylet" in {kind for kind, _ in node.dead_processes()}:
                self._cluster.remove_node(node, allow_graceful=False)
                self._cluster.add_node(num_cpus=2, **_STORE)

    def mend(self) -> None:
        """Start a new cluster if the head is lost."""
        if not self.has_head:
            self.stop()
            self.start()

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None
        os.environ.pop(MARK, None)


def start_job(
    stage: Stage, folder: Path, output: str, log: Path, address: str | None, mark: str
) -> "subprocess.Popen[bytes]":
    """Start a stage's job under its supervisor."""
    file = stage.write(folder, output)
    environment = {**os.environ, MARK: mark, **({"RAY_ADDRESS": address} if address else {})}
    with log.open("ab") as sink:
        command = [sys.executable, "-m", "sdp.supervisor", stage.job, "--config", str(file)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment)


def left_behind(mark: str, but: Sequence[str] = ()) -> dict[str, int]:
    """Wait until the processes with a mark are gone; return those that stay, and end them."""
    deadline = time.monotonic() + LEFT_S
    while (left := Counter(kind for _, kind in processes(mark) if kind not in but)) and time.monotonic() < deadline:
        time.sleep(0.2)
    end_all(mark)
    return dict(left)


def end_all(mark: str, only: str | None = None) -> None:
    """Kill the processes with a mark, or those of one kind."""
    for pid in [pid for pid, kind in processes(mark) if only in (None, kind)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Chaos:
    """Rounds on one S3 server, against references that were made there without being disturbed."""

    def __init__(self, folder: Path, gateway: Gateway) -> None:
        self.folder, self.gateway = folder, gateway
        self.stages = stages(f"{gateway.uri}/reference")
        self.uri = gateway.uri
        self._file = folder / "references.json"
        self._references: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def prepare(self, wanted: Sequence[str]) -> None:
        """Run each stage that is wanted undisturbed, and those that it reads, unless that has been done here."""
        needed = set(wanted)
        for stage in reversed(self.stages.values()):
            needed |= set(stage.reads) if stage.name in needed else set()
        for stage in (stage for stage in self.stages.values() if stage.name in needed):
            output = f"{self.gateway.uri}/reference/{stage.name}"
            known = self._references.get(stage.name)
            if known is not None and known["config"] == stage.text(output):
                continue
            for name in list(self._references):
                if name == stage.name or stage.name in self.stages[name].reads:
                    del self._references[name]
            self.forget(f"reference/{stage.name}")
            took = self._undisturbed(stage, output)
            self._references[stage.name] = {
                "config": stage.text(output),
                "took": took,
                "fingerprint": _plain(fingerprint(stage, output)),
                "names": sorted(names(output)),
            }
            self._file.write_text(json.dumps(self._references))
            say(f"undisturbed {stage.name}: {duration(took)}")

    def run(self, name: str, case: Case) -> Round:
        """Run one round; its verdict is "same", or what differs."""
        done = Round(name, case, self.stages[case.stage])
        output = f"{self.gateway.uri}/rounds/{name}"
        mark, began = f"{name}-{uuid4().hex[:8]}", time.monotonic()
        self.forget(f"rounds/{name}")  # a failed round leaves it
        log, cluster = self.folder / f"{name}.log", RayCluster(mark) if case.clustered else None
        try:
            if cluster is not None:
                cluster.start()
            code = self._disturbed(done, output, mark, cluster, log)
            done.verdict = f"ended with {code}" if code else self.judge(done.stage, output)
        finally:
            if cluster is not None:
                cluster.stop()
        done.seconds = time.monotonic() - began
        left = left_behind(mark, () if cluster is None else AGENTS)  # a cluster's agents are not the job's
        also = [f"left behind: {left}"] if left else []
        also += faults_in(log.read_text(errors="replace"))
        if also:
            done.verdict = "; ".join([done.verdict, *also])
        if done.verdict == "same":
            self.forget(f"rounds/{name}")
        return done

    def forget(self, path: str) -> None:
        shutil.rmtree(self.gateway.root / self.gateway.bucket / path, ignore_errors=True)

    def _undisturbed(self, stage: Stage, output: str) -> float:
        mark, began, log = f"reference-{uuid4().hex[:8]}", time.monotonic(), self.folder / "reference.log"
        code = start_job(stage, self.folder, output, log, None, mark).wait()
        took = time.monotonic() - began
        if code:
            raise SystemExit(f"chaos: the undisturbed {stage.name} ended with {code}: {log}")
        return took

    def _disturbed(self, done: Round, output: str, mark: str, cluster: RayCluster | None, log: Path) -> int:
        case, began, code = done.case, time.monotonic(), -1
        draw, kills, took = random.Random(done.name), list(case.kills), self._references[case.stage]["took"]
        while done.submissions < SUBMISSIONS:
            if cluster is not None:
                cluster.mend()
            address = cluster.address if cluster else "local" if case.on_ray else None
            job = start_job(done.stage, self.folder, output, log, address, mark)
            done.submissions += 1
            headless_at = math.inf
            while job.poll() is None:
                if cluster is not None and not cluster.has_head_raylet:
                    headless_at = min(headless_at, time.monotonic())
                elif cluster is not None and cluster.has_head:
                    cluster.replace_lost_nodes()
                if time.monotonic() - headless_at > HEADLESS_S:
                    end_all(mark)  # the head's container ends, and with it the job
                elapsed = time.monotonic() - began
                if elapsed > LONGEST_S:
                    end_all(mark)
                    return 124
                if (
                    kills
                    and kills[0].is_due(elapsed / took, log)
                    and (killed := self._kill(kills[0].target, mark, cluster, draw))
                ):
                    done.killed.append(f"{killed} at {elapsed:.0f} s")
                    kills.pop(0)
                elif kills and kills[0].at is not None and elapsed > 2 * took * kills[0].at + 10:
                    kills.pop(0)  # there is none of them
                time.sleep(0.02)  # kills come by the clock
            code = job.returncode
            headless = cluster is not None and not cluster.has_head  # and the next submission has another one
            if code == 0 or (code == 2 and not headless):  # as after a RayJob's end, which a person has to mend
                break
            # What a pod's end takes with it; on a cluster, what Ray's job manager ends with the entrypoint.
            end_all(mark, None if cluster is None else "driver")
        return code

    def _kill(self, target: str, mark: str, cluster: RayCluster | None, draw: random.Random) -> str:
        """Kill a target, and return what it was; an empty text if there is none."""
        if target == "s3":
            self.gateway.kill()
            time.sleep(draw.uniform(0, 4))  # how long the server is away
            self.gateway.start()
            return target
        if cluster is not None and target in ("node", "gcs"):
            return target if cluster.lose(target, draw) else ""
        pids = sorted(pid for pid, kind in processes(mark) if target in (kind, title_of(pid, kind)))
        if not pids:
            return ""
        pid = draw.choice(pids)
        title = title_of(pid, target)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return ""
        return title

    def judge(self, stage: Stage, output: str, *, names_too: bool = True) -> str:
        """Return "same", or what differs from an undisturbed run."""
        try:
            result = _plain(fingerprint(stage, output))
        except Exception as error:  # noqa: BLE001 (the verdict)
            return f"unreadable: {error}"
        reference = self._references[stage.name]
        if different := [key for key in result if result[key] != reference["fingerprint"][key]]:
            return f"differs in {', '.join(different)}"
        extra = names(output) ^ set(reference["names"]) if names_too else set()
        return f"other objects: {', '.join(sorted(extra)[:5])}" if extra else "same"


def _plain(value: Any) -> Any:
    """Return a value as JSON brings it back."""
    return json.loads(json.dumps(value))


def _server() -> Path:
    program = find("versitygw")
    if program is None:
        raise SystemExit("chaos: no versitygw; `python -m scripts.tools fetch versitygw` gets it")
    return program


def _port(folder: Path) -> int:
    """Return the image server's port, which is part of the reference's URLs."""
    file = folder / "port"
    if not file.exists():
        file.write_text(str(free_port()))
    return int(file.read_text())


def _spend_failures(port: int) -> None:
    """Have the image server answer with the failures that come only once or twice, so that all runs get the same."""
    for index in range(IMAGES):
        query = failure_of(index)
        for _ in range(int(query.partition("times=")[2] or 0)):
            connection = HTTPConnection("127.0.0.1", port)
            connection.request("GET", f"/{sample(index).path}{query}")
            connection.getresponse().read()
            connection.close()


@contextmanager
def chaos_in(folder: Path) -> Iterator[Chaos]:
    """Serve the images and the S3 server's folder, and yield rounds on them."""
    folder = folder.resolve()  # for workers, which have other working directories
    folder.mkdir(parents=True, exist_ok=True)
    with running_gateway(_server(), folder / "s3") as gateway, ImageServer(images=IMAGES, port=_port(folder)) as server:
        os.environ.update(gateway.env)
        _spend_failures(server.port)
        where = gateway.root / gateway.bucket / "reference" / "metadata"
        if not where.exists():
            write_metadata(where, IMAGES, server.url, files=3, failing=True)
        yield Chaos(folder, gateway)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds, print a line for each and a table of those that failed; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="the first round's seed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--directed", nargs="*", help="run the listed cases instead: those whose name has such a text")
    parser.add_argument("--stages", nargs="+", default=list(WHOLE), choices=WHOLE)
    parser.add_argument("--folder", type=Path, default=Path(".chaos"), help="logs, and what failed rounds have left")
    parser.add_argument("--keep", action="store_true", help="take the undisturbed runs that are in the folder")
    parser.add_argument(
        "--stopped", nargs="+", choices=("download", "process", "train"), help="stop jobs at each write"
    )
    parser.add_argument("--writes", nargs="+", default=[], help="only at these writes, by number or a part of the name")
    options = parser.parse_args(arguments)
    if not options.keep:
        shutil.rmtree(options.folder, ignore_errors=True)
    if options.stopped:
        from tests.chaos import stopped  # imports this module

        return stopped.main(options.folder, options.stopped, options.writes)
    rounds: list[tuple[str, Callable[[], Case]]]
    if options.directed is not None:
        chosen = [name for name in DIRECTED if not options.directed or any(text in name for text in options.directed)]
        rounds = [(name, lambda name=name: DIRECTED[name]) for name in chosen]  # type: ignore[misc]
        wanted = sorted({DIRECTED[name].stage for name in chosen})
    else:
        seeds = range(options.seed, options.seed + options.rounds)
        rounds = [(f"seed-{seed}", lambda seed=seed: draw_case(seed, options.stages)) for seed in seeds]  # type: ignore[misc]
        wanted = sorted({case().stage for _, case in rounds})
    done: list[Round] = []
    with chaos_in(options.folder) as chaos:
        chaos.prepare(wanted)
        for name, case in rounds:
            (options.folder / f"{name}.log").unlink(missing_ok=True)
            done.append(chaos.run(name, case()))
            say(str(done[-1]))
    failed = [(trial.name, trial.stage.name, trial.verdict) for trial in done if trial.verdict != "same"]
    say(
        "\n" + (table(failed, ("round", "stage", "verdict")) if failed else "all outputs are those of undisturbed runs")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
