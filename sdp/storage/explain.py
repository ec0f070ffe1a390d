"""What went wrong, read from what obstore raises: an exception whose text is a dump of the Rust error.

Nothing of that dump reaches a message of ours but an HTTP status, the server's own code and sentence, and the kind of
transport error; the rest may hold signatures and query strings.
"""

import re
from dataclasses import dataclass
from html import unescape
from typing import Literal

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

REPORTED: tuple[type[Exception], ...] = (BaseError, OSError, ValueError)
"""What obstore raises; TimeoutError is an OSError."""

Kind = Literal[
    "transient",  # trying again may help
    "missing",
    "bucket",  # there is no such bucket
    "denied",
    "credentials",  # there are none
    "region",  # the bucket is in another one
    "exists",
    "changed",
    "beyond",  # the range begins behind the end
    "unreadable",  # it answered with an error, but what it says cannot be read
    "unranged",  # the server sends whole files only
    "other",
]


@dataclass(frozen=True, slots=True)
class Failure:
    kind: Kind
    cause: str


class Reported(OSError):
    """A failure that was understood where it happened, on its way to whoever decides about another attempt."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.cause)


_DENIED = {
    *("AccessDenied", "AccountProblem", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId", "InvalidSecurity"),
    *("InvalidToken", "NotSignedUp", "RequestExpired", "RequestTimeTooSkewed", "SignatureDoesNotMatch"),
    *("TokenRefreshRequired", "XAdminUserNotFound"),  # versitygw's word for an access key that it does not know
}
_TRANSIENT = {
    *("Busy", "ConditionalRequestConflict", "InternalError", "NoSuchUpload", "OperationAborted", "RequestTimeout"),
    *("ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"),
}
_REGION = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}
_CREDENTIAL_SOURCES = ("/latest/api/token", "/latest/meta-data/", "metadata.google.internal", "computeMetadata")

_STATUS = re.compile(r"non-2xx status code: (\d{3})( [A-Z][A-Za-z ]+)?")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_SENTENCE = re.compile(r"<Message>([^<]*)</Message>")
_TRANSPORT = re.compile(r"HttpError \{\s*kind: (\w+)")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)|certificate verify failed|UnknownIssuer")
_PROVIDER = re.compile(r"External \w+ credential provider: (?:\w+: )?(.*)")


def classify(error: BaseException) -> Failure:
    """What an exception of obstore, or a deadline that ran out, means."""
    if isinstance(error, Reported):
        return error.failure
    text = str(error)
    if isinstance(error, TimeoutError):
        return Failure("transient", "no answer in time")
    if isinstance(error, UnauthenticatedError) and (provider := _PROVIDER.search(text)):
        return Failure("denied", _line(provider[1]))
    if any(source in text for source in _CREDENTIAL_SOURCES):
        return Failure("credentials", "no credentials found")
    if "redirect without LOCATION" in text:
        return Failure("region", "the server redirects elsewhere")
    if isinstance(error, NotSupportedError) or "non-partial response" in text:
        return Failure("unranged", "the server does not answer requests for a part of a file")
    if "invalid utf-8" in text:  # a page about an error, with the status lost in reading it
        return Failure("unreadable", "an error page that is not text")
    return _by_code(error, text) or _by_status(error, text) or _by_transport(text) or Failure("other", _line(text))


def _by_code(error: BaseException, text: str) -> Failure | None:
    """The server has said what is wrong in a code of S3."""
    code = _CODE.search(text)
    if not code:
        return None
    sentence = _SENTENCE.search(text)
    cause = _line(f"{code[1]}: {unescape(sentence[1]).rstrip('.')}" if sentence and sentence[1] else code[1])
    if code[1] in _TRANSIENT:
        return Failure("transient", cause)
    if code[1] in ("NoSuchBucket", "InvalidBucketName"):
        return Failure("bucket", cause)
    if code[1] in _DENIED:
        return Failure("denied", cause)
    if code[1] in _REGION:
        return Failure("region", cause)
    return _by_status(error, text, cause)


def _by_status(error: BaseException, text: str, cause: str = "") -> Failure | None:
    """The server has answered with an HTTP status, or obstore with a class of exceptions that stands for one."""
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    cause = cause or (f"HTTP {found[1]}{(found[2] or '').rstrip()}" if found else _line(text))
    if status == 416:
        return Failure("beyond", cause)
    if status in (408, 425, 429) or (status >= 500 and status not in (501, 505)):
        return Failure("transient", cause)
    # A conditional write finds nothing to replace: object_store calls that a failed precondition too.
    if isinstance(error, PreconditionError) or (status == 412 and not isinstance(error, AlreadyExistsError)):
        return Failure("changed", cause)
    if isinstance(error, AlreadyExistsError) and (
        status != 409 or "AlreadyExists" in cause or cause.startswith("HTTP")
    ):
        return Failure("exists", cause)  # object_store calls every 409 so, also one with a reason of its own
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return Failure("missing", cause)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
        return Failure("denied", cause)
    return Failure("other", cause) if found else None


def _by_transport(text: str) -> Failure | None:
    """There was no answer, or not the whole of one."""
    found = _TRANSPORT.search(text)
    if not found:
        return None
    kind = found[1]
    if _CERTIFICATE.search(text):
        return Failure("other", "the server's certificate is not trusted")
    if "InvalidContentType" in text:
        return Failure("other", "the server does not speak TLS: an http:// address is called https://")
    if "dns error" in text:
        return Failure("transient", "the host's name cannot be resolved")
    if "ConnectionRefused" in text:
        return Failure("transient", "connection refused")
    if kind == "Connect":
        return Failure("transient", "cannot connect")
    if kind == "Timeout":
        return Failure("transient", "no answer in time")
    if kind in ("Interrupted", "Request"):
        return Failure("transient", "connection lost in the middle of a request")
    return None


def _line(text: str) -> str:
    """The first line of a text, short, without query strings: they may sign a request."""
    first = text.split("\n\nDebug source", 1)[0]
    return re.sub(r"(https?://[^\s?]+)\?\S*", r"\1?…", " ".join(first.split()))[:300].rstrip()
