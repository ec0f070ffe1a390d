"""What the API server says when it does not do what was asked, as one line each."""

import json
from typing import Any

from sdp.errors import SdpError, UserError

OPERATOR_HINT = "install the KubeRay operator, 1.7 or later, and its CRDs"


class Unreachable(SdpError):
    """Nobody answered, or not in time, or with something that passes: trying again may help."""


class Forbidden(UserError):
    """These credentials may not do that."""


class Missing(UserError):
    """There is no such object."""


class NoSuchKind(UserError):
    """The cluster does not know this kind of object at all: a CRD is missing."""


class AlreadyThere(UserError):
    """There is an object of that name."""


def explain(method: str, path: str, status: int, body: bytes) -> SdpError:
    """The error that an answer of 400 or more means."""
    told = _status(body)
    words = _one_line(told.get("message") or body.decode("utf-8", "replace")) or f"answer {status}"
    if status == 401:
        return UserError(
            "kubernetes: the API server does not take these credentials (401); log in again, or take another --context"
        )
    if status == 403 and "system:anonymous" in words:
        return UserError(
            "kubernetes: no credentials were sent; the login of this context has failed (kubectl would say why)"
        )
    if status == 403:
        return Forbidden(f"kubernetes: {words}; ask for that right, or take another --context or --namespace")
    if status == 404 and told.get("reason") == "NotFound" and (told.get("details") or {}).get("name"):
        return Missing(f"kubernetes: {words}")
    if status == 404:
        hint = f"; {OPERATOR_HINT}" if path.startswith("/apis/ray.io/") else ""
        return NoSuchKind(f"kubernetes: this cluster does not serve {path.partition('?')[0]}{hint}")
    if status == 409 and told.get("reason") == "AlreadyExists":
        return AlreadyThere(f"kubernetes: {words}")
    if status in (409, 429) or status >= 500:
        return Unreachable(f"kubernetes: {method} {path.partition('?')[0]}: {words} ({status}); try again")
    return UserError(f"kubernetes: {words} ({status})")


def _status(body: bytes) -> dict[str, Any]:
    """The `Status` object that the API server describes an error with; {} where it is something else."""
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) and told.get("kind") == "Status" else {}


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:399]}…"
