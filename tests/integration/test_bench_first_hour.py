"""gpu_first_hour.sh with CPUs for GPUs, and the check of collocated latents on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import _gpu_checks
from scripts.bench.gpu_first_hour import ROWS, Machine, Results, Row, _measure
from tests.process_kit import make_images
from tests.programs import ROOT, printed
from tests.waiting import until

SMI = "#!/bin/sh\necho NVIDIA A100-SXM4-80GB, 535.104.05, 81920 MiB, 3 MiB\n"
PYTHON = f'exec {sys.executable} "$@"'


def first_hour(folder: Path, *names: str, python: str = PYTHON, **environ: str) -> tuple[str, Any]:
    """Run the script at the smallest sizes with a stub nvidia-smi; return its output and its figures by row."""
    for name, text in (("nvidia-smi", SMI), ("python", f"#!/bin/sh\n{python}\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environ |= {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder / "out"), "SDP_BENCH_SMALL": "1"}
    environ |= {"PYTHON": str(folder / "python"), "SDP_TESTS_WARM_PROGRAMS": "1"}
    command, env = ["scripts/bench/gpu_first_hour.sh", *names], {**os.environ, **environ}
    return printed(command, cwd=ROOT, env=env, timeout=550), figures_of(folder / "out")


def figures_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    by_row: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "rows.jsonl").read_text().splitlines():
        by_row.setdefault(json.loads(line)["row"], []).append(json.loads(line))
    return by_row


def test_a_python_without_packages_ends_every_row_with_what_it_lacks(tmp_path: Path) -> None:
    output, figures = first_hour(tmp_path, python=f'exec {sys.executable} -S "$@"')
    assert list(figures) == [row.name for row in ROWS]
    assert all(case["reason"].startswith("not run: needs ") for cases in figures.values() for case in cases)
    assert "missing packages: torch, numpy" in output
    assert "train-256: cannot run, needs torch, numpy" in output
    assert "GPUs: 1 × NVIDIA A100-SXM4-80GB, 81920 MiB, of which 3 MiB are in use" in output
    assert "driver: 535.104.05" in output
    assert "needs driver 580 or later, so this one is too old" in output
    page = (tmp_path / "out/gpu-results.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in page) == 1 + len(ROWS)


@pytest.mark.slow
def test_rows_end_with_figures_at_a_batch_that_fits(tmp_path: Path) -> None:
    names = ("train-256", "checkpoint", "encode-256", "latents", "generate", "exporter")
    _, figures = first_hour(tmp_path, *names, SDP_BENCH_ROOM="2")
    assert set(figures) == set(names)
    (case,) = figures["train-256"]
    assert case["batch"] == 2, "a batch of 4 does not fit, and is halved"
    assert case["per_s"] > 0
    assert {"data", "copy", "forward", "backward", "optimizer"} <= case["phases"].keys()
    (case,) = figures["checkpoint"]
    assert case["batch"] == 2
    assert "a worker stall" in case["checkpoint"]
    assert len(figures["encode-256"]) > 3
    assert [case for name in ("encode-256", "latents", "generate") for case in figures[name] if "reason" in case] == []
    assert "reason" in figures["exporter"][0], "NVML reports no GPU here, and the stub one"


def test_each_case_is_in_the_table_as_soon_as_it_ends_and_later_commands_keep_it(tmp_path: Path) -> None:
    results = Results(tmp_path, Machine(gpu="NVIDIA H100", torch="2.11"))
    first, second, broken, late = (Row(name, "", "") for name in ("train-256", "train-512", "broken", "late"))
    results.add(first, case="256 px", per_s=1234.5, mfu=0.421, phases={"forward": 80.0}, step_s=0.2, kernels=9000)
    assert "| 1,234.5 | - | 42.1% | - | 200.0: forward 80.0 | 9000 |" in (tmp_path / "gpu-results.md").read_text()
    results = Results(tmp_path, Machine(gpu="NVIDIA H100", torch="2.11"))
    results.add(second, case="512 px", per_s=400.0)
    _measure(Row("broken", "", "json.tool /nowhere/at/all", 60), results)
    _measure(Row("late", "", "http.server --bind 127.0.0.1 0", 2), results)
    figures = figures_of(tmp_path)
    assert list(figures) == [row.name for row in (first, second, broken, late)]
    assert "No such file or directory: '/nowhere/at/all'" in figures["broken"][0]["reason"]
    assert figures["late"][0]["reason"] == "ended after 2 s"


def test_a_command_that_is_ended_leaves_no_row_that_holds_the_gpu(tmp_path: Path) -> None:
    """The row's process has a process group of its own, so nobody else would end it."""
    code = (
        "import signal, sys; from pathlib import Path; from scripts.bench import gpu_first_hour as hour\n"
        "hour.ROWS = (hour.Row('endless', '', 'http.server --bind 127.0.0.1 0', packages=()),)\n"
        "sys.exit(hour.main(['endless']))"
    )
    environ = {**os.environ, "OUT": str(tmp_path), "SDP_BENCH_SMALL": "1"}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL) as process:
        log = tmp_path / "log.txt"
        until(lambda: log.exists() and "Serving" in log.read_text(), "the row's process")
        (row,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        process.terminate()
        assert process.wait(30) == 143
    until(lambda: not Path(f"/proc/{row}").exists(), "the row's process is gone")
    assert figures_of(tmp_path)["endless"][0]["reason"] == "was still running when the command ended"


@pytest.mark.slow
def test_latents_of_the_same_rows_are_close_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path, 40, unit_rows=20, fails=lambda _: False)
    arguments = ["latents", "--images", str(tmp_path / "images"), "--device", "cpu"]
    assert _gpu_checks.main(arguments) == 0
    assert "40 rows, at most 0.00% from fp32" in capsys.readouterr().out

    from sdp.train.data.batch import Batch

    real = _gpu_checks._batches
    calls: list[int] = []

    def stale(images: str, device: object) -> list[Batch]:
        """Latents of the rows before, in the first call: as a copy that was not waited for."""
        batches = real(images, device)
        calls.append(1)
        if len(calls) > 1:
            return batches
        return [Batch(b.rows, b.weights, b.latents.roll(1, 0), b.token_ids, moments=b.moments) for b in batches]

    monkeypatch.setattr(_gpu_checks, "_batches", stale)
    assert _gpu_checks.main(arguments) == 1
