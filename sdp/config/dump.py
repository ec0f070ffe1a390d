"""A configuration as YAML for people, which loads back to the same configuration."""

import json
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from sdp.config.base import Key, Section, fields, purpose, section_of
from sdp.config.phrases import expected
from sdp.config.scalars import parse_scalar

_WIDTH = 120
_PLAIN_START = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/._")
_PLAIN = _PLAIN_START | frozenset("0123456789:@+-=~")
# Phrases that a default value makes evident.
_EVIDENT = frozenset(
    {"text", "some text", "a URI", "true or false", "a number above 0", "a number of 0 or more"}
    | {"a whole number", "a whole number of 0 or more", "a whole number of 1 or more"}
)
# Text that YAML 1.1, which other tools use, reads as a boolean or null.
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "~", ""})


def dump_yaml(
    config: Section,
    *,
    comments: bool = True,
    missing: frozenset[str] = frozenset(),
    only: Collection[str] | None = None,
) -> str:
    """Return the resolved YAML, each key under a comment with its purpose; it loads back to an equal configuration.

    Keys in `missing` stay empty, commented as required. `only` names the keys to write; the others must have their
    defaults.
    """
    return "".join(_blocks(config, "", comments, missing, only)).removeprefix("\n")


def comment(key: Key) -> str:
    """Return a key's purpose and its expected value."""
    expectation = expected(key.field)
    plain = expectation.removesuffix(" or null").removesuffix(",") in _EVIDENT
    return key.what if plain else f"{key.what} [{expectation}]"


def scalar(value: Any) -> str:
    """Return a value as YAML on one line."""
    match value:
        case float():
            text = repr(value)
            mantissa, e, exponent = text.partition("e")
            return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text  # YAML 1.1 requires the point
        case str():
            return _text(value)
        case dict():
            return "{" + ", ".join(f"{name}: {scalar(inner)}" for name, inner in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_item, value)) + "]"
    return json.dumps(value)


def _item(value: Any) -> str:
    # Plain text in brackets may not contain their delimiters, so all text is quoted.
    return json.dumps(value) if isinstance(value, str) and value.isascii() and value.isprintable() else scalar(value)


def _text(value: str) -> str:
    plain = (
        value[:1] in _PLAIN_START
        and set(value) <= _PLAIN
        and not value.endswith(":")
        and value.lower() not in _WORDS
        and isinstance(parse_scalar(value), str)
    )
    if plain:
        return value
    if value.isascii() and value.isprintable():
        return json.dumps(value)
    import yaml

    quoted = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=10**9)
    return quoted.rstrip("\n")


def _blocks(
    config: Section, path: str, comments: bool, missing: frozenset[str], only: Collection[str] | None
) -> Iterator[str]:
    indent = "  " * (path.count(".") if path else 0)
    values = config.model_dump(mode="json")
    for name, field in fields(type(config)):
        inner = getattr(config, name)
        if only is not None and not any(f"{path_shown}.".startswith(f"{path}{name}.") for path_shown in only):
            continue
        if section_of(field):
            heading = _comment(purpose(type(config), name), indent) if comments else ""
            gap = "\n" if comments and not path else ""
            yield f"{gap}{heading}{indent}{name}:\n"
            yield from _blocks(inner, f"{path}{name}.", comments, missing, only)
            continue
        key = Key(path + name, field, type(config))
        if comments:
            yield ("\n" if not path else "") + _comment(comment(key), indent)
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
