"""The owners of processes, by /proc: the cgroup, and the pid in the container.

NVML reports the host's pids, so this needs `hostPID: true` on Kubernetes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# kubepods-burstable-pod1234abcd_….slice (systemd), pod1234abcd-… (cgroupfs), pod<32 hex> (a static pod).
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:]|$)")
_CONTAINER = re.compile(r"(?:^|[-/:])([0-9a-f]{64})(?:\.scope)?(?=/|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOwner:
    """The owner of a process, as far as known."""

    container_pid: str = ""
    """The pid inside the container, as in `sdp_process_info`."""
    process: str = ""
    pod_uid: str = ""
    container_id: str = ""


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


def pid_inside(status: str) -> str:
    """Return the pid inside the container: the innermost in the line NSpid of /proc/PID/status."""
    match = re.search(r"^NSpid:.*?(\d+)\s*$", status, re.MULTILINE)
    return match[1] if match else ""


def look_up(pids: Iterable[int], proc: Path = Path("/proc")) -> dict[int, PodOwner | None]:
    """Return what /proc tells of each process; None if it is hidden, absent, or ended during the read."""
    result: dict[int, PodOwner | None] = {}
    for pid in pids:
        try:
            files = (proc / str(pid) / name for name in ("comm", "status", "cgroup"))
            comm, status, cgroup = (file.read_text(encoding="utf-8", errors="replace") for file in files)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            result[pid] = None
            continue
        pod, container = parse_cgroup(cgroup)
        # A process chooses its name.
        name = "".join(character for character in comm if character.isprintable())
        result[pid] = PodOwner(container_pid=pid_inside(status), process=name, pod_uid=pod, container_id=container)
    return result
