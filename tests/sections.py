"""The sections of a configuration, for tests of all of them."""

from collections.abc import Iterator

from sdp.config.base import Section, fields, section_of


def sections_of(model: type[Section], path: str = "") -> Iterator[tuple[str, type[Section], type[Section]]]:
    """Yield every section below a model, parents first: its dotted path, its parent's class and its own."""
    for name, field in fields(model):
        if inner := section_of(field):
            yield path + name, model, inner
            yield from sections_of(inner, f"{path}{name}.")
