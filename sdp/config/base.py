"""Sections of keys: what makes a configuration, and how its keys are described."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sdp.config import phrases
from sdp.errors import Problem

REQUIRED: Any = ...
"""Marks a key without a default."""

DRAFT = "draft"
"""The validation context of an incomplete configuration, which may contradict itself."""


class Section(BaseModel):
    """A group of keys, strictly typed: an unknown key, a quoted number and `true` for a number are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=False,
        use_attribute_docstrings=True,
        defer_build=True,  # a command needs the models of one job only
    )

    def replaced(self, **values: Any) -> Self:
        """Return a copy with these values; None keeps a key's present one."""
        return self.model_copy(update={name: value for name, value in values.items() if value is not None})

    def with_defaults(self, **values: Any) -> Self:
        """Return a copy with these values for keys that are not set; None keeps the default."""
        return self.replaced(**{name: value for name, value in values.items() if name not in self.model_fields_set})

    def settled(self) -> Self:
        """Return a copy with the defaults that depend on other keys."""
        return self

    def contradictions(self) -> Iterable[Problem]:
        """Yield combinations of keys that cannot work, with paths relative to this section."""
        return ()

    def problem(self, path: str, expected: str, hint: str = "", got: str = "") -> Problem:
        """Return the problem with a key of this section; `got` is printed instead of its value."""
        return Problem(path, expected, got or phrases.got(reduce(getattr, path.split("."), self)), hint)

    @model_validator(mode="after")
    def _settle(self, info: ValidationInfo) -> Self:
        settled = self.settled()
        problems = () if info.context == DRAFT else tuple(settled.contradictions())
        if problems:
            raise phrases.refusal(*problems)
        return settled


def key(default: Any, *, shapes_output: bool = False, example: Any = None, **limits: Any) -> Any:
    """Declare a key with its default: REQUIRED, a value, or a Section class. The docstring below is its `purpose`.

    `shapes_output` marks a key that decides the output's content: it may not change once the output has been begun.
    Other keys (concurrency, deadlines) may change from run to run. `limits` are pydantic's (ge, gt, le, lt,
    multiple_of, min_length).
    """
    is_section = isinstance(default, type) and issubclass(default, Section)
    limits |= {"default_factory" if is_section else "default": default}
    examples = None if example is None else [example]
    return Field(**limits, examples=examples, json_schema_extra={"shapes_output": shapes_output})


def purpose(field: FieldInfo) -> str:
    """Return the docstring below a key, as one line."""
    return " ".join((field.description or "").split())


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a job, for documentation, errors and identities."""

    path: str
    field: FieldInfo
    section: type[Section]

    @property
    def what(self) -> str:
        return purpose(self.field)

    @property
    def default(self) -> Any:
        return None if self.field.default is PydanticUndefined else self.field.default

    @property
    def example(self) -> Any:
        return (self.field.examples or [None])[0]

    @property
    def shapes_output(self) -> bool:
        extra = self.field.json_schema_extra
        return bool(extra.get("shapes_output")) if isinstance(extra, dict) else False


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the class of a field that is a section, else None."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def fields(model: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield a section's fields in the order of declaration, but `storage` last."""
    yield from sorted(model.model_fields.items(), key=lambda item: item[0] == "storage")


def keys(model: type[Section], path: str = "") -> Iterator[Key]:
    """Yield every key of a model and of its sections."""
    for name, field in fields(model):
        if inner := section_of(field):
            yield from keys(inner, f"{path}{name}.")
        else:
            yield Key(path + name, field, model)


def changed(model: type[Section], values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the JSON values that differ from a model's defaults, by dotted path; unknown keys count as different."""
    different: dict[str, Any] = {}
    for name, value in values.items():
        field = model.model_fields.get(name)
        inner = section_of(field) if field else Section
        default = field.get_default(call_default_factory=True) if field else None
        if inner and isinstance(value, Mapping):
            different |= changed(inner, value, f"{path}{name}.")
        elif field is None or value != (list(default) if isinstance(default, tuple) else default):
            different[path + name] = value
    return different
