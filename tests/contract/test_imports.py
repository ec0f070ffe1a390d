"""The import rules: that sdp keeps them, and that each of them notices what it is there for."""

import functools
import re
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import import_rules
from tests.programs import ended

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def found_in(files: dict[str, str]) -> list[str]:
    """Return the faults that the rules find in these files of sdp/."""
    return [str(violation) for violation in import_rules.check({f"sdp/{path}": text for path, text in files.items()})]


def test_the_architecture_page_has_every_room() -> None:
    rooms = {path.stem for path in (ROOT / "sdp").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {room for level in import_rules.ROOMS for room in level} == rooms - {"__init__"}
    assert import_rules.rooms_table() in (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    texts = ElementTree.parse(ROOT / "docs/architecture.svg").iter("{http://www.w3.org/2000/svg}text")
    words = {word.strip(",;:") for text in texts for word in "".join(text.itertext()).split()}
    assert rooms - {"__init__", "__main__"} <= words


def test_no_room_takes_the_name_of_what_the_package_offers() -> None:
    """Its import would put the room in the function's place."""
    offered = re.findall(r"^def (\w+)", (ROOT / "sdp/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert "run" in offered
    assert {room for level in import_rules.ROOMS for room in level}.isdisjoint(offered)


def test_the_architecture_page_points_at_code_that_exists() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    cells = [line.split("|")[2] for line in page.split("## Where to look")[1].split("##")[0].splitlines()[4:] if line]
    assert len(cells) >= 10
    for file, name in re.findall(r"`(\S+\.py)`(?: `(\w+)`)?", " ".join(cells)):
        source = (ROOT / "sdp" / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^ *(async def|def|class) {name}\b", source, re.MULTILINE), f"{file}: {name}"


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"errors.py": "import sdp.storage"}, "errors must not import storage"),
        ({"train/loop.py": "import threading\nthreading.Thread(target=f)"}, "start it with sdp.device"),
        ({"model/a.py": "def f():\n  with ThreadPoolExecutor(2): pass"}, "start it with sdp.device"),
        ({"train/loop.py": "import torch\ntorch.cuda.Event().record()"}, "sdp.device makes streams and events"),
        ({"process/a.py": "here.wait_stream(there)"}, "sdp.device makes streams and events"),
        ({"storage.py": "from sdp import model"}, "storage must not import model"),
        ({"config/base.py": "from sdp.train.loop import run"}, "config must not import train"),
        ({"datasets/parts.py": "def f():\n  import sdp.model.sources"}, "datasets must not import model"),
        ({"model/sources.py": "from sdp.encode import encoder"}, "model must not import encode"),
        ({"train/loop.py": "import os\n\n\nimport sdp.cli\n"}, "sdp/train/loop.py:4: train must not import cli"),
        ({"train/loop.py": "from sdp.evaluate.result import notes"}, "train must not import evaluate, which is above"),
        ({"train/loop.py": "from sdp.score import stages"}, "train must not import score, which is on its own level"),
        ({"attic.py": ""}, "sdp/attic is not in ROOMS"),
        ({"config/base.py": "import torch.nn"}, "config must not import torch"),
        ({"config/base.py": "def f():\n  from ray import init"}, "config must not import ray"),
        ({"exporter/nvml.py": "import torch"}, "exporter must not import torch"),
        ({"config/base.py": "import sdp.storage", "storage.py": "import torch"}, "loads it through sdp/storage.py:1"),
        (
            {"config/base.py": "import sdp.datasets.a", "datasets/__init__.py": "import torch", "datasets/a.py": ""},
            "loads it through sdp/datasets/__init__.py:1",
        ),
        ({"train/loop.py": "import ray.train"}, "only RAY_FILES import ray"),
        ({"train/loop.py": "def f():\n  import ray"}, "only RAY_FILES import ray"),
        ({"telemetry/names.py": "from ray.util import metrics"}, "only RAY_FILES import ray"),
        ({"train/a.py": "import sdp.train.b", "train/b.py": "import sdp.train.a"}, "modules import each other"),
        (
            {"imaging/a.py": "import sdp.model.b", "imaging/c.py": "", "model/b.py": "import sdp.imaging.c"},
            "rooms import",
        ),
        (
            {"imaging/a.py": "def f(): import sdp.model.b", "imaging/c.py": "", "model/b.py": "import sdp.imaging.c"},
            "rooms import each other in a circle: imaging -> model -> imaging",
        ),
        ({"train/loop.py": "import time\ntime.sleep(1)"}, "time.sleep"),
        ({"train/loop.py": "import time as clock\nclock.sleep(1)"}, "time.sleep"),
        ({"train/loop.py": "from time import sleep as nap\nnap(1)"}, "time.sleep"),
        ({"train/loop.py": "from threading import Event\nEvent().wait(1)"}, "time.sleep"),
        ({"train/loop.py": "from threading import Event\nEvent().wait(timeout=1)"}, "time.sleep"),
        ({"train/a.py": "class Plan: ...", "train/b.py": "Plan = dict[str, str]"}, "Plan is something else in"),
    ],
)
def test_what_breaks_a_rule_is_named(files: dict[str, str], complaint: str) -> None:
    (violation,) = found_in(files)
    assert complaint in violation


@pytest.mark.parametrize(
    "files",
    [
        {"train/launch.py": "import ray.train"},
        {"cli.py": "import sdp.train.job"},
        {"train/loop.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import ray"},
        {"train/data.py": "from sdp.encode.encoder import Encoder", "encode/encoder.py": ""},
        {"config/base.py": "from sdp.errors import ConfigError", "errors.py": "class ConfigError(Exception): ..."},
        # Loaded late, so config loads without it:
        {"config/base.py": "import sdp.hardware", "hardware.py": "def f():\n  import torch"},
        {"train/a.py": "import sdp.train.b", "train/b.py": "def f():\n  import sdp.train.a"},
        {"train/__init__.py": "from sdp.train.a import A", "train/a.py": "from sdp.train.b import B", "train/b.py": ""},
        {"train/loop.py": "import asyncio\nasync def f():\n  await asyncio.sleep(0)"},
    ],
)
def test_what_the_rules_allow_is_left_alone(files: dict[str, str]) -> None:
    assert found_in(files) == []


def declared(*extras: str) -> list[Requirement]:
    """Return the requirements in pyproject.toml for the base install and these extras."""
    lines = [*PYPROJECT["dependencies"]]
    for extra in extras:
        lines += PYPROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


@functools.cache
def owners_of() -> dict[str, set[str]]:
    """Importable name -> the installed distributions that bring it."""
    return {top: {canonicalize_name(one) for one in owners} for top, owners in packages_distributions().items()}


@functools.cache
def installed_with(*extras: str) -> set[str]:
    """The distributions that an install with these extras holds here: those declared, and all that they need."""
    held: set[tuple[str, str]] = set()
    ahead = [(one.name, extra) for one in declared(*extras) for extra in ("", *one.extras)]
    while ahead:
        name, extra = ahead.pop()
        if (canonicalize_name(name), extra) in held:
            continue
        held.add((canonicalize_name(name), extra))
        for one in map(Requirement, requires(name) or ()):
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                ahead += [(one.name, inner) for inner in ("", *one.extras)]
    return {name for name, _ in held}


def test_every_outside_package_that_sdp_imports_is_one_of_its_declared_dependencies() -> None:
    allowed = {canonicalize_name(one.name) for one in declared("worker", "exporter")}
    strangers = set()
    for path, statement in import_rules.outside_imports(import_rules.read_sources(ROOT)):
        top = statement.target.split(".")[0]
        if not owners_of().get(top, set()) & allowed:
            strangers.add(f"{path}:{statement.line}: {top}")
    assert sorted(strangers) == []


BASE_MODULES = ("sdp.cli", "sdp.config", "sdp.storage", "sdp.lease", "sdp.datasets", "sdp.hardware")

FORBIDDING = """
import os, sys

def carried_by_ray(name):
    name = name.split(".")[0]
    return any(os.path.isdir(os.path.join(path, name)) for path in sys.path if path.endswith("thirdparty_files"))

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN and not carried_by_ray(name):
            raise ImportError(f"{name} is not in this install")

sys.meta_path.insert(0, Forbid())
for module in MODULES:
    try:
        __import__(module)
    except ImportError as error:
        print(f"{module}: {error}")
"""


def import_alone(modules: Sequence[str], *extras: str) -> list[str]:
    """Import modules in a process where only the requirements of these extras can be; return a line of each failure."""
    held = installed_with(*extras)
    forbidden = {top for top, owners in owners_of().items() if top != "sdp" and not held & owners}
    code = f"FORBIDDEN = {forbidden!r}\nMODULES = {modules!r}\n{FORBIDDING}"
    return ended([sys.executable, "-c", code], cwd=ROOT, check=True).stdout.splitlines()


def test_the_base_install_imports_its_modules_without_the_packages_of_the_cluster() -> None:
    missing = ("torch", "ray", "PIL", "diffusers", "pynvml")
    expected = [f"{package}: {package} is not in this install" for package in missing]
    assert import_alone([*BASE_MODULES, *missing]) == expected
    assert import_alone(["ray"], "worker") == []


def test_workers_that_compute_no_tensors_load_neither_torch_nor_diffusers() -> None:
    """Transforms, download workers and the desk: torch costs a process two seconds and 200 MB."""
    heavy = "{'torch', 'diffusers', 'transformers'}"
    modules = "sdp.download.stages, sdp.runners.on_ray, sdp.train.online"
    script = f"import sys, {modules}; sys.exit(' '.join({heavy} & sys.modules.keys()) or None)"
    done = ended([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
