"""S3 credentials, region and endpoint, from the same places and in the same order as AWS's own tools.

Keys, web identity (IRSA) and the container's endpoint, which the environment names, are obstore's business. botocore
looks in all other places: the profile in ~/.aws, single sign-on, processes and the instance's metadata.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ProfileNotFound
from botocore.session import Session

from sdp.errors import AccessDenied, UserError
from sdp.storage.base import StorageOptions

if TYPE_CHECKING:
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import S3Config

_NO_CREDENTIALS = (
    "no AWS credentials found (looked in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE, "
    "profile '{profile}' in ~/.aws, AWS_CONTAINER_CREDENTIALS_*, instance metadata); provide them in one of these "
    "places"
)


@dataclass(frozen=True, slots=True)
class S3Access:
    """The settings of a connection to S3. `credentials` is None where obstore gets them."""

    region: str
    endpoint: str | None
    config: "S3Config" = field(repr=False)
    credentials: "Boto3CredentialProvider | None" = field(repr=False)
    no_credentials: str
    """The error for obstore finding none."""


def find_access(uri: str, options: StorageOptions) -> S3Access:
    """Return the settings for a bucket; raise AccessDenied if there are certainly no credentials."""
    env = os.environ  # which botocore and obstore read, too
    name = env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE")
    session = Session(profile=name)
    session.set_config_variable("metadata_service_num_attempts", 3)  # the instance's metadata may throttle
    no_credentials = _NO_CREDENTIALS.format(profile=name or "default")
    try:
        profile = session.get_scoped_config()
        region = options.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or profile.get("region")
        endpoint = _endpoint(uri, options, profile, session)
        credentials = None if _obstore_finds_them(uri, name) else _credentials(uri, session, no_credentials)
    except ProfileNotFound:
        raise AccessDenied(f"{uri}: AWS_PROFILE is '{name}', which ~/.aws does not have; add or unset it") from None
    except BotoCoreError as error:
        raise AccessDenied(
            f"{uri}: profile '{name or 'default'}': {error}; run `aws sso login` or correct it"
        ) from None
    # Not every S3-compatible server implements bulk deletion.
    config: S3Config = {"region": region or "us-east-1", "disable_bulk_delete": True}
    if endpoint:
        config["endpoint"] = endpoint
        config["aws_endpoint_url_s3"] = endpoint  # or obstore would prefer the variable of that name
    return S3Access(config["region"], endpoint, config, credentials, no_credentials)


def _obstore_finds_them(uri: str, profile: str | None) -> bool:
    """Return whether the environment has credentials that precede a profile, or asks for unsigned requests."""
    env = os.environ
    key, secret = env.get("AWS_ACCESS_KEY_ID"), env.get("AWS_SECRET_ACCESS_KEY")
    if bool(key) != bool(secret):
        missing = "AWS_SECRET_ACCESS_KEY" if key else "AWS_ACCESS_KEY_ID"
        raise AccessDenied(f"{uri}: {missing} is not set, though its other half is; set both or neither")
    web_identity = env.get("AWS_WEB_IDENTITY_TOKEN_FILE") and env.get("AWS_ROLE_ARN")
    container = any(env.get(f"AWS_CONTAINER_CREDENTIALS_{kind}_URI") for kind in ("RELATIVE", "FULL"))
    return bool(
        key or web_identity or (container and not profile) or env.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1")
    )


def _credentials(uri: str, session: Session, no_credentials: str) -> "Boto3CredentialProvider":
    """Return a function that returns the current credentials of the first place that has some."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    if session.get_credentials() is None:
        raise AccessDenied(f"{uri}: {no_credentials}")
    return Boto3CredentialProvider(session, ttl=timedelta(0))  # botocore knows when they expire; it is asked each time


def _endpoint(uri: str, options: StorageOptions, profile: Mapping[str, Any], session: Session) -> str | None:
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    candidates: dict[str, str | None] = {
        "storage.endpoint": options.endpoint,
        "AWS_ENDPOINT_URL_S3": os.environ.get("AWS_ENDPOINT_URL_S3"),
        "AWS_ENDPOINT_URL": os.environ.get("AWS_ENDPOINT_URL"),
        "endpoint_url in ~/.aws": services.get("s3", {}).get("endpoint_url") or profile.get("endpoint_url"),
    }
    for where, endpoint in candidates.items():
        if endpoint:
            if not endpoint.startswith(("http://", "https://")):
                raise UserError(f"{uri}: {where} is '{endpoint}'; it must begin with http:// or https://")
            return endpoint.rstrip("/")
    return None
