"""The owner of a process: real cgroups, environments with secrets in them, processes that vanish."""

import os
from pathlib import Path

import pytest

from sdp.exporter.podresources import Allotment
from sdp.exporter.processes import (
    MAX_LABEL,
    Facts,
    PodOwner,
    Processes,
    owner_of,
    parse_cgroup,
    parse_environment,
    pid_inside,
)

UID = "0f3c9a1e-5b7d-4c11-9e2a-7d6f00c1b2a3"
UNDERSCORED = UID.replace("-", "_")
ID = "4c9d2f" + "0b" * 29
OUTER = "ee" * 32

CGROUPS = {
    "v2, systemd, containerd": (
        "0::/kubepods.slice/kubepods-burstable.slice/"
        f"kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n",
        (UID, ID),
    ),
    "v2, systemd, guaranteed, CRI-O": (
        f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope\n",
        (UID, ID),
    ),
    "v2, CRI-O's container below its scope": (
        f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope/container\n",
        (UID, ID),
    ),
    "v2, cgroupfs": (f"0::/kubepods/besteffort/pod{UID}/{ID}\n", (UID, ID)),
    "v2, seen out of another cgroup namespace": (
        f"0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n",
        (UID, ID),
    ),
    "v1, cgroupfs, docker": (
        f"12:pids:/kubepods/burstable/pod{UID}/{ID}\n11:memory:/kubepods/burstable/pod{UID}/{ID}\n"
        f"1:name=systemd:/kubepods/burstable/pod{UID}/{ID}\n",
        (UID, ID),
    ),
    "v1, systemd, docker": (
        "4:memory:/kubepods.slice/kubepods-burstable.slice/"
        f"kubepods-burstable-pod{UNDERSCORED}.slice/docker-{ID}.scope\n",
        (UID, ID),
    ),
    "v1, containerd as a service": (
        f"9:memory:/system.slice/containerd.service/kubepods-burstable-pod{UNDERSCORED}.slice:cri-containerd:{ID}\n",
        (UID, ID),
    ),
    "both versions, the pod in one of them only": (
        f"5:devices:/\n4:memory:/kubepods/pod{UID}/{ID}\n0::/\n",
        (UID, ID),
    ),
    "a static pod": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{'0a1b2c3d' * 4}.slice/crio-{ID}.scope\n",
        ("0a1b2c3d" * 4, ID),
    ),
    "kind: a Kubernetes in a container": (
        f"0::/system.slice/docker-{OUTER}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
        f"kubelet-kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n",
        (UID, ID),
    ),
    "the pause of a pod that has no container yet": (
        f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice\n",
        (UID, ""),
    ),
    "docker without Kubernetes": (f"0::/system.slice/docker-{ID}.scope\n", ("", ID)),
    "docker without Kubernetes, v1": (f"4:memory:/docker/{ID}\n", ("", ID)),
    "a login": ("0::/user.slice/user-1000.slice/session-3.scope\n", ("", "")),
    "a service called pod": ("0::/system.slice/podman-auto-update.service\n", ("", "")),
    "nothing": ("", ("", "")),
}


@pytest.mark.parametrize(("text", "expected"), CGROUPS.values(), ids=CGROUPS)
def test_the_pod_and_the_container_are_found_in_every_kind_of_cgroup(text: str, expected: tuple[str, str]) -> None:
    assert parse_cgroup(text) == expected


def test_only_known_environment_variables_are_kept_up_to_a_limit() -> None:
    raw = b"AWS_SECRET_ACCESS_KEY=hush\0RAY_CLUSTER_NAME=sd2\0RAY_NODE_TYPE_NAME=" + b"g" * 9999 + b"\0"
    raw += b'HOSTNAME=a\nb"\xff\0RAY_CLUSTER_NAME_X=no\0nonsense\0\xff\xfe=1\0'
    assert parse_environment(raw) == {
        "RAY_CLUSTER_NAME": "sd2",
        "RAY_NODE_TYPE_NAME": "g" * MAX_LABEL,
        "HOSTNAME": 'ab"�',
    }


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("Name:\tray\nNStgid:\t9 8 7\nNSpid:\t43210\t57\nNSpgid:\t1\n", "57"),
        ("NSpid:\t43210\t900\t12\n", "12"),
        ("NSpid:\t43210\n", "43210"),
        ("Name:\told kernel\n", ""),
    ],
)
def test_the_pid_inside_is_that_of_the_innermost_namespace(status: str, expected: str) -> None:
    assert pid_inside(status) == expected


class Proc:
    """A proc file system of files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def start(self, pid: int, *, started: int, name: str = "python", environment: bytes = b"") -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", *["0"] * 18, str(started), *["0"] * 30]
        (folder / "stat").write_text(f"{pid} (a) b (c) {' '.join(fields)}\n")
        (folder / "comm").write_text(f"{name}\n")
        (folder / "status").write_text(f"Name:\t{name}\nNSpid:\t{pid}\t7\n")
        (folder / "cgroup").write_text(f"0::/kubepods/pod{UID}/{ID}\n")
        (folder / "environ").write_bytes(environment)


def test_a_reused_pid_is_read_again_and_others_are_not(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.start(5, started=100, name="first")
    processes = Processes(tmp_path)
    first = processes.look_up([5])[5]
    assert first == Facts(PodOwner(process="first", container_pid="7", pod_uid=UID, container_id=ID))
    proc.start(5, started=100, name="renamed")
    assert processes.look_up([5])[5] is first
    proc.start(5, started=200, name="second")
    second = processes.look_up([5])[5]
    assert second is not None
    assert second.owner.process == "second"
    processes.look_up([])
    assert processes.look_up([5])[5] is not second  # nothing is kept of processes that left the GPU


def test_a_process_that_is_missing_or_ends_during_the_read_is_unknown(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.start(5, started=100)
    (tmp_path / "5" / "cgroup").unlink()
    assert Processes(tmp_path).look_up([4, 5]) == {4: None, 5: None}


def test_this_very_process_is_found_in_the_real_proc() -> None:
    facts = Processes(Path("/proc")).look_up([os.getpid()])[os.getpid()]
    assert facts is not None
    assert facts.readable
    pids = Path("/proc/self/status").read_text().split("NSpid:")[1].split("\n")[0].split()
    assert facts.owner.container_pid == pids[-1]


RAY = {
    "RAY_CLUSTER_NAME": "sd2",
    "RAY_NODE_TYPE_NAME": "a100",
    "RAY_CLOUD_INSTANCE_ID": "sd2-a100-worker-x7",
    "FQ_RAY_IP": "sd2-head-svc.training.svc.cluster.local",
}
TRAINER = Allotment("training", "sd2-a100-worker-x7", "ray-worker")
OTHER = Allotment("elsewhere", "other-0", "main")


def in_pod(folder: Path, process: str, environment: dict[str, str] | None = None) -> Facts | None:
    lines = [f"{name}={value}\0".encode() for name, value in (environment or {}).items()]
    Proc(folder).start(5, started=100, name=process, environment=b"".join(lines))
    return Processes(folder).look_up([5])[5]


def test_a_ray_worker_is_named_by_its_environment_alone(tmp_path: Path) -> None:
    owner = owner_of(in_pod(tmp_path, "ray::Trainer", RAY), ())
    assert owner == PodOwner(
        container_pid="7",
        process="ray::Trainer",
        namespace="training",
        pod="sd2-a100-worker-x7",
        pod_uid=UID,
        container_id=ID,
        ray_cluster="sd2",
        ray_group="a100",
    )


def test_the_kubelet_adds_the_container_and_decides_among_pods_that_share_a_gpu(tmp_path: Path) -> None:
    for allotted in ((TRAINER,), (OTHER, TRAINER)):
        owner = owner_of(in_pod(tmp_path, "python", RAY), allotted)
        assert (owner.namespace, owner.pod, owner.container) == ("training", "sd2-a100-worker-x7", "ray-worker")


def test_a_pod_that_says_nothing_of_itself_is_the_one_that_has_the_gpu_if_only_one_has(tmp_path: Path) -> None:
    silent = in_pod(tmp_path, "python")
    assert owner_of(silent, (TRAINER,)).pod == "sd2-a100-worker-x7"
    assert owner_of(silent, (TRAINER, OTHER)).pod == ""


def test_another_pods_process_and_the_hosts_are_not_taken_for_the_one_that_has_the_gpu(tmp_path: Path) -> None:
    agent = {"HOSTNAME": "dcgm-exporter-9z", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    owner = owner_of(in_pod(tmp_path, "dcgm-exporter", agent), (TRAINER,))
    assert (owner.pod, owner.namespace, owner.container) == ("dcgm-exporter-9z", "", "")
    host = owner_of(Facts(PodOwner(process="nvidia-persiste"), {"HOSTNAME": "n1"}), (TRAINER,))
    assert (host.pod, host.namespace, host.process) == ("", "", "nvidia-persiste")


def test_a_process_that_could_not_be_looked_up_has_no_owner() -> None:
    assert owner_of(None, (TRAINER,)) == PodOwner()
