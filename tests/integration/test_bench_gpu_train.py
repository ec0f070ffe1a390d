"""The benchmark for GPUs, with the tiny model on a CPU: that it runs, and what it prints."""

import os
import re
import sys

import pytest

from scripts.bench.gpu_train import main
from tests.programs import ROOT, printed

pytestmark = pytest.mark.slow


def gpu_train(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "scripts.bench.gpu_train", *arguments]
    environ = {**os.environ, "SDP_TESTS_WARM_PROGRAMS": "1"}
    return printed(command, cwd=ROOT, env=environ, timeout=280).splitlines()


def test_both_strategies_are_measured_over_several_workers() -> None:
    lines = gpu_train("--tiny", "--workers", "2", "--batch", "2", "--warm", "1", "--steps", "2", "--compile", "off")
    assert lines[0] == "gpu_train: 2 x CPU, 2 steps after 1"
    rows = [line.split() for line in lines if re.match(r"64\s", line)]
    assert [row[:5] for row in rows] == [["64", "ddp", "off", "-", "2"], ["64", "fsdp", "off", "-", "2"]]
    for row in rows:
        assert float(row[5]) > 0
        assert abs(float(row[6]) - float(row[5]) / 2) < 0.11
        assert row[7] == "-"  # no peak is known for a CPU


def test_a_batch_that_was_asked_for_and_does_not_fit_is_not_halved(capsys: pytest.CaptureFixture[str]) -> None:
    case = "--tiny --workers 1 --strategies ddp --compile off --batch 4 --warm 1 --steps 2 --room 2"
    assert main(case.split()) == 1
    assert "data.batch_size: 4 samples do not fit" in capsys.readouterr().out


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    import torch

    lines = gpu_train("--steps", "1")
    if not torch.cuda.is_available():
        assert lines == ["gpu_train: no GPU here, nothing measured; it needs one, --tiny tries the same code on a CPU"]
