"""The sources of credentials for a real S3 server besides the environment: ~/.aws, containers, instance metadata."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sdp.errors import AccessDenied
from sdp.storage import open_storage
from tests.integration.s3 import Gateway, gateway_fixture, s3_env_fixture  # noqa: F401 (fixtures)

pytestmark = pytest.mark.needs("versitygw")


@pytest.fixture(name="bare")
def without_keys(s3_env: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gateway:
    """An environment with the server's address and no credentials; HOME is tmp_path."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    (tmp_path / ".aws").mkdir()
    return s3_env


@pytest.fixture
def serve() -> Iterator[Callable[[dict[tuple[str, str], str]], str]]:
    """Starts a server with these answers, by method and path; gives its address."""
    servers = []

    def start(answers: dict[tuple[str, str], str]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = answers.get((self.command, self.path), "").encode()
                self.send_response(200 if body else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = answer  # noqa: N815 (the names that http.server looks for)

            def log_message(self, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def keys(gateway: Gateway) -> str:
    """As Amazon's services hand them out."""
    return json.dumps(
        {
            "Code": "Success",
            "AccessKeyId": gateway.access_key,
            "SecretAccessKey": gateway.secret_key,
            "Token": "",
            "Expiration": "2099-01-01T00:00:00Z",
        }
    )


def test_nothing_anywhere_is_denied_quickly_and_says_where_was_looked(bare: Gateway) -> None:
    start = time.monotonic()
    with pytest.raises(AccessDenied, match="no AWS credentials found") as caught:
        open_storage(f"{bare.uri}/d").names()
    assert time.monotonic() - start < 10
    assert str(caught.value).startswith(f"{bare.uri}/d: ")
    for place in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "'default' in ~/.aws", "instance metadata"):
        assert place in str(caught.value)


def test_the_instance_metadata_gives_them(
    bare: Gateway, monkeypatch: pytest.MonkeyPatch, serve: Callable[[dict[tuple[str, str], str]], str]
) -> None:
    role = "/latest/meta-data/iam/security-credentials/"
    address = serve({("PUT", "/latest/api/token"): "t", ("GET", role): "worker", ("GET", f"{role}worker"): keys(bare)})
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", address)
    assert open_storage(f"{bare.uri}/d").names() == []
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessDenied, match="no AWS credentials found"):
        open_storage(f"{bare.uri}/d").names()


def test_the_container_gives_them(
    bare: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    serve: Callable[[dict[tuple[str, str], str]], str],
) -> None:
    (tmp_path / "token").write_text("t")
    monkeypatch.setenv(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", serve({("GET", "/v1/credentials"): keys(bare)}) + "/v1/credentials"
    )
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    assert open_storage(f"{bare.uri}/d").names() == []


def test_a_process_that_a_profile_names_gives_them_through_boto3(bare: Gateway, tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps({"Version": 1, **json.loads(keys(bare)), "SessionToken": None}))
    config = tmp_path / ".aws" / "config"
    config.write_text(f"[default]\ncredential_process = cat {answer}\n")
    assert open_storage(f"{bare.uri}/process").names() == []
    # A process that fails, as when a session has expired, is a refusal and not a traceback.
    config.write_text("[default]\ncredential_process = false\n")
    with pytest.raises(AccessDenied) as caught:
        open_storage(f"{bare.uri}/process").names()
    assert str(caught.value).startswith(f"{bare.uri}/process: ")
    assert "\n" not in str(caught.value)
