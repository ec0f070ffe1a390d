"""Every key is read where the work is done: a setting that never arrives is worse than one that is refused.

A key counts as read where a stage's code has the attribute, by its section's name (`config.fetch.timeout_s`,
`self._fetch.timeout_s`, `how = config.fetch` and `how.timeout_s`) or by the section's class in an annotation
(`def fetch(how: FetchConfig)`, `how.timeout_s`). It also counts where a template of the stage names it.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sdp.config import JOBS, keys
from sdp.config.base import Key, Section
from sdp.config.shared import JobConfig
from tests.sections import sections_of

ROOT = Path(__file__).resolve().parents[2]

# The jobs with the rooms of their code. A new job is added here.
STAGES: Mapping[str, tuple[str, ...]] = {
    "download": ("download",),
    "score": ("score", "process", "encode", "runners", "sources"),
    "caption": ("caption", "process", "encode", "runners", "sources"),
    "process": ("process", "encode", "runners", "sources"),
    "train": ("train", "encode", "model"),
    "generate": ("generate", "runners"),
    "evaluate": ("evaluate", "runners"),
    "dreambooth": ("dreambooth", "model", "runners", "train"),
}

OWN_READERS = {"contradictions"}  # a check of the value is not a use of it


def unread(job: type[JobConfig], sources: Iterable[str]) -> list[str]:
    """The keys of a job that none of the sources reads, by dotted path."""
    by_class = {job.__name__: job} | {section.__name__: section for _, _, section in sections_of(job)}
    bases = {base for section in by_class.values() for base in section.__mro__ if issubclass(base, Section)}
    by_class |= {base.__name__: base for base in bases}
    by_name = {"config": job, "cfg": job} | {path.rpartition(".")[2]: section for path, _, section in sections_of(job)}
    read: set[tuple[type[Section], str]] = set()
    for source in sources:
        for nodes, known in _scopes(ast.parse(source), by_class):
            for owner, attribute in _reads(nodes, _aliases(nodes, by_name) | known, by_name):
                read |= {(base, attribute) for base in owner.__mro__ if issubclass(base, Section)}
    return [key.path for key in keys(job) if not _is_read(key, read)]


def _is_read(key: Key, read: set[tuple[type[Section], str]]) -> bool:
    name = key.path.rpartition(".")[2]
    bases = (base for base in key.section.__mro__ if issubclass(base, Section) and name in base.model_fields)
    return any((base, name) in read for base in bases)


def _scopes(
    tree: ast.Module, by_class: Mapping[str, type[Section]]
) -> Iterator[tuple[list[ast.AST], dict[str, type[Section]]]]:
    """Each function's own nodes, with the names in it that are annotated with a section's class."""
    everywhere: dict[str, type[Section]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and (section := _class_in(node.annotation, by_class)):
            everywhere[_last(node.target)] = section
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        own = {a.arg: c for a in arguments if a.annotation and (c := _class_in(a.annotation, by_class))}
        yield list(ast.walk(function)), everywhere | own
    yield list(ast.walk(tree)), everywhere


def _aliases(nodes: Iterable[ast.AST], by_name: Mapping[str, type[Section]]) -> dict[str, type[Section]]:
    """Return the local names of a section, as in `how = config.fetch`."""
    return {
        _last(target): by_name[_last(node.value).strip("_")]
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute)
        for target in node.targets
        if _last(node.value).strip("_") in by_name
    }


def _class_in(annotation: ast.AST, by_class: Mapping[str, type[Section]]) -> type[Section] | None:
    for node in ast.walk(annotation):
        text = node.value if isinstance(node, ast.Constant) else _last(node)
        if text in by_class:
            return by_class[str(text)]
    return None


def _reads(
    nodes: Iterable[ast.AST], known: Mapping[str, type[Section]], by_name: Mapping[str, type[Section]]
) -> Iterator[tuple[type[Section], str]]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = _last(node.value).strip("_")
            for owner in {known.get(_last(node.value)), by_name.get(name)} - {None}:
                assert owner is not None
                if node.attr in owner.model_fields:
                    yield owner, node.attr


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _sources(rooms: Iterable[str]) -> list[str]:
    paths = [path for room in rooms for path in sorted((ROOT / "sdp" / room).rglob("*.py"))]
    templates = [path for room in rooms for path in sorted((ROOT / "sdp" / room).rglob("*.yaml"))]
    return [path.read_text(encoding="utf-8") for path in paths] + [*map(_words, templates), _own_methods()]


def _words(template: Path) -> str:
    """Return the keys that a template names (`$draw.steps`) as expressions that read them."""
    return "\n".join(f"config.{word}" for word in re.findall(r"\$([a-z_]+(?:\.[a-z_]+)*)", template.read_text("utf-8")))


def _own_methods() -> str:
    """Return the sections' methods that use their own keys, such as StorageConfig.options, except validators."""
    own = []
    for path in sorted((ROOT / "sdp" / "config").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name not in OWN_READERS]
                for method in methods:
                    if method.args.args:
                        method.args.args[0].annotation = ast.Name(node.name, ast.Load())
                    own.append(ast.unparse(ast.fix_missing_locations(method)))
    return "\n".join(line for method in own for line in method.splitlines() if not line.startswith("@"))


def test_every_key_of_a_job_is_read_by_its_stage() -> None:
    assert {job: unread(JOBS[job], _sources(STAGES[job])) for job in JOBS} == {job: [] for job in JOBS}


def test_a_key_that_is_never_read_is_found() -> None:
    """As those that only training reads, in the code of download, and those that are only checked."""
    assert {"checkpoint.every_steps", "ema.decay", "max_steps"} <= set(unread(JOBS["train"], _sources(["download"])))
    checked = unread(JOBS["download"], [_own_methods()])
    assert "image.crop" in checked
    assert "storage.endpoint" not in checked, "StorageConfig.options reads it"


def test_a_key_is_read_by_the_name_of_its_section_or_by_an_annotation() -> None:
    ways = """
def run(config):
    how = config.image
    print(config.limit, self._fetch.timeout_s, how.size, other.quality)
def check(rules: FiltersConfig):
    rules.min_side, rules.max_aspect = rules.max_aspect, 1
"""
    read = {key.path for key in keys(JOBS["download"])} - set(unread(JOBS["download"], [ways]))
    assert read == {"limit", "fetch.timeout_s", "image.size", "filters.max_aspect"}
