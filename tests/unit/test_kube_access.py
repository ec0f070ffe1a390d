"""Which cluster is meant, as whom, and what an API server's refusals mean."""

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdp.errors import UserError
from sdp.kube import api as kube_api
from sdp.kube.access import connect
from sdp.kube.api import AlreadyThere, Forbidden, Missing, Unreachable, _Tunnel, explain

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
BAD_AUTHORITY = {
    **CONFIG,
    "clusters": [{"name": "c", "cluster": {"server": "https://[::1]:1", "certificate-authority-data": "bm8="}}],
}


def written(folder: Path, content: object) -> Path:
    path = folder / "config"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_a_context_is_a_server_a_namespace_and_credentials(tmp_path: Path) -> None:
    file = written(tmp_path, CONFIG)
    api = connect(None, None, {"KUBECONFIG": str(file)})
    assert (api.context, api.namespace) == ("one", "lab")
    assert api._settings.host == "https://[::1]:6443/k8s/c-1"
    (credentials,) = api._settings.auth_settings().values()
    assert (credentials["key"], credentials["value"]) == ("authorization", "Bearer not a secret")
    written(tmp_path, {**CONFIG, "current-context": ""})
    for namespace, expected in ((None, "default"), ("other", "other")):
        api = connect("two", namespace, {"KUBECONFIG": os.pathsep.join(["/no/such/file", str(file)])})
        assert (api.context, api.namespace) == ("two", expected)


@pytest.mark.parametrize(
    ("content", "context", "says"),
    [
        (CONFIG, "three", "Expected object with name three in "),
        ({**CONFIG, "current-context": ""}, None, "; fix it, or choose another --context"),
        ("]", None, "expected a kubeconfig with its certificates, got something else"),
        (BAD_AUTHORITY, None, "expected a kubeconfig with its certificates, got something else"),
        ("just words", None, "KUBECONFIG: "),
        ("", None, "KUBECONFIG: "),
        ({**CONFIG, "clusters": []}, None, "; fix it, or choose another --context"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_one_line(
    tmp_path: Path, content: object, context: str | None, says: str
) -> None:
    with pytest.raises(UserError) as refused:
        connect(context, None, {"KUBECONFIG": str(written(tmp_path, content))})
    assert says in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("environ", [{}, {"KUBECONFIG": "/no/such/file"}])
def test_without_a_kubeconfig_the_error_asks_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = environ.get("KUBECONFIG", f"{tmp_path}/.kube/config")
    with pytest.raises(UserError, match=f"KUBECONFIG: expected an existing file, got {expected}; export KUBECONFIG="):
        connect(None, None, environ)


@pytest.mark.parametrize("ask", [lambda api: api.get("/version"), lambda api: api.forward("head", 8265)])
def test_a_silent_server_is_given_up_in_time(tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_api, "ANSWER_S", 0.2)
    monkeypatch.setattr(kube_api, "ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        server = {"server": f"http://127.0.0.1:{mute.getsockname()[1]}"}
        file = written(tmp_path, {**CONFIG, "clusters": [{"name": "c", "cluster": server}]})
        api = connect(None, None, {"KUBECONFIG": str(file)})
        with pytest.raises(Unreachable, match=r"^kubernetes: 127\.0\.0\.1:\d+ does not answer \(.*[tT]ime"):
            ask(api)


def status_body(reason: str, message: str, name: str = "") -> bytes:
    return json.dumps({"kind": "Status", "reason": reason, "message": message, "details": {"name": name}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (401, status_body("Unauthorized", "Unauthorized"), UserError, "refuses these credentials (401)"),
        (403, status_body("Forbidden", 'User "system:anonymous" cannot'), UserError, "refuses these credentials (403)"),
        (403, status_body("Forbidden", 'User "me" cannot create'), Forbidden, "cannot create; ask for that right"),
        (404, status_body("NotFound", 'rayjobs "x" not found', "x"), Missing, 'rayjobs "x" not found'),
        (404, b"404 page not found\n", Missing, "install the KubeRay operator"),
        (409, status_body("AlreadyExists", 'rayjobs "x" already exists', "x"), AlreadyThere, "already exists"),
        (422, status_body("Invalid", "spec is\ninvalid"), UserError, "spec is invalid (422)"),
        (429, b"", Unreachable, "status 429"),
        (503, b"<html>" + b"x" * 9999, Unreachable, "(503); try again"),
    ],
)
def test_an_api_servers_refusal_is_one_line_and_says_whether_to_retry(
    status: int, body: bytes, kind: type[Exception], says: str
) -> None:
    error = explain("/apis/ray.io/v1/namespaces/lab/rayjobs", status, body)
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


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_forwarding_that_breaks_ends_the_wait_of_its_reader_at_once() -> None:
    websocket = BrokenWebSocket()
    with websocket.near, websocket.far:
        reader: Any = _Tunnel(websocket, [8265])  # type: ignore[no-untyped-call]
        threading.Timer(0.2, websocket.far.sendall, (b"?",)).start()
        reader.socket(8265).settimeout(30)
        assert reader.socket(8265).recv(1) == b""
