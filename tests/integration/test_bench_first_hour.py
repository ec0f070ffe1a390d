"""gpu_first_hour.sh on a machine without a GPU, and its check of latents on a CPU."""

import os
import subprocess
from pathlib import Path

import pytest

from scripts.bench import _gpu_checks
from tests.process_kit import make_images

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NO_SMI = "#!/bin/sh\nexit 9\n"


def first_hour(folder: Path, smi: str, python: str) -> str:
    """Run the script with this nvidia-smi and this Python; return the page that it wrote."""
    for name, text in (("nvidia-smi", smi), ("python", python)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder / "page.md")}
    command = ["scripts/bench/gpu_first_hour.sh"]
    subprocess.run(command, cwd=ROOT, env={**environ, "PYTHON": str(folder / "python")}, check=True, timeout=120)
    return (folder / "page.md").read_text()


def test_without_a_gpu_each_row_says_so_and_nothing_runs(tmp_path: Path) -> None:
    page = first_hour(tmp_path, NO_SMI, "#!/bin/sh\necho ran >>" + str(tmp_path / "ran"))
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 8
    assert all("| no GPU |" in row for row in rows)
    assert not (tmp_path / "ran").exists()


def test_a_row_that_fails_stops_no_other_and_those_that_need_more_gpus_say_so(tmp_path: Path) -> None:
    smi = "#!/bin/sh\necho NVIDIA A100-SXM4-80GB\n"
    page = first_hour(
        tmp_path, smi, '#!/bin/sh\ncase "$2" in *gpu_encode) echo broken >&2; exit 1;; *) echo 42 img/s;; esac\n'
    )
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[2] for row in rows].count("42 img/s") == 4
    assert sum("failed: broken" in row for row in rows) == 1
    assert sum("needs 2 GPUs" in row for row in rows) == 3
    assert "1 × NVIDIA A100-SXM4-80GB" in page
    assert "`python -m scripts.bench.gpu_train --resolutions 256 --steps 20`" in page


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
