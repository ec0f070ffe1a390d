"""A short round of `make chaos`: the cheapest stage, whose driver is killed."""

import sys
from pathlib import Path

import pytest

from tests.programs import ended


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.needs("versitygw")
def test_a_download_that_is_disturbed_leaves_what_an_undisturbed_one_writes(tmp_path: Path) -> None:
    done = ended(
        [sys.executable, "-m", "tests.chaos", "--directed", "download-driver", "--folder", str(tmp_path)], timeout=380
    )
    logs = "".join(f"\n{log.name}\n{log.read_text(errors='replace')}" for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    assert "killed nothing" not in done.stderr
