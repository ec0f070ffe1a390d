"""Suites that others wrote, for our readers: docs/security.md says how many cases agree, and why the others do not.

A case agrees if both accept it with the same result, or both refuse it. Where ours may refuse more, a refusal in one
line agrees, too.
"""

import json
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import cv2
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from sdp.config.yaml_text import parse_document
from sdp.errors import ConfigError, UserError
from sdp.imaging import ImageError, decode
from sdp.sources.captions import gather
from sdp.sources.tars import _files, read_samples
from sdp.urls import BadUrl, parse, redirected
from tests.programs import ROOT
from tests.unit.test_foreign import add, robots_allow

PAGE, TOOLS = ROOT / "docs" / "security.md", ROOT / ".tools"
IMAGES = (".png", ".apng", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".avif")
STRING = r'"(?:[^"\\]|\\.)*"'
ROBOTS = re.compile(
    rf"(?P<name>\w+) =\s*(?P<value>(?:\s*{STRING})+);"
    rf"|EXPECT_(?P<verdict>TRUE|FALSE)\(\s*IsUserAgentAllowed\((?P<arguments>(?:{STRING}|[^;\"(])*)\)\);"
)
"""Strings of the suite in C++, and what it expects of a robots.txt, an agent and a URL."""
SPELT = {"␣": " ", "⇔": "\ufeff", "↵": "", "∎\n": "", "←": "\r"}
"""Spellings by the suite of YAML of invisible characters, beside tabs."""

Cases = Iterator[bool]
Suites = Callable[[str], Path]


def page() -> dict[str, tuple[int, int]]:
    """Return for each suite of the page the number of cases that agree, and of all."""
    rows = re.findall(r"^\| ([^|]+?) \| ([\d,]+) of ([\d,]+) \|", PAGE.read_text(), re.MULTILINE)
    return {name: (int(agree.replace(",", "")), int(count.replace(",", ""))) for name, agree, count in rows}


def robots(suite: Suites, _: Path) -> Cases:
    def value(text: str) -> str:
        parts = [part[1:-1] for part in re.findall(STRING, text)]
        return "".join(parts).encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")

    strings: dict[str, str] = {}
    for case in ROBOTS.finditer((suite("suite-robots") / "robots_test.cc").read_text()):
        if case["name"]:
            strings[case["name"]] = value(case["value"])
        else:
            arguments = re.findall(rf"(?:{STRING}\s*)+|\w+", case["arguments"])
            text, agent, url = [value(each) if each[0] == '"' else strings[each] for each in arguments]
            path = re.sub("^http://[^/]*", "", url)
            yield robots_allow(text, agent, path) == (case["verdict"] == "TRUE")


def urls(suite: Suites, _: Path) -> Cases:
    """Expect a URL that sdp fetches as browsers have it, without fragment; the rest is to be refused."""
    for case in json.loads((suite("suite-urls") / "url/tests/urltestdata.json").read_text()):
        if isinstance(case, str):
            continue
        parts = urlsplit(case.get("href", ""))
        fetched = parts.scheme in ("http", "https") and "@" not in parts.netloc
        expected, result = case["href"].partition("#")[0] if fetched else None, None
        with suppress(BadUrl):
            base = case["base"] or ""
            result = redirected(parse(base), case["input"]) if base[:4] == "http" else parse(case["input"])
        yield (result and result.text) == expected


def documents(suite: Suites, folder: Path) -> Cases:
    """Expect each JSON to be read, or refused in one line, as a table of captions and beside a tar's picture."""
    (folder / "a.png").write_bytes(b"")
    for file in sorted((suite("suite-json") / "test_parsing").iterdir()):
        data = file.read_bytes()
        (folder / "captions.jsonl").write_bytes(data)
        try:
            gather(str(folder))
            yield True
        except UserError as error:
            # It reads lines, so a document that has several may be refused.
            yield "\n" not in str(error) and (file.name[0] != "y" or b"\n" in data.strip())
        with tarfile.open(folder / "a.tar", "w") as tar:
            add(tar, {"a.png": b"image", "a.json": data})
        yield [image for _, image, _ in read_samples(str(folder / "a.tar"), "caption", 0, 1, None)] == [b"image"]


def configurations(suite: Suites, _: Path) -> Cases:
    """Expect the data of valid YAML, or a refusal; PyYAML accepts some that is not valid."""
    for file in sorted((suite("suite-yaml") / "src").glob("*.yaml")):
        last: dict[str, str] = {}
        for case in yaml.safe_load(file.read_text()):
            last |= case
            text = re.sub("—*»", "\t", last["yaml"])
            for spelling, character in SPELT.items():
                text = text.replace(spelling, character)
            try:
                data = parse_document(text, file.name)
            except ConfigError:
                yield True
            else:
                yield bool(case.get("fail")) or not last.get("json") or data == json.loads(last["json"])


def tars(suite: Suites, _: Path) -> Cases:
    """Expect the files that Python's own reader finds; those with holes are known by their names alone."""
    for file in (*suite("suite-tars-js").glob("test/fixtures/*.tar"), *suite("suite-tars-rust").glob("tests/*/*.tar")):
        result = expected = None
        with suppress(tarfile.TarError), file.open("rb") as data:
            result = [(each.name, not each.sparse and each.size) for each in _files(data, 0)]
        with suppress(tarfile.TarError), tarfile.open(file) as tar:
            expected = [(each.name, not each.issparse() and each.size) for each in tar if each.isreg()]
        yield result == expected


def images(suite: Suites, _: Path) -> Cases:
    """Expect what OpenCV's decoders read, over white, within rounding of colours."""
    roots = (suite("suite-images"), suite("suite-pngs") / "tests", suite("suite-pictures") / "Tests")
    for file in sorted(file for root in roots for file in root.rglob("*") if file.suffix.lower() in IMAGES):
        data, result = file.read_bytes(), None
        if len(data) >= 4 << 20:
            continue
        with suppress(ImageError):
            result = decode(data).pixels
        expected = opencv(np.frombuffer(data, np.uint8))
        if result is None or expected is None:
            yield result is expected
        else:
            yield result.shape == expected.shape and bool(np.abs(result.astype(int) - expected).mean() < 3)


def opencv(data: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    pixels = None
    with suppress(cv2.error):
        pixels = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)
        if pixels is not None and pixels.shape[2:] == (3,):  # only so does it turn an image upright
            pixels = cv2.imdecode(data, cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
    if pixels is None or pixels.dtype not in (np.uint8, np.uint16):
        return None
    pixels = pixels.astype(float) / (257 if pixels.dtype == np.uint16 else 1)
    pixels = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, 2)
    opaque = pixels[..., 3:] / 255 if pixels.shape[2] == 4 else 1
    return np.asarray((pixels[..., :3] * opaque + 255 * (1 - opaque)).round()[..., ::-1], np.uint8)


SUITES = {
    "robots.txt": robots, "URLs": urls, "JSON": documents, "YAML": configurations, "tar": tars, "images": images,
}  # fmt: skip


REPOSITORIES = {
    "suite-robots": "google/robotstxt@22b355ff855419e6a3ff8ff09c0ad7fdb17116f9",
    "suite-urls": "servo/rust-url@25137be1fc1d35cc8ea7d43fc0a02166b023a483",
    "suite-json": "nst/JSONTestSuite@1ef36fa01286573e846ac449e8683f8833c5b26a",
    "suite-yaml": "yaml/yaml-test-suite@ccfa74e56afb53da960847ff6e6976c0a0825709",
    "suite-tars-js": "mafintosh/tar-stream@7a6fd517dfb2bae5c667b9ff982210ed4298d050",
    "suite-tars-rust": "alexcrichton/tar-rs@2349b494827807791473f3c6ca9b2fc5ef274cdb",
    "suite-images": "image-rs/image@2c5368b8de2f76ae9d18bc0bcf2cd16c3164cefe",
    "suite-pngs": "image-rs/image-png@4f873e4a628c0e8dbb4204fb263697298f89eb01",
    "suite-pictures": "python-pillow/Pillow@4e5f09f533dbd0d87d39951f48b62f4d1a421cba",
}
"""On GitHub, with the commits to clone into .tools; the tests are skipped where they are not."""


@pytest.fixture
def suite() -> Suites:
    def folder(name: str) -> Path:
        root, (repository, _, commit) = TOOLS / name, REPOSITORIES[name].partition("@")
        head = root / ".git" / "HEAD"
        if not head.exists() or head.read_text().strip() != commit:
            pytest.skip(f"clone {repository} into {root} and check out {commit}")
        return root

    return folder


@pytest.mark.parametrize("name", SUITES)
def test_as_many_cases_of_a_suite_agree_as_the_page_says(suite: Suites, tmp_path: Path, name: str) -> None:
    cases = list(SUITES[name](suite, tmp_path))
    assert (sum(cases), len(cases)) == page()[name]


def test_the_page_counts_every_suite() -> None:
    assert page().keys() == SUITES.keys()
