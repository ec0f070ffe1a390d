"""The network addresses that may be connected to: a table of URLs must not lead into our own network."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

_TRANSLATED = ip_network("64:ff9b::/96")
"""IPv6 addresses that embed an IPv4 address in their last 32 bits."""

_SPECIAL = tuple(
    map(
        ip_network,
        (
            # Python versions disagree on whether these are global.
            *("192.0.0.0/24", "192.88.99.0/24", "fec0::/10", "2001::/23"),
            "64:ff9b:1::/48",  # local translation to IPv4 (RFC 8215), which varies by network
            "168.63.129.16/32",  # the host of each of Azure's virtual machines
        ),
    )
)
"""Networks that are not public, although `is_global` may say so."""


class Networks:
    """The networks that may be connected to: the internet, and those that the configuration allows."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = [ip_network(network) for network in allowed]

    def refuses(self, address: str) -> bool:
        """Return whether connections to this address are refused; text that is not an address is refused too."""
        try:
            ip = effective(ip_address(address.partition("%")[0]))
        except ValueError:
            return True
        return not is_public(ip) and not any(_contains(network, ip) for network in self._allowed)


def effective(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address that an IPv6 one embeds, or the address itself."""
    if isinstance(ip, IPv4Address):
        return ip
    if ip in _TRANSLATED:
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or ip


def is_public(ip: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is on the internet: not private, shared, link-local, reserved or multicast."""
    special = any(_contains(network, ip) for network in _SPECIAL)
    return ip.is_global and not ip.is_multicast and not ip.is_reserved and not special


def _contains(network: IPv4Network | IPv6Network, ip: IPv4Address | IPv6Address) -> bool:
    return ip.version == network.version and ip in network
