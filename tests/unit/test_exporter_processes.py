"""The owner of a process: real cgroups, processes that vanish."""

from pathlib import Path

import pytest

from sdp.exporter.processes import PodOwner, look_up, parse_cgroup, pid_inside

UID = "0f3c9a1e-5b7d-4c11-9e2a-7d6f00c1b2a3"
UNDERSCORED = UID.replace("-", "_")
ID = "4c9d2f" + "0b" * 29
OUTER = "ee" * 32

SLICE = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
OF_THE_POD = {
    "v2, systemd, containerd": f"0::/{SLICE}{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n",
    "v2, systemd, guaranteed, CRI-O": f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope\n",
    "v2, CRI-O's container below its scope": (
        f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope/container\n"
    ),
    "v2, cgroupfs": f"0::/kubepods/besteffort/pod{UID}/{ID}\n",
    "v2, seen out of another cgroup namespace": (
        f"0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n"
    ),
    "v1, cgroupfs, docker": "".join(
        f"{which}:/kubepods/burstable/pod{UID}/{ID}\n" for which in ("12:pids", "11:memory", "1:name=systemd")
    ),
    "v1, systemd, docker": f"4:memory:/{SLICE}{UNDERSCORED}.slice/docker-{ID}.scope\n",
    "v1, containerd as a service": (
        f"9:memory:/system.slice/containerd.service/kubepods-burstable-pod{UNDERSCORED}.slice:cri-containerd:{ID}\n"
    ),
    "both versions, the pod in one of them only": f"5:devices:/\n4:memory:/kubepods/pod{UID}/{ID}\n0::/\n",
    "kind: a Kubernetes in a container": (
        f"0::/system.slice/docker-{OUTER}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
        f"kubelet-kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n"
    ),
}
CGROUPS = {name: (text, (UID, ID)) for name, text in OF_THE_POD.items()} | {
    "a static pod": (f"0::/{SLICE}{'0a1b2c3d' * 4}.slice/crio-{ID}.scope\n", ("0a1b2c3d" * 4, ID)),
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


def make_process(proc: Path, pid: int, *, name: str = "python") -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "comm").write_text(f"{name}\n")
    (folder / "status").write_text(f"Name:\t{name}\nNSpid:\t{pid}\t7\n")
    (folder / "cgroup").write_text(f"0::/kubepods/pod{UID}/{ID}\n")


def test_a_process_that_is_missing_or_ends_during_the_read_is_unknown(tmp_path: Path) -> None:
    make_process(tmp_path, 5)
    make_process(tmp_path, 6, name='a\tb"')
    (tmp_path / "5" / "cgroup").unlink()
    known = PodOwner(process='ab"', container_pid="7", pod_uid=UID, container_id=ID)
    assert look_up([4, 5, 6], tmp_path) == {4: None, 5: None, 6: known}
