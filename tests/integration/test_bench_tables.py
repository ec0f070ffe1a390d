"""The article's tables on a cluster: what is run for which line, what is printed, and one line in earnest."""

import argparse
import os
import re
import sys
from pathlib import Path

import pytest

from scripts.bench import tables
from tests.programs import ROOT, printed
from tests.training import tiny_inputs

pytestmark = pytest.mark.slow


def test_a_line_of_both_tables_is_run_once_and_the_baseline_goes_without_efa() -> None:
    with_efa = tables.cases_of([], 256, efa=True)
    assert list(with_efa) == ["collocated", "offline", "online", "ddp", "+ efa", "+ fsdp", "+ compile"]
    assert with_efa["offline"] == with_efa["+ efa"], "theirs is the same figure, too"
    assert [case.efa for case in with_efa.values()] == [True, True, True, False, True, True, True]
    without = tables.cases_of([], 256, efa=False)
    assert "+ efa" not in without
    assert without["offline"] == without["ddp"]


def test_steps_before_the_first_that_counts_do_not_count() -> None:
    lines = [
        {"step": 1, "samples_per_s": 1.0, "step_seconds": 50.0},
        {"step": 2, "samples_per_s": 10.0, "step_seconds": 1.0},
        {"step": 3, "samples_per_s": 40.0, "step_seconds": 0.25},
    ]
    assert tables.rate_of(lines, warm=1) == pytest.approx(20 / 1.25)


def test_ours_stand_beside_theirs_by_gpu() -> None:
    rates = {"collocated": 8 * 90.0, "offline": 8 * 135.0, "ddp": 8 * 60.0, "+ fsdp": 8 * 180.0, "+ compile": None}
    lines = [re.split(r"\s{2,}", line) for line in tables.report(rates, 256, workers=8).splitlines()]
    figures = {line[0]: line[1:] for line in lines if len(line) > 1}
    assert figures["collocated"] == ["720.0", "90.0", "1.00×", "87.7", "1.00×"]
    assert figures["offline"] == ["1,080.0", "135.0", "1.50×", "127.1", "1.45×"]  # 4068 of 32 GPUs, as the article says
    assert figures["+ fsdp"] == ["1,440.0", "180.0", "3.00×", "120.3", "1.79×", "156.7", "3.19×"]
    assert figures["+ compile"] == ["-", "-", "-", "181.9", "2.71×", "184.6", "3.76×"]


def test_without_datasets_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("tables: no --images and --latents")


def test_a_line_is_a_run_of_sdp_train(tmp_path: Path) -> None:
    tiny_inputs(tmp_path, 80, unit_rows=20, group_rows=5)
    words = {"--images": "unused", "--latents": tmp_path / "latents", "--model": tmp_path / "model"}
    words |= {"--work": tmp_path / "work", "--warm": 1, "--steps": 2, "--batch": 8, "--only": "offline"}
    options = [word for pair in words.items() for word in pair]
    command = [sys.executable, "-m", "scripts.bench.tables", "--tiny", *options]
    environ = {**os.environ, "SDP_TESTS_WARM_PROGRAMS": "1"}
    text = printed(command, cwd=ROOT, env=environ, timeout=280)
    (rate,) = re.findall(r"^  64 px, offline: ([\d.,]+) img/s$", text, re.MULTILINE)
    assert float(rate.replace(",", "")) > 0
    (run,) = (tmp_path / "work").iterdir()
    assert (run / "checkpoints/step-000000003/complete.json").exists()


def test_a_cases_settings_are_valid_for_sdp_train() -> None:
    from sdp.config import load

    options = argparse.Namespace(
        images="s3://b/images", latents="s3://b/latents", model="s3://b/sd2", workers=32, accelerator="A100",
        encoders=40, encoder_accelerator="A10G", batch=None, warm=30, steps=100, tiny=False,
    )  # fmt: skip
    for case in tables.cases_of([], 512, efa=True).values():
        config = load("train", None, tables.settings_of(options, case, "s3://b/run"))
        assert (config.data.mode, config.data.batch_size, config.strategy.kind) == (case.mode, 32, case.strategy)
        assert config.source.uri == ("s3://b/latents" if case.mode == "offline" else "s3://b/images")
