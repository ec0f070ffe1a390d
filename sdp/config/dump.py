"""A configuration as YAML for people, which loads back to the same configuration."""

import textwrap
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from sdp.config.base import Key, Section, fields, purpose, section_of
from sdp.config.phrases import expected
from sdp.config.scalars import parse_scalar

_WIDTH = 120
# Phrases that a default value makes evident.
_EVIDENT = frozenset(
    {"text", "some text", "a URI", "true or false", "a number above 0", "a number of 0 or more"}
    | {"a whole number", "a whole number of 0 or more", "a whole number of 1 or more"}
)


def dump_yaml(config: Section, *, missing: frozenset[str] = frozenset(), only: Collection[str] | None = None) -> str:
    """Return the resolved YAML, each key under a comment with its purpose; it loads back to an equal configuration.

    Keys in `missing` stay empty, commented as required. `only` names the keys to write; the others must have their
    defaults.
    """
    return "".join(_blocks(config, "", missing, only)).removeprefix("\n")


def comment(key: Key) -> str:
    """Return a key's purpose and its expected value."""
    expectation = expected(key.field)
    plain = expectation.removesuffix(" or null").removesuffix(",") in _EVIDENT
    return key.what if plain else f"{key.what} [{expectation}]"


def scalar(value: Any) -> str:
    """Return a value as YAML on one line, which readers of YAML 1.1 and 1.2 understand alike."""
    import yaml

    line = yaml.dump(value, Dumper=_dumper(), default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**9)
    return line.removesuffix("\n...\n").rstrip("\n")


@cache
def _dumper() -> Any:
    """Return PyYAML's dumper with quotes around text that YAML 1.2 takes for something else."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        # Quotes allow escapes for characters that the output's encoding cannot hold.
        simple = value.isascii() and value.isprintable() and value.lower() not in ("y", "n")
        plain = simple and isinstance(parse_scalar(value), str)
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')

    Dumper.add_representer(str, text)
    Dumper.add_representer(tuple, Dumper.represent_list)
    return Dumper


def _blocks(config: Section, path: str, missing: frozenset[str], only: Collection[str] | None) -> Iterator[str]:
    """Yield a section's YAML key by key; `path` is the section's own, with a dot at its end."""
    indent = "  " * path.count(".")
    gap = "" if path else "\n"
    values = config.model_dump(mode="json")
    for name, field in fields(type(config)):
        if only is not None and not any(f"{key}.".startswith(f"{path}{name}.") for key in only):
            continue
        if section_of(field):
            yield f"{gap}{_comment(purpose(field), indent)}{indent}{name}:\n"
            yield from _blocks(getattr(config, name), f"{path}{name}.", missing, only)
            continue
        key = Key(path + name, field, type(config))
        yield gap + _comment(comment(key), indent)
        if key.path in missing:
            yield f"{indent}{name}:  # REQUIRED, for example {scalar(key.example)}\n"
        else:
            yield f"{indent}{name}: {_value(values[name], indent)}\n"


def _value(value: Any, indent: str) -> str:
    line = scalar(value)
    if isinstance(value, list) and len(line) > _WIDTH - len(indent):
        return "".join(f"\n{indent}  - {scalar(item)}" for item in value)
    return line


def _comment(text: str, indent: str) -> str:
    lines = textwrap.wrap(text, _WIDTH - len(indent) - 2, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{indent}# {line}\n" for line in lines)
