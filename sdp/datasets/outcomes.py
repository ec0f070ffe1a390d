"""The possible outcomes of an address with their reasons, and the account that records them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

from sdp.datasets.records import Whole
from sdp.errors import shortened

WRITTEN, FILTERED, FAILED = "written", "filtered", "failed"
OUTCOMES = (WRITTEN, FILTERED, FAILED)
TAKEN_DOWN, REPEATED = "taken_down", "repeated"
"""Outcomes in an account for other readers: rows that are in a part, but that every reader leaves out."""

SCORE = "score"
"""The reason that names a column, such as score:aesthetic."""

FILTER_REASONS: Mapping[str, str] = {
    "min_size": "an image side is below the minimum",
    "aspect": "too long or too wide",
    "blocked_url": "the URL is on a blocklist",
    "blocked_domain": "the domain is on a blocklist",
    "blocked_content": "the content's hash is on a blocklist",
    "duplicate_url": "a lower address has the same URL",
    "duplicate_content": "a lower address has the same content",
    "opt_out": "the site asks not to be used for training (X-Robots-Tag, robots.txt)",
    "tombstone": "taken down",
    SCORE: "outside the bounds of a filter, whose column is named",
    "not_in_table": "no entry in a table of source.tables",
}

FAILURE_REASONS: Mapping[str, str] = {
    "bad_row": "the source row itself is unusable",
    "bad_url": "not a URL that can be fetched",
    "no_caption": "the caption is empty or not text",
    "private_address": "the URL leads to a private, loopback or link-local address; fetch.allow_networks allows some",
    "dns": "the host has no address",
    "connect": "no connection to the host",
    "tls": "the certificate or the TLS handshake is bad",
    "timeout": "no whole image within the deadline",
    "http_status": "the server answered with an error",
    "not_asked": "not requested: its host asked for a long pause, or could not be reached several times",
    "redirects": "too many redirects, or one that leads nowhere",
    "broken_transfer": "the connection ended in the middle of the image",
    "too_big": "more bytes than allowed",
    "empty": "no bytes at all",
    "not_an_image": "the bytes are of no supported image type",
    "too_many_pixels": "more pixels than allowed",
    "no_memory": "it takes more memory to decode than allowed",
    "too_small": "fewer pixels than needed",
    "undecodable": "truncated or corrupt image",
    "not_finite": "NaN or infinite values came out of the encoder",
    "empty_answer": "the model has nothing to say",
    "refused": "the model declines to describe the picture",
    "repetitive": "the model repeats the same words",
    "cut_off": "the answer does not end before max_tokens",
    "bad_answer": "the server's answer is not one of a chat",
    "crashed": "it crashed its worker, twice",
    "internal": "an error in sdp itself: please report it",
}

REASONS = {FILTERED: FILTER_REASONS, FAILED: FAILURE_REASONS}


def rule_of(reason: str) -> str:
    """Return a reason without the column that it names, such as score for score:aesthetic."""
    return reason.partition(":")[0]


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
"""Characters kept of a detail: enough for a status or an exception, too few to bloat a footer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one address."""

    row: int
    outcome: str
    reason: str | None = None
    detail: str | None = None
    attempts: int = 1

    def __post_init__(self) -> None:
        known = REASONS.get(self.outcome)
        is_misplaced = self.reason is not None if known is None else rule_of(self.reason or "") not in known
        if self.outcome not in OUTCOMES or is_misplaced:
            raise ValueError(f"row {self.row}: no such outcome: {self.outcome}, reason {self.reason}")


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of addresses by outcome; `input` is always the sum of the others."""

    written: Whole = 0
    filtered: Whole = 0
    failed: Whole = 0
    reasons: Mapping[str, Whole] = field(default_factory=dict)
    """Filtered and failed addresses by reason; no reason is in both sets."""

    @property
    def input(self) -> int:
        return self.written + self.filtered + self.failed

    def __add__(self, other: "Counts") -> "Counts":
        written, filtered, failed = (getattr(self, name) + getattr(other, name) for name in OUTCOMES)
        reasons = Counter(self.reasons) + Counter(other.reasons)
        return Counts(written, filtered, failed, dict(sorted(reasons.items())))

    def to_json(self) -> dict[str, Any]:
        outcomes = {name: getattr(self, name) for name in ("input", *OUTCOMES)}
        return {**outcomes, "reasons": dict(sorted(self.reasons.items()))}


def _checked_sum(data: Any, validate: ValidatorFunctionWrapHandler) -> Counts:
    """Return the counts in a record; refuse them if their stored sum is wrong."""
    counts: Counts = validate(data)
    for name in (*OUTCOMES, "input"):
        if name not in data:
            raise ValueError(f"counts.{name}: missing")
    if counts.input != data["input"]:
        sums = " + ".join(str(data[name]) for name in OUTCOMES)
        raise ValueError(f"counts do not add up: {sums} is not {data['input']}")
    return counts


StoredCounts = Annotated[Counts, WrapValidator(_checked_sum), PlainSerializer(Counts.to_json)]
"""Counts in JSON, with their sum as `input`."""


def account_table(outcomes: Sequence[Outcome]) -> pa.Table:
    """Return the account of some addresses, by address."""
    ordered = sorted(outcomes, key=lambda o: o.row)
    columns: dict[str, list[Any]] = {name: [getattr(o, name) for o in ordered] for name in ACCOUNT_SCHEMA.names}
    columns["detail"] = [d and clean_detail(d) for d in columns["detail"]]
    return pa.table(columns, schema=ACCOUNT_SCHEMA)


def relabelled(account: pa.Table, mask: Sequence[bool] | NDArray[np.bool_], outcome: str, reason: str) -> pa.Table:
    """Return an account with another outcome for those of its written rows that a mask selects."""
    chosen = pc.and_(pa.array(mask, pa.bool_()), pc.equal(account["outcome"], WRITTEN))
    for name, value in (("outcome", outcome), ("reason", reason)):
        at = account.schema.get_field_index(name)
        changed = pc.if_else(chosen, pa.scalar(value, account.schema.field(at).type), account[name])
        account = account.set_column(at, account.schema.field(at), changed)
    return account


def clean_detail(detail: str) -> str:
    """Return a detail as one short line of valid text."""
    line = " ".join(detail.encode("utf-8", "replace").decode("utf-8").split())
    return shortened(line, DETAIL_LIMIT)


def count(account: pa.Table) -> Counts:
    """Count the outcomes of an account."""
    by_outcome = {v["values"]: v["counts"] for v in pc.value_counts(account["outcome"]).to_pylist()}
    refused = account.filter(pc.field("outcome") != WRITTEN)
    reasons = {v["values"]: v["counts"] for v in pc.value_counts(refused["reason"]).to_pylist()}
    written, filtered, failed = (by_outcome.get(outcome, 0) for outcome in OUTCOMES)
    return Counts(written, filtered, failed, dict(sorted(reasons.items())))
