"""The sources of credentials for a real S3 server besides the environment: ~/.aws, containers, instance metadata."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdp.errors import AccessDenied
from sdp.storage import open_storage
from tests.integration.s3 import Gateway, gateway_fixture, s3_env_fixture  # noqa: F401 (fixtures)
from tests.storage_server import Answer, Request, serving

pytestmark = pytest.mark.needs("versitygw")

ROLE = "/latest/meta-data/iam/security-credentials/"


@pytest.fixture(name="bare")
def without_keys(s3_env: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gateway:
    """An environment with the server's address and no credentials; HOME is tmp_path."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    return s3_env


def keys(gateway: Gateway) -> str:
    """As Amazon's services hand them out."""
    secrets = {"AccessKeyId": gateway.access_key, "SecretAccessKey": gateway.secret_key, "Token": ""}
    return json.dumps({"Code": "Success", **secrets, "Expiration": "2099-01-01T00:00:00Z"})


@pytest.fixture
def amazon(bare: Gateway) -> Iterator[str]:
    """The address of services that hand out keys, to instances and to containers."""
    answers = {
        ("PUT", "/latest/api/token"): "t",
        ("GET", ROLE): "worker",
        ("GET", f"{ROLE}worker"): keys(bare),
        ("GET", "/v1/credentials"): keys(bare),
    }

    def answer(request: Request) -> Answer:
        body = answers.get((request.method, request.path), "")
        return Answer(200 if body else 404, body.encode())

    with serving(answer) as server:
        yield server.address


def test_the_instance_metadata_gives_them(bare: Gateway, amazon: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", amazon)
    assert open_storage(f"{bare.uri}/d").names() == []
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessDenied, match=rf"^{bare.uri}/d: no AWS credentials found"):
        open_storage(f"{bare.uri}/d").names()


def test_the_container_gives_them(bare: Gateway, amazon: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{amazon}/v1/credentials")
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
