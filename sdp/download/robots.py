"""The opt-out that a server declares for its images: X-Robots-Tag."""

from collections.abc import Collection

DIRECTIVES = frozenset({"noai", "noimageai", "noindex", "noimageindex", "noml"})
"""What keeps an image out of a dataset for training."""

_WITH_VALUE = frozenset({"max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"})
"""Directives that have a colon themselves, and so are not the name of an agent."""


def opt_out(value: str, agent: str, directives: Collection[str] = DIRECTIVES) -> str | None:
    """The directive in one X-Robots-Tag header that asks us to leave the image, if any.

    A header may be for everybody (`noai, noindex`) or for one agent by name (`somebot: noai`); a name holds until the
    next name in the same header. `agent` is the name that we go by.
    """
    ours = True
    for item in value.lower().split(","):
        name, colon, rest = item.partition(":")
        if colon and name.strip() not in _WITH_VALUE:
            ours = name.strip() in (agent.lower(), "*")
            item = rest
        directive = item.strip()
        if ours and directive in directives:
            return directive
        if ours and directive == "none" and "noindex" in directives:
            return directive
    return None
