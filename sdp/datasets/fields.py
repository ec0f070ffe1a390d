"""JSON that lies beside a dataset, checked field by field as it comes in: what reads on has what it should be."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sdp.errors import DatasetError, one_line

LARGEST = 1 << 53
"""What a number of JSON holds exactly."""

_REQUIRED: Any = object()


class BadField(ValueError):
    """A field that is not what it should be: which, what was expected, what is there."""


class Fields:
    """A JSON object, from which each field is taken as what it has to be."""

    def __init__(self, data: object, path: str = "") -> None:
        """`path` is where it stands in the file, such as `counts`."""
        if not isinstance(data, Mapping):
            raise BadField(f"{path or 'the whole of it'}: expected a mapping, got {_shown(data)}")
        self._data, self._path = data, path

    def whole(self, name: str, default: Any = _REQUIRED, *, low: int = 0, high: int = LARGEST) -> int:
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._bad(name, f"a whole number from {low} to {high}", value)
        return value

    def number(self, name: str, *, above: float, high: float) -> float:
        value = self._get(name, _REQUIRED)
        if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= high:
            raise self._bad(name, f"a number above {above:g}, {high:g} at most", value)
        return float(value)

    def truth(self, name: str) -> bool:
        value = self._get(name, _REQUIRED)
        if not isinstance(value, bool):
            raise self._bad(name, "true or false", value)
        return value

    def text(self, name: str, default: Any = _REQUIRED, *, like: str = r"(?s).*", what: str = "some text") -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or not re.fullmatch(like, value):
            raise self._bad(name, what, value)
        return value

    def mapping(self, name: str, default: Any = _REQUIRED) -> dict[str, Any]:
        value = self._get(name, default)
        if not isinstance(value, Mapping):
            raise self._bad(name, "a mapping", value)
        return dict(value)

    def texts(self, name: str, default: Any = _REQUIRED) -> dict[str, str]:
        return {key: self._inner(name, default).text(key) for key in self.mapping(name, default)}

    def wholes(self, name: str, default: Any = _REQUIRED) -> dict[str, int]:
        return {key: self._inner(name, default).whole(key) for key in self.mapping(name, default)}

    def list_of_wholes(self, name: str) -> list[int]:
        numbered = Fields({str(at): value for at, value in enumerate(self._list(name))}, self._at(name))
        return [numbered.whole(at) for at in numbered._data]

    def list_of_texts(self, name: str, default: Any = _REQUIRED) -> list[str]:
        numbered = Fields({str(at): value for at, value in enumerate(self._list(name, default))}, self._at(name))
        return [numbered.text(at) for at in numbered._data]

    def has(self, name: str) -> bool:
        """Whether there is such a field, other than null."""
        return self._data.get(name) is not None

    def inner(self, name: str) -> "Fields":
        """A mapping in it, to be taken apart likewise."""
        return self._inner(name, _REQUIRED)

    def _inner(self, name: str, default: Any) -> "Fields":
        return Fields(self._get(name, default), self._at(name))

    def _list(self, name: str, default: Any = _REQUIRED) -> list[Any]:
        value = self._get(name, default)
        if not isinstance(value, list):
            raise self._bad(name, "a list", value)
        return value

    def _get(self, name: str, default: Any) -> Any:
        if name in self._data:
            return self._data[name]
        if default is _REQUIRED:
            raise BadField(f"{self._at(name)}: missing")
        return default

    def _at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _bad(self, name: str, expected: str, got: object) -> BadField:
        return BadField(f"{self._at(name)}: expected {expected}, got {_shown(got)}")


@contextmanager
def reading(where: str, hint: str) -> Iterator[None]:
    """Turn what a file's content lacks, or has of another type, into one line that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, ZeroDivisionError) as error:
        cause = one_line(f"{type(error).__name__}: {error}", 120)
        raise DatasetError(f"{where}: not what sdp writes there ({cause}); {hint}") from error


def _shown(value: object) -> str:
    if isinstance(value, list | Mapping):
        return "a list" if isinstance(value, list) else "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
