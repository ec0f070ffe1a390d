"""Asks the kubelet which container has which device: its pod-resources API, a socket on the node."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from sdp.exporter import grpc
from sdp.exporter.readings import Allotment

LIST = "/v1.PodResourcesLister/List"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def list_allotments(path: Path, *, timeout_s: float) -> dict[str, tuple[Allotment, ...]]:
    """Device id -> the containers that have it; several where a device is shared.

    Raises:
        sdp.exporter.grpc.CallFailed: The kubelet does not answer, or not with what it should.
    """
    return parse(grpc.call(path, LIST, b"", timeout_s=timeout_s))


def parse(message: bytes) -> dict[str, tuple[Allotment, ...]]:
    """Of a ListPodResourcesResponse. A replica of a shared GPU ("GPU-…::3") counts as the GPU."""
    found: dict[str, dict[Allotment, None]] = {}
    for pod in _messages(message, 1):
        name, namespace = _text(pod, 1), _text(pod, 2)
        for container in _messages(pod, 3):
            allotment = Allotment(namespace, name, _text(container, 1))
            for devices in _messages(container, 2):
                for device in _messages(devices, 2):
                    identifier = device.decode("utf-8", "replace").partition("::")[0]
                    found.setdefault(identifier, {})[allotment] = None
    return {device: tuple(allotments) for device, allotments in found.items()}


def of_device(
    allotments: Mapping[str, tuple[Allotment, ...]], *, uuid: str, minor: int | None = None
) -> tuple[Allotment, ...]:
    """NVIDIA's device plugin names devices by UUID, GKE's by the number of the device file."""
    return allotments.get(uuid, ()) or allotments.get(f"nvidia{minor}", ())


def _messages(message: bytes, number: int) -> Iterator[bytes]:
    """The fields of this number that have a length: strings and messages."""
    return (value for field, value in _fields(message) if field == number)


def _text(message: bytes, number: int) -> str:
    return next(_messages(message, number), b"").decode("utf-8", "replace")


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Protobuf's wire format; numbers are skipped."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
            continue
        if kind not in (_FIXED64, _BYTES, _FIXED32):
            raise grpc.CallFailed(f"the kubelet's answer is no protobuf: wire type {kind} at byte {at}")
        length, at = _varint(message, at) if kind == _BYTES else ({_FIXED64: 8, _FIXED32: 4}[kind], at)
        if at + length > len(message):
            raise grpc.CallFailed("the kubelet's answer is cut off")
        if kind == _BYTES:
            yield tag >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise grpc.CallFailed("the kubelet's answer is cut off")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
