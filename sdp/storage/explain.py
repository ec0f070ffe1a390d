"""The failures behind obstore's exceptions, whose text is a dump of the Rust error, and sdp's errors for them.

Only an HTTP status, the server's own code and sentence, and the kind of transport error are taken from that dump. The
rest may hold signatures and query strings.
"""

import re
from collections.abc import Callable, Mapping
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

from sdp.errors import AccessDenied, AlreadyExists, Conflict, NotFound, SdpError, StorageError, Unavailable

REPORTED: tuple[type[Exception], ...] = (BaseError, OSError, ValueError)
"""The exceptions that obstore raises; TimeoutError is an OSError."""

FailureKind = Literal[
    "transient",  # a retry may help
    "missing",
    "bucket",  # no such bucket
    "denied",
    "credentials",  # none found for Google
    "region",  # the bucket is in another region
    "exists",
    "changed",
    "beyond",  # the range begins behind the end
    "unranged",  # the server sends whole files only
    "certificates",  # none to check servers by
    "other",
]


@dataclass(frozen=True, slots=True)
class StorageFailure:
    kind: FailureKind
    cause: str


Explain = Callable[[StorageFailure, str], SdpError]
"""Makes the error for a failure, given a phrase that counts the attempts and their time."""

_ERRORS: Mapping[FailureKind, tuple[type[SdpError], str]] = {
    "missing": (NotFound, "{name}: not found ({cause}); check the URI"),
    "bucket": (NotFound, "{named}: no bucket '{bucket}'{at} ({cause}); create it or correct the URI"),
    "denied": (AccessDenied, "{name}: access denied{at} ({cause}); check credentials, tokens and permissions"),
    "credentials": (AccessDenied, "{named}: no Google credentials found; set GOOGLE_APPLICATION_CREDENTIALS"),
    "region": (AccessDenied, "{named}: the bucket is not in region '{region}' ({cause}); set AWS_REGION"),
    "exists": (AlreadyExists, "{name}: exists already; another writer was first, run the same command again"),
    "changed": (Conflict, "{name}: changed or deleted meanwhile; run the same command again"),
    "certificates": (AccessDenied, "{name}: {cause}; install the package ca-certificates, or set SSL_CERT_FILE"),
    "unranged": (StorageError, "{name}: {cause}; download the file, and name the copy"),
    "transient": (
        Unavailable,
        "{name}: {cause}{at} ({tried}); check that the server is up and reachable, then run the same command again",
    ),
}
"""Errors by kind of failure. Those of the bucket name what the user `named`, not a file that sdp chose."""
_OTHER = (StorageError, "{name}: {cause}{at}; check the URI and the server's settings")


_ELSEWHERE: Mapping[str, FailureKind] = {"bucket": "missing", "credentials": "other", "region": "other"}
"""The meaning of a bucket's failures where there is none."""


def explaining(name: str, kinds: Mapping[str, FailureKind] = _ELSEWHERE, at: str = "", **bucket: str) -> Explain:
    """Return a function that makes the errors about `name`; `kinds` maps failures to their meaning in an operation."""

    def error(failure: StorageFailure, tried: str) -> SdpError:
        kind, text = _ERRORS.get(kinds.get(failure.kind, failure.kind), _OTHER)
        return kind(text.format(name=name, at=at, cause=failure.cause, tried=tried, **bucket))

    return error


class Reported(OSError):
    """A failure that is already classified."""

    def __init__(self, failure: StorageFailure) -> None:
        self.failure = failure
        super().__init__(failure.cause)


_CODES: Mapping[FailureKind, set[str]] = {
    "transient": {
        *("ConditionalRequestConflict", "NoSuchUpload", "OperationAborted", "RequestTimeout"),
        *("Throttling", "ThrottlingException"),
    },
    "bucket": {"NoSuchBucket", "InvalidBucketName"},
    # The last is versitygw's code for an unknown access key.
    "denied": {"ExpiredToken", "InvalidToken", "RequestExpired", "TokenRefreshRequired", "XAdminUserNotFound"},
    "region": {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"},
}
"""S3's error codes by what they mean; the HTTP status decides for all others."""
_TRANSPORT_ERRORS: tuple[tuple[str, FailureKind, str], ...] = (
    (r"InvalidCertificate\(|verify failed|UnknownIssuer", "other", "the server's certificate is not trusted"),
    ("InvalidContentType", "other", "the server does not speak TLS: use http:// instead of https://"),
    ("dns error", "transient", "the host's name cannot be resolved"),
    ("ConnectionRefused", "transient", "connection refused"),
    (r"kind: Connect\b", "transient", "cannot connect"),
    (r"kind: Timeout\b", "transient", "no response in time"),
    (r"kind: (Interrupted|Request)\b", "transient", "connection lost in the middle of a request"),
)

_STATUS = re.compile(r"non-2xx status code: (\d{3})( [A-Z][A-Za-z ]+)?")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_SENTENCE = re.compile(r"<Message>([^<]*)</Message>")
_TRANSPORT = re.compile(r"HttpError \{\s*kind: \w+")
_PROVIDER = re.compile(r"External \w+ credential provider: (?:\w+: )?(.*)")


def classify(error: BaseException) -> StorageFailure:
    """Return the failure behind an exception of obstore's, or behind a missed deadline."""
    if isinstance(error, Reported):
        return error.failure
    text = str(error)
    if isinstance(error, TimeoutError):
        return StorageFailure("transient", "no response in time")
    if isinstance(error, UnauthenticatedError) and (provider := _PROVIDER.search(text)):
        return StorageFailure("denied", _line(provider[1]))
    if "metadata.google.internal" in text or "computeMetadata" in text:
        return StorageFailure("credentials", "no credentials found")
    if "No CA certificates" in text:
        return StorageFailure("certificates", "this machine has no CA certificates, by which https is checked")
    if "redirect without LOCATION" in text:
        return StorageFailure("region", "the server redirects elsewhere")
    if isinstance(error, NotSupportedError) or "non-partial response" in text:
        return StorageFailure("unranged", "the server sends whole files only")
    return _by_response(error, text) or _by_transport(text) or StorageFailure("other", _line(text))


def _by_response(error: BaseException, text: str) -> StorageFailure | None:
    """Return the failure that S3's error code means, an HTTP status, or obstore's class of exceptions for it."""
    match, code, sentence = (pattern.search(text) for pattern in (_STATUS, _CODE, _SENTENCE))
    status = int(match[1]) if match else 0
    cause = f"HTTP {match[1]}{(match[2] or '').rstrip()}" if match else _line(text)
    if code:
        cause = _line(f"{code[1]}: {unescape(sentence[1]).rstrip('.')}" if sentence and sentence[1] else code[1])
        if kind := next((kind for kind, codes in _CODES.items() if code[1] in codes), None):
            return StorageFailure(kind, cause)
    if status == 416:
        return StorageFailure("beyond", cause)
    if status in (408, 425, 429) or (status >= 500 and status not in (501, 505)):
        return StorageFailure("transient", cause)
    # object_store also raises PreconditionError where a conditional write has nothing to replace.
    if isinstance(error, PreconditionError) or (status == 412 and not isinstance(error, AlreadyExistsError)):
        return StorageFailure("changed", cause)
    # object_store raises AlreadyExistsError for every 409, whatever its code.
    if isinstance(error, AlreadyExistsError) and (
        status != 409 or "AlreadyExists" in cause or cause.startswith("HTTP")
    ):
        return StorageFailure("exists", cause)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return StorageFailure("missing", cause)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
        return StorageFailure("denied", cause)
    return StorageFailure("other", cause) if match else None


def _by_transport(text: str) -> StorageFailure | None:
    """Return the failure of a request that got no whole response."""
    if not _TRANSPORT.search(text):
        return None
    failures = (StorageFailure(kind, cause) for pattern, kind, cause in _TRANSPORT_ERRORS if re.search(pattern, text))
    return next(failures, None)


def _line(text: str) -> str:
    """Return the start of a text as one line, without query strings, which may sign a request."""
    first = text.split("\n\nDebug source", 1)[0]
    return re.sub(r"(https?://[^\s?]+)\?\S*", r"\1?…", " ".join(first.split()))[:300].rstrip()
