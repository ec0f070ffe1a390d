"""YAML files in which words that begin with a dollar stand for values."""

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import yaml


class _Text(Template):
    """Text with words such as `$folder` and `$source.uri`."""

    idpattern = r"[a-z_]+(?:\.[a-z_]+)*"


def fill(file: Path, values: Mapping[str, Any]) -> Any:
    """Return a file's data. A word alone becomes its value; within longer text it becomes the value's text."""

    def filled(node: Any) -> Any:
        match node:
            case dict():
                return {key: filled(item) for key, item in node.items()}
            case list():
                return [filled(item) for item in node]
            case str() if node.startswith("$") and node[1:] in values:
                return values[node[1:]]
            case str():
                return _Text(node).substitute(values)
        return node

    return filled(yaml.safe_load(file.read_text(encoding="utf-8")))
