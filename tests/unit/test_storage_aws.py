"""The sources of S3 credentials, region and endpoint."""

import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest

from sdp.errors import AccessDenied, UserError
from sdp.storage import StorageOptions, open_storage
from sdp.storage.aws import S3Access, find_access

KEYS = {"AWS_ACCESS_KEY_ID": "env-key", "AWS_SECRET_ACCESS_KEY": "env-secret"}
PROFILES = """
[default]
aws_access_key_id = default-key
aws_secret_access_key = default-secret

[lab]
aws_access_key_id = lab-key
aws_secret_access_key = lab-secret
aws_session_token = lab-token
"""
CONFIG = """
[default]
region = eu-west-1

[profile lab]
region = eu-central-1
endpoint_url = https://lab.example

[profile sso]
sso_session = corp
region = us-west-2

[profile here]
services = local

[services local]
s3 =
  endpoint_url = http://127.0.0.1:9000/
dynamodb =
  endpoint_url = http://127.0.0.1:8000
"""


def find(env: dict[str, str], home: Path, **options: str) -> S3Access:
    """With no other variables: botocore reads the environment itself."""
    nobody = {"HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"}
    with patch.dict(os.environ, {**nobody, **env}, clear=True):
        return find_access("s3://bucket/x", StorageOptions(**options))  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(PROFILES)
    (tmp_path / ".aws" / "config").write_text(CONFIG)
    return tmp_path


def key_of(access: S3Access) -> str | None:
    return access.credentials()["access_key_id"] if access.credentials else None


@pytest.mark.parametrize(
    ("env", "method"),
    [
        ({**KEYS, "AWS_PROFILE": "lab"}, "env"),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_ROLE_ARN": "arn:aws:iam::1:role"}, "assume-role-with-web-identity"),
        ({"AWS_PROFILE": "lab"}, "shared-credentials-file"),
    ],
)
def test_what_the_environment_holds_comes_before_any_profile(home: Path, env: dict[str, str], method: str) -> None:
    access = find(env, home)
    assert access.credentials
    assert access.credentials.credentials.method == method


def test_requests_are_unsigned_if_the_environment_says_so(home: Path) -> None:
    assert find({"AWS_SKIP_SIGNATURE": "true"}, home).credentials is None


def test_the_profile_gives_keys_token_and_region(home: Path) -> None:
    default = find({}, home)
    assert (key_of(default), default.region) == ("default-key", "eu-west-1")
    lab = find({"AWS_PROFILE": "lab"}, home)
    assert lab.credentials
    secrets = lab.credentials()
    assert (secrets["access_key_id"], secrets["secret_access_key"]) == ("lab-key", "lab-secret")
    assert secrets["token"] == "lab-token"
    assert (lab.region, lab.endpoint) == ("eu-central-1", "https://lab.example")


def test_the_region_is_the_environments_the_profiles_or_amazons_first(home: Path, tmp_path: Path) -> None:
    both = {"AWS_REGION": "r1", "AWS_DEFAULT_REGION": "r2"}
    assert find(both, home).region == "r1"
    assert find({"AWS_DEFAULT_REGION": "r2"}, home).region == "r2"
    assert find({}, home).region == "eu-west-1"
    assert find(KEYS, tmp_path / "nowhere").region == "us-east-1"


def test_the_endpoint_is_the_options_the_services_the_general_one_or_the_profiles(home: Path) -> None:
    both = {"AWS_ENDPOINT_URL_S3": "http://a", "AWS_ENDPOINT_URL": "http://b", "AWS_PROFILE": "lab"}
    assert find(both, home, endpoint="http://c/").endpoint == "http://c"
    assert find(both, home).endpoint == "http://a"
    assert find({"AWS_ENDPOINT_URL": "http://b"}, home).endpoint == "http://b"
    assert find({"AWS_PROFILE": "here", **KEYS}, home).endpoint == "http://127.0.0.1:9000"
    assert find({}, home).endpoint is None
    for wrong in ("localhost:9000", "http://[::1:9000"):
        says = f"storage.endpoint or AWS_ENDPOINT_URL is '{wrong}'; write http://HOST:PORT"
        with pytest.raises(UserError, match=re.escape(says)):
            find({}, home, endpoint=wrong)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"AWS_ACCESS_KEY_ID": "x"}, "missing: AWS_SECRET_ACCESS_KEY"),
        ({"AWS_PROFILE": "nobody"}, "AWS_PROFILE is 'nobody', which ~/.aws does not have"),
    ],
)
def test_settings_that_cannot_work_are_denied_before_any_request(home: Path, env: dict[str, str], says: str) -> None:
    with pytest.raises(AccessDenied) as caught:
        find(env, home)
    assert str(caught.value).startswith("s3://bucket/x: ")
    assert says in str(caught.value)


def test_without_credentials_the_named_folder_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AccessDenied, match=r"^s3://bucket/run: no AWS credentials found"):
        open_storage("s3://bucket/run").child("phase-1").exists("_run.json")


def test_nothing_printable_of_an_access_holds_a_secret(home: Path) -> None:
    assert "secret" not in repr(find({"AWS_PROFILE": "lab"}, home))
