"""The kubelet's pod-resources API, a socket on the node that lists the containers of each device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sdp.exporter import grpc

LIST = "/v1.PodResourcesLister/List"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Allotment:
    """A container to which the kubelet has allotted a device."""

    namespace: str
    pod: str
    container: str


def list_allotments(path: Path, *, timeout_s: float) -> dict[str, tuple[Allotment, ...]]:
    """Return the containers of each device by its id, several for a shared one; raise CallFailed on a bad response."""
    return parse(grpc.call(path, LIST, b"", timeout_s=timeout_s))


def parse(message: bytes) -> dict[str, tuple[Allotment, ...]]:
    """Parse a ListPodResourcesResponse. A replica of a shared GPU ("GPU-…::3") counts as the GPU."""
    result: dict[str, dict[Allotment, None]] = {}
    for pod in _messages(message, 1):
        name, namespace = _text(pod, 1), _text(pod, 2)
        for container in _messages(pod, 3):
            allotment = Allotment(namespace, name, _text(container, 1))
            for devices in _messages(container, 2):
                for device in _messages(devices, 2):
                    identifier = device.decode("utf-8", "replace").partition("::")[0]
                    result.setdefault(identifier, {})[allotment] = None
    return {device: tuple(allotments) for device, allotments in result.items()}


def of_device(
    allotments: Mapping[str, tuple[Allotment, ...]], *, uuid: str, minor: int | None = None
) -> tuple[Allotment, ...]:
    """Return a device's containers; NVIDIA's plugin names devices by UUID, GKE's by the device file's number."""
    return allotments.get(uuid, ()) or allotments.get(f"nvidia{minor}", ())


def _messages(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the strings and messages of this field number."""
    return (value for field, value in _fields(message) if field == number)


def _text(message: bytes, number: int) -> str:
    return next(_messages(message, number), b"").decode("utf-8", "replace")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the length-delimited fields of protobuf's wire format; skip numbers."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
            continue
        if kind not in (_FIXED64, _BYTES, _FIXED32):
            raise grpc.CallFailed(f"the kubelet's response is not protobuf: wire type {kind} at byte {at}")
        length, at = _varint(message, at) if kind == _BYTES else ({_FIXED64: 8, _FIXED32: 4}[kind], at)
        if at + length > len(message):
            raise grpc.CallFailed("the kubelet's response is truncated")
        if kind == _BYTES:
            yield tag >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise grpc.CallFailed("the kubelet's response is truncated")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
