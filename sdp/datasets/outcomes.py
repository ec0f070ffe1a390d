"""What can become of an address: the closed sets of outcomes and reasons, and the account that records them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidatorFunctionWrapHandler, WrapValidator

from sdp.datasets.records import Whole

WRITTEN, FILTERED, FAILED = "written", "filtered", "failed"
OUTCOMES = (WRITTEN, FILTERED, FAILED)

FILTER_REASONS: Mapping[str, str] = {
    "min_size": "an image side is below the minimum",
    "aspect": "too long or too wide",
    "similarity": "image and caption are not similar enough",
    "punsafe": "probably unsafe",
    "pwatermark": "probably watermarked",
    "aesthetic": "aesthetic score below the minimum",
    "blocked_url": "the URL is on a blocklist",
    "blocked_domain": "the domain is on a blocklist",
    "blocked_content": "the content's hash is on a blocklist",
    "duplicate_url": "a lower address has the same URL",
    "duplicate_content": "a lower address has the same content",
    "opt_out": "the site asks not to be used for training (X-Robots-Tag, robots.txt)",
    "tombstone": "on a takedown list",
}

FAILURE_REASONS: Mapping[str, str] = {
    "bad_row": "the source row itself is unusable",
    "bad_url": "not a URL that can be fetched",
    "no_caption": "the caption is empty or not text",
    "private_address": "the URL leads to a private, loopback or link-local address",
    "dns": "the host has no address",
    "connect": "no connection to the host",
    "tls": "the certificate or the TLS handshake is bad",
    "timeout": "no whole image within the deadline",
    "http_status": "the server answered with an error",
    "not_asked": "its host is left alone: it asked for a long pause, or could not be reached again and again",
    "redirects": "too many redirects, or one that leads nowhere",
    "broken_transfer": "the connection ended in the middle of the image",
    "too_big": "more bytes than allowed",
    "empty": "no bytes at all",
    "not_an_image": "the bytes are of no image type that is read here",
    "too_many_pixels": "more pixels than allowed",
    "no_memory": "decoding it takes more memory than allowed",
    "too_small": "fewer pixels than needed",
    "undecodable": "truncated or corrupt image",
    "not_finite": "NaN or infinite values came out of the encoder",
    "crashed": "its worker died on it, twice",
    "internal": "an error in sdp itself: please report it",
}

REASONS = {FILTERED: FILTER_REASONS, FAILED: FAILURE_REASONS}

ACCOUNT_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("attempts", pa.int16(), nullable=False),
    ]
)

DETAIL_LIMIT = 200
"""Characters of a detail that are kept: enough for a status or an exception, too few to bloat a footer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one address."""

    row: int
    outcome: str
    reason: str | None = None
    detail: str | None = None
    attempts: int = 1

    def __post_init__(self) -> None:
        known = REASONS.get(self.outcome)
        if self.outcome not in OUTCOMES or (self.reason is not None if known is None else self.reason not in known):
            raise ValueError(f"row {self.row}: no such outcome: {self.outcome}, reason {self.reason}")


@dataclass(frozen=True, slots=True)
class Counts:
    """How many addresses came to what; `input` is always the sum of the others."""

    written: Whole = 0
    filtered: Whole = 0
    failed: Whole = 0
    reasons: Mapping[str, Whole] = field(default_factory=dict)
    """Filtered and failed addresses by reason (the two sets of reasons have no name in common)."""

    @property
    def input(self) -> int:
        return self.written + self.filtered + self.failed

    def __add__(self, other: "Counts") -> "Counts":
        return self._combine(other, 1)

    def __sub__(self, other: "Counts") -> "Counts":
        return self._combine(other, -1)

    def _combine(self, other: "Counts", sign: int) -> "Counts":
        reasons = dict(self.reasons)
        for reason, count in other.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + sign * count
        return Counts(
            self.written + sign * other.written,
            self.filtered + sign * other.filtered,
            self.failed + sign * other.failed,
            {reason: count for reason, count in sorted(reasons.items()) if count},
        )

    def to_json(self) -> dict[str, Any]:
        counts = {
            "input": self.input,
            "written": self.written,
            "filtered": self.filtered,
            "failed": self.failed,
        }
        return {**counts, "reasons": dict(sorted(self.reasons.items()))}


def _adding_up(data: Any, validate: ValidatorFunctionWrapHandler) -> Counts:
    counts: Counts = validate(data)
    for name in (*OUTCOMES, "input"):
        if name not in data:
            raise ValueError(f"counts.{name}: missing")
    if counts.input != data["input"]:
        sums = " + ".join(str(data[name]) for name in OUTCOMES)
        raise ValueError(f"counts do not add up: {sums} is not {data['input']}")
    return counts


StoredCounts = Annotated[Counts, WrapValidator(_adding_up)]
"""Counts as JSON keeps them: with their sum, `input`."""


def account_table(outcomes: Sequence[Outcome]) -> pa.Table:
    """The account of some addresses, by address."""
    ordered = sorted(outcomes, key=lambda o: o.row)
    columns: dict[str, list[Any]] = {name: [getattr(o, name) for o in ordered] for name in ACCOUNT_SCHEMA.names}
    columns["detail"] = [d and clean_detail(d) for d in columns["detail"]]
    return pa.table(columns, schema=ACCOUNT_SCHEMA)


def clean_detail(detail: str) -> str:
    """One short line of valid text, whatever an exception or a server said."""
    line = " ".join(detail.encode("utf-8", "replace").decode("utf-8").split())
    return line if len(line) <= DETAIL_LIMIT else line[: DETAIL_LIMIT - 1] + "…"


def count(account: pa.Table) -> Counts:
    """The counts of an account."""
    by_outcome = {v["values"]: v["counts"] for v in pc.value_counts(account["outcome"]).to_pylist()}
    refused = account.filter(pc.field("outcome") != WRITTEN)
    reasons = {v["values"]: v["counts"] for v in pc.value_counts(refused["reason"]).to_pylist()}
    written, filtered, failed = (by_outcome.get(outcome, 0) for outcome in OUTCOMES)
    return Counts(written, filtered, failed, dict(sorted(reasons.items())))
