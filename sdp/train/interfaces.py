"""The network interface by which a worker's collectives connect."""

import fcntl
import os
import socket
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path

_SIOCGIFADDR = 0x8915
_INET6 = Path("/proc/net/if_inet6")


def choose_interface(
    address: str,
    interfaces: Iterable[tuple[str, str]] | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Have gloo and NCCL use the interface that has an address, each unless the environment names one for it.

    gloo's own choice is by the host's name, which can be the loopback interface in a pod.
    """
    for name, own in interfaces or _interfaces():
        if own == address:
            environ.setdefault("GLOO_SOCKET_IFNAME", name)
            environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without "=" it is a prefix


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield interfaces and their addresses; none where this is not Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                yield name, socket.inet_ntoa(reply[20:24])
    with suppress(FileNotFoundError):
        for line in _INET6.read_text().splitlines():
            digits, *_, name = line.split()
            yield name, str(IPv6Address(bytes.fromhex(digits)))
