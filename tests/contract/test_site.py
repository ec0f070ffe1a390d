"""The site: every page is in it, links out of docs/ lead to GitHub, and mkdocs builds it where it is installed."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import site_links
from tests.programs import ended

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(nav: Any) -> Iterator[str]:
    """Yield the files of a nav."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    expected = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(pages(SITE["nav"])) == expected


def test_the_contents_page_leads_to_every_page_too() -> None:
    """It is the site's first page, and what GitHub shows of docs/."""
    links = set(re.findall(r"\]\(([\w./-]+\.md)\)", (DOCS / "README.md").read_text()))
    expected = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    assert expected <= links


@pytest.mark.parametrize(
    ("page", "link", "address"),
    [
        ("kubernetes.md", "../manifests", "https://github.com/sdp/sdp/tree/main/manifests"),
        ("kubernetes.md", "../images/ray/Dockerfile", "https://github.com/sdp/sdp/blob/main/images/ray/Dockerfile"),
        ("runbooks/xid.md", "../../README.md", "https://github.com/sdp/sdp/blob/main/README.md"),
        ("runbooks/xid.md", "../monitoring.md", "../monitoring.md"),
        ("kubernetes.md", "../no-such-file", "../no-such-file"),
    ],
)
def test_a_link_out_of_docs_leads_to_the_file_at_github(page: str, link: str, address: str) -> None:
    class Page:
        class file:  # noqa: N801 (as mkdocs names it)
            src_uri = page

    text = site_links.on_page_markdown(f"See [it]({link}#part) and [that](other.md).", Page)
    assert text == f"See [it]({address}#part) and [that](other.md)."


def test_the_keys_that_newcomers_are_told_of_exist() -> None:
    """docs/coming-from.md names keys of download, process and train in its tables' second columns."""
    known = set(re.findall(r"^\| `([\w.]+)`", (DOCS / "configuration.md").read_text(), re.MULTILINE))
    rows = re.findall(r"^\|.*?[^\\]\|(.*)\|$", (DOCS / "coming-from.md").read_text(), re.MULTILINE)
    named = {key for row in rows for key in re.findall(r"`([a-z_]\w*\.[a-z_][\w.]*)(?=[`:])", row)}
    assert len(named) > 40
    assert {key for key in named if key not in known and not any(name.startswith(f"{key}.") for name in known)} == set()


def test_mkdocs_builds_the_site_without_a_warning(tmp_path: Path) -> None:
    folders = [str(ROOT / ".tools" / "site" / "bin"), os.environ.get("PATH", "")]
    mkdocs = shutil.which("mkdocs", path=os.pathsep.join(folders))
    if mkdocs is None:
        pytest.skip("mkdocs is not installed; make site installs it, and CI builds the site with it")
    done = ended(  # without --quiet, with which mkdocs does not count warnings
        [mkdocs, "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "monitoring" / "index.html").is_file()
    assert (tmp_path / "pictures" / "dashboard-run.png").is_file()
    assert (tmp_path / "search" / "search_index.json").is_file()
