"""What a key expects and what it got, in words."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from sdp.config.base import Says, Section

_LONGEST = 60


def expected(field: FieldInfo) -> str:
    """What a key expects: `a number above 0`, `ddp or fsdp`, `a whole number of 1 or more, or null`."""
    return phrase(field.annotation, field.metadata)


def phrase(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """The same for a bare annotation."""
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
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"a mapping ({', '.join(annotation.model_fields)})"
    return _scalar(annotation, _limits(metadata))


def unwrap(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> tuple[Any, list[Any]]:
    """An annotation without Annotated, and all the metadata that belongs to it."""
    gathered = list(metadata)
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        for item in more:
            gathered += [*item.metadata] if isinstance(item, FieldInfo) else [item]
    return annotation, gathered


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; none for anything else."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()


def either(words: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def got(value: Any) -> str:
    """A value as an error shows it, as YAML would have it and never at length."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _scalar(annotation: Any, limits: dict[str, Any]) -> str:
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "some text" if limits.get("min_length") else "text"
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
    """Whole numbers in full: 1000000, where Python would say 1e+06."""
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:g}"


def _limits(metadata: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in metadata:
        match item:
            case annotated_types.Ge():
                found["ge"] = item.ge
            case annotated_types.Gt():
                found["gt"] = item.gt
            case annotated_types.Le():
                found["le"] = item.le
            case annotated_types.Lt():
                found["lt"] = item.lt
            case annotated_types.MultipleOf():
                found["multiple_of"] = item.multiple_of
            case annotated_types.MinLen():
                found["min_length"] = item.min_length
    return found
