"""Keys that earlier versions had, and what happens without them; names in other tools; removed.yaml lists both."""

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from sdp.config.base import Section
from sdp.config.jobs import JOBS

SINCE = "0.3"


@cache
def table(name: str) -> Mapping[str, Any]:
    """Return a table of removed.yaml, which most commands do not need: `keys`, `values` or `names`."""
    from sdp.config.yaml_text import parse_document

    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    tables: Mapping[str, Mapping[str, Any]] = parse_document(text, "removed.yaml")
    return tables[name]


def removed(path: str, model: type[Section]) -> str | None:
    """Return what to say of a key that an earlier version had; None if none had it."""
    job = next((name for name, config in JOBS.items() if config is model), "")
    lines = (line for old, line in _removed_of(job) if f"{path}.".startswith(f"{old}."))
    return next((f"remove it: gone since {SINCE}: {line}" for line in lines), None)


def own_key(name: str, known: Collection[str]) -> str | None:
    """Return the key that another tool's name or option means, whatever its case; None if there is none."""
    name = name.lower().replace("-", "_")
    keys = next((keys for names, keys in table("names").items() if name in names.split()), "")
    return next((key for key in keys.split() if key in known), None)


def without_removed(job: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that an earlier version saved, without the keys that are gone."""
    values = deepcopy(dict(saved))
    for path, _ in _removed_of(job):
        *parents, name = path.split(".")
        section: Any = values
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(name, None)
    return values


def fixed_since(identity: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values, then and now, of an identity's keys that are gone and had another value."""
    now = table("values")
    return {path: (value, now[path]) for path, value in identity.items() if path in now and value != now[path]}


def _removed_of(job: str) -> Iterator[tuple[str, str]]:
    for jobs, rows in table("keys").items():
        if jobs == "every job" or job in jobs.split():
            yield from ((path, line) for paths, line in rows.items() for path in paths.split())
