"""Failures of a request: their reason, and whether a retry may help."""

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import pycurl

from sdp.datasets.outcomes import FAILED

RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 527, 529})
THROTTLING_STATUSES = frozenset({429, 503})
REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})

_CERTIFICATE = frozenset({pycurl.E_PEER_FAILED_VERIFICATION, pycurl.E_SSL_CACERT, pycurl.E_SSL_ISSUER_ERROR})
_TLS = _CERTIFICATE | {code for name, code in vars(pycurl).items() if name.startswith("E_SSL_")}
_REASONS = {
    **dict.fromkeys(_TLS, "tls"),
    pycurl.E_COULDNT_RESOLVE_HOST: "dns",
    pycurl.E_COULDNT_CONNECT: "connect",
    pycurl.E_OPERATION_TIMEDOUT: "timeout",
    pycurl.E_FILESIZE_EXCEEDED: "too_big",
    pycurl.E_URL_MALFORMAT: "bad_url",
    pycurl.E_OUT_OF_MEMORY: "internal",
}
"""By libcurl's error code. Any other means a broken transfer: cut short, reset, closed, not HTTP, a malformed chunk."""
_UNREACHABLE = frozenset({"dns", "connect"})
LONGEST_BELIEVED_S = 86_400.0
"""The longest Retry-After that is believed; servers have asked for eight thousand years."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a request brought no image."""

    reason: str
    detail: str
    outcome: str = FAILED
    retry: bool = False
    retry_after: float | None = None
    """Seconds that the server asked for."""

    @property
    def unreachable(self) -> bool:
        """Return whether the host could not be connected to."""
        return self.reason in _UNREACHABLE

    @property
    def silent(self) -> bool:
        """Return whether the host was connected to and did not answer."""
        return self.reason == "timeout"


def of_curl(code: int, message: str, *, connected: bool) -> Failure:
    """Return the failure behind one of libcurl's error codes."""
    detail = " ".join(message.split())[:160] or pycurl.Curl().errstr() or f"libcurl error {code}"
    reason = _REASONS.get(code, "broken_transfer")
    if message.startswith("Resolving timed out"):
        reason = "dns"
    elif reason == "timeout" and not connected:
        reason = "connect"
    return Failure(reason, detail, retry=reason not in ("too_big", "bad_url") and code not in _CERTIFICATE)


def of_multi(error: pycurl.error) -> Failure:
    """Return the failure of a transfer that libcurl could not start, or that it dropped with all others."""
    return Failure("internal", f"libcurl: {error.args[-1]}", retry=True)


def of_status(status: int, retry_after: float | None) -> Failure:
    detail = str(status)
    if retry_after is not None:
        long = retry_after >= LONGEST_BELIEVED_S
        detail += f", Retry-After {'of a day or more' if long else f'{retry_after:.0f} s'}"
    return Failure("http_status", detail, retry=status in RETRIED_STATUSES, retry_after=retry_after)


def retry_after_s(value: str, now: datetime | None = None) -> float | None:
    """Parse a Retry-After header, a number or a date, to at most LONGEST_BELIEVED_S; None for anything else."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(LONGEST_BELIEVED_S, float(value[:9]))
    if (date := moment(value)) is None:
        return None
    return min(LONGEST_BELIEVED_S, max(0.0, (date - (now or datetime.now(UTC))).total_seconds()))


def moment(value: str) -> datetime | None:
    """Parse a date of HTTP's; None for anything else."""
    try:
        date = parsedate_to_datetime(value.strip())
    except (ValueError, OverflowError):
        return None
    return date.replace(tzinfo=UTC) if date.tzinfo is None else date
