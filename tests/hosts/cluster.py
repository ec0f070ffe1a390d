"""A Ray cluster on hosts of their own, an S3 server on another one, and sdp's jobs on them."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

import yaml

from sdp.storage import Storage, open_storage
from tests.hosts.network import Host, Network, network
from tests.waiting import until

GCS_PORT, S3_PORT = 6379, 9000
BUCKET = "sdp-hosts"
STORE = "store"
RAYLETS: Mapping[str, Sequence[str]] = {
    "head": ("--head", f"--port={GCS_PORT}", "--num-cpus=0", "--include-dashboard=false"),
    "cpu": ("--num-cpus=2", "--labels=ray.io/node-group=cpu"),
    "a10g": ("--num-cpus=2", "--num-gpus=1", "--labels=ray.io/node-group=a10g,ray.io/accelerator-type=A10G"),
    "a100": ("--num-cpus=2", "--num-gpus=1", "--labels=ray.io/node-group=a100,ray.io/accelerator-type=A100"),
}
"""The arguments of each host's raylet; the GPUs are made up."""
_RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
_OBJECT_STORE = 300_000_000
_STARTS = 100
_STARTED = "Ray runtime started"
_UP_S = 400.0


class Raylet:
    """A host's raylet, started again when it ends, as a pod's container is."""

    def __init__(self, host: Host, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.starts = 0
        self._host, self._arguments, self._environment = host, arguments, environment
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._over.is_set() and self.starts < _STARTS:
            self.starts += 1
            self._host.start([*_RAY, *self._arguments], self._environment).wait()

    def stop(self) -> None:
        """Let it stay ended; the end of its host ends it."""
        self._over.set()

    def join(self) -> None:
        self._thread.join()


@dataclass
class Job:
    """A job under way, or its end."""

    process: "subprocess.Popen[bytes]"
    log: Path
    notes: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Return its exit code."""
        until(lambda: self.process.poll() is not None, f"the end of the job:\n{self.text}", timeout_s, 0.1)
        return int(self.process.returncode)

    def end_well(self, timeout_s: float = 300.0) -> None:
        """Wait for its end, which must be a good one."""
        assert self.wait(timeout_s) == 0, self.text

    def says(self, what: str, timeout_s: float = 180.0) -> None:
        """Wait for a text in its log."""

        def said() -> bool:
            assert self.process.poll() is None or what in self.text, f"ended without {what!r}:\n{self.text}"
            return what in self.text

        until(said, f"{what!r} in the job's log", timeout_s, 0.1)

    @property
    def places(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.notes.read_text())
        return result


@dataclass
class Cluster:
    """The running cluster."""

    network: Network
    folder: Path
    environment: dict[str, str]
    bucket: Path
    """The S3 server's files of the bucket at `uri`."""
    uri: str = f"s3://{BUCKET}"
    raylets: dict[str, Raylet] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    _watch: "subprocess.Popen[str] | None" = None

    def nodes(self) -> dict[str, str]:
        """Return the host of each node that Ray considers alive, by the node's id."""
        if self._watch is None:
            head = self.network["head"]
            command = [sys.executable, "-m", "tests.hosts.nodes", f"{head.address}:{GCS_PORT}"]
            self._watch = subprocess.Popen(
                head.entered(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **self.environment},
            )
        assert self._watch.stdin is not None
        assert self._watch.stdout is not None
        print(file=self._watch.stdin, flush=True)
        names = {host.address: host.name for host in self.network.hosts.values()}
        return {
            node["id"]: names[node["address"]] for node in json.loads(self._watch.stdout.readline()) if node["alive"]
        }

    def is_whole(self) -> bool:
        """Return whether each host has one node."""
        return sorted(self.nodes().values()) == sorted(RAYLETS)

    def start(self, command: str, config: Mapping[str, Any], on: str = "head", **environment: str) -> Job:
        """Start a command of sdp with a configuration, on one of the hosts."""
        number = len(self.jobs)
        file, log, notes = (self.folder / f"job-{number}{end}" for end in (".yaml", ".log", ".json"))
        file.write_text(yaml.safe_dump({**config}))
        arguments: list[str | Path] = [sys.executable, "-m", "tests.hosts.job", notes, command, "--config", file]
        job = Job(self.network[on].start(arguments, {**self.environment, **environment}, log), log, notes)
        self.jobs.append(job)
        return job

    def storage(self, name: str) -> Storage:
        """Return a folder of the bucket, read from the server's disk."""
        return open_storage(str(self.bucket / name))


@contextmanager
def running_cluster(
    folder: Path, versitygw: Path, clocks: Mapping[str, float], compiler: Path | None
) -> Iterator[Cluster]:
    """Start the hosts, the S3 server and Ray; `clocks` are the seconds by which hosts' clocks are ahead."""
    with ExitStack() as stack:
        net = stack.enter_context(network(folder / "hosts", *RAYLETS, STORE))
        for name, ahead_s in clocks.items():
            assert compiler is not None
            net[name].environment.update(_clock(compiler, folder, ahead_s))
        head, store = net["head"], net[STORE]
        keys = {"ROOT_ACCESS_KEY_ID": f"AK{token_hex(8)}", "ROOT_SECRET_ACCESS_KEY": token_hex(20)}
        (folder / "s3" / BUCKET).mkdir(parents=True)
        address = f"{store.address}:{S3_PORT}"
        store.start([versitygw, "--port", address, "--quiet", "--keep-alive", "posix", folder / "s3"], keys)
        environment = {
            # `ray start` turns authentication on for what it starts; other processes of Ray must be told of it.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token_hex(32),
            "RAY_ADDRESS": f"{head.address}:{GCS_PORT}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "AWS_ACCESS_KEY_ID": keys["ROOT_ACCESS_KEY_ID"],
            "AWS_SECRET_ACCESS_KEY": keys["ROOT_SECRET_ACCESS_KEY"],
            "AWS_ENDPOINT_URL_S3": f"http://{address}",
            "AWS_REGION": "us-east-1",
            "OMP_NUM_THREADS": "1",
        }
        running = Cluster(net, folder, environment, folder / "s3" / BUCKET)
        stack.callback(_stop, running)
        for name, arguments in RAYLETS.items():
            to_head = [] if name == "head" else [f"--address={head.address}:{GCS_PORT}"]
            usual = [f"--node-ip-address={net[name].address}", f"--object-store-memory={_OBJECT_STORE}"]
            arguments = [*arguments, *to_head, *usual]
            without = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
            running.raylets[name] = Raylet(net[name], arguments, without)
            if name == "head":  # it starts again with another GCS if the machine is too busy for Ray's deadline
                until(lambda: _STARTED in (head.folder / "log").read_text(), "the head", _UP_S, 0.1)
        until(lambda: store.listens(S3_PORT), "the S3 server", _UP_S, 0.1)
        until(running.is_whole, "all raylets", _UP_S, 0.5)
        yield running


def _clock(compiler: Path, folder: Path, ahead_s: float) -> dict[str, str]:
    """Return the environment in which a program's wall clock is ahead."""
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "SDP_TESTS_AHEAD_S": f"{ahead_s:.0f}"}


def _stop(running: Cluster) -> None:
    for raylet in running.raylets.values():
        raylet.stop()
    if running._watch is not None:
        running._watch.kill()
        running._watch.communicate()
    for host in running.network.hosts.values():
        host.end()
    for raylet in running.raylets.values():
        raylet.join()
    for job in running.jobs:
        job.process.wait()
