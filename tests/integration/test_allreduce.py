"""The all-reduce between nodes, on a local Ray of two nodes with processors alone."""

import os
import re
import sys

import pytest

from scripts.allreduce import bus_rate, memory_lock, network_of
from tests.programs import ROOT, ended

TWO_NODES = """
from ray.cluster_utils import Cluster
import ray
from scripts.allreduce import main
cluster = Cluster()
cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
for name in ("A100", "A100"):
    cluster.add_node(num_cpus=1, labels={"ray.io/accelerator-type": name}, object_store_memory=100_000_000)
ray.init(cluster.address, log_to_driver=False)
main(["--accelerator", "A100", "--megabytes", "4", "--wait", "120"])
main(["--accelerator", "A100", "--nodes", "3", "--wait", "3"])
"""


@pytest.mark.slow
def test_nodes_of_the_accelerator_are_measured_between_and_those_that_are_not_added_are_named() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", TWO_NODES]
    done = ended(command, cwd=ROOT, env=environ, timeout=240)
    line = re.search(r"^all-reduce of 4 MB: (\S+) GB/s \(2 nodes, CPUs only, (\S+) ms; ulimit -l: (.*)\)$", done.stdout)
    assert line, done.stderr
    assert float(line[1]) == pytest.approx(4 / float(line[2]), rel=0.02)
    assert line[3] == memory_lock()
    assert done.returncode == 1
    assert "all-reduce: 3 nodes with 0 A100 did not start in 3 s" in done.stderr


def test_the_rate_is_that_of_the_slowest_link() -> None:
    # nccl-tests' doc/PERFORMANCE.md: busbw = algbw * 2 (n - 1) / n
    assert bus_rate(10**9, 0.1, 16) == pytest.approx(18.75)
    assert bus_rate(10**9, 0.1, 2) == pytest.approx(10.0)


def test_nccls_transport_is_read_from_its_log() -> None:
    chosen = "ip-10:1:1 [0] NCCL INFO NET/OFI Selected provider is efa\n"
    used = "ip-10:1:1 [0] NCCL INFO Using network AWS Libfabric\n"
    assert network_of(chosen + used) == "AWS Libfabric"
    assert network_of("ip-10:1:1 [0] NCCL INFO Using network Socket\n") == "Socket"
    assert network_of("") == ""


def test_the_limit_on_locked_memory_is_reported_as_by_the_shell() -> None:
    limit = ended(["bash", "-c", "ulimit -l"], check=True)
    assert memory_lock() == limit.stdout.strip()
