"""Names and docstrings that say little, for `make check`: vague names, docstrings that begin with a question word.

    python -m scripts.prose_rules [PATH ...]

A docstring of a function begins with a verb; that of a class or field is a noun phrase. `found`, `told` and their like
say that a value has a history; a reader wants to know what it is. The text below a configuration's key is a sentence
for its user, and may begin with any word.
"""

import ast
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

VAGUE_NAMES = {"found", "told", "given", "there", "again", "wish", "ours", "theirs", "hired", "dear"}
VAGUE_OPENING = re.compile(r"(Of|What|Who|Whose|Where|How|Whether|When|Why|Against|That)\b")


def faults(path: Path) -> Iterator[str]:
    """Yield a line for each name and docstring of a file that breaks a rule."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    purposes = set(_purposes(tree))
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if (name := _bound_name(node)) in VAGUE_NAMES:
            yield f"{path}:{line}: name {name!r}: use the noun for what it holds"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node not in purposes:
            opening = VAGUE_OPENING.match(str(node.value.value))
            if opening is not None:
                yield f"{path}:{line}: docstring begins with {opening[0]!r}: begin with a verb or the noun"


def _purposes(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the texts below the keys of configurations."""
    for section in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for field, text in pairwise(section.body):
            value = field.value if isinstance(field, ast.AnnAssign) else None
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "key":
                yield text


def _bound_name(node: ast.AST) -> str | None:
    """Return the name that a node binds, if it binds one."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    return None


def main(arguments: list[str]) -> int:
    """Print the faults of the paths, or of the whole tree; return the exit status."""
    roots = [Path(argument) for argument in arguments or ("sdp", "scripts", "tests")]
    files = [file for root in roots for file in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    lines = [line for file in files for line in faults(file)]
    print("\n".join(lines) or "names and docstrings follow the rules")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
