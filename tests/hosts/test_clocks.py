"""A host whose clock is an hour ahead of the others'."""

import time

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.stages import parts, process

pytestmark = [
    pytest.mark.needs("ip"), pytest.mark.needs("tc"), pytest.mark.needs("versitygw"), pytest.mark.needs("faketime")
]  # fmt: skip
CLOCKS = {"cpu": 3600.0}
_LEASE = """
import sys
from pathlib import Path
from sdp.errors import LeaseHeld
from sdp.lease import Lease
from sdp.storage import open_storage
storage = open_storage(sys.argv[1])
try:
    lease = Lease.acquire(storage, sys.argv[2], ttl_s=6)
except LeaseHeld:
    sys.exit(3)
print("held", flush=True)
sys.stdin.read()
lease.check()
"""
"""Take a lease, keep it until the input ends, and be sure of it still."""


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
