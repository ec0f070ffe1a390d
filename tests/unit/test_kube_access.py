"""Which cluster is meant, as whom, and what an API server's refusals mean."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from urllib3 import ProxyManager
from urllib3.exceptions import HTTPError

from sdp.errors import UserError
from sdp.kube.access import access
from sdp.kube.api import AlreadyThere, Api, Forbidden, ForwardedPort, Missing, NoSuchKind, Timing, Unreachable, explain

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
    resolved = access(None, {"KUBECONFIG": str(kubeconfig)})
    assert (resolved.context, resolved.namespace) == ("one", "lab")
    assert resolved.configuration.host == "https://[::1]:6443/k8s/c-1"
    (credentials,) = resolved.configuration.auth_settings().values()
    assert (credentials["key"], credentials["value"]) == ("authorization", "Bearer not a secret")
    other = access("two", {"KUBECONFIG": os.pathsep.join(["/no/such/file", str(kubeconfig)])})
    assert (other.context, other.namespace) == ("two", "default")


@pytest.mark.parametrize(("exempt", "proxied"), [("", True), ("::1", False), ("elsewhere.example", True)])
def test_a_proxy_of_the_environment_is_used_unless_the_server_is_exempt(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, exempt: str, *, proxied: bool
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, exempt)
    api = Api(access(None, {"KUBECONFIG": str(kubeconfig)}))
    assert isinstance(api._client.client.rest_client.pool_manager, ProxyManager) is proxied


@pytest.mark.parametrize(
    ("content", "context", "says"),
    [
        (None, None, "KUBECONFIG: expected an existing file, got "),
        (CONFIG, "three", "--context: no context 'three' in "),
        ({**CONFIG, "current-context": ""}, None, "; fix it, or choose a --context"),
        ("]", None, "expected a kubeconfig, got something else"),
        ("just words", None, "KUBECONFIG: "),
        ("", None, "KUBECONFIG: "),
        ({**CONFIG, "clusters": []}, None, "; fix it, or choose a --context"),
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


def test_a_context_can_be_chosen_without_a_current_one(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump({**CONFIG, "current-context": ""}))
    assert access("two", {"KUBECONFIG": str(path)}).context == "two"


def test_without_any_kubeconfig_one_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"KUBECONFIG: not set, and ~/\.kube/config does not exist"):
        access(None, {})


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo the session has expired >&2; exit 1", "exec: process returned 1. the session has expired"),
        ("echo '{}'", "exec: malformed response. missing key 'apiVersion'"),
    ],
)
def test_a_login_command_that_fails_is_one_line_which_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], script: str, says: str
) -> None:
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script]}
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump({**CONFIG, "users": [{"name": "u", "user": {"exec": command}}]}))
    with pytest.raises(UserError) as refused:
        access(None, {"KUBECONFIG": str(path)})
    assert "the login of context 'one' failed (" in str(refused.value)
    assert says in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert "ERROR" not in capfd.readouterr().err


@pytest.mark.parametrize("ask", [lambda api: api.get("/version"), lambda api: api.forward("head", 8265)])
def test_a_server_that_takes_a_connection_and_says_nothing_is_given_up_in_time(tmp_path: Path, ask: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        server = {"server": f"http://127.0.0.1:{mute.getsockname()[1]}"}
        path = tmp_path / "config"
        path.write_text(yaml.safe_dump({**CONFIG, "clusters": [{"name": "c", "cluster": server}]}))
        api = Api(access(None, {"KUBECONFIG": str(path)}), timing=Timing(answer_s=0.2, attempts=1))
        with pytest.raises(Unreachable, match=r"^kubernetes: 127\.0\.0\.1:\d+ does not answer \(.*time"):
            ask(api)


def status_body(reason: str, message: str, name: str = "") -> bytes:
    return json.dumps({"kind": "Status", "reason": reason, "message": message, "details": {"name": name}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (401, status_body("Unauthorized", "Unauthorized"), UserError, "refuses these credentials"),
        (
            403,
            status_body("Forbidden", 'User "me" cannot create'),
            Forbidden,
            'User "me" cannot create; ask for that right',
        ),
        (403, status_body("Forbidden", 'User "system:anonymous" cannot'), UserError, "no credentials were sent"),
        (404, status_body("NotFound", 'rayjobs "x" not found', "x"), Missing, 'rayjobs "x" not found'),
        (404, b"404 page not found\n", NoSuchKind, "install the KubeRay operator"),
        (409, status_body("AlreadyExists", 'rayjobs "x" already exists', "x"), AlreadyThere, "already exists"),
        (409, status_body("Conflict", "the object has been modified", "x"), Unreachable, "try again"),
        (422, status_body("Invalid", "spec is\ninvalid"), UserError, "spec is invalid (422)"),
        (429, b"", Unreachable, "status 429"),
        (503, b"<html>" + b"x" * 9999, Unreachable, "…"),
    ],
)
def test_an_api_servers_refusal_is_one_line_and_says_whether_to_retry(
    status: int, body: bytes, kind: type[Exception], says: str
) -> None:
    error = explain("GET", "/apis/ray.io/v1/namespaces/lab/rayjobs?limit=500", status, body)
    assert type(error) is kind
    assert error.exit_code == (1 if kind is Unreachable else 2)
    assert says in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 600


class BrokenWebSocket:
    """A connection to the API server that breaks as soon as it is read."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.connected, self.sock = True, self.near

    def fileno(self) -> int:
        return self.near.fileno()

    def recv_data_frame(self, _: bool) -> None:
        raise ConnectionResetError("Connection reset by peer")

    def close(self) -> None:
        self.connected = False


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_forwarding_that_breaks_ends_the_request_at_once() -> None:
    websocket = BrokenWebSocket()
    with websocket.near, websocket.far:
        port = ForwardedPort(websocket, 8265)
        websocket.far.sendall(b"?")
        with pytest.raises(HTTPError):
            port.urlopen("GET", "/", timeout=30)
        assert port.error() == "Connection reset by peer"
