"""A strict YAML parser for jobs: refuses repeated keys, anchors and tags; sdp.config.scalars parses scalars."""

import re
from typing import Any

import yaml

from sdp.config.scalars import parse_scalar
from sdp.errors import ConfigError, Problem

Path = tuple[str, ...]
"""The names of a key's sections and its own; an item of a list is named by its number."""
_DEEPEST = 20
"""Levels of nesting, with which the paths of all keys stay short."""


def parse_document(text: str, name: str, lines: dict[Path, int] | None = None) -> Any:
    """Return the data of one YAML document; a ConfigError names the line and column of a fault.

    `lines` receives the line of each key and of each item of a list.
    """
    try:
        node = _Loader(text).get_single_node()
        return None if node is None else _data(node, (), {} if lines is None else lines)
    except _RefusedError as error:
        expected, got, mark = error.args
        raise ConfigError([Problem(f"{name}:{mark.line + 1}:{mark.column + 1}", expected, got)]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        remedy = "indent with spaces" if "'\\t'" in str(error.problem) else ""
        raise ConfigError([Problem(where, "YAML", f"a syntax error ({error.problem})", remedy)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        got = f"the character U+{error.character:04X}"
        raise ConfigError([Problem(f"{name}:{line}", "YAML", got)]) from None


class _RefusedError(Exception):
    """Valid YAML that a job may not use: what was expected, what was read, and its place (yaml.Mark)."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which resolves no scalars, and refuses anchors, aliases, tags and deep nesting."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # types-pyyaml leaves it untyped
        if event.anchor is not None:
            name = f"{'alias *' if isinstance(event, yaml.AliasEvent) else 'anchor &'}{event.anchor}"
            raise _RefusedError("the value written out", f"the {name}", event.start_mark)
        if tag := getattr(event, "tag", None):
            raise _RefusedError("plain values", f"the tag {tag}", event.start_mark)
        if self._depth == _DEEPEST:
            raise _RefusedError(f"at most {_DEEPEST} levels", "YAML that is nested deeper", event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _data(node: yaml.Node, path: Path, lines: dict[Path, int]) -> Any:
    """Return a node's plain data, and note the lines in it."""
    if isinstance(node, yaml.ScalarNode):
        return parse_scalar(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_data_with_line(item, item, (*path, str(number)), lines) for number, item in enumerate(node.value)]
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _data(key_node, (), {})
        if not isinstance(key, str):
            raise _RefusedError("a key that is text", repr(key), key_node.start_mark)
        if key in mapping:
            raise _RefusedError("each key once", f"{key} a second time", key_node.start_mark)
        mapping[key] = _data_with_line(key_node, value_node, (*path, key), lines)
    return mapping


def _data_with_line(place: yaml.Node, node: yaml.Node, path: Path, lines: dict[Path, int]) -> Any:
    lines[path] = place.start_mark.line + 1
    return _data(node, path, lines)
