"""Checks of URIs in a configuration. Nothing is opened."""

import os.path
import re
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic_core import PydanticCustomError

from sdp.config.phrases import refusal
from sdp.console import either
from sdp.errors import Problem

READABLE = ("file", "s3", "gs", "https", "http", "hf")
WRITABLE = ("file", "s3", "gs")

# Parameters that carry a credential; a configuration is saved with every output.
_SECRET = re.compile(
    r"(.*[-_])?(token|secret|password|passwd|pwd|credential|signature|sig|jwt)|auth(orization)?"
    r"|(.*[-_])?(api|access|private|subscription)[-_]?key([-_]?id)?|awsaccesskeyid",
    re.IGNORECASE,
)
_ELSEWHERE = "set them in the environment, since configurations are saved with every output"


def check_endpoint(value: str) -> str:
    """Refuse credentials in the address of a store; the first request checks the rest."""
    try:
        parts = urlsplit(value)
    except ValueError as error:
        raise problem("an address such as https://host:port", "one that cannot be read", str(error)) from None
    if "@" in parts.netloc or "@" in value or parts.query:
        got = f"one with them, or with a query ({parts.scheme or 'https'}://…)"
        raise problem("an address without credentials", got, _ELSEWHERE)
    return value


def check_uri(value: str, schemes: tuple[str, ...]) -> str:
    """Check a local path, or a URI of one of these schemes."""
    if not value.strip() or value != value.strip() or any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise problem("a URI", repr(value), "give a path or one of " + either([f"{name}://" for name in schemes]))
    if "://" not in value:
        return value  # a local path
    scheme = value.split("://", 1)[0]
    if scheme not in schemes:
        raise problem("a local path, " + either([f"{name}://" for name in schemes]), repr(_without_query(value)))
    try:
        parts = urlsplit(value)
    except ValueError as error:
        raise problem("a URI", repr(value), str(error)) from None
    # The value is not repeated, since messages are logged.
    parameters = [name for name, _ in parse_qsl(f"{parts.query}&{parts.fragment}") if scheme in ("http", "https")]
    if "@" in parts.netloc or any(map(_SECRET.fullmatch, parameters)):
        raise problem("a URI without credentials", f"one with them ({scheme}://…)", _ELSEWHERE)
    if scheme != "file" and not parts.netloc:
        raise problem("a URI", repr(value), f"name the bucket or host after {scheme}://")
    return value


def _without_query(value: str) -> str:
    return value.split("?", 1)[0].rsplit("@", 1)[-1]


def problem(expected: str, got: str, hint: str = "") -> PydanticCustomError:
    """Return the error of a validator of one value."""
    return refusal(Problem("", expected, got, hint))


def inside(uri: str, folder: str) -> bool:
    """Return whether a URI is a folder or in it."""
    inner, outer = _normal(uri), _normal(folder)
    return inner == outer or inner.startswith(f"{outer.rstrip('/')}/")


def _normal(uri: str) -> str:
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        path = unquote(urlsplit(uri).path) if separator else os.path.expanduser(uri)  # noqa: PTH111 (Path's raises for an unknown user)
        return os.path.abspath(path)  # noqa: PTH100 (no resolving)
    return f"{scheme}://{rest.rstrip('/')}"
