"""One attempt at a request, the memory that all attempts share, and the addresses that they may lead to."""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import certifi
import pycurl

from sdp.config.download import FetchConfig
from sdp.datasets.outcomes import FILTERED
from sdp.download import transfer
from sdp.download.robots import MAX_BYTES, opt_out
from sdp.download.transfer import Failure

_EXPECTED_BYTES = 1 << 20
"""Bytes to reserve for a body of unknown length."""
_TRIMMED_AFTER_S = 2.0
"""Time after which a slow transfer loses the memory that it has reserved but not used."""
_ERROR_BODY = 64 << 10
"""Bytes of an error page that are read. A new connection is cheaper than the rest of a longer one."""
_HEADERS = ("Accept: image/jpeg,image/png,image/webp;q=0.9,image/*;q=0.8,*/*;q=0.5", "Accept-Encoding: identity")
"""Compressed bodies fail: libcurl, which could unpack them, would hold megabytes of a paused transfer."""
_READ = frozenset({b"content-length", b"location", b"retry-after", b"date"})
_RECEIVE_BYTES = 64 << 10
"""Bytes that libcurl reads at once, and so the most that it holds of a paused transfer."""
_PIECE_BYTES = 16 << 10
"""Bytes up to which smaller pieces are joined. A server may send chunks of a byte, and each object costs forty more."""

IPNetwork = IPv4Network | IPv6Network

_TRANSLATED = ip_network("64:ff9b::/96")
"""IPv6 addresses that embed an IPv4 address in their last 32 bits."""
_SPECIAL = [
    # Python versions disagree on whether these are global.
    *map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "fec0::/10", "2001::/23", "3fff::/20")),
    ip_network("64:ff9b:1::/48"),  # local translation to IPv4 (RFC 8215), which varies by network
    ip_network("168.63.129.16/32"),  # the host of each of Azure's virtual machines
]
"""Networks that are not public, although `is_global` may say so."""


class Buffer:
    """A limit on bytes in memory."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0
        self._lock = threading.Lock()
        self.on_release: Callable[[], None] = lambda: None
        """A function that the releasing thread calls."""

    def reserve(self, size: int, *, spare: int = 0, beyond_limit: bool = False) -> bool:
        """Reserve bytes if `spare` (at most half the limit) stay free, or if `beyond_limit`; return whether it did."""
        limit = self._limit - min(spare, self._limit // 2)
        with self._lock:
            if self.used + size > limit and not beyond_limit:
                return False
            self.used += size
            return True

    def release(self, size: int) -> None:
        if not size:
            return
        with self._lock:
            self.used -= size
        self.on_release()

    @property
    def full(self) -> bool:
        return self.used >= self._limit


def refuses(address: str, allowed: Iterable[IPNetwork]) -> bool:
    """Return whether connections to this address are refused: a table of URLs must not lead into our own network.

    Addresses of the internet are not (those that are private, shared, link-local, reserved or multicast are not of it),
    nor are those in the networks that the configuration allows. Text that is not an address is refused too.
    """
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return True
    if isinstance(ip, IPv6Address):  # which may embed an IPv4 address
        ip = IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in _TRANSLATED else ip.ipv4_mapped or ip.sixtofour or ip
    special = any(ip in network for network in _SPECIAL)
    public = ip.is_global and not ip.is_multicast and not ip.is_reserved and not special
    return not public and not any(ip in network for network in allowed)


@dataclass(slots=True, eq=False)
class Slot:
    """One attempt at a request, on a libcurl handle of its own."""

    options: FetchConfig
    allowed: Sequence[IPNetwork]
    """Networks that may be connected to beside the internet."""
    buffer: Buffer
    waiting: "deque[Slot]"
    """The queue of slots that wait for memory."""
    multi: Any
    """The multi handle that the request runs in, which keeps connections for later requests."""
    request: Any
    began_at: float
    curl: Any = field(default_factory=pycurl.Curl)
    pieces: list[bytearray] = field(default_factory=list)
    size: int = 0
    reserved: int = 0
    unbound: bool = False
    """True if this slot may exceed the buffer's limit. If all slots wait for memory, one of them may."""
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    """The response's headers that are read, by name in lower case."""
    refused: str | None = None
    """The last address that was not connected to."""
    stopped: Failure | None = None
    """The reason for which this slot ended the transfer itself."""
    cut_short: bool = False
    """True if this slot has read enough of an error page or a robots.txt."""
    moved_at: float = field(init=False)
    """Time of the last header line or piece of the body."""
    paused_at: float = 0.0
    paused_s: float = 0.0

    def begin(self) -> None:
        """Start the transfer."""
        self.moved_at = self.began_at
        options, curl = self.options, self.curl
        curl.setopt(pycurl.NOSIGNAL, 1)
        curl.setopt(pycurl.WRITEFUNCTION, self.write)
        curl.setopt(pycurl.HEADERFUNCTION, self.header)
        curl.setopt(pycurl.USERAGENT, options.user_agent)
        curl.setopt(pycurl.HTTPHEADER, list(_HEADERS))
        curl.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
        curl.setopt(pycurl.CONNECTTIMEOUT_MS, max(1, round(options.connect_s * 1000)))
        curl.setopt(pycurl.DNS_CACHE_TIMEOUT, 600)
        curl.setopt(pycurl.BUFFERSIZE, _RECEIVE_BYTES)
        curl.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        curl.setopt(pycurl.MAXFILESIZE_LARGE, options.max_bytes)
        curl.setopt(pycurl.FOLLOWLOCATION, 0)
        if not options.use_proxy:  # a proxy decides itself which addresses are allowed
            curl.setopt(pycurl.PROXY, "")
            curl.setopt(pycurl.OPENSOCKETFUNCTION, self.open_socket)
        curl.setopt(pycurl.CAINFO, os.fsencode(os.environ.get("SSL_CERT_FILE") or certifi.where()))
        curl.setopt(pycurl.URL, self.request.url.text)
        self.multi.add_handle(curl)

    def active_s(self, now: float) -> float:
        paused = self.paused_s + (now - self.paused_at if self.paused_at else 0.0)
        return max(0.0, now - self.began_at - paused)

    def overdue(self, now: float) -> Failure | None:
        """Return the failure of a request that has missed a deadline; libcurl has its own for connecting."""
        options, active_s = self.options, self.active_s(now)
        left_s = options.timeout_s - self.request.seconds
        if active_s <= left_s and now - self.moved_at <= options.silence_s:
            return None
        connecting_s = self.curl.getinfo(pycurl.PRETRANSFER_TIME)  # 0 until connected
        if active_s > left_s and not connecting_s:
            return Failure("connect", f"not connected after {active_s:.1f} s", retry=True)
        if active_s > left_s:
            return Failure("timeout", f"not whole after {options.timeout_s:g} s, {self.size} bytes", retry=True)
        if not connecting_s or now - max(self.moved_at, self.began_at + connecting_s) <= options.silence_s:
            return None
        state = f"silent after {self.size} bytes" if self.moved_at > self.began_at else "no answer"
        return Failure("timeout", f"{state} for {options.silence_s:g} s", retry=True)

    def failure(self, code: int, message: str) -> Failure | None:
        """Return the failure behind one of libcurl's errors; None if this slot ended the transfer itself."""
        if self.refused is not None and code == pycurl.E_COULDNT_CONNECT:
            return Failure("private_address", self.refused)
        if self.stopped or self.cut_short:
            return None
        if self.status >= 300 and code in (pycurl.E_FILESIZE_EXCEEDED, pycurl.E_PARTIAL_FILE, pycurl.E_RECV_ERROR):
            return None
        return transfer.of_curl(code, message, connected=self.curl.getinfo(pycurl.PRETRANSFER_TIME) > 0)

    def verdict(self) -> Failure | None:
        """Return what is wrong with a complete response; None for an image or a redirect."""
        if self.status in transfer.REDIRECT_STATUSES:
            return None if self.location else Failure("redirects", f"{self.status} without a Location")
        if self.status != 200:
            date, wait = (self.headers.get(name, b"").decode("latin-1") for name in (b"date", b"retry-after"))
            # The server's own clock counts.
            return transfer.of_status(self.status, transfer.retry_after_s(wait, transfer.moment(date)))
        return self.stopped or (None if self.size else Failure("empty", "0 bytes"))

    @property
    def location(self) -> str:
        return self.headers.get(b"location", b"").decode("utf-8", "replace")

    def reserve(self) -> bool:
        """Reserve the announced length, or else as much again as before; return False if there is no memory.

        A body of unknown length leaves room for the one transfer that continues when all wait, so the limit holds.
        """
        most = self.options.max_bytes - self.reserved
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and not self.reserved:
            wanted, spare = min(max(1, int(length[:20])), most), 0
        else:
            wanted = most if self.unbound else min(most, self.reserved or _EXPECTED_BYTES)
            spare = self.options.max_bytes
        if not self.buffer.reserve(wanted, spare=spare, beyond_limit=self.unbound):
            return False
        self.reserved += wanted
        return True

    def trim(self, now: float) -> None:
        """Release memory reserved for bytes that come too slowly, since a server can announce any number."""
        active, unused = self.active_s(now), self.reserved - self.size - _EXPECTED_BYTES
        if unused > 0 and active > _TRIMMED_AFTER_S and self.size * self.options.timeout_s < self.reserved * active:
            self.reserved -= unused
            self.buffer.release(unused)

    def resume(self, now: float) -> None:
        self.paused_s += now - self.paused_at
        self.paused_at, self.moved_at = 0.0, now
        self.curl.unpause()

    # Called by libcurl.

    def open_socket(self, purpose: int, address: Any) -> Any:  # noqa: ARG002 (pycurl's signature)
        """Open a socket for one resolved IP address, unless it lies in a network that may not be connected to."""
        ip = str(address.addr[0])
        if refuses(ip, self.allowed):
            self.refused = ip
            return pycurl.SOCKET_BAD
        try:
            return socket.socket(address.family, address.socktype, address.protocol)
        except OSError:  # no IPv6 here, or too many open files: libcurl reports that it could not connect
            return pycurl.SOCKET_BAD

    def header(self, line: bytes) -> None:
        self.moved_at = time.monotonic()
        if line.startswith(b"HTTP/"):
            code = line.split(None, 2)[1:2]
            self.status = int(code[0][:9]) if code and code[0].isdigit() else 0
            self.headers, self.stopped = {}, None
            return
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in _READ:
            self.headers[name] = value.strip()
        elif name == b"content-encoding" and self.request.robots_of and self.status == 200:
            if value.strip().lower() not in (b"", b"identity"):
                self.stopped = Failure("broken_transfer", "compressed, although not asked for")
        elif name == b"x-robots-tag" and self.status == 200 and not self.request.robots_of:
            # The header of a redirect, an error page or a robots.txt does not concern the image.
            directive = opt_out(value.decode("latin-1"), self.options.agent)
            if directive is not None and self.options.respect_opt_out:
                self.stopped = self.stopped or Failure("opt_out", f"X-Robots-Tag: {directive}", FILTERED)

    def write(self, piece: bytes) -> int | None:
        self.moved_at = time.monotonic()
        if self.stopped:
            return 0
        if self.status != 200:
            self.size += len(piece)
            self.cut_short = self.size > _ERROR_BODY
            return 0 if self.cut_short else None
        size = self.size + len(piece)
        if self.request.robots_of and size > MAX_BYTES:
            self.cut_short = True
            return 0
        if size > self.options.max_bytes:
            self.stopped = Failure("too_big", f"more than {self.options.max_bytes} bytes")
            return 0
        if size > self.reserved and not ((self.unbound or not self.waiting) and self.reserve()):
            self.paused_at = time.monotonic()
            if self.reserved:  # it goes first: a complete body soon frees its memory
                self.waiting.appendleft(self)
            else:
                self.waiting.append(self)
            return int(pycurl.WRITEFUNC_PAUSE)
        self.size = size
        if self.pieces and len(self.pieces[-1]) + len(piece) <= _PIECE_BYTES:
            self.pieces[-1] += piece
        else:
            self.pieces.append(bytearray(piece))
        return None
