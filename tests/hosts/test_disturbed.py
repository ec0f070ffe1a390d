"""A slow link, a host that is cut off, and a driver that no longer reaches the head."""

import time
from collections.abc import Iterator

import pytest

from tests.hosts.cluster import Cluster, Job
from tests.hosts.stages import PIXELS, parts, process
from tests.waiting import until

pytestmark = [pytest.mark.needs("ip", "tc", "versitygw"), pytest.mark.timeout(1200)]
STEADY_MBIT_S = 8.0
"""A pace at which the pixels of a unit take three seconds, so that a job is caught at work."""


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> dict[str, str]:
    cluster.start("process", process(f"{cluster.uri}/images", f"{cluster.uri}/undisturbed")).end_well()
    return parts(cluster.storage("undisturbed"))


@pytest.fixture
def steady(cluster: Cluster) -> Iterator[None]:
    """Slow the link of the pixels, and wait for all nodes first and last."""
    until(cluster.is_whole, "all nodes", 240, 0.5)
    cluster.network.pace("cpu", "a10g", STEADY_MBIT_S)
    yield
    cluster.network.pace("cpu", "a10g")


def start(cluster: Cluster, output: str) -> Job:
    """Start a job, and wait for its first part."""
    job = cluster.start("process", process(f"{cluster.uri}/images", f"{cluster.uri}/{output}"))

    def has_part() -> bool:
        assert job.process.poll() is None, job.text
        return bool(cluster.storage(output).list("parts/"))

    until(has_part, "the first part", 240, 0.1)
    return job


@pytest.mark.usefixtures("steady")
def test_a_link_that_drops_to_1_mbit_s_slows_a_job_and_changes_no_byte(
    cluster: Cluster, undisturbed: dict[str, str]
) -> None:
    before, began = cluster.network["cpu"].sent(cluster.network["a10g"]), time.monotonic()
    job = start(cluster, "slow")
    cluster.network.pace("cpu", "a10g", 1.0)
    job.end_well(500)
    crossed = cluster.network["cpu"].sent(cluster.network["a10g"]) - before
    print(f"1 Mbit/s: {time.monotonic() - began:.0f} s, {crossed / PIXELS:.2f} of the pixels crossed, {job.places}")
    print(job.text)
    assert parts(cluster.storage("slow")) == undisturbed


@pytest.mark.usefixtures("steady")
def test_a_host_that_is_cut_off_for_half_a_minute_changes_no_byte(
    cluster: Cluster, undisturbed: dict[str, str]
) -> None:
    began = time.monotonic()
    job = start(cluster, "cut")
    with cluster.network.partition("a10g"):
        end = time.monotonic() + 30
        until(lambda: time.monotonic() >= end, "the end of the partition", 90, 0.5)
        assert job.process.poll() is None, f"it did not need the host: {job.text}"
    job.end_well(400)
    print(f"cut off: {time.monotonic() - began:.0f} s, {job.places}, starts {cluster.raylets['a10g'].starts}")
    print(job.text)
    assert parts(cluster.storage("cut")) == undisturbed


def test_a_driver_whose_network_no_longer_leads_to_the_head_ends_with_one_line(cluster: Cluster) -> None:
    until(cluster.is_whole, "all nodes", 240, 0.5)
    cluster.network.pace("cpu", "a10g", 0.5)
    try:
        job = cluster.start("process", process(f"{cluster.uri}/images", f"{cluster.uri}/lost"), on="a100")
        job.says("process: 0 of")
        began = time.monotonic()
        with cluster.network.unplugged("a100"):
            assert job.wait(120) == 1, job.text
    finally:
        cluster.network.pace("cpu", "a10g")
    print(f"no route: {time.monotonic() - began:.0f} s\n{job.text}")
    errors = [line for line in job.text.splitlines() if line.startswith("sdp: ")]
    assert errors == [
        "sdp: process: Ray's head (GCS) was lost (see the nodes' logs); run the same command again, it continues"
    ], job.text
    assert "Traceback" not in job.text
