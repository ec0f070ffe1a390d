"""Every command and every piece of YAML that a page shows is one that sdp and its charts accept."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sdp.cli import COMMANDS, JOBS
from sdp.cli.command import Command, CommandParser
from sdp.config import draft, load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    sdp .*\n)+", re.MULTILINE)
_INLINE = re.compile(r"`(sdp [a-z][^`]*)`")
_REFUSED = re.compile(r"^ *sdp: .*expected", re.MULTILINE)
"""A block that shows errors; test_config_docs.py compares them."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match["language"], match["text"])


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMAND_BLOCKS = [
    block for block in BLOCKS if block.language in ("sh", "console", "") and re.search(r"\bsdp ", block.text)
]
YAML_BLOCKS = [block for block in BLOCKS if block.language == "yaml"]
WHOLE = re.compile(rf" *# .*?\b({'|'.join(JOBS)})[\w-]*\.yaml\b")
"""The first line of a job's whole configuration: `# train-small.yaml`, or `# a train.yaml for one GPU`."""


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of every `sdp` command in a shell's text, without `sdp` itself."""
    prompted = re.search(r"^ *\$ ", text, re.MULTILINE)  # then the other lines are output
    for line in text.replace("\\\n", " ").splitlines():
        if "sdp " not in line or (prompted and not line.lstrip().startswith("$ ")):
            continue
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|;&<>()"):
                if words[:1] == ["sdp"]:
                    yield words[1:]
                words = []
            elif word == "--":  # kubectl exec POD -- sdp doctor
                words = []
            else:
                words.append(word)


def parser_of(words: list[str]) -> tuple[Command, CommandParser, list[str]]:
    for command in COMMANDS:
        name = command.name.split()
        if words[: len(name)] == name:
            parser = CommandParser(command)
            return command, parser, words[len(name) :]
    raise AssertionError(f"sdp {' '.join(words)}: there is no such command")


def check_options(words: list[str]) -> None:
    _, parser, rest = parser_of(words)
    known = {option for action in parser._actions for option in action.option_strings}
    assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known, words


def check_whole(words: list[str]) -> None:
    command, parser, rest = parser_of(words)
    arguments, unknown = parser.parse_known_args(rest)
    assert not unknown, words
    job = command.name if command.name in JOBS else str(getattr(arguments, "job", "")).split("-")[0]
    if getattr(arguments, "set", None):
        draft(job, None, arguments.set, part=True)


@pytest.mark.parametrize("block", COMMAND_BLOCKS, ids=str)
def test_a_command_that_a_page_shows_is_one_that_sdp_takes(block: Block) -> None:
    if _REFUSED.search(block.text):
        return
    for words in command_lines(block.text):
        check_whole(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_named_in_a_sentence_has_the_options_that_it_is_shown_with(page: Path) -> None:
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for code in _INLINE.findall(prose):
        for words in command_lines(code.replace("\n", " ")):
            check_options(words)
    assert not _INDENTED.search(prose), "fence it, so that the tests find it"


@pytest.mark.parametrize("block", YAML_BLOCKS, ids=str)
def test_yaml_that_a_page_shows_is_accepted(block: Block, tmp_path: Path) -> None:
    """As a job's file or a part of one, or as values of a chart; a Kubernetes object is the cluster's business."""
    text = re.sub(r"\b[A-Z]{4,}\b", lambda place: place[0].lower(), block.text)  # BUCKET, REGISTRY: the reader's own
    data = yaml.safe_load(text)
    if "apiVersion" in data or "Argo CD" in block.text:
        return
    file = tmp_path / "job.yaml"
    file.write_text(text, encoding="utf-8")
    if whole := WHOLE.match(text):
        assert load(whole[1], str(file))
        return
    job = {"training-data": "train"}.get(block.page.stem, block.page.stem)
    if job in JOBS:
        draft(job, str(file), part=True)
        return
    for chart in sorted((ROOT / "charts").iterdir()):
        values = yaml.safe_load((chart / "values.yaml").read_text())
        if data.keys() <= values.keys():
            jsonschema.validate(merged(values, data), json.loads((chart / "values.schema.json").read_text()))
            return
    raise AssertionError("no job and no chart has these keys")


def test_every_job_has_a_whole_example() -> None:
    assert {whole[1] for block in YAML_BLOCKS if (whole := WHOLE.match(block.text))} == set(JOBS)


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a chart's values as Helm merges a file into them."""
    both = {key: merged(own, changes[key]) for key, own in values.items() if key in changes and isinstance(own, dict)}
    return {**values, **changes, **both}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_modules_and_files_of_a_command_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language not in ("sh", "console"):
            continue
        for module in re.findall(r"python -m ([\w.]+)", block.text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
        for file in re.findall(r"(?<![\w/.-])(?:charts|manifests|scripts)/[\w./-]+", block.text):
            assert (ROOT / file).exists(), file
