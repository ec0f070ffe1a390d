"""One unary gRPC call over a Unix socket, by hand: grpcio would take more memory than the rest of the exporter.

This implements only the HTTP/2 that such a call needs. Response headers are not decoded: a failed call has no message.
"""

import socket
import struct
import time
from pathlib import Path

from sdp.errors import SdpError

MAX_ANSWER = 16 << 20
_WINDOW = MAX_ANSWER
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_INITIAL_WINDOW_SIZE = 4
_STREAM = 1


class CallFailed(SdpError):
    """The server is missing, does not answer in time, or returns an error."""


def call(path: Path, method: str, request: bytes, *, timeout_s: float) -> bytes:
    """Call `/package.Service/Method` and return the response message; raise CallFailed if there is none."""
    until = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(_opening(method, request))
            return _message(_answer(connection, until))
    except OSError as error:
        raise CallFailed(f"{path}: {error.strerror or error or type(error).__name__}") from error


def _opening(method: str, request: bytes) -> bytes:
    """Return all bytes that the client sends."""
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW)
    message = b"\0" + struct.pack(">I", len(request)) + request
    return b"".join(
        (
            _PREFACE,
            _frame(_SETTINGS, 0, 0, settings),
            _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW)),
            _frame(_HEADERS, _END_HEADERS, _STREAM, b"".join(_header(*pair) for pair in headers)),
            _frame(_DATA, _END_STREAM, _STREAM, message),
        )
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _header(name: str, value: str) -> bytes:
    """Encode a header literally, without index or compression, as every server must accept (RFC 7541, 6.2.2).

    Name and value must be shorter than 127 bytes.
    """
    parts = name.encode("ascii"), value.encode("ascii")
    return b"\0" + b"".join(bytes((len(part),)) + part for part in parts)


def _answer(connection: socket.socket, until: float) -> bytes:
    """Return the bytes of all DATA frames of the stream."""
    data = bytearray()
    while True:
        head = _receive(connection, 9, until)
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
        if length + len(data) > MAX_ANSWER:
            raise CallFailed(f"the response is larger than {MAX_ANSWER} bytes")
        payload = _receive(connection, length, until)
        if kind == _SETTINGS and not flags & _ACK:
            connection.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            connection.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY or (kind == _RST_STREAM and stream == _STREAM):
            raise CallFailed("the server ended the call")
        elif kind == _DATA and stream == _STREAM:
            data += payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
        if stream == _STREAM and kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            return bytes(data)


def _receive(connection: socket.socket, count: int, until: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            raise CallFailed("the server closed the connection before the end of its response")
        data += part
    return bytes(data)


def _message(data: bytes) -> bytes:
    """Return the message without gRPC's framing."""
    if not data:
        raise CallFailed("the response has no message: the server refuses the call, or does not know it")
    if len(data) < 5 or data[0] != 0 or int.from_bytes(data[1:5], "big") != len(data) - 5:
        raise CallFailed("the response is not one whole uncompressed message")
    return data[5:]
