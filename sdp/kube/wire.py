"""Connections to an API server: a socket to it, HTTP on one, and a pod's port forwarded through it.

Python's own http.client, since each byte of a forwarded port has to go by a deadline: a laptop that slept, a head that
was moved, must not leave a thread waiting for ever.
"""

import base64
import http.client
import io
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

FORWARDING = "v4.channel.k8s.io"
_DATA, _ERROR = 0, 1
_CONTINUED, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x2, 0x8, 0x9, 0xA
_LONGEST_FRAME = 1 << 26

Failures = (OSError, http.client.HTTPException)
"""What breaks when a connection does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an API server is and how to speak to it."""

    host: str
    port: int
    base: str = ""
    """What paths begin with, where a gateway serves several clusters."""
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    """The name in its certificate, where it is not `host`."""
    proxy: tuple[str, int] | None = None
    proxy_headers: Mapping[str, str] | None = None
    credentials: Callable[[], Mapping[str, str]] = dict
    """The headers that say who we are; asked for anew each time, since tokens run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long to wait for what, in seconds."""

    connect_s: float = 10.0
    answer_s: float = 30.0
    attempts: int = 3
    """Of what may be asked twice."""
    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    watch_s: float = 30.0
    """How long one watch lasts before the state is asked for anew."""
    quiet_s: float = 60.0
    """Without a line of a log for so long, its connection is taken for dead and made anew."""
    lost_s: float = 900.0
    """Without an answer for so long, a job is followed no more."""
    closing_s: float = 60.0
    """For the last lines of a job that has ended."""

    def pause(self, attempt: int) -> float:
        return min(self.longest_pause_s, self.first_pause_s * 2.0**attempt)


def pause(seconds: float) -> None:
    """Between two attempts: what is waited for is somebody else's recovery, which nobody announces."""
    threading.Event().wait(seconds)


def dial(endpoint: Endpoint, timing: Timing) -> socket.socket:
    """A connection to the API server, through the proxy if there is one."""
    if endpoint.proxy:
        through = http.client.HTTPConnection(*endpoint.proxy, timeout=timing.connect_s)
        through.set_tunnel(endpoint.host, endpoint.port, headers=dict(endpoint.proxy_headers or {}))
        through.connect()
        sock: socket.socket = through.sock
    else:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout=timing.connect_s)
    try:
        if endpoint.tls:
            sock = endpoint.tls.wrap_socket(sock, server_hostname=endpoint.server_name or endpoint.host)
        sock.settimeout(timing.answer_s)
    except BaseException:
        sock.close()
        raise
    return sock


def http_on(sock: Any, host: str) -> http.client.HTTPConnection:
    """HTTP on a socket that is there; it is never opened again by itself."""
    connection = http.client.HTTPConnection(host)
    connection.auto_open = 0
    connection.sock = sock
    return connection


def host_header(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port}"


def hang_up(sock: Any) -> None:
    """End a connection that another thread may be reading from: it reads an end, or an error, at once."""
    try:
        # Of a TLS socket too: its own shutdown would take the session away under the reader's feet.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # it was down already


class HandshakeRefused(Exception):
    """The API server answered something other than a switch of protocols."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body
        super().__init__(f"answer {status}")


class ForwardedPort:
    """A TCP connection to a pod's port, through the API server: as much of a socket as http.client needs.

    The protocol is the API server's port forwarding over WebSocket: each message begins with a channel, 0 for data and
    1 for what went wrong, and the first message on each is the port's number.
    """

    def __init__(self, sock: socket.socket, reader: io.BufferedReader) -> None:
        self.sock = sock
        self._reader = reader
        self._greeted: set[int] = set()
        self._begun: tuple[int, bytes] = (_CONTINUED, b"")
        """A message of which parts are still to come: its kind and what there is of it."""

    @classmethod
    def open(cls, sock: socket.socket, path: str, headers: Mapping[str, str]) -> "ForwardedPort":
        """Ask for the port on a connection to the API server; HandshakeRefused where it says no."""
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {path} HTTP/1.1",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Protocol: {FORWARDING}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        reader = sock.makefile("rb")
        parts = reader.readline(4096).split(None, 2)
        if len(parts) < 2 or not parts[1].isdigit():
            raise ConnectionResetError("the API server hung up on a port forwarding")
        answer = http.client.parse_headers(reader)
        if int(parts[1]) != 101:
            length = answer.get("Content-Length", "")
            raise HandshakeRefused(int(parts[1]), reader.read(int(length)) if length.isdigit() else b"")
        return cls(sock, reader)

    def sendall(self, data: bytes) -> None:
        for start in range(0, len(data), 32_000):
            self._send(_BINARY, bytes([_DATA]) + data[start : start + 32_000])

    def makefile(self, mode: str = "rb", *_: Any) -> io.BufferedReader:
        assert mode == "rb", "http.client reads bytes"
        return io.BufferedReader(_Incoming(self), 65_536)

    def settimeout(self, seconds: float | None) -> None:
        self.sock.settimeout(seconds)

    def close(self) -> None:
        self._reader.close()
        self.sock.close()

    def receive(self) -> bytes:
        """The next bytes that the pod sent; b"" at the end."""
        while True:
            opcode, message = self._message()
            if opcode == _CLOSE:
                return b""
            if opcode == _PING:
                self._send(_PONG, message)
            elif opcode == _BINARY and message:
                channel, data = message[0], message[1:]
                if channel not in self._greeted:
                    self._greeted.add(channel)
                elif channel == _ERROR and data:
                    raise ConnectionResetError(f"port forwarding: {data.decode('utf-8', 'replace').strip()}")
                elif channel == _DATA and data:
                    return data

    def _message(self) -> tuple[int, bytes]:
        while True:
            first, second = self._exactly(2)
            length = second & 0x7F
            if length > 125:
                wide = length == 127
                (length,) = struct.unpack("!Q" if wide else "!H", self._exactly(8 if wide else 2))
            if length > _LONGEST_FRAME:
                raise ConnectionResetError(f"port forwarding: a frame of {length} bytes")
            data, opcode = self._exactly(length), first & 0x0F
            if opcode >= _CLOSE:
                return opcode, data  # control frames come whole, also between the parts of a message
            kind, before = self._begun
            kind, message = (kind if opcode == _CONTINUED else opcode), before + data
            self._begun = (kind, message)
            if first & 0x80:
                self._begun = (_CONTINUED, b"")
                return kind, message

    def _exactly(self, count: int) -> bytes:
        data = self._reader.read(count)
        if len(data) < count:
            raise ConnectionResetError("the port forwarding was cut off")
        return data

    def _send(self, opcode: int, data: bytes) -> None:
        mask = os.urandom(4)
        size = len(data)
        if size < 126:
            head = struct.pack("!BB", 0x80 | opcode, 0x80 | size)
        else:
            head = struct.pack("!BBH", 0x80 | opcode, 0x80 | 126, size)
        masked = int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        self.sock.sendall(head + mask + masked.to_bytes(size, "big"))


class _Incoming(io.RawIOBase):
    """What a forwarded port sends, as a file."""

    def __init__(self, port: ForwardedPort) -> None:
        self._port, self._left = port, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = self._port.receive()
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count
