"""S3 credentials, region and endpoint, from the same places and in the same order as AWS's own tools.

The places are environment variables, web identity (IRSA), the profile in ~/.aws, the container's endpoint and the
instance's metadata. obstore reads all but the profile itself; the profile is read here.
"""

import configparser
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from sdp.errors import AccessDenied, UserError
from sdp.storage.base import StorageOptions

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Credential

Credentials: TypeAlias = "Callable[[], S3Credential]"

_METADATA_S = 1.5
_NO_CREDENTIALS = (
    "no AWS credentials found (looked in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE, "
    "profile '{profile}' in ~/.aws, AWS_CONTAINER_CREDENTIALS_*, instance metadata); provide them in one of these "
    "places"
)
_BY_BOTO3 = ("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session")


@dataclass(frozen=True, slots=True)
class S3Access:
    """The settings of a connection to S3. `credentials` is None where obstore gets them."""

    region: str
    endpoint: str | None
    config: "S3Config" = field(repr=False)
    credentials: "Credentials | None" = field(repr=False)
    no_credentials: str
    """The error for obstore finding none."""


def find_access(uri: str, options: StorageOptions, env: Mapping[str, str]) -> S3Access:
    """Return the settings for a bucket; raise AccessDenied if there are certainly no credentials."""
    explicit = env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE")
    name = explicit or "default"
    no_credentials = _NO_CREDENTIALS.format(profile=name)
    profile = _profile(name, env)
    region = options.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or profile.get("region")
    config: S3Config = {"region": region or "us-east-1"}
    endpoint = _endpoint(uri, options, env, profile)
    if endpoint:
        config["endpoint"] = endpoint
        config["aws_endpoint_url_s3"] = endpoint  # or obstore would prefer the variable of that name
    config["metadata_endpoint"] = _metadata(env)
    # Not every S3-compatible server implements bulk deletion.
    config["disable_bulk_delete"] = True
    credentials = None
    if not _obstore_finds_them(uri, env):
        credentials = _credentials(uri, name, profile)
        if credentials is None and explicit:
            raise AccessDenied(f"{uri}: AWS_PROFILE is '{name}', but ~/.aws has no credentials for it; add or unset it")
        if credentials is None and not _in_container(env) and not _metadata_answers(env):
            raise AccessDenied(f"{uri}: {no_credentials}")
    return S3Access(config["region"], endpoint, config, credentials, no_credentials)


def _obstore_finds_them(uri: str, env: Mapping[str, str]) -> bool:
    """Return whether the environment has credentials that precede a profile, or asks for unsigned requests."""
    key, secret = env.get("AWS_ACCESS_KEY_ID"), env.get("AWS_SECRET_ACCESS_KEY")
    if bool(key) != bool(secret):
        missing = "AWS_SECRET_ACCESS_KEY" if key else "AWS_ACCESS_KEY_ID"
        raise AccessDenied(f"{uri}: {missing} is not set, though its other half is; set both or neither")
    web_identity = env.get("AWS_WEB_IDENTITY_TOKEN_FILE") and env.get("AWS_ROLE_ARN")
    return bool(key or web_identity or env.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1"))


def _in_container(env: Mapping[str, str]) -> bool:
    return bool(env.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") or env.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"))


def _metadata(env: Mapping[str, str]) -> str:
    return (env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254").rstrip("/")


def _metadata_answers(env: Mapping[str, str]) -> bool:
    """Return whether instance metadata can be reached.

    In a pod its responses often never arrive (a hop limit of 1), and the first operation would wait for them until its
    deadline.
    """
    if env.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    address = urlsplit(_metadata(env))
    connection = HTTPConnection(address.hostname or "", address.port or 80, timeout=_METADATA_S)
    try:
        connection.request("PUT", "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        connection.getresponse()
        return True  # obstore interprets the response
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _endpoint(uri: str, options: StorageOptions, env: Mapping[str, str], profile: Mapping[str, str]) -> str | None:
    candidates = {
        "storage.endpoint": options.endpoint,
        "AWS_ENDPOINT_URL_S3": env.get("AWS_ENDPOINT_URL_S3"),
        "AWS_ENDPOINT_URL": env.get("AWS_ENDPOINT_URL"),
        "endpoint_url in ~/.aws": profile.get("endpoint_url"),
    }
    for where, endpoint in candidates.items():
        if endpoint:
            if not endpoint.startswith(("http://", "https://")):
                raise UserError(f"{uri}: {where} is '{endpoint}'; it must begin with http:// or https://")
            return endpoint.rstrip("/")
    return None


def _profile(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a profile of ~/.aws/credentials and ~/.aws/config; none if it does not exist."""
    home = Path(env.get("HOME") or Path.home()) / ".aws"
    config = _ini(env.get("AWS_CONFIG_FILE") or home / "config")
    secrets = _ini(env.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials")
    section = "default" if name == "default" else f"profile {name}"
    values = {**config.get(section, {}), **secrets.get(name, {})}
    services = config.get(f"services {values.get('services', '')}", {})
    for line in services.get("s3", "").splitlines():  # lines of "endpoint_url = …"
        key, _, value = line.partition("=")
        if key.strip() == "endpoint_url":
            values["endpoint_url"] = value.strip()
    return values


def _credentials(uri: str, name: str, profile: Mapping[str, str]) -> "Credentials | None":
    """Return a function that returns a profile's current credentials; None where it has none."""
    key, secret = profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")
    if key and secret:
        static: S3Credential = {
            "access_key_id": key,
            "secret_access_key": secret,
            "token": profile.get("aws_session_token") or None,
            "expires_at": None,
        }
        return lambda: static
    setting = next((setting for setting in _BY_BOTO3 if profile.get(setting)), None)
    if setting is None:
        return None
    # Only boto3 implements single sign-on, roles and external processes.
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise AccessDenied(
            f"{uri}: profile '{name}' has {setting}, which needs boto3; "
            "pip install '.[worker]', or put keys into the environment (aws configure export-credentials)"
        ) from None
    try:
        provider: Credentials = Boto3CredentialProvider(boto3.Session(profile_name=name))
    except (BotoCoreError, ValueError) as error:
        raise AccessDenied(f"{uri}: profile '{name}': {error}; run `aws sso login` or correct it") from None
    return provider


def _ini(path: str | os.PathLike[str]) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(default_section="", strict=False)
    try:
        parser.read(Path(path).expanduser(), encoding="utf-8")
    except configparser.Error as error:
        raise UserError(
            f"{path}: not an AWS configuration file ({error.message.splitlines()[0]}); correct it"
        ) from None
    return {section: dict(parser.items(section)) for section in parser.sections()}
