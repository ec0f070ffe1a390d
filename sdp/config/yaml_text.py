"""A strict YAML parser for jobs: refuses repeated keys, aliases and tags; sdp.config.scalars parses scalars."""

import re
from typing import Any

import yaml

from sdp.config.scalars import parse_scalar
from sdp.errors import ConfigError, Problem


def parse_document(text: str, name: str) -> Any:
    """Return the data of one YAML document; a ConfigError names the line and column of a fault."""
    try:
        return yaml.load(text, Loader=_Loader)
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
    except RecursionError:
        raise ConfigError([Problem(name, "YAML", "brackets nested too deeply")]) from None


class _RefusedError(Exception):
    """Valid YAML that a job may not use: what was expected, what was read, and its place (yaml.Mark)."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, made stricter."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own shape

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]  # types-pyyaml leaves it untyped
            raise _RefusedError("the value written out", f"the alias *{event.anchor}", event.start_mark)
        return super().compose_node(parent, index)

    def construct_plain(self, node: yaml.Node) -> Any:
        assert isinstance(node, yaml.ScalarNode)
        return parse_scalar(node.value) if node.style is None else node.value

    def construct_keyed_once(self, node: yaml.Node) -> dict[str, Any]:
        assert isinstance(node, yaml.MappingNode)
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _RefusedError("a key that is text", repr(key), key_node.start_mark)
            if key in mapping:
                raise _RefusedError("each key once", f"{key} a second time", key_node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping

    def construct_items(self, node: yaml.Node) -> list[Any]:
        assert isinstance(node, yaml.SequenceNode)
        return [self.construct_object(item, deep=True) for item in node.value]

    def refuse(self, node: yaml.Node) -> Any:
        raise _RefusedError("plain values", f"the tag {node.tag}", node.start_mark)


_Loader.yaml_constructors = {
    "tag:yaml.org,2002:str": _Loader.construct_plain,
    "tag:yaml.org,2002:map": _Loader.construct_keyed_once,
    "tag:yaml.org,2002:seq": _Loader.construct_items,
    None: _Loader.refuse,
}
