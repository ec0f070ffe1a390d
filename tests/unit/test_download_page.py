"""docs/download.md and docs/datasets.md against the code."""

import re
from pathlib import Path

from sdp.config import keys
from sdp.config.download import DownloadConfig
from sdp.datasets.outcomes import FAILURE_REASONS, FILTER_REASONS

PAGE = (Path(__file__).parents[2] / "docs" / "download.md").read_text()


def test_every_key_that_the_page_names_is_one() -> None:
    known = {key.path for key in keys(DownloadConfig)}
    sections = "|".join(sorted({path.partition(".")[0] for path in known if "." in path}))
    named = set(re.findall(rf"`((?:{sections})\.[a-z0-9_]+)", PAGE))
    assert len(named) > 10
    assert named - known == set()


def test_the_reasons_on_the_page_of_datasets_are_those_of_the_account() -> None:
    page = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()
    assert dict(re.findall(r"^\| `([a-z_]+)` \| (.+) \|$", page, re.MULTILINE)) == {**FILTER_REASONS, **FAILURE_REASONS}
