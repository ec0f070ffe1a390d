"""A host whose clock is an hour ahead of the others'."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.stages import parts, process
from tests.programs import ROOT

pytestmark = [pytest.mark.needs("ip", "tc", "versitygw", "cc"), pytest.mark.timeout(1200)]
CLOCKS = {"cpu": 3600.0}
TTL_S, HELD = 6.0, 3
_LEASE = f"""
import sys
from pathlib import Path
from sdp.errors import LeaseHeld
from sdp.lease import Lease
from sdp.storage import open_storage
storage = open_storage(sys.argv[1])
try:
    lease = Lease.acquire(storage, sys.argv[2], ttl_s={TTL_S})
except LeaseHeld:
    sys.exit({HELD})
print("held", flush=True)
sys.stdin.read()
lease.check()
"""
"""Take a lease, keep it until the input ends, and be sure of it still."""


@pytest.fixture
def lease_of(cluster: Cluster) -> Iterator[Callable[[str, Path], "subprocess.Popen[str]"]]:
    """Starts a process on a host that takes an output's lease."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, folder: Path) -> "subprocess.Popen[str]":
        host = cluster.network[name]
        command = host.entered([sys.executable, "-c", _LEASE, folder, name])
        environment = {**os.environ, **host.environment, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def expect_held(process: "subprocess.Popen[str]") -> None:
    """Read the line that says that a process holds the lease."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 60)
    assert ready, "the lease was not taken"
    assert process.stdout.readline() == "held\n"


@pytest.mark.parametrize(("holder", "newcomer"), [("head", "cpu"), ("cpu", "head")])
def test_a_lease_is_not_taken_from_a_live_holder_by_a_clock_an_hour_off_and_is_from_a_dead_one(
    lease_of: Callable[[str, Path], "subprocess.Popen[str]"], tmp_path: Path, holder: str, newcomer: str
) -> None:
    first = lease_of(holder, tmp_path)
    expect_held(first)
    second = lease_of(newcomer, tmp_path)
    assert second.wait(60) == HELD
    (inside,) = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    os.kill(int(inside), signal.SIGKILL)
    first.wait(60)
    began = time.monotonic()
    third = lease_of(newcomer, tmp_path)
    expect_held(third)
    assert time.monotonic() - began >= TTL_S, "it did not wait until the holder had certainly gone"
    _, errors = third.communicate("", timeout=60)
    assert third.returncode == 0, errors


def test_the_clock_of_the_host_is_an_hour_ahead(cluster: Cluster) -> None:
    ask = ["python3", "-c", "import time; print(time.time())"]
    ahead = [float(cluster.network[name].run(ask)) - time.time() for name in ("cpu", "a10g")]
    assert [round(seconds / 60) for seconds in ahead] == [60, 0]


def test_a_job_on_shared_files_writes_the_same_whichever_clock_its_transforms_have(cluster: Cluster) -> None:
    job = cluster.start("process", process(str(cluster.bucket / "images"), str(cluster.bucket / "latents")))
    job.end_well()
    print(job.text)
    assert len(parts(cluster.storage("latents"))) == 4
    assert "Traceback" not in job.text


def test_an_s3_server_that_refuses_the_clock_ends_the_job_with_a_line_that_names_the_host(cluster: Cluster) -> None:
    job = cluster.start("process", process(f"{cluster.uri}/images", f"{cluster.uri}/refused"))
    assert job.wait(300) != 0, job.text
    print(job.text)
    (error,) = [line for line in job.text.splitlines() if line.startswith("sdp: ")]
    assert "RequestTimeTooSkewed" in error
    assert error.endswith("check the clock of cpu")
