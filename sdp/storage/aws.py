"""S3 credentials, region and endpoint, from the same places and in the same order as AWS's own tools.

botocore looks for all of them: in the environment, in ~/.aws, at a container's endpoint and in an instance's metadata.
"""

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import BotoCoreError, ProfileNotFound
from botocore.session import Session

from sdp.errors import AccessDenied, UserError
from sdp.storage.base import StorageOptions
from sdp.storage.uri import is_address

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
    """The settings of a connection to S3. `credentials` is None where requests are unsigned."""

    region: str
    endpoint: str | None
    config: "S3Config" = field(repr=False)
    credentials: "Boto3CredentialProvider | None" = field(repr=False)


def find_access(uri: str, options: StorageOptions) -> S3Access:
    """Return the settings for a bucket; raise AccessDenied if there are certainly no credentials."""
    env = os.environ  # which botocore and obstore read, too
    session, credentials = Session(), None
    session.set_config_variable("metadata_service_num_attempts", 3)  # the instance's metadata may throttle
    name = session.profile or "default"
    try:
        profile = session.get_scoped_config()
        region = env.get("AWS_REGION") or session.get_config_variable("region")
        endpoint = options.endpoint or ConfiguredEndpointProvider(session.full_config, profile, "s3").provide()
        if env.get("AWS_SKIP_SIGNATURE", "").lower() not in ("true", "1"):
            from obstore.auth.boto3 import Boto3CredentialProvider

            if session.get_credentials() is None:
                raise AccessDenied(f"{uri}: {_NO_CREDENTIALS.format(profile=name)}")
            # botocore knows when they expire, and is asked each time
            credentials = Boto3CredentialProvider(session, ttl=timedelta(0))
    except ProfileNotFound:
        raise AccessDenied(f"{uri}: AWS_PROFILE is '{name}', which ~/.aws does not have; add or unset it") from None
    except BotoCoreError as error:
        raise AccessDenied(f"{uri}: profile '{name}': {error}; run `aws sso login` or correct it") from None
    # Not every S3-compatible server implements bulk deletion.
    config: S3Config = {"region": region or "us-east-1", "disable_bulk_delete": True}
    if endpoint:
        if not endpoint.startswith(("http://", "https://")) or not is_address(endpoint):
            raise UserError(f"{uri}: storage.endpoint or AWS_ENDPOINT_URL is '{endpoint}'; write http://HOST:PORT")
        endpoint = config["endpoint"] = endpoint.rstrip("/")
        config["aws_endpoint_url_s3"] = endpoint  # or obstore would prefer the variable of that name
    return S3Access(config["region"], endpoint, config, credentials)
