"""Errors of pydantic in sdp's words: the key, what was expected, what was found, and what to do."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sdp.config.base import Section, keys
from sdp.config.jobs import JOBS
from sdp.config.phrases import expected, got, phrase, union_members, unwrap
from sdp.config.shared import JobConfig
from sdp.console import nearest
from sdp.errors import Problem

KeyLocation = tuple[int | str, ...]
_MOST = 100
"""Limit on the errors that are explained, since each takes some milliseconds."""


def explain(error: ValidationError, model: type[Section], data: Mapping[str, Any]) -> list[Problem]:
    """Return one problem for each key at fault, in the order of the keys."""
    by_path: dict[str, Problem] = {}
    errors = error.errors(include_url=False)
    for detail in errors[:_MOST]:
        for problem in _problems(detail, model, data):
            by_path.setdefault(problem.path, problem)
    problems = [*by_path.values()]
    if len(errors) > _MOST:
        limit = f"at most {_MOST} problems"
        problems.append(Problem("configuration", limit, f"{len(errors):,}", "the others are not listed"))
    return problems


def value_at(data: Any, location: KeyLocation) -> Any:
    """Return the value at a location of plain data; None if there is none."""
    for part in location:
        if isinstance(data, Mapping):
            data = data.get(str(part))
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _problems(detail: ErrorDetails, model: type[Section], data: Mapping[str, Any]) -> Iterator[Problem]:
    kind, context = detail["type"], detail.get("ctx", {})
    location, expectation, siblings = _locate(model, detail["loc"], data)
    if location is None:
        return
    path = ".".join(map(str, location))
    value = value_at(data, location)
    if kind == "refused":
        for problem in context["problems"]:
            yield replace(problem, path=".".join(filter(None, (path, problem.path))))
    elif kind == "extra_forbidden":
        yield Problem(path, "a known key", "an unknown key", _nearest_key(path, model, siblings))
    elif kind == "missing" or (value is None and not expectation.endswith("or null")):
        nothing = "nothing" if kind == "missing" else "null"
        hint = "set it in the file"
        if issubclass(model, JobConfig):
            hint += f" or with --set {path}=…"
        yield Problem(path, expectation, nothing, hint, is_missing=kind == "missing")
    else:
        yield Problem(path, expectation, got(value), _hint(value, expectation))


def _locate(model: type[Section], loc: KeyLocation, data: Any) -> tuple[KeyLocation | None, str, list[str]]:
    """Return an error's location, without pydantic's names for members of unions, and the phrase for what it expects.

    For an unknown key, also return the known keys beside it. The location is None if the error is about a member of a
    union that the value does not resemble.
    """
    annotation: Any = model
    metadata: list[Any] = []
    expectation = phrase(model)
    location: list[int | str] = []
    for part in loc:
        annotation, metadata = unwrap(annotation, metadata)
        members = [member for member in union_members(annotation) if member is not type(None)]
        if len(members) == 1:
            annotation, metadata = unwrap(members[0])
            members = []
        if members:
            chosen = [member for member in members if _is_section(unwrap(member)[0])]
            mapping = isinstance(value_at(data, tuple(location)), Mapping)
            if not chosen or not mapping:
                return tuple(location), expectation, []
            if chosen[0].__name__ not in str(part):
                return None, "", []
            annotation, metadata = chosen[0], []
            continue
        location.append(part)
        if _is_section(annotation) and part in annotation.model_fields:
            field = annotation.model_fields[part]
            annotation, metadata, expectation = field.annotation, field.metadata, expected(field)
        elif get_origin(annotation) is tuple:
            annotation, metadata = unwrap(get_args(annotation)[0])
            expectation = phrase(annotation, metadata)
        elif get_origin(annotation) is dict and _is_section(get_args(annotation)[1]):
            annotation = get_args(annotation)[1]
            expectation = phrase(annotation)
        else:
            break
    siblings = list(annotation.model_fields) if _is_section(annotation) else []
    return tuple(location), expectation, siblings


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _nearest_key(path: str, model: type[Section], siblings: list[str]) -> str:
    parent, _, name = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    everywhere = [key.path for key in keys(model)]
    if meant := _own_key(name, everywhere):
        return f"did you mean {meant}?"
    if jobs := _jobs_with(path):
        return f"it is a key of {' and '.join(filter(None, (', '.join(jobs[:-1]), jobs[-1])))}"
    if near := nearest(name, siblings):
        return f"did you mean {prefix}{near}?"
    same = [path for path in everywhere if path.rpartition(".")[2] == name]
    # In a section that exists, a path is near to every key there, whatever the key's own name.
    if near := " or ".join(same[:2]) or (None if parent and siblings else nearest(path, everywhere)):
        return f"did you mean {near}?"
    return f"the keys here are {', '.join(siblings)}" if siblings else ""


def _own_key(name: str, known: Collection[str]) -> str | None:
    """Return the key that another tool's name or option means, whatever its case; None if there is none."""
    from sdp.config.yaml_text import parse_document

    name = name.lower().replace("-", "_")
    table: Mapping[str, str] = parse_document(Path(__file__).with_name("names.yaml").read_text(), "names.yaml")
    keys = next((keys for names, keys in table.items() if name in names.split()), "")
    return next((key for key in keys.split() if key in known), None)


def _jobs_with(path: str) -> list[str]:
    """Return the jobs that have a key or section, since the file of one may have been passed to another."""
    return [job for job, model in JOBS.items() if any(f"{key.path}.".startswith(f"{path}.") for key in keys(model))]


def _hint(value: Any, expectation: str) -> str:
    if isinstance(value, str):
        return _text_hint(value, expectation)
    if expectation.startswith("a list") and not isinstance(value, list | dict):
        return f"write [{got(value)}]"
    if isinstance(value, float) and expectation.startswith("a whole number") and value.is_integer():
        return f"write {value:.0f}"
    return ""


def _text_hint(value: str, expectation: str) -> str:
    choices = expectation.removesuffix(", or null").replace(" or ", ", ").split(", ")
    if near := nearest(value, choices):
        return f"did you mean {near}?"
    if expectation.startswith("a list") and len(value) < 40:
        return f"write [{value}]"
    if "number" in expectation and len(value) < 40 and value.replace(".", "", 1).replace("_", "").isdecimal():
        return "write it without quotes"
    return ""
