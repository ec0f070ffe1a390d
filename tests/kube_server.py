"""Doubles on 127.0.0.1 for the commands on a cluster: an API server and a Ray dashboard, with faults on demand.

The API server keeps objects by path and speaks what sdp.kube speaks: TLS, bearer tokens, lists in pages, watches,
and port forwarding over WebSocket.
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
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.certificate import Certificate

Object = dict[str, Any]
NAMESPACE = "lab"
NODE_ID = "4e0de1"
"""Pods of the head, which run drivers."""
RAY = f"/apis/ray.io/v1/namespaces/{NAMESPACE}"
CORE = f"/api/v1/namespaces/{NAMESPACE}"
GROUPS = {
    "/api/v1": [
        "nodes",
        "pods",
        "secrets",
        "configmaps",
        "serviceaccounts",
        "events",
        "services",
        "namespaces",
    ],
    "/apis/ray.io/v1": ["rayclusters", "rayjobs"],
    "/apis/apps/v1": ["deployments"],
    "/apis/networking.k8s.io/v1": ["networkpolicies"],
    "/apis/apiextensions.k8s.io/v1": ["customresourcedefinitions"],
}


@dataclass
class Fault:
    """A failure of the next requests that match it."""

    method: str
    matches: str
    does: str | int
    """drop: hang up; lose: do it, and hang up instead of answering; a number: answer with it."""
    times: int = 1


class KubeServer:
    """An API server with nothing behind it but a dictionary."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.objects: dict[str, Object] = {}
        self.groups = {path: list(kinds) for path, kinds in GROUPS.items()}
        self.denied: set[tuple[str, str]] = set()
        """(verb, resource/subresource) that the user may not."""
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.page = 500
        self.dashboard_port = 0
        self.on_create: Callable[[str, Object], None] = lambda path, item: None  # noqa: ARG005
        self.changed = threading.Condition()
        self._version = 0
        self._forwards: list[socket.socket] = []
        self._certificate = Certificate(["127.0.0.1"])
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        # The handshake is left to the connection's own thread.
        self._server.socket = self._certificate.context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port: int = self._server.server_address[1]
        threading.Thread(target=lambda: self._server.serve_forever(0.05), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.cut_forwards()
        self._certificate.close()

    def kubeconfig(self, path: Path, **user: str) -> Path:
        """A kubeconfig that leads here: context `lab`, and one, `elsewhere`, that leads nowhere."""
        authority = base64.b64encode(self._certificate.path.read_bytes()).decode()
        clusters = {"here": self.port, "nowhere": 1}
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "lab",
                    "clusters": [
                        {
                            "name": name,
                            "cluster": {"server": f"https://127.0.0.1:{port}", "certificate-authority-data": authority},
                        }
                        for name, port in clusters.items()
                    ],
                    "users": [{"name": "me", "user": user or {"token": self.token}}],
                    "contexts": [
                        {"name": "lab", "context": {"cluster": "here", "user": "me", "namespace": NAMESPACE}},
                        {"name": "elsewhere", "context": {"cluster": "nowhere", "user": "me"}},
                    ],
                }
            )
        )
        return path

    def put(self, path: str, item: Object) -> Object:
        """Create or change an object, and notify watchers."""
        with self.changed:
            self._version += 1
            name = path.rpartition("/")[2]
            about = {"name": name, "uid": f"uid-{name}", **item.get("metadata", {})}
            about["resourceVersion"] = str(self._version)
            about.setdefault("creationTimestamp", datetime.now(UTC).isoformat())
            self.objects[path] = {**item, "metadata": about}
            self.changed.notify_all()
            return self.objects[path]

    def remove(self, path: str) -> None:
        with self.changed:
            self._version += 1
            self.objects.pop(path, None)
            self.changed.notify_all()

    def update_status(self, path: str, **status: Any) -> None:
        item = self.objects[path]
        self.put(path, {**item, "status": {**item.get("status", {}), **status}})

    def fault(self, method: str, matches: str, does: str | int, times: int = 1) -> None:
        self.faults.append(Fault(method, matches, does, times))

    def cut_forwards(self) -> None:
        """Break each port forwarding that is open, without a word."""
        forwards, self._forwards = self._forwards, []
        for sock in forwards:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def asked(self, method: str, pattern: str) -> int:
        """Return the number of requests of this kind."""
        return sum(request == method and re.search(pattern, path) is not None for request, path in self.requests)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        kube = self

        class Handler(_Handler):
            server_of_objects = kube

        return Handler

    def struck(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and re.search(fault.matches, path):
                fault.times -= 1
                return fault
        return None

    def listed(self, collection: str) -> list[Object]:
        """The objects of a collection, of one namespace or of all."""
        group = next(group for group in self.groups if collection.startswith(f"{group}/"))
        kind = collection.rpartition("/")[2]
        inside = collection.removesuffix(f"/{kind}")
        objects = []
        for path, item in self.objects.items():
            folder, _, _ = path.rpartition("/")
            here = folder == collection or (
                inside == group and re.fullmatch(rf"{group}(/namespaces/[^/]+)?/{kind}", folder)
            )
            if here:
                objects.append(item)
        return objects


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_objects: KubeServer

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        kube = self.server_of_objects
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kube.requests.append((method, self.path))
        fault = kube.struck(method, self.path)
        if fault and fault.does == "drop":
            self._hang_up()
            return
        if fault and isinstance(fault.does, int):
            self._refuse(fault.does, "InternalError", "the double was told to")
            return
        self._silent = bool(fault)
        if self.headers.get("Authorization") != f"Bearer {kube.token}":
            self._refuse(401, "Unauthorized", "Unauthorized")
            return
        parts = urlsplit(self.path)
        path, query = parts.path, dict(parse_qsl(parts.query))
        if self._denied(method, path, query):
            return
        if path.endswith("/portforward"):
            self._forward(path)
        elif path == "/version":
            self._reply({"gitVersion": "v1.34.1"})
        elif path in kube.groups:
            self._reply({"kind": "APIResourceList", "resources": [{"name": name} for name in kube.groups[path]]})
        elif method == "GET":
            self._get(path, query)
        elif method == "POST":
            self._create(path, json.loads(body))
        else:
            self._delete(path)

    def _denied(self, method: str, path: str, query: dict[str, str]) -> bool:
        kube = self.server_of_objects
        parts = [
            part for part in re.sub(r"^(/api/v1|/apis/[^/]+/[^/]+)(/namespaces/[^/]+)?", "", path).split("/") if part
        ]
        verb = {"POST": "create", "DELETE": "delete"}.get(method, "get" if len(parts) > 1 else "list")
        if query.get("watch"):
            verb = "watch"
        kind = parts[0] if parts else ""
        if path.endswith("/portforward"):
            verb, kind = "create", "pods/portforward"
        if (verb, kind) not in kube.denied:
            return False
        self._refuse(403, "Forbidden", f'{kind} is forbidden: User "me" cannot {verb} resource "{kind}"')
        return True

    def _get(self, path: str, query: dict[str, str]) -> None:
        kube = self.server_of_objects
        group = next((group for group in kube.groups if path.startswith(f"{group}/")), None)
        kinds = [kind for kind in kube.groups.get(group or "", ()) if re.search(rf"/{kind}(/|$)", path)]
        if not kinds:
            self._plain(404, b"404 page not found\n")
        elif path.rpartition("/")[2] == kinds[0]:
            items = [item for item in kube.listed(path) if _selected(item, query)]
            first = int(query.get("continue", "0"))
            last = first + min(kube.page, int(query.get("limit", "500")))
            more = {"continue": str(last)} if last < len(items) else {}
            self._reply({"kind": "List", "metadata": more, "items": items[first:last]})
        elif path in kube.objects:
            self._reply(kube.objects[path])
        else:
            self._not_found(path)

    def _create(self, path: str, item: Object) -> None:
        kube = self.server_of_objects
        object_path = f"{path}/{item['metadata']['name']}"
        if object_path in kube.objects:
            self._refuse(409, "AlreadyExists", f'{path.rpartition("/")[2]} "{item["metadata"]["name"]}" already exists')
            return
        made = kube.put(object_path, item)
        kube.on_create(object_path, made)
        self._reply(made, 201)

    def _delete(self, path: str) -> None:
        if path not in self.server_of_objects.objects:
            self._not_found(path)
            return
        self.server_of_objects.remove(path)
        self._reply({"kind": "Status", "status": "Success"})

    def _forward(self, path: str) -> None:
        kube = self.server_of_objects
        if path.removesuffix("/portforward") not in kube.objects:
            self._not_found(path.removesuffix("/portforward"))
            return
        accept = hashlib.sha1(
            (self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()
        ).digest()
        self.wfile.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Protocol: v4.channel.k8s.io\r\nSec-WebSocket-Accept: "
            + base64.b64encode(accept)
            + b"\r\n\r\n"
        )
        port = 8265
        for channel in (0, 1):
            self._frame(bytes([channel]) + struct.pack("<H", port))
        try:
            inner = socket.create_connection(("127.0.0.1", kube.dashboard_port), timeout=10)
        except OSError as error:
            self._frame(b"\x01" + f"error forwarding port {port}: {error}".encode())
            self._hang_up()
            return
        inner.settimeout(None)
        kube._forwards.append(self.connection)
        threading.Thread(target=self._pump_out, args=(inner,), daemon=True).start()
        with contextlib.suppress(OSError, struct.error):
            while (data := self._received()) is not None:
                inner.sendall(data[1:])
        with contextlib.suppress(OSError):
            inner.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _pump_out(self, inner: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the other thread has closed the connection
            self._frame(b"still here?", opcode=9)
            while data := inner.recv(65_536):
                self._frame(b"\x00" + data)
            self._frame(struct.pack("!H", 1000), opcode=8)

    def _frame(self, data: bytes, opcode: int = 2) -> None:
        size = len(data)
        head = bytes([0x80 | opcode])
        head += (
            bytes([size])
            if size < 126
            else struct.pack("!BH", 126, size)
            if size < 65_536
            else struct.pack("!BQ", 127, size)
        )
        self.wfile.write(head + data)
        self.wfile.flush()

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

    # --- answers ---

    def _reply(self, data: Any, status: int = 200) -> None:
        self._plain(status, json.dumps(data).encode())

    def _plain(self, status: int, content: bytes) -> None:
        if self._silent:
            self._hang_up()
            return
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _not_found(self, path: str) -> None:
        kind, name = path.split("/")[-2:]
        self._refuse(404, "NotFound", f'{kind} "{name}" not found', {"name": name, "kind": kind})

    def _refuse(self, status: int, reason: str, message: str, details: Object | None = None) -> None:
        self._silent = False
        body = {
            "kind": "Status",
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": details or {},
            "code": status,
        }
        self._reply(body, status)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


def _selected(item: Object, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    for key, values, single, value in re.findall(
        r"([\w./-]+) in \(([^)]*)\)|([\w./-]+)=([^,]+)", query.get("labelSelector", "")
    ):
        if key and labels.get(key) not in values.split(","):
            return False
        if single and labels.get(single) != value:
            return False
    selector = query.get("fieldSelector", "")
    if selector.startswith("involvedObject.uid="):
        return bool(item.get("involvedObject", {}).get("uid") == selector.partition("=")[2])
    return True


# --- Ray -------------------------------------------------------------------------------------------------------------


@dataclass
class RayJob:
    """A job as a dashboard knows it."""

    start_time: int
    log: bytearray = field(default_factory=bytearray)
    stopped: bool = False
    ended: bool = False


class RayServer:
    """A dashboard's job API: jobs that write what a test makes them write."""

    def __init__(self, token: str | None) -> None:
        self.token = token
        self.jobs: dict[str, RayJob] = {}
        self.changed = threading.Condition()
        self.on_stop: Callable[[str], None] = lambda submission: None  # noqa: ARG005
        self.streams = 0
        ray = self

        class Handler(_RayHandler):
            ray_server = ray

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=lambda: self._server.serve_forever(0.05), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def end(self, submission: str) -> None:
        with self.changed:
            self.jobs[submission].ended = True
            self.changed.notify_all()

    def write(self, submission: str, text: bytes) -> None:
        with self.changed:
            self.jobs[submission].log += text
            self.changed.notify_all()


class _RayHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ray_server: RayServer

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        ray = self.ray_server
        if ray.token is not None and self.headers.get("x-ray-authorization") != f"Bearer {ray.token}":
            missing = "x-ray-authorization" not in self.headers
            self._answer(
                401 if missing else 403, b"Unauthorized: Missing authentication token" if missing else b"Forbidden"
            )
            return
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        words = parts.path.strip("/").split("/")
        name = query.get("submission_id") or (words[2] if len(words) > 2 else "")
        job = ray.jobs.get(name)
        if job is None:
            self._answer(404, f"Job {name} does not exist".encode())
        elif parts.path.endswith("/logs/tail"):
            self._tail(job)
        elif parts.path.endswith("/stop"):
            job.stopped = True
            ray.on_stop(name)
            self._answer(200, b'{"stopped": true}')
        elif words[1] == "jobs":
            known = {"submission_id": name, "start_time": job.start_time, "driver_node_id": NODE_ID}
            self._answer(200, json.dumps(known).encode())
        elif query.get("node_id") != NODE_ID:  # Ray 2.60 requires it, although the submission would suffice
            self._answer(500, b"500 Internal Server Error\n\nServer got itself in trouble")
        else:
            lines = int(query["lines"])
            text = bytes(job.log)
            self._answer(200, text if lines < 0 else b"".join(text.splitlines(keepends=True)[-lines:]))

    def _tail(self, job: RayJob) -> None:
        """Send the log over a WebSocket until the job has ended, as Ray does."""
        ray = self.ray_server
        ray.streams += 1
        key = hashlib.sha1(f"{self.headers['Sec-WebSocket-Key']}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode())
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(key.digest()).decode())
        self.end_headers()
        at = 0
        with contextlib.suppress(OSError):
            while True:
                with ray.changed:
                    while len(job.log) <= at and not job.ended:
                        ray.changed.wait(60)
                    new, over = bytes(job.log[at:]), job.ended
                at += len(new)
                if new:
                    self._frame(0x81, new)
                elif over:
                    self._frame(0x88, b"")
                    return

    def _frame(self, first: int, content: bytes) -> None:
        length = bytes([len(content)]) if len(content) < 126 else b"\x7f" + len(content).to_bytes(8, "big")
        self.wfile.write(bytes([first]) + length + content)
        self.wfile.flush()

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


# --- objects ---------------------------------------------------------------------------------------------------------


def raycluster(*groups: Object, token: bool = True, jobs_map: bool = True) -> Object:
    """A RayCluster that is ready, as the chart makes it but shorter."""
    container: Object = {"name": "ray-head", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}
    head: Object = {"containers": [container]}
    if jobs_map:
        container["volumeMounts"] = [{"name": "jobs", "mountPath": "/etc/sdp/jobs"}]
        head["volumes"] = [{"name": "jobs", "configMap": {"name": "sdp-jobs"}}]
    return {
        "spec": {
            **({"authOptions": {"mode": "token"}} if token else {}),
            "headGroupSpec": {"template": {"spec": head}},
            "workerGroupSpecs": list(groups),
        },
        "status": {
            "state": "ready",
            "observedGeneration": 1,
            "readyWorkerReplicas": 1,
            "desiredWorkerReplicas": 1,
            "head": {"podName": "sdp-head-abcde", "serviceName": "sdp-head-svc"},
        },
    }


def group(name: str, gpus: int = 0, accelerator: str = "", fewest: int = 0, most: int = 1, **pod: Any) -> Object:
    """A worker group."""
    amounts = {"cpu": "2", "memory": "4Gi", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    container = {"name": "ray-worker", "resources": {"requests": amounts, "limits": amounts}}
    return {
        "groupName": name,
        "minReplicas": fewest,
        "maxReplicas": most,
        "labels": {"ray.io/accelerator-type": accelerator} if accelerator else {},
        "template": {"spec": {"containers": [container], **pod}},
    }


def node(name: str, gpus: int = 0, product: str = "", **spec: Any) -> Object:
    """A node with eight CPUs."""
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": product} if product else {}},
        "spec": spec,
        "status": {
            "allocatable": {
                "cpu": "8",
                "memory": "32Gi",
                "pods": "110",
                **({"nvidia.com/gpu": str(gpus)} if gpus else {}),
            },
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@contextlib.contextmanager
def running() -> Iterator[tuple[KubeServer, RayServer]]:
    """An API server with a ready cluster `sdp`, and the dashboard of its head."""
    kube, ray = KubeServer(), RayServer(secrets.token_hex(16))
    kube.dashboard_port = ray.port
    kube.put(f"{RAY}/rayclusters/sdp", raycluster())
    kube.put(
        f"{CORE}/pods/sdp-head-abcde",
        {
            "metadata": {"labels": {"ray.io/cluster": "sdp", "ray.io/node-type": "head"}},
            "status": {"phase": "Running"},
        },
    )
    encoded = base64.b64encode((ray.token or "").encode()).decode()
    kube.put(f"{CORE}/secrets/sdp", {"data": {"auth_token": encoded}})
    try:
        yield kube, ray
    finally:
        kube.close()
        ray.close()
