"""Check the rules for imports in sdp/, and a few others that can be read from the code.

`python -m scripts.import_rules` prints one line for each violation. To change a rule, change the tables at the top.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent

ROOMS: tuple[Mapping[str, str], ...] = (
    {
        "errors": "The errors that sdp raises on purpose; exit code 2 means that the user can fix it.",
        "backoff": "The pause before a retry.",
        "leaving": "Ends this process and its children at once.",
    },
    {
        "console": "Progress, tables, and figures as people read them.",
        "config": "One YAML file per job: frozen models, errors that name the key.",
        "urls": "Image URLs: parsing and normal form.",
        "storage": "A URI is a folder: listing, atomic publish, conditional put, retries with a deadline.",
        "datasets": "Index, units, parts and their account, manifests, takedowns, audit.",
        "lease": "One writer per output.",
        "families": "Everything that depends on the kind of a model, one object for each.",
        "hardware": "GPUs and instances: names, memory, peak rates. An unknown GPU stays unknown.",
        "device": "The device that a process computes on; threads, streams and events that stay on it.",
        "ray": "Connecting to Ray, waiting for places, the loss of Ray, and everything that Ray keeps private.",
        "telemetry": "The names, units and labels of the jobs' metrics, and where they go.",
        "charts": "Curves as SVG, and jinja2 templates.",
    },
    {
        "runners": "Pieces of work through a job's stages, in this process or on Ray Data; units to parts.",
        "sources": "What jobs read: datasets of pictures, Parquet files, tars, folders, and tables joined to them.",
        "imaging": "Image bytes to pixels and crops, within bounds.",
        "sandbox": "Decoding of strangers' images in processes that can do nothing else.",
        "model": "Model sources, the noise schedule, losses, checkpoints, export.",
    },
    {"encode": "Images to crops to latents: transform, encoder, recipe."},
    {
        "download": "`sdp download`: fetch, check, filter, write.",
        "process": "`sdp process`: feed units to `encode`, join by unit, write parts.",
        "generate": "`sdp generate`: pictures for prompts.",
        "plan": "`sdp plan`: hours and money of a job before it runs.",
        "exporter": "NVML to Prometheus.",
    },
    {
        "train": "`sdp train`: readers, step, strategies, checkpoints, callbacks; `launch.py` runs it on Ray Train.",
        "caption": "`sdp caption`: the same units with other stages; a vision-language model, or requests to a server.",
        "score": "`sdp score`: the same units with other stages; aesthetics, similarity and near-duplicates.",
    },
    {
        "evaluate": "`sdp evaluate`: CLIP score, FID, KID, similarity.",
        "kube": "`sdp doctor`, `submit`, `status`, `logs`, `stop`, on the official client.",
    },
    {
        "report": "`sdp inspect` and `sdp report`: what lies at a URI, as text, as one HTML page and in Python.",
        "supervisor": "Runs a job's command again, within bounds.",
    },
    {"dreambooth": "`sdp dreambooth`: the other jobs one after another."},
    {"cli": "The commands. Nothing heavy is loaded before a command runs."},
    {"__main__": "`python -m sdp`."},
)
"""The rooms of sdp/, lowest level first. A room imports from lower levels, and up to level SHARED from its own too,
never in a circle, not even late."""
LAYERS = tuple(frozenset(level) for level in ROOMS)
SHARED = 2
"""The highest level whose rooms may import each other; above it are the jobs, which do so only downwards."""


def rooms_table() -> str:
    """Return the table of rooms in docs/architecture.md."""
    rows = [f"| {number} | `{room}` | {what} |" for number, level in enumerate(ROOMS) for room, what in level.items()]
    return "\n".join(["| Level | Room | What it is for |", "|---|---|---|", *rows, ""])


RAY_ROOMS = frozenset({"cli", "ray"})
"""Rooms that may import ray anywhere."""
RAY_FILES = frozenset(
    {
        "sdp/train/group.py",
        "sdp/train/launch.py",
        "sdp/train/online.py",
        "sdp/train/ray_data.py",
        "sdp/train/worker.py",
        "sdp/runners/exchange.py",
        "sdp/runners/on_ray.py",
        "sdp/telemetry/ray_metrics.py",
    }
)
"""Other files that may import ray: few, which run the plain functions of jobs on a cluster."""

NEVER: Mapping[str, frozenset[str]] = {
    "config": frozenset({"torch", "ray"}),
    "exporter": frozenset({"torch", "ray"}),
    "plan": frozenset({"torch", "ray"}),
}
"""Packages that a room must not import, not even late or through another module."""

SLEEPS: Mapping[str, str] = {
    "sdp/storage/local.py": "flock has no deadline of its own, so it is polled until one",
    "sdp/supervisor.py": "it polls storage for another job's manifest, and stays until its pod is ended",
    "sdp/kube/logs.py": "the pause before a job's state is read again",
    "sdp/kube/submit.py": "the pause before a request to create a job is repeated",
    "sdp/kube/leave.py": "the children of other processes are polled",
    "sdp/kube/mounted.py": "a kubelet renews the file",
    "sdp/exporter/events.py": "the pause before a driver that failed is asked again",
}
"""Files that may call time.sleep, and why they cannot wait for a condition."""

GPU_ROOMS = frozenset({"runners", "train", "process", "score", "caption", "encode", "model", "generate", "evaluate"})
THREADS: Mapping[str, str] = {
    "sdp/train/metrics_log.py": "it writes lines to storage",
    "sdp/runners/here.py": "a worker makes its device that of each thread that calls it",
    "sdp/train/callbacks/watchdog.py": "it writes stacks to storage, and must not wait for a GPU that hangs",
}
"""Files of these rooms that start threads without sdp.device, and why their threads use no GPU. RAY_FILES are drivers,
which use none."""


class When(Enum):
    """The time at which an import statement takes effect."""

    LOAD = "when the module is loaded"
    CALL = "when a function is called"
    TYPING = "for the type checker only"


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement."""

    target: str
    """The module imported, absolute and dotted."""
    names: tuple[str, ...]
    """The names imported from it, in a `from` import."""
    line: int
    when: When


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """A line of code that breaks a rule."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


Sources = Mapping[str, str]
"""The text of each file, by path, such as `sdp/config/base.py`."""


def check(sources: Sources) -> list[Violation]:
    """Return all violations in these files, by file and line."""
    trees = {path: ast.parse(text, filename=path) for path, text in sources.items()}
    imports = {path: list(imports_in(tree)) for path, tree in trees.items()}
    modules = {module_of(path): path for path in sources}
    violations: list[Violation] = []
    for path, tree in trees.items():
        violations += _layers(path, imports[path])
        violations += _ray(path, imports[path])
        violations += _banned_directly(path, imports[path])
        violations += _calls(path, tree)
    violations += _names(trees)
    edges = _edges(imports, modules)
    violations += _banned_indirectly(imports, modules, edges)
    violations += _circles(edges, _edges(imports, modules, set(When)), modules)
    return sorted(violations)


def stale_entries(sources: Sources) -> list[str]:
    """Return the entries of SLEEPS and THREADS that are no longer needed."""
    return [
        f"SLEEPS allows {path}, which does not call time.sleep: remove it"
        for path in SLEEPS
        if path not in sources or not any(_sleeps(ast.parse(sources[path])))
    ] + [
        f"THREADS allows {path}, which starts no thread: remove it"
        for path in THREADS
        if path not in sources or not any(_threads(ast.parse(sources[path])))
    ]


def read_sources(root: Path) -> dict[str, str]:
    """Return the Python files of sdp/ under a root."""
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((root / "sdp").rglob("*.py"))
    }


def module_of(path: str) -> str:
    """Return a file's module: `sdp/config/base.py` -> `sdp.config.base`; `sdp/config/__init__.py` -> `sdp.config`."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return a module's room: `sdp.config.base` -> `config`; "" for `sdp` itself."""
    return module.split(".")[1] if "." in module else ""


def imports_in(tree: ast.Module) -> Iterator[Import]:
    """Yield every import statement of a file, whenever it takes effect."""
    yield from _imports_below(tree, When.LOAD)


def _imports_below(node: ast.AST, when: When) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, (), child.lineno, when)
        elif isinstance(child, ast.ImportFrom):
            names = tuple(alias.name for alias in child.names)
            yield Import(child.module or "", names, child.lineno, when)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports_below(child, When.TYPING if when is When.TYPING else When.CALL)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from _imports_below(ast.Module(child.body, []), When.TYPING)
            yield from _imports_below(ast.Module(child.orelse, []), when)
        else:
            yield from _imports_below(child, when)


def _is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "attr", getattr(test, "id", "")) == "TYPE_CHECKING"


def _layer_of(room: str) -> int | None:
    return next((number for number, rooms in enumerate(LAYERS) if room in rooms), None)


def _rooms_of(statement: Import) -> list[str]:
    """Return the rooms that a statement imports from: `from sdp import config` imports from config."""
    if statement.target == "sdp":
        return [name for name in statement.names if _layer_of(name) is not None]
    return [room_of(statement.target)] if statement.target.startswith("sdp.") else []


def _layers(path: str, imports: list[Import]) -> Iterator[Violation]:
    room = room_of(module_of(path))
    layer = -1 if room == "" else _layer_of(room)
    if layer is None:
        yield Violation(path, 1, f"sdp/{room} is not in ROOMS of scripts/import_rules.py: add it")
        return
    for one in imports:
        if not room and one.when is not When.LOAD:  # what `import sdp` offers, such as sdp.ray_dataset
            continue
        for target in _rooms_of(one):
            target_layer = _layer_of(target)
            if target_layer is None or target == room:
                continue
            if target_layer > layer:
                yield Violation(path, one.line, f"{room or 'sdp itself'} must not import {target}, which is above it")
            elif target_layer == layer > SHARED:
                yield Violation(path, one.line, f"{room} must not import {target}, which is on its own level")


def _ray(path: str, imports: list[Import]) -> Iterator[Violation]:
    room = room_of(module_of(path))
    if path in RAY_FILES or room in RAY_ROOMS or room in NEVER:  # _banned_directly and _banned_indirectly check NEVER
        return
    for one in imports:
        if _top(one) == "ray" and one.when is not When.TYPING:
            yield Violation(path, one.line, "only RAY_FILES import ray: they run plain functions on a cluster")


def _banned_directly(path: str, imports: list[Import]) -> Iterator[Violation]:
    room = room_of(module_of(path))
    for one in imports:
        if _top(one) in NEVER.get(room, frozenset()):
            yield Violation(path, one.line, f"{room} must not import {_top(one)}")


def _banned_indirectly(
    imports: Mapping[str, list[Import]], modules: Mapping[str, str], edges: Mapping[str, set[str]]
) -> Iterator[Violation]:
    """Yield violations by modules that a room loads, directly or not: loading config loads what config imports."""
    loaded = {module: targets | _parents({module, *targets}, modules) for module, targets in edges.items()}
    for module, path in modules.items():
        room = room_of(module)
        for banned in NEVER.get(room, frozenset()):
            for other in sorted(_reachable(module, loaded)):
                if room_of(other) == room:
                    continue  # _banned_directly reports it
                loads = [i for i in imports[modules[other]] if i.when is When.LOAD and _top(i) == banned]
                for one in loads:
                    message = f"{room} must not import {banned}, and loads it through {modules[other]}:{one.line}"
                    yield Violation(path, 1, message)


def _edges(
    imports: Mapping[str, list[Import]], modules: Mapping[str, str], times: Set[When] = frozenset({When.LOAD})
) -> dict[str, set[str]]:
    """Return the modules of sdp that each module imports at these times; by default, those that it loads."""
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        targets: set[str] = set()
        for one in imports[path]:
            if one.when in times:
                targets |= _modules_of(one, modules)
        edges[module] = targets - {module}
    return edges


def _modules_of(statement: Import, modules: Mapping[str, str]) -> set[str]:
    """Return the modules that a statement loads: `base` in `from sdp.config import base` is a module or a name."""
    inner = {f"{statement.target}.{name}" for name in statement.names} & set(modules)
    if statement.names and len(inner) == len(statement.names):
        return inner
    return inner | ({statement.target} & set(modules))


def _parents(names: set[str], modules: Mapping[str, str]) -> set[str]:
    """Return the packages that are loaded before these modules."""
    return {parent for name in names for parent in modules if name.startswith(f"{parent}.")}


def _reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += edges.get(module, ())
    return seen


def _circles(
    loaded: Mapping[str, set[str]], imported: Mapping[str, set[str]], modules: Mapping[str, str]
) -> Iterator[Violation]:
    """Yield circles among modules that load each other, and among rooms by all their imports, late ones too."""
    for circle in _cycles_of(loaded):
        yield Violation(modules[circle[0]], 1, f"modules import each other in a circle: {' -> '.join(circle)}")
    rooms: dict[str, set[str]] = {}
    for module, targets in imported.items():
        rooms.setdefault(room_of(module), set()).update({room_of(t) for t in targets} - {room_of(module), ""})
    for circle in _cycles_of(rooms):
        path = min(path for module, path in modules.items() if room_of(module) == circle[0])
        yield Violation(path, 1, f"rooms import each other in a circle: {' -> '.join(circle)}")


def _cycles_of(edges: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield a shortest cycle through each node that is on one, each cycle once, from its smallest node."""
    reported: set[frozenset[str]] = set()
    for start in sorted(edges):
        paths = [[start]]
        seen = {start}
        while paths:
            path = paths.pop(0)
            targets = edges.get(path[-1], set())
            if start in targets:
                if frozenset(path) not in reported:
                    reported.add(frozenset(path))
                    yield [*path, start]
                break
            for target in sorted(targets - seen):
                seen.add(target)
                paths.append([*path, target])


def _names(trees: Mapping[str, ast.Module]) -> Iterator[Violation]:
    """Yield the classes and types whose name another module gives to something else."""
    first: dict[str, str] = {}
    for path, tree in trees.items():
        for node in tree.body:
            match node:
                case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    pass
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if "TypeVar(" not in ast.unparse(value):
                    pass
                case _:
                    continue
            if name[0].isupper() and not name.isupper() and first.setdefault(name, path) != path:
                yield Violation(path, node.lineno, f"{name} is something else in {first[name]}: give it another name")


def _calls(path: str, tree: ast.Module) -> Iterator[Violation]:
    if path not in SLEEPS:
        for line in _sleeps(tree):
            yield Violation(path, line, "time.sleep: wait for the condition itself, with a deadline")
    if room_of(module_of(path)) in GPU_ROOMS and path not in RAY_FILES and path not in THREADS:
        for line in _threads(tree):
            yield Violation(path, line, "a thread that may use a GPU: start it with sdp.device, which sets its device")
    if path != "sdp/device.py":
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(_CUDA_CALLS):
                yield Violation(path, node.lineno, f"{ast.unparse(node.func)}: sdp.device makes streams and events")


_CUDA_CALLS = ("cuda.Stream", "cuda.Event", "cuda.set_device", "record_event", "wait_stream")
"""Calls that use the thread's current device, or create objects of it."""


def _threads(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that start a thread or a thread pool."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "Thread",
            "Timer",
            "ThreadPoolExecutor",
        ):
            yield node.lineno


def _sleeps(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that call time.sleep, under any name, or wait for an event that nobody else has."""
    clocks = {"time"}
    sleeps: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            clocks |= {alias.asname or alias.name for alias in node.names if alias.name == "time"}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            sleeps |= {alias.asname or alias.name for alias in node.names if alias.name == "sleep"}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=clock), attr="sleep")) if clock in clocks:
                yield node.lineno
            case ast.Call(func=ast.Name(id=name)) if name in sleeps:
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Call(func=event), attr="wait"), args=args, keywords=limits) if (
                args or limits
            ) and ast.unparse(event).endswith("Event"):
                yield node.lineno


def _top(statement: Import) -> str:
    return statement.target.split(".")[0]


def outside_imports(sources: Sources) -> Iterable[tuple[str, Import]]:
    """Yield the imports of third-party packages, file by file."""
    for path, text in sources.items():
        for one in imports_in(ast.parse(text)):
            if _top(one) not in {"sdp", *sys.stdlib_module_names}:
                yield path, one


def main() -> int:
    """Print the violations; return 1 if there are any."""
    sources = read_sources(ROOT)
    lines = [*map(str, check(sources)), *stale_entries(sources)]
    print("\n".join(lines) if lines else f"{len(sources)} files keep the rules")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
