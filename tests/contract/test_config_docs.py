"""Every key is documented, and so are the errors."""

import re
from pathlib import Path

import pytest

from scripts import generate_config_docs
from sdp.config import JOBS, keys
from sdp.config.base import purpose
from tests.sections import sections_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configuration.md"

SENTENCE = re.compile(r"[A-Z].{5,}[.]")


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


def test_the_errors_on_the_page_are_the_real_ones(capsys: pytest.CaptureFixture[str]) -> None:
    from sdp.cli import main

    page = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"^ *\$ sdp (.*)\n((?: *sdp: .*\n)+)", page, re.MULTILINE)
    assert shown
    for line, message in shown:
        assert main(line.split()) == 2
        assert capsys.readouterr().err.splitlines() == [line.strip() for line in message.splitlines()]
