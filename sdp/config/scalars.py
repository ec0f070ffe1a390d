"""Plain YAML scalars, by YAML 1.2 as in JSON: `no` is text, `1e-4` is a number, `1:30` and `2024-01-01` are text."""

import math
import re

_NULL = re.compile(r"(?:~|null|Null|NULL|)")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)")
_INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_LONGEST_NUMBER = 1000
"""Characters; longer scalars are text, since Python refuses to parse thousands of digits."""
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def parse_scalar(text: str) -> str | int | float | bool | None:
    """Parse a plain scalar by YAML 1.2's core schema, with `_` allowed between digits."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    if _FLOAT.fullmatch(text):
        return _number(float(text), exponent="e" in text.lower())
    return text


def _number(value: float, *, exponent: bool) -> int | float:
    # People write 1e9, and Helm writes large whole numbers as 1.1264e+09.
    return int(value) if exponent and math.isfinite(value) and value.is_integer() and abs(value) < 2**53 else value
