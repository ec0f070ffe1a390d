"""What counts as a URI in a configuration. Pure checks: nothing is opened."""

import os.path
from urllib.parse import parse_qsl, urlsplit

from pydantic_core import PydanticCustomError

READABLE = ("file", "s3", "gs", "https", "http", "hf")
WRITABLE = ("file", "s3", "gs")

# Query parameters that carry a credential. A configuration is saved beside everything made with it.
_SECRET_PARAMETERS = frozenset(
    {"access_token", "sig", "signature", "token", "x-amz-security-token", "x-amz-signature", "x-goog-signature"}
)


def check_uri(value: str) -> str:
    """A URI that can be read."""
    return _check(value, READABLE)


def check_folder_uri(value: str) -> str:
    """A URI that can be written."""
    return _check(value, WRITABLE)


def check_endpoint(value: str) -> str:
    """The address of a store. Whether it is one is seen when it is asked; what must never be in it is seen here."""
    try:
        parts = urlsplit(value)
    except ValueError as error:
        raise _problem("an address such as https://host:port", "one that cannot be read", str(error)) from None
    if "@" in parts.netloc or "@" in value or parts.query:
        raise _problem(
            "an address without credentials",
            f"one with them, or with a query ({parts.scheme or 'https'}://…)",
            "they belong in the environment: a configuration is saved with everything made from it",
        )
    return value


def _check(value: str, schemes: tuple[str, ...]) -> str:
    if not value.strip() or value != value.strip() or any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise _problem("a URI", repr(value), "give a path or one of " + _listed(schemes))
    if "://" not in value:
        return value  # a local path
    scheme = value.split("://", 1)[0]
    if scheme not in schemes:
        raise _problem("a local path, " + _listed(schemes), repr(_without_query(value)))
    try:
        parts = urlsplit(value)
    except ValueError as error:
        raise _problem("a URI", repr(value), str(error)) from None
    # Such a value is not repeated in the message: messages are logged.
    if "@" in parts.netloc or _SECRET_PARAMETERS & {name.lower() for name, _ in parse_qsl(parts.query)}:
        raise _problem(
            "a URI without credentials",
            f"one with them ({scheme}://…)",
            "they belong in the environment: a configuration is saved with everything made from it",
        )
    if scheme != "file" and not parts.netloc:
        raise _problem("a URI", repr(value), f"name the bucket or host after {scheme}://")
    return value


def _without_query(value: str) -> str:
    return value.split("?", 1)[0].rsplit("@", 1)[-1]


def _listed(schemes: tuple[str, ...]) -> str:
    *most, last = (f"{scheme}://" for scheme in schemes)
    return f"{', '.join(most)} or {last}"


def _problem(expected: str, got: str, hint: str = "") -> PydanticCustomError:
    context = {"expected": expected, "got": got, "hint": hint}
    return PydanticCustomError("expected", "expected {expected}, got {got}", context)


def inside(uri: str, folder: str) -> bool:
    """Whether a place is a folder or in it."""
    here, there = _normal(uri), _normal(folder)
    return here == there or here.startswith(f"{there.rstrip('/')}/")


def _normal(uri: str) -> str:
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return os.path.abspath(os.path.expanduser(rest if separator else uri))  # noqa: PTH100, PTH111 (no resolving)
    return f"{scheme}://{rest.rstrip('/')}"
