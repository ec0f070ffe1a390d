"""Which network addresses may be connected to: a table of URLs must not lead us into our own network."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

_TRANSLATED = ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for the IPv4 address in their last 32 bits."""

_SPECIAL = tuple(
    map(
        ip_network,
        (
            # What the standard library takes for global in one version and not in another.
            *("192.0.0.0/24", "192.88.99.0/24", "fec0::/10", "2001::/23"),
            "64:ff9b:1::/48",  # translated to IPv4 inside one network only (RFC 8215), in any of several ways
            "168.63.129.16/32",  # Azure's host, seen from each of its virtual machines
        ),
    )
)
"""Networks that are not public, though their addresses may look so."""


class Networks:
    """Decides over addresses: those of the internet, and those of the networks that are allowed by name."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = [ip_network(network) for network in allowed]

    def refuses(self, address: str) -> bool:
        """Whether a connection to this address is not to be made; what is no address is refused."""
        try:
            ip = effective(ip_address(address.partition("%")[0]))
        except ValueError:
            return True
        return not is_public(ip) and not any(_contains(network, ip) for network in self._allowed)


def effective(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 one stands for, if it does."""
    if isinstance(ip, IPv4Address):
        return ip
    if ip in _TRANSLATED:
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or ip


def is_public(ip: IPv4Address | IPv6Address) -> bool:
    """Reachable in the whole internet: not private, shared, loopback, link-local, reserved, multicast or unset."""
    special = any(_contains(network, ip) for network in _SPECIAL)
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and not special


def _contains(network: IPv4Network | IPv6Network, ip: IPv4Address | IPv6Address) -> bool:
    return ip.version == network.version and ip in network
