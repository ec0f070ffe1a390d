"""The interface of a worker's collectives."""

import sys
from pathlib import Path

import pytest

from sdp.train import interfaces
from sdp.train.interfaces import choose_interface

POD = [("lo", "127.0.0.1"), ("eth0", "10.1.2.3"), ("eth1", "192.168.0.7"), ("lo", "::1"), ("eth1", "fd00::7")]


@pytest.mark.parametrize(
    ("address", "environ", "expected"),
    [
        ("10.1.2.3", {}, ("eth0", "=eth0")),
        ("fd00::7", {}, ("eth1", "=eth1")),
        ("10.1.2.3", {"NCCL_SOCKET_IFNAME": "eth1"}, ("eth0", "eth1")),
        ("10.1.2.3", {"GLOO_SOCKET_IFNAME": "eth1"}, ("eth1", "=eth0")),
        ("10.1.2.4", {}, (None, None)),
    ],
)
def test_collectives_use_the_interface_of_the_node_s_address_unless_told_otherwise(
    address: str, environ: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    choose_interface(address, POD, environ)
    assert (environ.get("GLOO_SOCKET_IFNAME"), environ.get("NCCL_SOCKET_IFNAME")) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's table")
def test_the_loopback_address_is_that_of_the_loopback_interface() -> None:
    environ: dict[str, str] = {}
    choose_interface("127.0.0.1", environ=environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_an_interface_is_found_by_its_ipv6_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "fe80000000000000fcfffe0000010000 04 40 20 80     eth0\n20010db8000000000000000000000005 05 40 00 82     eth1\n"
    )
    monkeypatch.setattr(interfaces, "_INET6", table)
    environ: dict[str, str] = {}
    choose_interface("2001:db8::5", environ=environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth1"
