"""Expected and actual values of keys, in words."""

import json
import types
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from sdp.console import either
from sdp.errors import Problem, shortened


@dataclass(frozen=True, slots=True)
class Says:
    """The phrase for a key's expected value in errors, where its type alone would be unclear."""

    phrase: str


def refusal(*problems: Problem) -> PydanticCustomError:
    """Return an error for a validator to raise; `explain` reports these problems of the value that it validates."""
    return PydanticCustomError("refused", "{text}", {"text": "\n".join(map(str, problems)), "problems": problems})


def expected(field: FieldInfo) -> str:
    """Return the phrase for a key's value, such as `a whole number of 1 or more, or null` or `ddp or fsdp`."""
    return phrase(field.annotation, field.metadata)


def phrase(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """Return the phrase for an annotation."""
    annotation, metadata = unwrap(annotation, metadata)
    for item in metadata:
        if isinstance(item, Says):
            return item.phrase
    members = union_members(annotation)
    if type(None) in members:
        rest = tuple(member for member in members if member is not type(None))
        words = phrase(rest[0] if len(rest) == 1 else Union[rest], metadata)  # noqa: UP007 - built at run time
        return f"{words}, or null" if "," in words or " or " in words else f"{words} or null"
    if members:
        return either([phrase(member) for member in members])
    if get_origin(annotation) is Literal:
        return either([str(choice) for choice in get_args(annotation)])
    if get_origin(annotation) is tuple:
        least = _limits(metadata).get("min_length", 0)
        return f"a list{' of one or more' if least else ''}, each {phrase(get_args(annotation)[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping ({', '.join(annotation.model_fields)})"
    return _scalar(annotation, _limits(metadata))


def unwrap(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> tuple[Any, list[Any]]:
    """Return an annotation without Annotated, and all of its metadata."""
    gathered = list(metadata)
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        for item in more:
            gathered += [*item.metadata] if isinstance(item, FieldInfo) else [item]
    return annotation, gathered


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; none for any other annotation."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()


def got(value: Any) -> str:
    """Return a value for an error: as in YAML, and shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return shortened(repr(value), 60)


def _scalar(annotation: Any, limits: dict[str, Any]) -> str:
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "some text" if limits.get("min_length") else "text"
    if annotation is date:
        return "a date such as 2026-01-31"
    words = "a whole number" if annotation is int else "a number"
    low, high = limits.get("ge"), limits.get("le")
    if low is not None and high is not None:
        words += f" from {_number(low)} to {_number(high)}"
    elif low is not None:
        words += f" of {_number(low)} or more"
    elif high is not None:
        words += f" of {_number(high)} or less"
    if (above := limits.get("gt")) is not None:
        words += f" above {_number(above)}"
    if (below := limits.get("lt")) is not None:
        words += f" and below {_number(below)}" if low is not None or above is not None else f" below {_number(below)}"
    if (step := limits.get("multiple_of")) is not None:
        words += f", divisible by {_number(step)}"
    return words


def _number(value: float) -> str:
    """Return whole numbers in full: 1000000 rather than 1e+06."""
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:g}"


def _limits(metadata: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
    names = ("ge", "gt", "le", "lt", "multiple_of", "min_length")
    return {name: getattr(item, name) for item in metadata for name in names if hasattr(item, name)}
