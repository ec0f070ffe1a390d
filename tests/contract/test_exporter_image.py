"""The exporter's image holds just what the exporter imports."""

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from scripts.import_rules import outside_imports, read_sources

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "images" / "exporter" / "Dockerfile").read_text()
ROOMS = ("sdp/exporter/", "sdp/backoff.py", "sdp/errors.py", "sdp/console.py", "sdp/__init__.py")


def installed() -> set[str]:
    """The packages that the Dockerfile installs."""
    lock = (ROOT / "images" / "exporter" / "requirements.lock").read_text()
    return set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))


def imported() -> set[str]:
    """The distributions that the exporter's own code imports."""
    sources = read_sources(ROOT)
    own = {path: text for path, text in sources.items() if path.startswith(ROOMS)}
    for path, text in own.items():
        rooms = set(re.findall(r"^ *(?:from|import) (sdp\.[a-z]+)", text, re.MULTILINE))
        late = {"sdp.train", "sdp.report"} if path == "sdp/__init__.py" else set()  # imported when a function is called
        assert rooms <= {"sdp.exporter", "sdp.backoff", "sdp.errors", "sdp.console"} | late, path
    modules = {one.target.split(".")[0] for _, one in outside_imports(own)}
    known = packages_distributions()
    return {known[module][0].lower().replace("_", "-") for module in modules}


def test_the_image_holds_what_the_exporter_imports_and_no_more() -> None:
    assert installed() == imported() == {"nvidia-ml-py", "prometheus-client"}


def test_what_the_image_holds_is_among_the_requirements_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["exporter"]]
    assert installed() <= {Requirement(line).name for line in wanted}


def test_the_image_runs_as_an_ordinary_user_on_a_base_that_can_be_chosen() -> None:
    assert re.search(r"^ARG BASE_IMAGE=\S+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["${BASE_IMAGE}", "${BASE_IMAGE}"]
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["9850:9850"]
