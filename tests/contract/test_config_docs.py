"""Every key is documented, and every configuration that the documentation shows works."""

import re
from pathlib import Path

import pytest

from scripts import generate_config_docs
from sdp.config import JOBS, keys, load
from sdp.config.base import purpose
from tests.sections import sections_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configuration.md"

# A fenced block of YAML whose first line names a job's file is that job's configuration: `# train.yaml`, also
# `# train-small.yaml` and `# a train.yaml for one GPU`.
EXAMPLE = re.compile(
    r"^(?P<indent>[ \t]*)```ya?ml\n(?P<text>[ \t]*# .*?\b(?P<job>" + "|".join(JOBS) + r")[\w-]*\.yaml\b.*?)^[ \t]*```",
    re.MULTILINE | re.DOTALL,
)


SENTENCE = re.compile(r"[A-Z].{5,}[.]")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples() -> list[tuple[str, str, str]]:
    result = []
    for page in pages():
        if page.exists():
            text = page.read_text(encoding="utf-8")
            for match in EXAMPLE.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                result.append((f"{page.relative_to(ROOT)}:{line}", match["job"], match["text"]))
    return result


@pytest.mark.parametrize("job", JOBS)
def test_every_key_is_described_in_a_sentence(job: str) -> None:
    for key in keys(JOBS[job]):
        assert SENTENCE.fullmatch(key.what), f"{job}: {key.path}: {key.what!r}"
        assert "|" not in key.what
    for path, parent, section in sections_of(JOBS[job]):
        text = purpose(parent.model_fields[path.rpartition(".")[2]])
        assert SENTENCE.fullmatch(text), f"{job}: {path}: {text!r}"
        assert section.model_fields


def test_the_page_agrees_with_the_models() -> None:
    assert generate_config_docs.main(["--check"]) == 0, "python -m scripts.generate_config_docs"


def test_every_job_has_an_example_in_the_documentation() -> None:
    assert {job for _, job, _ in examples()} == set(JOBS)


@pytest.mark.parametrize(("where", "job", "text"), examples(), ids=lambda value: str(value).partition("\n")[0])
def test_every_example_in_the_documentation_loads(where: str, job: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    assert load(job, str(path)), where


def test_the_errors_on_the_page_are_the_real_ones(capsys: pytest.CaptureFixture[str]) -> None:
    from sdp.cli import main

    page = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"^ *\$ sdp (.*)\n((?: *sdp: .*\n)+)", page, re.MULTILINE)
    assert shown
    for line, message in shown:
        assert main(line.split()) == 2
        assert capsys.readouterr().err.splitlines() == [line.strip() for line in message.splitlines()]
