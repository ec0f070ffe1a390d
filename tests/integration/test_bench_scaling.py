"""The scaling benchmark, with CPU stand-ins for GPUs."""

import os
import sys
from pathlib import Path

import pytest

from tests.programs import ended

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_it_measures_several_workers_and_draws_them_beside_a_straight_line(tmp_path: Path) -> None:
    picture = tmp_path / "scaling.svg"
    command = [sys.executable, "-m", "scripts.bench.scaling", "--workers", "1,2", "--steps", "2", "--wait-ms", "50"]
    environ = {**os.environ, "SDP_TESTS_WARM_PROGRAMS": "1"}
    command += ["--picture", str(picture)]
    done = ended(command, cwd=ROOT, env=environ, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2"]
    assert rows[0][1] == rows[0][2]  # the straight line begins at one worker
    assert "measured" in picture.read_text()
    assert "linear" in picture.read_text()
