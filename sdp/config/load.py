"""Configurations from a YAML file and `--set` overrides; all problems are reported at once, each with its place."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from stat import S_ISFIFO
from typing import Any, TypeVar

from pydantic import ValidationError

from sdp.config.base import DRAFT, Section, keys, section_of
from sdp.config.explain import explain, value_at
from sdp.config.jobs import JOBS
from sdp.config.phrases import got
from sdp.config.scalars import parse_scalar
from sdp.config.shared import JobConfig
from sdp.errors import ConfigError, Problem

_LARGEST_FILE = 1 << 17
"""Characters; PyYAML takes up to three seconds for as many."""
_PATHS = ("uri", "checkpoint", "start_from", "source", "model", "clip_model", "aesthetics", "urls", "domains", "sha256")
"""The last names of keys that may hold a local path."""
_AT_A_SERVER = "captions.model"
"""The key whose value may be a model's name at a server."""
_ELSEWHERE = re.compile(r"\s|$|/|~|[A-Za-z][A-Za-z0-9+.-]*:")
"""The beginnings of absolute paths, URIs and names of models."""
_UNREADABLE: Mapping[type[Exception], tuple[str, str, str]] = {
    FileNotFoundError: ("a configuration file", "nothing there", "check the path"),
    IsADirectoryError: ("a configuration file", "a directory", "name a file in it"),
    PermissionError: ("a readable file", "no permission", ""),
    UnicodeDecodeError: ("a configuration file in UTF-8", "other bytes", "save it as UTF-8"),
}
"""The words for a file that cannot be read: what was expected, what was found, and the remedy."""

_IN_ENVIRONMENT = "env:"
"""The beginning of a path that names an environment variable with the file's text."""

Job = TypeVar("Job", bound=Section)


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration with examples in place of required keys that are not set yet."""

    config: JobConfig
    missing: frozenset[str]

    def value(self, path: str) -> Any:
        """Return a key's value; None if it is not set, or the job has no such key."""
        config: Any = None if path in self.missing else self.config
        return reduce(lambda section, name: getattr(section, name, None), path.split("."), config)


@dataclass(frozen=True, slots=True)
class Source:
    """The plain data of a configuration, unchecked, and the places where its keys are set."""

    data: dict[str, Any]
    file: str = ""
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """The lines in the file, by the parts of the path."""
    options: list[tuple[str, ...]] = field(default_factory=list)
    """The paths that `--set` names."""

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Let the problems that the block finds name the places of their keys."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError([self._placed(problem) for problem in error.problems]) from error.__cause__

    def _placed(self, problem: Problem) -> Problem:
        """Return a problem with the place to mend it: the option --set, or a line of the file."""
        if problem.place:
            return problem
        parts = tuple(problem.path.split("."))
        # An option sets its key, what is in it, and the sections around it that the file lacks.
        around = len(parts) if parts not in self.lines else 0
        if any(parts[: len(option)] == option or option[:around] == parts for option in self.options):
            return replace(problem, place="--set ")
        # A missing key is to be added to its section.
        ends = range(len(parts), 0, -1) if problem.is_missing else [len(parts)]
        line = next((self.lines[parts[:end]] for end in ends if parts[:end] in self.lines), None)
        if line is not None:
            return replace(problem, place=f"{self.file}:{line}: ")
        return replace(problem, place=f"{self.file}: ") if problem.is_missing and self.file else problem


def load(job: str, path: str | None, overrides: Sequence[str] = (), *, text: str | None = None) -> JobConfig:
    """Return the configuration of a file, if any, with overrides `a.b=c`; ConfigError lists every problem.

    Local paths in the file are relative to its folder, those in overrides to the working directory. With `text`, the
    file is not read: this is its content.
    """
    source = read(path, overrides, text)
    with source.placed():
        return parse(job, source.data)


def parse(job: str, data: Mapping[str, Any]) -> JobConfig:
    """Return the configuration of plain data, such as a saved configuration."""
    return parse_into(JOBS[job], data)


def parse_into(model: type[Job], data: Mapping[str, Any]) -> Job:
    """Return the configuration of plain data as this model."""
    return _validate(model, _with_sections(model, dict(data)))


def draft(
    job: str, path: str | None, overrides: Sequence[str] = (), *, text: str | None = None, part: bool = False
) -> Draft:
    """Return an incomplete configuration: required keys may be missing, everything else must be valid.

    Keys are not checked against each other where some are missing, or where this is only a `part`.
    """
    return _draft(job, read(path, overrides, text), part=part)


def draft_of(job: str, values: Mapping[str, Any]) -> Draft:
    """Return an incomplete configuration of values by dotted path."""
    data: dict[str, Any] = {}
    for path, value in values.items():
        _put(data, path.split("."), value)
    return _draft(job, Source(data))


def _draft(job: str, source: Source, *, part: bool = False) -> Draft:
    model, missing = JOBS[job], set()
    data = _with_sections(model, source.data)
    for key in keys(model):
        *parents, name = key.path.split(".")
        section = value_at(data, tuple(parents))
        if key.field.is_required() and isinstance(section, dict) and section.get(name) is None:
            section[name] = key.example
            missing.add(key.path)
    with source.placed():
        return Draft(_validate(model, data, DRAFT if part or missing else None), frozenset(missing))


def read(path: str | None, overrides: Sequence[str] = (), text: str | None = None) -> Source:
    """Return the plain data of a file with the overrides applied, unchecked."""
    source = Source({}) if path is None else read_file(path, text)
    if path is not None and (folder := Path(path).parent) != Path():
        source = replace(source, data=_beside(source.data, "", folder))
    problems: list[Problem] = []
    for override in overrides:
        try:
            source.options.append(_apply(source.data, override))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return source


def read_file(path: str, text: str | None = None) -> Source:
    """Return the plain data of a YAML file, or of its text, unchecked."""
    from sdp.config.yaml_text import parse_document

    if text is None:
        text = _text_of(path)
    if len(text) > _LARGEST_FILE:
        raise ConfigError([Problem(path, f"a configuration of at most {_LARGEST_FILE:,} characters", "more")])
    lines: dict[tuple[str, ...], int] = {}
    data = parse_document(text, path, lines)
    if not isinstance(data, dict | None):
        raise ConfigError([Problem(path, "a mapping of keys to values", got(data))])
    return Source(data or {}, path, lines)


def _text_of(path: str) -> str:
    if path.startswith(_IN_ENVIRONMENT):
        if (text := os.environ.get(path.removeprefix(_IN_ENVIRONMENT))) is None:
            raise ConfigError([Problem(path, "a variable that holds a configuration", "none", "submit the job again")])
        return text
    try:
        with open(path, encoding="utf-8-sig", newline="", opener=_open_at_once) as file:
            text = file.read(_LARGEST_FILE + 1)
            if not text and S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise ConfigError([Problem(path, "a configuration file", "a pipe without content", "name a file")])
            return text
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte, or text that is not UTF-8
        usual = _UNREADABLE.get(type(error))
        unusual = Problem(repr(path), "a configuration file", f"an error ({error})")
        raise ConfigError([Problem(path, *usual) if usual else unusual]) from None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for a writer, should it be a pipe; then wait for what there is to read."""
    number = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(number, True)
    return number


def _beside(value: Any, key: str, folder: Path) -> Any:
    """Return a file's value with the paths in it below the file's folder."""
    if isinstance(value, dict):
        return {name: _beside(inner, f"{key}.{name}".lstrip("."), folder) for name, inner in value.items()}
    if isinstance(value, list):
        return [_beside(inner, key, folder) for inner in value]
    if not isinstance(value, str) or key.rpartition(".")[2] not in _PATHS or _ELSEWHERE.match(value):
        return value
    beside = folder / value
    of_hub = ("@" in value or key == _AT_A_SERVER) and not key.endswith("uri") and not beside.exists()
    return value if of_hub else os.path.normpath(beside)


def _apply(data: dict[str, Any], override: str) -> tuple[str, ...]:
    """Set one value in place, and return its path. A value that is a mapping or a list replaces what was there."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path or not all(path.split(".")):
        raise ConfigError([Problem("--set", "key=value, for example limit=1000", repr(override))])
    parts = path.split(".")
    _put(data, parts, _value(text.strip(), f"--set {path}"))
    return tuple(parts)


def _value(text: str, name: str) -> Any:
    """Parse flow YAML in brackets or quotes, or else the whole text as one scalar."""
    if text[:1] not in ("[", "{", '"', "'"):
        return parse_scalar(text)
    from sdp.config.yaml_text import parse_document

    return parse_document(text, name)


def _put(data: dict[str, Any], parts: list[str], value: Any) -> None:
    node: Any = data
    for depth, part in enumerate(parts):
        key_or_index: Any = _item(node, part, parts[:depth]) if isinstance(node, list) else part
        if depth == len(parts) - 1:
            node[key_or_index] = value
            return
        child: Any = node[key_or_index] if isinstance(node, list) else node.get(key_or_index)
        if not isinstance(child, dict | list):
            child = node[key_or_index] = {}
        node = child


def _item(items: list[Any], part: str, parts: list[str]) -> int:
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    problem = Problem(".".join(parts), f"one of its {len(items)} items, from 0", repr(part), place="--set ")
    raise ConfigError([problem])


def _unfit_text(data: Any, path: str = "") -> Iterator[Problem]:
    """Yield text that is not valid UTF-8 or holds null characters."""
    if isinstance(data, str):
        if "\0" in data or any("\ud800" <= character <= "\udfff" for character in data):
            yield Problem(path, "text in UTF-8 without null characters", ascii(data)[:60], "correct it")
    elif isinstance(data, dict):
        for name, value in data.items():
            yield from _unfit_text(value, f"{path}.{name}" if path else str(name))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from _unfit_text(value, f"{path}.{number}")


def _with_sections(model: type[Section], data: dict[str, Any]) -> dict[str, Any]:
    """Return the data with all sections, so that errors name missing keys by their own path.

    A section that is null, such as `fetch:` with all of its keys commented out, means its defaults.
    """
    filled = dict(data)
    for name, declared in model.model_fields.items():
        if inner := section_of(declared):
            value = filled.get(name)
            if value is None:
                value = {}
            filled[name] = _with_sections(inner, value) if isinstance(value, dict) else value
    return filled


def _validate(model: type[Job], data: dict[str, Any], context: str | None = None) -> Job:
    if problems := list(_unfit_text(data)):
        raise ConfigError(problems)
    try:
        # From JSON, pydantic's strict mode accepts lists for tuples and converts nothing else.
        return model.model_validate_json(json.dumps(data), context=context)
    except ValidationError as error:
        raise ConfigError(explain(error, model, data)) from None
