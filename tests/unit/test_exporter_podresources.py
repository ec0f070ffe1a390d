"""The kubelet's pod-resources API: our few lines of gRPC and protobuf against Google's own."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from sdp.exporter import grpc as ours
from sdp.exporter import podresources
from sdp.exporter.podresources import Allotment

MESSAGES: dict[str, list[tuple[str, int, str, bool]]] = {
    "NUMANode": [("ID", 1, "int64", False)],
    "TopologyInfo": [("nodes", 1, "NUMANode", True)],
    "ContainerMemory": [("memory_type", 1, "string", False), ("size", 2, "uint64", False)],
    "ContainerDevices": [
        ("resource_name", 1, "string", False),
        ("device_ids", 2, "string", True),
        ("topology", 3, "TopologyInfo", False),
    ],
    "ContainerResources": [
        ("name", 1, "string", False),
        ("devices", 2, "ContainerDevices", True),
        ("cpu_ids", 3, "int64", True),
        ("memory", 4, "ContainerMemory", True),
    ],
    "PodResources": [
        ("name", 1, "string", False),
        ("namespace", 2, "string", False),
        ("containers", 3, "ContainerResources", True),
        ("cpu_ids", 4, "int64", True),
    ],
    "ListPodResourcesResponse": [("pod_resources", 1, "PodResources", True)],
}
"""The fields of the kubelet's api.proto v1 that are used: (field, number, type, repeated)."""


def response(*pods: dict[str, Any]) -> bytes:
    """Encoded by Google's protobuf."""
    file = descriptor_pb2.FileDescriptorProto(name="api.proto", package="v1", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            scalar = {"string": kinds.TYPE_STRING, "int64": kinds.TYPE_INT64, "uint64": kinds.TYPE_UINT64}.get(kind)
            one = message.field.add(name=field, number=number, label=label, type=scalar or kinds.TYPE_MESSAGE)
            if scalar is None:
                one.type_name = f".v1.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("v1.ListPodResourcesResponse"))
    return bytes(kind(pod_resources=pods).SerializeToString())


def pod(name: str, container: str, *devices: str, resource: str = "nvidia.com/gpu") -> dict[str, Any]:
    device = {"resource_name": resource, "device_ids": list(devices), "topology": {"nodes": [{"ID": -1}]}}
    memory = [{"memory_type": "memory", "size": 2**40}]
    return {
        "name": name,
        "namespace": "training",
        "containers": [
            {"name": "sidecar", "cpu_ids": [1, 2, 300]},
            {"name": container, "devices": [device], "cpu_ids": [4, 5], "memory": memory},
        ],
        "cpu_ids": [7],
    }


@contextmanager
def kubelet(folder: Path, answer: Callable[[bytes], bytes]) -> Iterator[Path]:
    """Google's gRPC server on a socket."""

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            if details.method != podresources.LIST:
                return None
            return grpc.unary_unary_rpc_method_handler(lambda request, _: answer(request))

    path = folder / "kubelet.sock"
    server = grpc.server(ThreadPoolExecutor(4), handlers=[Handler()], options=[("grpc.max_send_message_length", -1)])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield path
    finally:
        server.stop(None).wait()


def test_each_device_is_found_with_the_containers_that_have_it(tmp_path: Path) -> None:
    answer = response(
        pod("trainer-0", "ray-worker", "GPU-aaaa", "GPU-bbbb"),
        pod("encoder-0", "ray-worker", "MIG-cccc", resource="nvidia.com/mig-1g.10gb"),
        pod("shared-0", "main", "GPU-dddd::0"),
        pod("shared-1", "main", "GPU-dddd::1"),
        pod("gke-0", "main", "nvidia7"),
        {"name": "no-devices", "namespace": "default"},
    )
    with kubelet(tmp_path, lambda _: answer) as path:
        allotments = podresources.list_allotments(path, timeout_s=10)
    trainer = Allotment("training", "trainer-0", "ray-worker")
    shared = tuple(Allotment("training", f"shared-{n}", "main") for n in (0, 1))
    assert allotments == {
        "GPU-aaaa": (trainer,),
        "GPU-bbbb": (trainer,),
        "MIG-cccc": (Allotment("training", "encoder-0", "ray-worker"),),
        "GPU-dddd": shared,
        "nvidia7": (Allotment("training", "gke-0", "main"),),
    }
    assert podresources.of_device(allotments, uuid="GPU-dddd") == shared
    assert podresources.of_device(allotments, uuid="GPU-eeee", minor=7) == (Allotment("training", "gke-0", "main"),)
    assert podresources.of_device(allotments, uuid="GPU-eeee", minor=1) == ()


@pytest.mark.parametrize("pods", [0, 1, 5000])
def test_an_answer_may_be_empty_or_of_many_frames(tmp_path: Path, pods: int) -> None:
    answer = response(*(pod(f"pod-{n:05d}", "main", f"GPU-{n:05d}") for n in range(pods)))
    assert pods < 5000 or len(answer) > 300_000  # more than HTTP/2's first window, and than one frame
    with kubelet(tmp_path, lambda _: answer) as path:
        assert len(podresources.list_allotments(path, timeout_s=20)) == pods


def test_an_error_of_the_server_is_a_failed_call(tmp_path: Path) -> None:
    def refuse(_: bytes) -> bytes:
        raise RuntimeError("no")

    with kubelet(tmp_path, refuse) as path:
        with pytest.raises(ours.CallFailed, match="has no message"):
            podresources.list_allotments(path, timeout_s=10)
        with pytest.raises(ours.CallFailed, match="has no message"):
            ours.call(path, "/v1.PodResourcesLister/Nothing", b"", timeout_s=10)


def test_an_answer_that_drips_is_cut_off_at_the_deadline(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(1)

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                while True:  # until the other end is closed
                    connection.sendall(b"\0\0\0\x04\x01\0\0\0\0")

        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        with pytest.raises(ours.CallFailed, match="timed out"):
            podresources.list_allotments(path, timeout_s=0.3)
        assert time.monotonic() - began < 5
        thread.join(10)


def test_a_missing_socket_is_a_failed_call(tmp_path: Path) -> None:
    with pytest.raises(ours.CallFailed, match="No such file"):
        podresources.list_allotments(tmp_path / "none.sock", timeout_s=1)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", r"larger than|closed the connection"),
        (b"\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0b", "ended the call"),
        (b"\0\0\x04\x03\0\0\0\0\x01\0\0\0\x07", "ended the call"),
        (b"\0\0\x06\0\x01\0\0\0\x01\x01\0\0\0\x01x", "not one whole uncompressed"),
        (b"\0\0\x06\0\x01\0\0\0\x01\0\0\0\0\x09x", "not one whole uncompressed"),
        (b"\0\0\x07\0\x01\0\0\0\x01\0\0\0\0\x02\x0f\x00", "not protobuf|truncated"),
        (b"\0\0\x07\0\x01\0\0\0\x01\0\0\0\0\x02\x0a\x63", "truncated"),
    ],
)
def test_a_malformed_response_is_a_failed_call(tmp_path: Path, sent: bytes, message: str) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(1)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(sent)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ours.CallFailed, match=message):
            podresources.list_allotments(path, timeout_s=5)
        thread.join(10)
