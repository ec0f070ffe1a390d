"""The lease between processes that are killed, stopped and woken, on a local disk and on a real S3 server."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sdp.errors import LeaseHeld, LeaseLost
from sdp.lease import Lease
from sdp.storage import Storage, StorageOptions, open_storage
from tests.integration.s3 import (  # noqa: F401 (fixtures)
    Gateway,
    Proxy,
    gateway_fixture,
    proxy_fixture,
    s3_env_fixture,
)
from tests.waiting import until

TTL_S = 2.0

HOLD = """
import sys
from sdp.errors import *
from sdp.lease import *
from sdp import lease as module
from sdp.storage import open_storage
if {elsewhere}: module._kernel = lambda: "another machine"
print("ready", flush=True); sys.stdin.readline()
try: lease = Lease.acquire(open_storage({uri!r}), holder="child", ttl_s={ttl})
except LeaseHeld: print("held", flush=True); sys.exit()
print("won", lease.generation, flush=True)
sys.stdin.readline()
try: lease.check(); print("mine", flush=True)
except LeaseLost as error: print("lost", error, flush=True)
lease.release()
"""


class Child:
    """A process that takes the lease and checks it on command."""

    def __init__(self, storage: Storage, *, elsewhere: bool = False, ttl_s: float = TTL_S) -> None:
        code = HOLD.format(uri=storage.uri, ttl=ttl_s, elsewhere=elsewhere)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def children() -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def start(storage: Storage, **options: float) -> Child:
        started.append(Child(storage, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for child in started:
        child.kill()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "out"))


def test_a_killed_holder_on_another_machine_is_replaced_after_its_time_to_live(
    storage: Storage, children: Callable[..., Child]
) -> None:
    child = children(storage, elsewhere=True)
    child.go()
    assert child.line() == "won 1"
    with pytest.raises(LeaseHeld, match="child on "):
        Lease.acquire(storage, ttl_s=TTL_S)
    child.kill()
    start = time.monotonic()
    with Lease.acquire(storage, ttl_s=TTL_S) as lease:
        assert lease.generation == 2
        assert TTL_S <= time.monotonic() - start < TTL_S + 30


def test_a_stopped_holder_that_wakes_up_finds_that_it_has_lost(
    storage: Storage, children: Callable[..., Child]
) -> None:
    child = children(storage)
    child.go()
    assert child.line() == "won 1"
    child.process.send_signal(signal.SIGSTOP)
    with Lease.acquire(storage, ttl_s=TTL_S) as lease:
        assert lease.generation == 2
        child.process.send_signal(signal.SIGCONT)
        child.go()
        assert child.line().startswith(f"lost {storage.uri}: generation 1 of the lease is lost")
        assert child.process.wait(30) == 0
        lease.check()
        # The loser has not touched the winner's lease.
        assert storage.read("_lease/0000000002.json") != b""
    assert b'"released": false' in storage.read("_lease/0000000001.json")


CONTEND = """
import random, sys, time
from sdp.errors import *
from sdp.lease import *
from sdp.storage import open_storage
chance = random.Random({seed})
storage = open_storage({uri!r})
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    try: lease = Lease.acquire(storage, ttl_s={ttl})
    except (LeaseHeld, Unavailable): continue  # a busy machine may not answer within so short a time to live
    print("from", lease.generation, time.monotonic(), flush=True)
    silent = chance.random() < 0.5
    if silent: lease._end.set()  # alive, but its heartbeat has stopped
    checked, until = 0.0, time.monotonic() + (60 if silent else chance.random())
    try:
        while time.monotonic() < until:
            lease.check()
            checked = time.monotonic()
            time.sleep(0.002)
    except LeaseLost: pass
    print("to", lease.generation, checked, flush=True)
    lease.release()
"""


@pytest.mark.needs("versitygw")
def test_two_processes_never_hold_the_lease_at_once(s3_env: Gateway, tmp_path: Path) -> None:
    """Processes take it, release it or fall silent at random; they share a clock, so their times can be compared."""
    storage = open_storage(f"{s3_env.uri}/{tmp_path.name}")
    seed = random.randrange(10**6)
    code = CONTEND.replace("{uri!r}", repr(storage.uri)).replace("{seconds}", "4").replace("{ttl}", "0.5")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code.replace("{seed}", str(seed + number))], stdout=subprocess.PIPE, text=True
        )
        for number in range(3)
    ]
    held: dict[int, dict[str, float]] = {}
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        for line in out.splitlines():
            edge, generation, at = line.split()
            assert edge not in held.setdefault(int(generation), {}), f"two had generation {generation} (seed {seed})"
            held[int(generation)][edge] = float(at)
    assert len(held) > 2
    assert sorted(held) == list(range(1, len(held) + 1))
    for generation in range(2, len(held) + 1):
        assert held[generation - 1]["to"] < held[generation]["from"], f"overlap at {generation} (seed {seed})"


def lost(lease: Lease) -> bool:
    try:
        lease.check()
    except LeaseLost:
        return True
    return False


@pytest.mark.needs("versitygw")
def test_a_storage_that_stalls_for_longer_than_the_time_to_live_takes_the_lease_away(
    s3_env: Gateway, proxy: Proxy, tmp_path: Path
) -> None:
    through = open_storage(f"{s3_env.uri}/{tmp_path.name}", StorageOptions(endpoint=proxy.endpoint))
    with Lease.acquire(through, ttl_s=TTL_S) as lease:
        lease.check()
        proxy.stall()
        until(lambda: lost(lease), "it knows that it has lost the lease", TTL_S + 30)
        proxy.pass_on()
        with pytest.raises(LeaseLost):
            lease.check()
