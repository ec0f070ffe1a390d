"""requirements.lock and pyproject.toml agree, on each Python and system that we support, and all is pinned."""

import re
import tomllib
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()
ENTRIES = [entry.replace("\\\n", " ").split() for entry in re.split(r"\n(?=\S)", LOCK.strip())]

PYTHONS = ("3.11", "3.12", "3.13")
SYSTEMS = (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64"))
MACHINES = [
    {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": platform,
        "platform_system": system,
        "platform_machine": machine,
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    for python in PYTHONS
    for platform, system, machine in SYSTEMS
]


def requirement_of(entry: list[str]) -> Requirement:
    return Requirement(" ".join(word for word in entry if not word.startswith("--hash=")))


def direct_requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    groups = PYPROJECT["dependency-groups"]
    lines = [*PYPROJECT["build-system"]["requires"], *project["dependencies"], *groups["test"]]
    lines += [line for line in groups["dev"] if isinstance(line, str)]
    for extra in project["optional-dependencies"].values():
        lines += extra
    return [Requirement(line) for line in lines]


LOCKED: dict[str, list[Requirement]] = defaultdict(list)
for _entry in ENTRIES:
    LOCKED[canonicalize_name(requirement_of(_entry).name)].append(requirement_of(_entry))


def applies(requirement: Requirement, machine: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(machine)


@pytest.mark.parametrize("wanted", direct_requirements(), ids=str)
def test_a_dependency_is_locked_once_and_within_its_range_on_every_supported_machine(wanted: Requirement) -> None:
    for machine in MACHINES:
        if applies(wanted, machine):
            (locked,) = [one for one in LOCKED[canonicalize_name(wanted.name)] if applies(one, machine)]
            (pin,) = locked.specifier
            assert wanted.specifier.contains(pin.version), f"{locked} is outside of {wanted}"


def test_every_entry_is_one_exact_version_with_hashes() -> None:
    assert len(ENTRIES) > 100
    for entry in ENTRIES:
        hashes = [word for word in entry if word.startswith("--hash=")]
        assert hashes
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), entry[0]
        (pin,) = requirement_of(entry).specifier
        assert pin.operator == "==", entry[0]
        assert "*" not in pin.version, entry[0]


@pytest.mark.parametrize("lock", ["requirements.lock", "scripts/uv.lock", "scripts/site.lock"])
def test_a_lock_names_no_address_and_no_option_but_hashes(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert "/" not in text
    assert " @ " not in text
    assert set(re.findall(r"(?:^|\s)(-[-\w]+)", text)) == {"--hash"}


def test_each_supported_python_is_allowed_and_no_other() -> None:
    allowed = SpecifierSet(PYPROJECT["project"]["requires-python"])
    assert [minor for minor in range(20) if allowed.contains(f"3.{minor}.5")] == [11, 12, 13, 14]
    assert "(3, 11) <= sys.version_info[:2] <= (3, 14)" in (ROOT / "scripts" / "venv.sh").read_text()


def test_the_environment_that_runs_the_tests_is_the_locked_one() -> None:
    differing = []
    for name, requirements in LOCKED.items():
        for one in requirements:
            if one.marker is None or one.marker.evaluate():
                (pin,) = one.specifier
                try:
                    have = version(name)
                except PackageNotFoundError:
                    have = "nothing"
                if have != pin.version:
                    differing.append(f"{name}: {have} installed, {pin.version} locked (make venv mends it)")
    assert differing == []
