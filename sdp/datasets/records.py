"""JSON records stored beside a dataset: dataclasses that pydantic reads, checks and writes."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, TypeVar

from pyarrow import ArrowException
from pydantic import Field, TypeAdapter, ValidationError

from sdp.config.phrases import got
from sdp.errors import DatasetError, one_line

T = TypeVar("T")

LARGEST = 1 << 53
"""The largest whole number that every JSON reader keeps exactly."""
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Identifier = Annotated[str, Field(pattern="^[a-z_]{1,40}$")]
"""The name of a kind of dataset or of a job."""


_FAULTS = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, ArrowException)
"""Exceptions that malformed content leads to."""


class BadRecord(ValueError):
    """A malformed record; the message names the field, what was expected and what was read."""


def parse(kind: type[T], data: bytes | Mapping[str, Any]) -> T:
    """Read a record of this dataclass from JSON; fields that only a newer sdp knows are ignored."""
    try:
        text = data if isinstance(data, bytes) else json.dumps(data)
        record: T = _adapter(kind).validate_json(text, strict=True)  # type: ignore[arg-type]  # classes are hashable
        return record
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
    path = ".".join(map(str, problem["loc"])) or "the record"
    if problem["type"] == "missing":
        raise BadRecord(f"{path}: missing")
    if problem["type"] == "value_error":  # raised by a validator of sdp's, which names the field
        raise BadRecord(problem["msg"].removeprefix("Value error, "))
    expected = problem["msg"].removeprefix("Input should be ")
    raise BadRecord(f"{path}: expected {expected}, got {got(problem['input'])}")


def dump(record: Any) -> bytes:
    """Write a record as the JSON that `parse` reads."""
    adapter = _adapter(type(record))  # type: ignore[arg-type]  # classes are hashable
    data = adapter.dump_python(record, mode="json", fallback=str)
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


@contextmanager
def reading(where: str, hint: str, fault: str = "malformed") -> Iterator[None]:
    """Turn errors from malformed content into one line that names the file, the fault and its cause."""
    try:
        yield
    except _FAULTS as error:
        cause = error if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        raise DatasetError(f"{where}: {fault} ({one_line(cause, 160)}); {hint}") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
