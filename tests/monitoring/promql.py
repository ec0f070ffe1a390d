"""The part of PromQL needed to find the series in an expression. promtool checks that it parses."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
      | (?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<window>\[[^\]]*\])
      | (?P<number>\d[\w.]*)
      | (?P<word>[A-Za-z_:][\w:]*)
      | (?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^(){},=<>@])
      | (?P<space>\s+)""",
    re.VERBOSE,
)
_LISTS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_AFTER_A_FUNCTION = frozenset({"(", "by", "without"})
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan", *_LISTS})


@dataclass(frozen=True, slots=True)
class Selector:
    """`name{label="value"}[5m]`, its names, the labels that it names, and its text without the window."""

    names: tuple[str, ...]
    """Several where the name is a pattern: a|b|c."""
    labels: frozenset[str]
    text: str


def tokens(expr: str) -> Iterator[tuple[str, str]]:
    """Yield the tokens of an expression, each as kind and text."""
    at = 0
    while at < len(expr):
        match = _TOKEN.match(expr, at)
        if match is None:
            raise ValueError(f"{expr[at : at + 20]!r} is not PromQL that this reader knows")
        at = match.end()
        if match.lastgroup not in ("space", "comment"):
            assert match.lastgroup is not None
            yield match.lastgroup, match.group()


def selectors(expr: str) -> list[Selector]:
    """Return all selectors of an expression, in order."""
    result: list[Selector] = []
    rest = list(tokens(expr))
    at = 0
    while at < len(rest):
        kind, text = rest[at]
        following = rest[at + 1][1] if at + 1 < len(rest) else ""
        if kind == "word" and text in _LISTS and following == "(":
            at = next(n for n in range(at, len(rest)) if rest[n][1] == ")")
        elif (kind == "word" and text.lower() not in _WORDS and following not in _AFTER_A_FUNCTION) or text == "{":
            name = text if kind == "word" else ""
            opens = at + 1 if kind == "word" else at
            closes = opens - 1
            if opens < len(rest) and rest[opens][1] == "{":
                closes = next(n for n in range(opens, len(rest)) if rest[n][1] == "}")
            result.append(_selector(name, rest[opens : closes + 1]))
            at = max(at, closes)
        at += 1
    return result


def lists(expr: str, words: frozenset[str] = frozenset({"by", "on"})) -> list[set[str]]:
    """Return the labels of each by (…) and on (…)."""
    rest = list(tokens(expr))
    result: list[set[str]] = []
    for at, (kind, text) in enumerate(rest):
        if kind == "word" and text in words and at + 1 < len(rest) and rest[at + 1][1] == "(":
            closes = next(n for n in range(at, len(rest)) if rest[n][1] == ")")
            result.append({word for kind, word in rest[at + 2 : closes] if kind == "word"})
    return result


def labels_of_lists(expr: str) -> set[str]:
    """Return all labels in by (…), on (…) and similar lists."""
    return set[str]().union(*lists(expr, _LISTS))


def _selector(name: str, braces: list[tuple[str, str]]) -> Selector:
    names, labels = ((name,) if name else ()), set[str]()
    inside = braces[1:-1]
    for at, (kind, text) in enumerate(inside):
        if kind != "word":
            continue
        if text == "__name__":
            names = tuple(inside[at + 2][1].strip("\"'").split("|"))
        else:
            labels.add(text)
    return Selector(names, frozenset(labels), name + "".join(text for _, text in braces))
