"""The lease between processes, and over a storage that stalls, on a real S3 server."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from sdp.errors import LeaseLost, Unavailable
from sdp.lease import Lease
from sdp.storage import StorageOptions, open_storage
from tests.integration.s3 import (  # noqa: F401 (fixtures)
    Gateway,
    Proxy,
    gateway_fixture,
    proxy_fixture,
    s3_env_fixture,
)
from tests.waiting import until

pytestmark = pytest.mark.needs("versitygw")

TTL_S = 2.0


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
            asked = time.monotonic()
            lease.confirm()
            checked = asked
            time.sleep(0.002)
    except LeaseLost: pass
    print("to", lease.generation, checked, flush=True)
    lease.release()
"""


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


def test_a_job_that_is_cut_off_from_its_storage_holds_the_lease_until_another_takes_it(
    s3_env: Gateway, proxy: Proxy, tmp_path: Path
) -> None:
    through = open_storage(f"{s3_env.uri}/{tmp_path.name}", StorageOptions(endpoint=proxy.endpoint, timeout_s=3.0))
    direct = open_storage(through.uri)
    with Lease.acquire(through, ttl_s=TTL_S) as lease:
        proxy.refuse()
        with pytest.raises(Unavailable):  # for longer than the time to live
            lease.confirm()
        lease.check()
        proxy.pass_on()
        lease.confirm()
        proxy.refuse()
        Lease.acquire(direct, ttl_s=TTL_S).release()
        lease.check()  # it cannot know
        proxy.pass_on()
        until(lambda: not lease._thread.is_alive(), "a heartbeat has noticed")
        with pytest.raises(LeaseLost, match="generation 2 has taken over"):
            lease.check()
