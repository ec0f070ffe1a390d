"""The meaning of obstore's exceptions, from obstore 0.12 against versitygw 1.8; test_storage_retry.py has others."""

import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from sdp.storage.explain import classify

AT = "Error performing GET http://127.0.0.1:7070/bucket/key in 1.2ms"


def answered(status: str, code: str = "") -> str:
    body = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>m</Message></Error>' if code else ""
    line = f"Generic S3 error: {AT} - Server returned non-2xx status code: {status}: {body}"
    return f"{line}\n\nDebug source:\nGeneric {{}}"


def transport(kind: str, detail: str) -> str:
    return (
        f"Generic S3 error: {AT} - HTTP error: error sending request\n\nDebug source:\nGeneric {{\n inner: Http(\n"
        f"                HttpError {{\n                    kind: {kind},\n  source: {detail} }}"
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), "transient"),
        (GenericError('Generic HTTP client error: builder error … "No CA certificates were loaded …"'), "certificates"),
        (GenericError(answered("501 Not Implemented", "NotImplemented")), "other"),
        (GenericError(answered("400 Bad Request", "InvalidBucketName")), "bucket"),
        (GenericError(f"{AT} - Received redirect without LOCATION, this normally indicates …"), "region"),
        (GenericError(answered("404 Not Found", "NoSuchBucket")), "bucket"),
        (PreconditionError(answered("404 Not Found", "NoSuchBucket")), "bucket"),
        (PreconditionError(answered("404 Not Found", "NoSuchKey")), "changed"),
        (PreconditionError(answered("412 Precondition Failed", "PreconditionFailed")), "changed"),
        (AlreadyExistsError(answered("412 Precondition Failed", "PreconditionFailed")), "exists"),
        (AlreadyExistsError(answered("409 Conflict", "FileAlreadyExists")), "exists"),
        (AlreadyExistsError(answered("409 Conflict", "InvalidBucketState")), "other"),
        (AlreadyExistsError(answered("409 Conflict")), "exists"),
        (FileNotFoundError(answered("404 Not Found")), "missing"),
        (FileNotFoundError(answered("404 Not Found", "XAdminUserNotFound")), "denied"),
        (PermissionDeniedError(answered("403 Forbidden", "SignatureDoesNotMatch")), "denied"),
        (PermissionDeniedError(answered("403 Forbidden")), "denied"),
        (GenericError(answered("403 Forbidden", "AccessDenied")), "denied"),
        (GenericError(answered("416 Range Not Satisfiable", "InvalidRange")), "beyond"),
        (NotSupportedError("Operation not supported: Range request not supported by "), "unranged"),
        (GenericError("Generic S3 error: Received non-partial response when range requested"), "unranged"),
        (GenericError(answered("403 Forbidden").replace("bucket/key", "computeMetadata/v1/token")), "credentials"),
        (UnauthenticatedError("… path External AWS credential provider: ValueError: expired"), "denied"),
        (GenericError(transport("Connect", "kind: ConnectionRefused")), "transient"),
        (GenericError(transport("Connect", '"dns error"')), "transient"),
        (GenericError(transport("Timeout", "TimedOut")), "transient"),
        (GenericError(transport("Interrupted", "kind: ConnectionReset")), "transient"),
        (GenericError(transport("Request", "IncompleteMessage")), "transient"),
        (GenericError(transport("Connect", "InvalidCertificate(UnknownIssuer)")), "other"),
        (GenericError(transport("Connect", "InvalidMessage(InvalidContentType)")), "other"),
        (ValueError("whatever"), "other"),
    ],
)
def test_each_failure_has_its_kind(error: Exception, kind: str) -> None:
    failure = classify(error)
    assert failure.kind == kind, failure
    assert failure.cause
    assert "\n" not in failure.cause
    assert "Debug" not in failure.cause


def test_the_cause_is_the_servers_own_sentence_and_nothing_else_of_its_answer() -> None:
    body = (
        "<Error><Code>SignatureDoesNotMatch</Code><Message>Check your key &amp; method.</Message>"
        "<AWSAccessKeyId>AKSECRET</AWSAccessKeyId><StringToSign>SECRET</StringToSign></Error>"
    )
    cause = classify(PermissionDeniedError(f"{AT} - Server returned non-2xx status code: 403 Forbidden: {body}")).cause
    assert cause == "SignatureDoesNotMatch: Check your key & method"


def test_query_strings_never_reach_a_cause() -> None:
    text = "Generic HTTP error: Error performing GET https://h/a?X-Amz-Signature=SECRET in 1ms - odd"
    assert "SECRET" not in classify(GenericError(text)).cause
