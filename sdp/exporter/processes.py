"""The owners of processes, by /proc (cgroup, pid in the container, parts of the environment) and the kubelet.

NVML reports the host's pids, so this needs `hostPID: true` on Kubernetes. Reading other users' environments needs
CAP_SYS_PTRACE; without it only the pod's uid is known, from the cgroup.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sdp.exporter.podresources import Allotment

MAX_LABEL = 128
"""Limit on the characters of a name that a process sets itself."""
MAX_ENVIRONMENT = 1 << 20
WANTED = frozenset(
    {
        # KubeRay's: cluster, worker group, pod, and the head's service, which has the namespace
        *("RAY_CLUSTER_NAME", "RAY_NODE_TYPE_NAME", "RAY_CLOUD_INSTANCE_ID", "FQ_RAY_IP"),
        *("POD_NAME", "POD_NAMESPACE", "HOSTNAME", "KUBERNETES_SERVICE_HOST"),
    }
)
"""The only variables read from an environment, which also holds secrets."""

# kubepods-burstable-pod1234abcd_….slice (systemd), pod1234abcd-… (cgroupfs), pod<32 hex> (a static pod).
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:]|$)")
_CONTAINER = re.compile(r"(?:^|[-/:])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
_SERVICE = re.compile(r"^[^.]+\.([^.]+)\.svc(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOwner:
    """The owner of a process, as far as known."""

    container_pid: str = ""
    """The pid inside the container, as in `sdp_process_info`."""
    process: str = ""
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    container_id: str = ""
    ray_cluster: str = ""
    ray_group: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """A process's properties from /proc."""

    owner: PodOwner
    """Without namespace, pod and container, which also depend on the kubelet."""
    environment: Mapping[str, str] = field(default_factory=dict)
    readable: bool = True
    """True if its environment could be read."""


def parse_cgroup(text: str) -> tuple[str, str]:
    """Return the pod's uid and the container's id from /proc/PID/cgroup, each empty if there is none.

    Both versions and all runtimes are known: docker, containerd, CRI-O; cgroupfs or systemd. With version 2 and a
    cgroup namespace, the path is relative and may lead upwards, but still contains the pod. In Kubernetes inside a
    container (kind), an outer container comes first; the pod's container is below the pod.
    """
    outside = ""
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        pods = list(_POD.finditer(path))  # the innermost is the last
        containers = _CONTAINER.findall(path[pods[-1].end() :] if pods else path)
        container = containers[-1] if containers else ""
        if pods:
            return pods[-1][1].replace("_", "-"), container
        outside = outside or container
    return "", outside


def parse_environment(raw: bytes) -> dict[str, str]:
    """Return the wanted variables of /proc/PID/environ."""
    result = {}
    for entry in raw.split(b"\0"):
        name, separator, value = entry.partition(b"=")
        key = name.decode("ascii", "replace")
        if separator and key in WANTED:
            result[key] = as_label(value.decode("utf-8", "replace"))
    return result


def as_label(text: str) -> str:
    """Return the printable characters of a text that a process chose, shortened."""
    return "".join(c for c in text if c.isprintable())[:MAX_LABEL]


def pid_inside(status: str) -> str:
    """Return the pid inside the container: the innermost in the line NSpid of /proc/PID/status."""
    match = re.search(r"^NSpid:.*?(\d+)\s*$", status, re.MULTILINE)
    return match[1] if match else ""


def owner_of(facts: Facts | None, allotted: Sequence[Allotment]) -> PodOwner:
    """Combine a process's own properties with the containers to which the kubelet has allotted its device.

    The kubelet's answer applies only to processes in pods. If a device is shared, or the process names another pod, the
    pod that the process names decides: a monitoring agent on the same GPU does not belong to the trainer's pod.
    """
    if facts is None:
        return PodOwner()
    if not facts.owner.pod_uid:
        return facts.owner
    environment = facts.environment
    names = [environment.get(name, "") for name in ("RAY_CLOUD_INSTANCE_ID", "POD_NAME")]
    names += [environment.get("HOSTNAME", "") if "KUBERNETES_SERVICE_HOST" in environment else ""]
    pod = next(filter(None, names), "")
    fitting = [a for a in allotted if a.pod in names] or ([] if pod else list(allotted))
    if len(fitting) == 1:
        return replace(facts.owner, **asdict(fitting[0]))
    service = _SERVICE.match(environment.get("FQ_RAY_IP", ""))
    namespace = environment.get("POD_NAMESPACE", "") or (service[1] if service else "")
    return replace(facts.owner, pod=pod, namespace=namespace)


class Processes:
    """Looks up processes in /proc, each once, since these properties do not change while a process lives."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc
        self._known: dict[tuple[int, str], Facts] = {}

    def look_up(self, pids: Iterable[int]) -> dict[int, Facts | None]:
        """Return each process's properties; None if it is hidden, absent, or ended during the read."""
        result: dict[int, Facts | None] = {}
        known: dict[tuple[int, str], Facts] = {}
        for pid in pids:
            result[pid] = None
            try:
                # With the start time, since the pid may have been reused.
                key = (pid, _start_time((self._proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")))
                facts = self._known.get(key) or self._read(pid)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            known[key] = result[pid] = facts
        self._known = known
        return result

    def _read(self, pid: int) -> Facts:
        folder = self._proc / str(pid)
        comm, status, cgroup = (
            (folder / name).read_text(encoding="utf-8", errors="replace") for name in ("comm", "status", "cgroup")
        )
        environment: dict[str, str] = {}
        readable = True
        try:
            with (folder / "environ").open("rb") as file:
                environment = parse_environment(file.read(MAX_ENVIRONMENT))
        except PermissionError:
            readable = False
        pod_uid, container_id = parse_cgroup(cgroup)
        owner = PodOwner(
            container_pid=pid_inside(status),
            process=as_label(comm.strip()),
            pod_uid=pod_uid,
            container_id=container_id,
            ray_cluster=environment.get("RAY_CLUSTER_NAME", ""),
            ray_group=environment.get("RAY_NODE_TYPE_NAME", ""),
        )
        return Facts(owner, environment, readable)


def _start_time(stat: str) -> str:
    """Return field 22 of /proc/PID/stat; the name before it, in parentheses, may contain anything."""
    return stat.rpartition(")")[2].split()[19]
