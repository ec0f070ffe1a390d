"""A Ray of this machine that Prometheus sees as it would see the pods of KubeRay, and GPUs that are not there.

Ray's nodes are processes here; the names that Kubernetes would give them are put on by the chart's own relabelings.
GPUs are those of the fake driver, behind the real exporter, which looks into a folder in place of /proc: its processes
have the pids in there that the jobs tell of themselves, and other ones for the driver.
"""

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sdp.dreambooth.template import fill
from tests import nvml
from tests.exporter_kit import exporting
from tests.monitoring.chart import Manifest, one
from tests.monitoring.prometheus import Prometheus, as_prometheus
from tests.storage_server import Answer, serving

NAMESPACE, CLUSTER, JOB = "training", "sdp", "sdp-train-7xk2p-q8w4z"
GIB = 1 << 30
HOST_PIDS = 1_000_000
"""The driver's pids are those inside, and this."""
PIECE_S = 0.4
EXPORT_MS = 2000
"""The interval at which Ray's processes report their metrics, in place of 10 s."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A pod of Ray, and the node that it is on."""

    group: str
    """As KubeRay calls it."""
    node: str
    labels: Mapping[str, str]
    gpus: int = 0
    cpus: int = 3

    @property
    def pod(self) -> str:
        return f"{CLUSTER}-{self.group}-0"


def uid_of(pod: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, pod))


MACHINES = (
    Machine("headgroup", "node-0", {"ray.io/node-group": "cpu"}),
    Machine("a10g", "node-1", {"ray.io/accelerator-type": "A10G"}, gpus=2),
    Machine("a100", "node-2", {"ray.io/accelerator-type": "A100"}, gpus=2),
)


@contextmanager
def ray_of() -> Iterator[dict[str, int]]:
    """Start Ray and connect this process to it; yield the port of each pod's metrics."""
    import ray

    from tests.local_ray import several_nodes

    def take_time() -> None:
        """Slow down encoding in a worker: with a tiny model a run would end between two exports of metrics.

        A local function travels by value, so that workers need not find this module.
        """
        from sdp.encode import work

        encode = work.EncodeSpec.work

        def slowly(*arguments: Any) -> Any:
            time.sleep(PIECE_S)
            return encode(*arguments)

        work.EncodeSpec.work = slowly  # type: ignore[method-assign]

    head, *others = [
        {"num_cpus": machine.cpus, "num_gpus": machine.gpus, "labels": {**machine.labels, "sdp/group": machine.group}}
        for machine in MACHINES
    ]
    reports: dict[str, Any] = {"_system_config": {"metrics_report_interval_ms": EXPORT_MS}}
    submitted = ray.job_config.JobConfig(metadata={"job_name": JOB})  # as Ray's job server has it for a RayJob
    with several_nodes(*others, setup=take_time, job=submitted, **head, **reports):
        pods = {machine.group: machine.pod for machine in MACHINES}
        yield {pods[node["Labels"]["sdp/group"]]: node["MetricsExportPort"] for node in ray.nodes()}


@dataclass
class Gpus:
    """The fake GPUs of a node."""

    machine: Machine
    scenario: nvml.Scenario
    proc: Path
    target: str
    """The exporter's address."""
    _known: set[int] = field(default_factory=set)

    def host(self, pid: int, gpu: int, memory: int, *, pod: str = "") -> None:
        """Put a process on a GPU, in the machine's own pod if no other is named."""
        if pid in self._known:
            return
        self._known.add(pid)
        host_pid = HOST_PIDS + pid
        folder = self.proc / str(host_pid)
        folder.mkdir()
        (folder / "comm").write_text("ray::worker\n")
        (folder / "status").write_text(f"Name:\tray::worker\nNSpid:\t{host_pid}\t{pid}\n")
        (folder / "cgroup").write_text(
            "0::/kubepods.slice/kubepods-burstable.slice/"
            f"kubepods-burstable-pod{uid_of(pod or self.machine.pod).replace('-', '_')}.slice\n"
        )
        number = sum(key.startswith(f"gpu.{gpu}.process.") for key in self.scenario.lines)
        self.scenario.write({f"gpu.{gpu}.process.{number}": f"C {host_pid} {memory}"})


@contextmanager
def gpus_of(machine: Machine, library: Path, folder: Path, lines: Mapping[str, object]) -> Iterator[Gpus]:
    """Start an exporter over the fake driver."""
    proc = folder / "proc"
    proc.mkdir(parents=True)
    scenario = nvml.Scenario(folder / "gpus", lines)
    arguments = ("--host-proc", str(proc))
    environment = {key: value for key, value in scenario.environment(library).items() if key in _PASSED}
    with exporting({**os.environ, **environment, "NODE_NAME": machine.node}, *arguments) as exporter:
        yield Gpus(machine, scenario, proc, urlsplit(exporter.url).netloc)


_PASSED = frozenset({"LD_LIBRARY_PATH", "FAKE_NVML_SCENARIO"})


def healthy(count: int, product: str, total: int) -> dict[str, object]:
    activity = {"gpu.*.gpm": 1, "gpu.*.gpm.3": 30, "gpu.*.gpm.5": 40}
    memory = {"gpu.*.memory_total": total, "gpu.*.memory_used": total // 4}
    return {**nvml.a100s(count), **memory, **activity, "gpu.*.name": product}


def with_faults() -> dict[str, object]:
    """Five A100: two that train, a hot one with XIDs and a row to replace, an idle one, one that will be lost."""
    return {
        **healthy(5, "NVIDIA A100-SXM4-80GB", 80 * GIB),
        "gpu.2.throttle_reasons": 0x40,
        "gpu.2.temperature": 88,
        "gpu.2.remapped": "1 0 1 0",
        "gpu.2.pcie_width": 8,
        "xid.0": "2 79",
        "xid.1": "2 31",
    }


@contextmanager
def all_gpus(folder: Path) -> Iterator[dict[str, Gpus]]:
    """By group: encoders' GPUs, one of them almost full, and trainers', some of them in trouble."""
    library = nvml.build(folder / "nvml")
    encoders = {**healthy(2, "NVIDIA A10G", 24 * GIB), "gpu.1.memory_used": int(23.8 * GIB), "gpu.*.memory_reserved": 0}
    with ExitStack() as stack:
        yield {
            machine.group: stack.enter_context(gpus_of(machine, library, folder / machine.group, lines))
            for machine, lines in zip(MACHINES[1:], (encoders, with_faults()), strict=True)
        }


_RAYJOBS = {"broken": "Failed", JOB.rpartition("-")[0]: "Running", "waits": "Initializing", "idle": "Running"}
_POD = f'namespace="{NAMESPACE}",pod="waits",uid="3"'
OF_KUBERNETES = (
    *(
        f'kuberay_job_deployment_status{{deployment_status="{state}",name="{name}",namespace="{NAMESPACE}",uid="1"}} 1'
        for name, state in _RAYJOBS.items()
    ),
    f'kuberay_cluster_info{{name="sdp",namespace="{NAMESPACE}",owner_kind="None",uid="1"}} 1',
    'kueue_pending_workloads{cluster_queue="gpus",status="inadmissible",replica_role="leader"} 1',
    f'kube_pod_status_phase{{{_POD},phase="Pending"}} 1',
    f'kube_pod_container_resource_requests{{{_POD},container="ray-worker",resource="nvidia_com_gpu",unit="integer"}} 8',
    f'kube_pod_container_status_waiting_reason{{{_POD},container="ray-worker",reason="ImagePullBackOff"}} 1',
    f'kube_pod_container_status_restarts_total{{{_POD},container="ray-head"}} 0',
    "go_goroutines 40",
)
"""Metrics as KubeRay's operator, Kueue and kube-state-metrics serve them."""


@contextmanager
def kubernetes_metrics() -> Iterator[str]:
    """Serve the metrics of Kubernetes; yield the address."""
    text = "".join(f"{line}\n" for line in OF_KUBERNETES).encode()
    with serving(lambda _: Answer(200, text, {"Content-Type": "text/plain; version=0.0.4"})) as server:
        yield server.address.removeprefix("http://")


def scraping(
    manifests: list[Manifest], ports: Mapping[str, int], exporters: Mapping[str, Gpus], kubernetes: str
) -> dict[str, Any]:
    """Return Prometheus' configuration: the chart's PodMonitors, with these targets in place of pods."""
    by_pod = {machine.pod: machine for machine in MACHINES}
    ray = one(manifests, "PodMonitor", "ray-worker")["spec"]["podMetricsEndpoints"][0]
    operator, exporter = (
        one(manifests, "PodMonitor", f"-{name}")["spec"]["podMetricsEndpoints"][0] for name in ("operator", "exporter")
    )
    values = {
        "ray.relabelings": as_prometheus(ray["relabelings"]),
        "ray.metric": as_prometheus(ray["metricRelabelings"]),
        "ray.targets": [
            {"targets": [f"127.0.0.1:{port}"], "labels": _pod_labels(by_pod[pod])} for pod, port in ports.items()
        ],
        "operator.honor": operator["honorLabels"],
        "operator.metric": as_prometheus(operator["metricRelabelings"]),
        "kubernetes": [kubernetes],
        "exporter.honor": exporter["honorLabels"],
        "exporter.relabelings": as_prometheus(exporter["relabelings"]),
        "exporter.targets": [
            {"targets": [gpus.target], "labels": {**_pod_labels(gpus.machine), "pod": f"exporter-{number}"}}
            for number, gpus in enumerate(exporters.values())
        ],
    }
    config: dict[str, Any] = fill(Path(__file__).with_name("scraping.yaml"), values)
    return config


def _pod_labels(machine: Machine) -> dict[str, str]:
    """Return a pod's labels after the operator's own relabelings, as the chart's relabelings get them."""
    return {
        "namespace": NAMESPACE,
        "pod": machine.pod,
        "container": "ray",
        "__meta_kubernetes_pod_node_name": machine.node,
        "__meta_kubernetes_pod_uid": uid_of(machine.pod),
        "__meta_kubernetes_pod_label_ray_io_cluster": CLUSTER,
        "__meta_kubernetes_pod_label_ray_io_group": machine.group,
    }


def settle(prometheus: Prometheus, gpus: Mapping[str, Gpus]) -> None:
    """Assign the jobs' processes to GPUs of their node: 2 GiB for an encoder, 30 for a trainer."""
    for labels, _ in prometheus.series("sdp_process_info"):
        if labels["ray_group"] in gpus:
            trains = labels["role"] == "trainer"
            gpu = int(labels["rank"] or 0) if trains else 0
            gpus[labels["ray_group"]].host(int(labels["pid"]), gpu, (30 if trains else 2) * GIB)
