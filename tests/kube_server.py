"""Doubles on 127.0.0.1 for the commands on a cluster: an API server and a Ray dashboard, with faults on demand.

The API server keeps objects by path and speaks what sdp.kube speaks: TLS, bearer tokens, lists, and port forwarding
over WebSocket.
"""

import base64
import contextlib
import hashlib
import json
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.certificate import Certificate

Object = dict[str, Any]
NAMESPACE = "lab"
RAY = f"/apis/ray.io/v1/namespaces/{NAMESPACE}"
CORE = f"/api/v1/namespaces/{NAMESPACE}"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rayclusters.ray.io"
OPERATOR = "/apis/apps/v1/namespaces/kuberay-system/deployments/kuberay-operator"
KUEUE = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}"
KINDS = (
    "customresourcedefinitions", "nodes", "pods", "secrets", "configmaps", "rayclusters", "rayjobs", "deployments",
    "events", "workloads", "serviceaccounts",
)  # fmt: skip


@dataclass
class Fault:
    """A failure of the next requests that match it."""

    method: str
    matches: str
    does: str | int
    """drop: hang up; lose: do it, and hang up instead of answering; a number: answer with it."""
    times: int = 1


class _Handler(BaseHTTPRequestHandler):
    """The handler of both servers: quiet, plain replies, and the server's side of a WebSocket."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self.serve("GET")

    def do_POST(self) -> None:
        self.serve("POST")

    def do_DELETE(self) -> None:
        self.serve("DELETE")

    def serve(self, method: str) -> None:
        raise NotImplementedError

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def upgrade(self) -> None:
        key = hashlib.sha1(f"{self.headers['Sec-WebSocket-Key']}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode())
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        if protocol := self.headers.get("Sec-WebSocket-Protocol"):
            self.send_header("Sec-WebSocket-Protocol", protocol)
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(key.digest()).decode())
        self.end_headers()

    def frame(self, data: bytes, opcode: int = 2) -> None:
        short = bytes([0x80 | opcode, len(data)]) if len(data) < 126 else b""
        self.wfile.write((short or struct.pack("!BBQ", 0x80 | opcode, 127, len(data))) + data)
        self.wfile.flush()


class _Server:
    """A server in a thread."""

    def __init__(self, handler: type[_Handler], certificate: Certificate | None = None) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        if certificate:  # the handshake is left to the connection's own thread
            self._http.socket = certificate.context.wrap_socket(
                self._http.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = self._http.server_address[1]
        threading.Thread(target=lambda: self._http.serve_forever(0.05), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class KubeServer(_Server):
    """An API server with nothing behind it but a dictionary."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.objects: dict[str, Object] = {}
        self.kinds = set(KINDS)
        self.denied: set[tuple[str, str]] = set()
        """(verb, resource/subresource) that the user may not."""
        self.faults: list[Fault] = []
        self.user = ""
        self.requests: list[tuple[str, str]] = []
        self.dashboard_port = 0
        self.on_create: Callable[[str, Object], None] = lambda path, item: None  # noqa: ARG005
        self.forwards: list[socket.socket] = []
        self._certificate = Certificate(["127.0.0.1"])
        super().__init__(type("Handler", (_KubeHandler,), {"kube": self}), self._certificate)

    def close(self) -> None:
        super().close()
        self.cut_forwards()
        self._certificate.close()

    @property
    def authority(self) -> str:
        """The certificate that clients trust."""
        return self._certificate.path.read_text()

    def kubeconfig(self, path: Path) -> Path:
        """A kubeconfig that leads here: context `lab`, and one, `elsewhere`, that leads nowhere."""
        authority = base64.b64encode(self.authority.encode()).decode()
        clusters = [
            {"name": name, "cluster": {"server": f"https://127.0.0.1:{port}", "certificate-authority-data": authority}}
            for name, port in (("here", self.port), ("nowhere", 1))
        ]
        contexts = [
            {"name": "lab", "context": {"cluster": "here", "user": "me", "namespace": NAMESPACE}},
            {"name": "elsewhere", "context": {"cluster": "nowhere", "user": "me"}},
        ]
        users = [{"name": "me", "user": {"token": self.token}}]
        parts = {"clusters": clusters, "users": users, "contexts": contexts, "current-context": "lab"}
        path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **parts}))
        return path

    def put(self, path: str, item: Object) -> Object:
        """Create or change an object."""
        name, (_, _, rest) = path.rpartition("/")[2], path.partition("/namespaces/")
        about = {"name": name, "namespace": rest.partition("/")[0], **item.get("metadata", {})}
        self.objects[path] = {**item, "metadata": about}
        return self.objects[path]

    def update_status(self, path: str, **status: Any) -> None:
        item = self.objects[path]
        self.put(path, {**item, "status": {**item.get("status", {}), **status}})

    def fault(self, method: str, matches: str, does: str | int, times: int = 1) -> None:
        self.faults.append(Fault(method, matches, does, times))

    def cut_forwards(self) -> None:
        """Break each port forwarding that is open, without a word."""
        forwards, self.forwards = self.forwards, []
        for sock in forwards:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def asked(self, method: str, pattern: str) -> int:
        """Return the number of requests of this kind."""
        return sum(request == method and re.search(pattern, path) is not None for request, path in self.requests)

    def struck(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and re.search(fault.matches, path):
                fault.times -= 1
                return fault
        return None

    def listed(self, collection: str, query: dict[str, str]) -> list[Object]:
        """The objects of a collection, of one namespace or of all, that the selectors choose."""
        return [
            item
            for path, item in list(self.objects.items())
            if collection in (folder := path.rpartition("/")[0], re.sub("/namespaces/[^/]+", "", folder))
            and _selected(item, query)
        ]


def _selected(item: Object, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    for key, values, single, value in re.findall(
        r"([\w./-]+) in \(([^)]*)\)|([\w./-]+)=([^,]+)", query.get("labelSelector", "")
    ):
        if labels.get(key or single) not in (values.split(",") if key else [value]):
            return False
    fields = {"involvedObject.uid": item.get("involvedObject", {}).get("uid"), "type": item.get("type")}
    wanted = [each.split("=") for each in query.get("fieldSelector", "").split(",") if each]
    return all(fields[field] == value for field, value in wanted)


class _KubeHandler(_Handler):
    kube: KubeServer

    def serve(self, method: str) -> None:
        kube, parts = self.kube, urlsplit(self.path)
        path, name = parts.path, parts.path.rpartition("/")[2]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kube.requests.append((method, self.path))
        fault = kube.struck(method, self.path)
        self._silent = bool(fault)
        kind = next((kind for kind in path.split("/") if kind in kube.kinds), "")
        verb = {"POST": "create", "DELETE": "delete"}.get(method, "list" if name == kind else "get")
        if name == "portforward":
            verb, kind = "create", "pods/portforward"
        if fault and fault.does == "drop":
            self._hang_up()
        elif fault and isinstance(fault.does, int):
            self._silent = False
            self._refuse(fault.does, "InternalError", "the double was told to")
        elif self.headers.get("Authorization") != f"Bearer {kube.token}":
            self._refuse(401, "Unauthorized", "Unauthorized")
        elif (verb, kind) in kube.denied:
            self._refuse(403, "Forbidden", f'{kind} is forbidden: User "me" cannot {verb} resource "{kind}"')
        elif name == "portforward":
            self._forward(path.removesuffix("/portforward"))
        elif path.endswith("/selfsubjectreviews") and self.kube.user:
            self._answer({"status": {"userInfo": {"username": kube.user}}})
        elif path == "/version":
            self._answer({"gitVersion": "v1.34.1"})
        elif not kind and path not in kube.objects:
            self.reply(404, b"404 page not found\n")
        elif verb == "list":
            self._answer({"kind": "List", "items": kube.listed(path, dict(parse_qsl(parts.query)))})
        elif verb == "create":
            self._create(path, json.loads(body))
        elif path not in kube.objects:
            self._not_found(path)
        elif verb == "delete" and kube.objects[path]["metadata"].get("finalizers"):
            kube.objects[path]["metadata"]["deletionTimestamp"] = "2026-11-21T07:30:00Z"
            self._answer(kube.objects[path])
        elif verb == "delete":
            del kube.objects[path]
            self._answer({"kind": "Status", "status": "Success"})
        else:
            self._answer(kube.objects[path])

    def _create(self, path: str, item: Object) -> None:
        object_path = f"{path}/{item['metadata']['name']}"
        if object_path in self.kube.objects:
            self._refuse(409, "AlreadyExists", f'{path.rpartition("/")[2]} "{item["metadata"]["name"]}" already exists')
            return
        made = self.kube.put(object_path, item)
        self.kube.on_create(object_path, made)
        self._answer(made)

    def _forward(self, pod: str) -> None:
        if pod not in self.kube.objects:
            self._not_found(pod)
            return
        self.upgrade()
        for channel in (0, 1):
            self.frame(bytes([channel]) + struct.pack("<H", 8265))
        inner = socket.create_connection(("127.0.0.1", self.kube.dashboard_port), timeout=10)
        inner.settimeout(None)
        self.kube.forwards.append(self.connection)
        threading.Thread(target=self._pump_out, args=(inner,), daemon=True).start()
        with contextlib.suppress(OSError, struct.error):
            while (data := self._received()) is not None:
                inner.sendall(data[1:])
        with contextlib.suppress(OSError):
            inner.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _pump_out(self, inner: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the other thread has closed the connection
            self.frame(b"still here?", opcode=9)
            while data := inner.recv(65_536):
                self.frame(b"\x00" + data)
            self.frame(struct.pack("!H", 1000), opcode=8)

    def _received(self) -> bytes | None:
        """The next message of the client's; None at its end. Clients have to mask."""
        while True:
            head = self.rfile.read(2)
            if len(head) < 2:
                return None
            length = head[1] & 0x7F
            assert head[1] & 0x80, "a client's frame without a mask"
            if length == 126:
                (length,) = struct.unpack("!H", self.rfile.read(2))
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.rfile.read(length)))
            if head[0] & 0x0F == 8:
                return None
            if head[0] & 0x0F == 2:
                return data

    def _answer(self, data: Any, status: int = 200) -> None:
        if self._silent:
            self._hang_up()
        else:
            self.reply(status, json.dumps(data).encode())

    def _not_found(self, path: str) -> None:
        kind, name = path.split("/")[-2:]
        self._refuse(404, "NotFound", f'{kind} "{name}" not found', {"name": name, "kind": kind})

    def _refuse(self, status: int, reason: str, message: str, details: Object | None = None) -> None:
        self._answer({"kind": "Status", "message": message, "reason": reason, "details": details or {}}, status)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


# --- Ray -------------------------------------------------------------------------------------------------------------


@dataclass
class RayJob:
    """A job as a dashboard knows it."""

    log: bytearray = field(default_factory=bytearray)
    stopped: bool = False
    record: Object = field(default_factory=lambda: {"status": "RUNNING", "end_time": None})
    ended: bool = False


class RayServer(_Server):
    """A dashboard's job API: jobs that write what a test makes them write."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.jobs: dict[str, RayJob] = {}
        self.changed = threading.Condition()
        self.on_stop: Callable[[str], None] = lambda submission: None  # noqa: ARG005
        self.streams = 0
        self.lists: dict[str, list[Object]] = {}
        """The items that it lists, by path."""
        super().__init__(type("Handler", (_RayHandler,), {"ray": self}))

    def end(self, submission: str) -> None:
        with self.changed:
            self.jobs[submission].ended = True
            self.changed.notify_all()

    def write(self, submission: str, text: bytes) -> None:
        with self.changed:
            self.jobs[submission].log += text
            self.changed.notify_all()


class _RayHandler(_Handler):
    ray: RayServer

    def serve(self, method: str) -> None:
        name, _, what = self.path.removeprefix("/api/jobs/").partition("/")
        if self.path.startswith("/api/v0/logs/file?"):
            query = dict(parse_qsl(urlsplit(self.path).query))
            name, what = query["submission_id"], "end" if query["node_ip"] == "127.0.0.1" else "elsewhere"
        job = self.ray.jobs.get(name)
        if self.headers.get("x-ray-authorization") != f"Bearer {self.ray.token}":
            self.reply(403, b"Forbidden")
        elif (items := self.ray.lists.get(urlsplit(self.path).path)) is not None:
            data = items if name == "" else {"data": {"result": {"result": items}}}
            self.reply(200, json.dumps(data).encode())
        elif job is None:
            self.reply(404, f"Job {name} does not exist".encode())
        elif what == "logs/tail":
            self._tail(job)
        elif what == "":
            self.reply(200, json.dumps(job.record).encode())
        elif what == "end":
            self.reply(200, bytes(job.log))
        elif what == "logs":
            self.reply(200, json.dumps({"logs": job.log.decode()}).encode())
        else:
            assert (method, what) == ("POST", "stop")
            job.stopped = True
            self.ray.on_stop(name)
            self.reply(200, b'{"stopped": true}')

    def _tail(self, job: RayJob) -> None:
        """Send the log over a WebSocket until the job has ended, as Ray does."""
        ray = self.ray
        ray.streams += 1
        self.upgrade()
        at = 0
        with contextlib.suppress(OSError):
            while True:
                with ray.changed:
                    while len(job.log) <= at and not job.ended:
                        ray.changed.wait(60)
                    new, over = bytes(job.log[at:]), job.ended
                at += len(new)
                if new:
                    self.frame(new, opcode=1)
                elif over:
                    self.frame(b"", opcode=8)
                    return


# --- objects ---------------------------------------------------------------------------------------------------------


def raycluster(*groups: Object, jobs_map: bool = True) -> Object:
    """A RayCluster that is ready, as the chart makes it but shorter."""
    head: Object = {"containers": [{"name": "ray-head"}]}
    if jobs_map:
        head["volumes"] = [{"name": "jobs", "configMap": {"name": "sdp-jobs"}}]
    return {
        "spec": {
            "authOptions": {"mode": "token"},
            "enableInTreeAutoscaling": True,
            "headGroupSpec": {"template": {"spec": head}},
            "workerGroupSpecs": list(groups),
        },
        "status": {
            "state": "ready",
            "readyWorkerReplicas": 1,
            "desiredWorkerReplicas": 1,
            "head": {"podName": "sdp-head-abcde"},
        },
    }


def group(name: str, gpus: int = 0, accelerator: str = "", most: int = 1, **pod: Any) -> Object:
    """A worker group."""
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {
        "groupName": name,
        "maxReplicas": most,
        "labels": {"ray.io/accelerator-type": accelerator} if accelerator else {},
        "template": {"spec": {"containers": [{"name": "ray-worker", "resources": {"limits": limits}}], **pod}},
    }


def node(name: str, gpus: int = 0, product: str = "") -> Object:
    """A node, with GPUs of a product."""
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": product} if product else {}},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)} if gpus else {}},
    }


@contextlib.contextmanager
def running() -> Iterator[tuple[KubeServer, RayServer]]:
    """An API server with a ready cluster `sdp`, and the dashboard of its head."""
    kube, ray = KubeServer(), RayServer(secrets.token_hex(16))
    kube.dashboard_port = ray.port
    kube.put(f"{RAY}/rayclusters/sdp", raycluster())
    labels, status = {"ray.io/cluster": "sdp", "ray.io/node-type": "head"}, {"phase": "Running", "podIP": "127.0.0.1"}
    kube.put(f"{CORE}/pods/sdp-head-abcde", {"metadata": {"labels": labels}, "status": status})
    kube.put(f"{CORE}/secrets/sdp", {"data": {"auth_token": base64.b64encode(ray.token.encode()).decode()}})
    try:
        yield kube, ray
    finally:
        kube.close()
        ray.close()
