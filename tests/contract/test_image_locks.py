"""The images install only packages with a hash, in the versions of requirements.lock."""

import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.programs import ended

ROOT = Path(__file__).parents[2]
IMAGES = ("ray", "exporter")


def entries(path: Path) -> dict[str, set[str]]:
    """The hashes of each pinned version in a lock."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {words[0]: {word for word in words if word.startswith("--hash=")} for words in lines}


def dockerfile(image: str) -> str:
    return (ROOT / "images" / image / "Dockerfile").read_text().replace("\\\n", " ")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_locked_to_versions_and_hashes_of_the_common_lock(image: str) -> None:
    common, own = entries(ROOT / "requirements.lock"), entries(ROOT / "images" / image / "requirements.lock")
    assert own
    for pin, hashes in own.items():
        assert hashes, pin
        assert hashes == common[pin], f"{pin}: run make lock"


@pytest.mark.parametrize("image", IMAGES)
def test_every_installation_in_an_image_checks_hashes_and_so_does_what_builds_sdp(image: str) -> None:
    text = dockerfile(image)
    assert f"COPY images/{image}/requirements.lock ./image.lock" in text
    installs = re.findall(r"pip install ([^&\n]+)", text)
    assert len(installs) >= 3
    for install in installs:
        locked = "--require-hashes" in install and re.search(r"-r (uv|image)\.lock", install)
        assert locked or install.split()[-2:] == ["--no-deps", "/wheel/*.whl"], install
    (build,) = re.findall(r"uv build ([^&\n]+)", text)
    assert "--require-hashes" in build
    assert "--build-constraints requirements.lock --out-dir /wheel ." in " ".join(build.split())


def test_the_ray_image_contains_the_requirements_of_sdp_and_its_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {canonicalize_name(Requirement(line).name) for line in
              [*project["dependencies"], *extras["worker"]]}  # fmt: skip
    locked = {pin.split("==")[0].split("[")[0] for pin in entries(ROOT / "images" / "ray" / "requirements.lock")}
    assert wanted <= locked


def test_an_efa_installer_without_its_digest_is_refused_before_anything_is_built() -> None:
    environment = {**os.environ, "EFA_INSTALLER": "1.43.2"}
    environment.pop("EFA_SHA256", None)
    done = ended(["sh", "scripts/build_images.sh", "registry.example", "ray"], cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("build_images: EFA_SHA256: expected the SHA-256 of AWS's archive, got nothing; ")


def test_the_efa_installer_runs_only_after_its_digest_was_checked() -> None:
    """The Dockerfile's own commands, with a downloaded archive of another content."""
    (step,) = re.findall(r'RUN (\[ -z "\$EFA_INSTALLER" \].+)', dockerfile("ray"))
    words = ('[ -n "$EFA_SHA256" ]', "wget", "sha256sum --check", "tar -xzf", "efa_installer.sh")
    assert [step.index(word) for word in words] == sorted(map(step.index, words))
    prefix = step[: step.index("tar -xzf")].replace("cd /tmp;", "").replace("wget ", "touch efa.tar.gz; : ")
    for digest, message in (("", "EFA_SHA256: expected"), ("0" * 64, "")):
        environment = {"PATH": os.defpath, "EFA_INSTALLER": "1", "EFA_SHA256": digest}
        script = f'cd "$(mktemp -d)"; {prefix} echo reached; }}'
        done = ended(["sh", "-c", script], env=environment)
        assert done.returncode != 0
        assert "reached" not in done.stdout
        assert message in done.stderr
