"""The all-reduce between nodes, on a local Ray of two nodes with processors alone, and the job that asks for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdp.cli import main
from sdp.kube.allreduce import AllReduce, bus_rate, lowest_lock, memory_lock, network_of
from sdp.kube.rayjob import make_all_reduce
from tests.kube_server import RAY, group, raycluster, running

ROOT = Path(__file__).resolve().parents[2]
TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
import ray
from sdp.kube.allreduce import main
cluster = Cluster()
cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
for name in ("A100", "A100"):
    cluster.add_node(num_cpus=1, labels={"ray.io/accelerator-type": name}, object_store_memory=100_000_000)
ray.init(cluster.address, log_to_driver=False)
code = main(sys.argv[1:])
ray.shutdown()
cluster.shutdown()
sys.exit(code)
"""


def on_two_nodes(*words: str, first: str = "") -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-c", first + TWO_NODES, *words],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_nodes_of_the_accelerator_are_measured_between() -> None:
    done = on_two_nodes("--accelerator", "A100", "--megabytes", "4", "--json", "--wait", "120")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["nodes"], figures["gpus"], figures["network"]) == (2, 0, "")
    assert figures["memlock"] == memory_lock()
    assert figures["gb_per_s"] == pytest.approx(0.004 / figures["seconds"])


def test_nodes_that_are_not_added_are_reported_in_one_line() -> None:
    done = on_two_nodes("--accelerator", "A100", "--nodes", "3", "--wait", "3")
    assert done.returncode == 1
    assert "all-reduce: 3 nodes did not start within 3 s" in done.stderr
    assert "Traceback" not in done.stderr


BROKEN = """
import os
os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # as sdp.cluster.connect has it, which here finds a Ray that runs
from sdp.kube import allreduce
class Failing(allreduce._Rank):
    def _run(self, address, megabytes):
        os.environ["NCCL_NET"] = "AWS Libfabric"
        raise RuntimeError("NCCL error in: NCCLUtils.cpp\\nLast error:\\n{said}")
allreduce._Rank = Failing
"""


@pytest.mark.parametrize(
    ("said", "code", "line"),
    [
        (
            "Failed to initialize any NET plugin",
            2,
            "NCCL_NET: NCCL cannot use the network 'AWS Libfabric' here; build the image with its plugin",
        ),
        ("unhandled cuda error", 1, "all-reduce: a process failed: unhandled cuda error; the nodes' logs may say more"),
    ],
)
def test_a_network_that_is_not_there_ends_in_a_line_and_not_in_a_traceback(said: str, code: int, line: str) -> None:
    done = on_two_nodes("--accelerator", "A100", "--wait", "120", first=BROKEN.replace("{said}", said))
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1].startswith(line)
    assert "Traceback" not in done.stderr


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
    report = AllReduce(
        nodes=2,
        gpus=16,
        megabytes=1000,
        seconds=0.02,
        gb_per_s=93.75,
        network="AWS Libfabric",
        memlock="unlimited",
    )
    assert str(report) == (
        "all-reduce of 1000 MB: 93.8 GB/s (2 nodes, 16 GPUs, 20 ms, through AWS Libfabric; ulimit -l: unlimited)"
    )


def test_the_limit_on_locked_memory_is_reported_as_by_the_shell_and_the_lowest_counts() -> None:
    limit = subprocess.run(["bash", "-c", "ulimit -l"], capture_output=True, text=True, check=True)
    assert memory_lock() == limit.stdout.strip()
    assert lowest_lock(["unlimited", "8192", "64"]) == "64"
    assert lowest_lock(["unlimited", "unlimited"]) == "unlimited"


def test_the_doctor_submits_it_with_the_gpus_that_a_node_of_the_group_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with running() as (kube, _):
        monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig(tmp_path / "kubeconfig")))
        kube.put(f"{RAY}/rayclusters/sdp", raycluster(group("a100", 8, "A100", most=4)))
        kube.on_create = lambda path, _: kube.update_status(path, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
        assert main(["doctor", "--all-reduce", "A100", "--nodes", "4"]) == 0
        (made,) = [item for path, item in kube.objects.items() if path.startswith(f"{RAY}/rayjobs/")]
        assert made["spec"] == make_all_reduce(4, 8, "A100")["spec"]
        assert "--nodes 4 --gpus 8 --accelerator A100" in made["spec"]["entrypoint"]
        capfd.readouterr()
        assert main(["doctor", "--all-reduce", "A10G"]) == 2
        assert (
            "--all-reduce: expected an accelerator of the cluster's groups (A100), got 'A10G'" in capfd.readouterr().err
        )
        assert main(["doctor", "--all-reduce", "A100", "--nodes", "1"]) == 2
        assert main(["doctor", "--json"]) == 1
        findings = [each for each in json.loads(capfd.readouterr().out)["findings"] if each["check"] == "all-reduce"]
        assert [each["do"] for each in findings] == ["sdp doctor --all-reduce A100 uses two of them for a minute"]
