"""Which cluster is meant, what an API server's refusals mean, and how a forwarded port is read."""

import io
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sdp.errors import UserError
from sdp.kube.access import access
from sdp.kube.answers import AlreadyThere, Forbidden, Missing, NoSuchKind, Unreachable, explain
from sdp.kube.api import _ahead
from sdp.kube.wire import ForwardedPort, HandshakeRefused

CONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "one",
    "clusters": [{"name": "c", "cluster": {"server": "https://[::1]:6443/k8s/c-1"}}],
    "users": [{"name": "u", "user": {"token": "not a secret"}}],
    "contexts": [
        {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "lab"}},
        {"name": "two", "context": {"cluster": "c", "user": "u"}},
    ],
}


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def test_a_context_is_a_server_a_namespace_and_credentials(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    found = access(None, {"KUBECONFIG": str(kubeconfig)})
    assert (found.context, found.namespace) == ("one", "lab")
    assert (found.endpoint.host, found.endpoint.port, found.endpoint.base) == ("::1", 6443, "/k8s/c-1")
    assert found.endpoint.credentials() == {"authorization": "Bearer not a secret"}
    assert found.endpoint.tls is not None
    assert found.endpoint.proxy is None
    other = access("two", {"KUBECONFIG": os.pathsep.join(["/no/such/file", str(kubeconfig)])})
    assert (other.context, other.namespace) == ("two", "default")


def test_a_proxy_of_the_environment_is_gone_through(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    assert access(None, {"KUBECONFIG": str(kubeconfig)}).endpoint.proxy == ("proxy.example", 3128)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "::1")
    assert access(None, {"KUBECONFIG": str(kubeconfig)}).endpoint.proxy is None


@pytest.mark.parametrize(
    ("content", "context", "says"),
    [
        (None, None, "KUBECONFIG: expected a file that is there, got "),
        (CONFIG, "three", "--context: there is no context 'three' in "),
        ({**CONFIG, "current-context": ""}, None, "; mend it, or choose a --context"),
        ("]", None, "expected a kubeconfig, got something else"),
        ("just words", None, "KUBECONFIG: "),
        ("", None, "KUBECONFIG: "),
        ({**CONFIG, "clusters": []}, None, "; mend it, or choose a --context"),
    ],
)
def test_a_kubeconfig_that_leads_nowhere_is_one_line(
    tmp_path: Path, content: object, context: str | None, says: str
) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(UserError) as refused:
        access(context, {"KUBECONFIG": str(path)})
    assert says in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_context_can_be_chosen_where_none_is_current(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump({**CONFIG, "current-context": ""}))
    assert access("two", {"KUBECONFIG": str(path)}).context == "two"


def test_without_any_kubeconfig_one_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"KUBECONFIG: not set, and there is no ~/\.kube/config"):
        access(None, {})


def told(reason: str, message: str, name: str = "") -> bytes:
    return json.dumps({"kind": "Status", "reason": reason, "message": message, "details": {"name": name}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (401, told("Unauthorized", "Unauthorized"), UserError, "does not take these credentials"),
        (403, told("Forbidden", 'User "me" cannot create'), Forbidden, 'User "me" cannot create; ask for that right'),
        (403, told("Forbidden", 'User "system:anonymous" cannot'), UserError, "no credentials were sent"),
        (404, told("NotFound", 'rayjobs "x" not found', "x"), Missing, 'rayjobs "x" not found'),
        (404, b"404 page not found\n", NoSuchKind, "install the KubeRay operator"),
        (409, told("AlreadyExists", 'rayjobs "x" already exists', "x"), AlreadyThere, "already exists"),
        (409, told("Conflict", "the object has been modified", "x"), Unreachable, "try again"),
        (422, told("Invalid", "spec is\ninvalid"), UserError, "spec is invalid (422)"),
        (429, b"", Unreachable, "answer 429"),
        (503, b"<html>" + b"x" * 9999, Unreachable, "…"),
    ],
)
def test_what_an_api_server_refuses_is_one_line_and_says_whether_to_try_again(
    status: int, body: bytes, kind: type[Exception], says: str
) -> None:
    error = explain("GET", "/apis/ray.io/v1/namespaces/lab/rayjobs?limit=500", status, body)
    assert type(error) is kind
    assert error.exit_code == (1 if kind is Unreachable else 2)
    assert says in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 600


def test_a_clock_is_compared_with_the_server_s_date() -> None:
    assert _ahead(1_763_700_010.5, "Fri, 21 Nov 2025 04:40:00 GMT") == pytest.approx(10)
    assert _ahead(1_763_700_010.5, None) is None
    assert _ahead(1_763_700_010.5, "noon") is None


# --- a forwarded port ------------------------------------------------------------------------------------------------


def frame(data: bytes, opcode: int = 2, *, final: bool = True) -> bytes:
    """As a server sends it."""
    size = len(data)
    head = bytes([(0x80 if final else 0) | opcode])
    if size < 126:
        return head + bytes([size]) + data
    return head + (struct.pack("!BH", 126, size) if size < 65_536 else struct.pack("!BQ", 127, size)) + data


GREETING = frame(b"\x00" + struct.pack("<H", 8265)) + frame(b"\x01" + struct.pack("<H", 8265))


@pytest.fixture
def wire() -> Iterator[tuple[ForwardedPort, socket.socket]]:
    """A forwarded port, and the far end of its connection to the API server."""
    near, far = socket.socketpair()
    near.settimeout(5)
    yield ForwardedPort(near, near.makefile("rb")), far
    near.close()
    far.close()


def test_what_a_pod_sends_is_read_across_frames_of_all_sizes(wire: tuple[ForwardedPort, socket.socket]) -> None:
    port, far = wire
    large = os.urandom(70_000)
    sent = [b"HTTP/1.1 ", b"200 OK", b"y" * 300, large]
    content = GREETING + b"".join(frame(b"\x00" + part) for part in sent) + frame(b"", 8)
    threading.Thread(target=far.sendall, args=(content,), daemon=True).start()
    assert port.makefile().read() == b"".join(sent)


def test_a_message_in_parts_with_a_ping_between_them_is_one(wire: tuple[ForwardedPort, socket.socket]) -> None:
    port, far = wire
    far.sendall(GREETING + frame(b"\x00ab", final=False) + frame(b"?", 9) + frame(b"cd", 0) + frame(b"", 8))
    assert port.makefile().read() == b"abcd"
    head = far.recv(100)
    assert head[0] == 0x8A, "a pong"
    assert bytes(byte ^ head[2 + i % 4] for i, byte in enumerate(head[6:])) == b"?"


def test_what_we_send_is_masked_and_on_the_data_channel(wire: tuple[ForwardedPort, socket.socket]) -> None:
    port, far = wire
    data = os.urandom(1000)
    port.sendall(data)
    content = io.BytesIO(far.recv(4096))
    first, second = content.read(2)
    assert (first, second) == (0x82, 0x80 | 126)
    (length,) = struct.unpack("!H", content.read(2))
    mask = content.read(4)
    assert bytes(byte ^ mask[i % 4] for i, byte in enumerate(content.read())) == b"\x00" + data
    assert length == 1001


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (frame(b"\x01connection refused"), "port forwarding: connection refused"),
        (frame(b"\x00abc")[:-1], "cut off"),
        (b"", "cut off"),
        (struct.pack("!BBQ", 0x82, 127, 1 << 40), "a frame of 1099511627776 bytes"),
    ],
)
def test_a_forwarding_that_breaks_is_an_error_and_no_end(
    wire: tuple[ForwardedPort, socket.socket], sent: bytes, says: str
) -> None:
    port, far = wire
    far.sendall(GREETING + sent)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match=says):
        port.makefile().read()


def test_a_handshake_that_is_refused_says_with_what() -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
        with pytest.raises(HandshakeRefused) as refused:
            ForwardedPort.open(near, "/x", {"Host": "h"})
        assert (refused.value.status, refused.value.body) == (403, b"no")
        far.close()
