"""Every benchmark still runs, at its smallest size; those with tests of their own are not repeated."""

import os
import sys

import pytest

from scripts.bench._cases import SMALL
from scripts.benchmarks import FOLDER, benchmarks
from tests.programs import printed

pytestmark = pytest.mark.slow

TESTED_ELSEWHERE = {"gpu_first_hour", "gpu_train", "kernels", "tables"}
MEASURES_A_START = {"download", "imports"}
"""Measures what a new process takes, so it starts anew; the others are forked from one that has loaded torch."""


@pytest.mark.parametrize("name", sorted(benchmarks(FOLDER).keys() - TESTED_ELSEWHERE))
def test_a_benchmark_runs_at_its_smallest_size(name: str) -> None:
    env = {**os.environ, SMALL: "1", **({} if name in MEASURES_A_START else {"SDP_TESTS_WARM_PROGRAMS": "1"})}
    assert printed([sys.executable, "-m", f"scripts.bench.{name}"], env=env, timeout=300).strip()
