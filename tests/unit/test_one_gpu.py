"""`sdp init --gpu`: files for Stable Diffusion 2 on one GPU, which fit it."""

from pathlib import Path
from typing import Any

import pytest

from sdp.cli import main
from sdp.config import load
from sdp.model.sources import parse
from sdp.plan.memory import estimate
from sdp.plan.one_gpu import find
from tests.kit import write_files

LORA = 16


def pictures(folder: Path, number: int) -> str:
    write_files(folder, {f"{name}.jpg": "" for name in range(number)})
    return str(write_files(folder, {f"{name}.txt": f"cat {name % 2}" for name in range(number)}))


@pytest.mark.parametrize(
    ("gpu", "rank", "checkpointed", "at_once"),
    [
        ("6GB", LORA, True, 8),
        ("8GB", LORA, False, 4),
        ("12 GB", LORA, False, 8),
        ("24GB", None, False, 4),
        ("a10g", None, False, 4),
        ("A100", None, False, 16),
        ("auto", None, False, 4),
    ],
)
def test_the_files_for_a_gpu_fit_it_and_agree(
    gpu: str, rank: int | None, checkpointed: bool, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '40536, NVIDIA A100'\necho '24564, NVIDIA GeForce RTX 4090'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    folder = tmp_path / "my"
    assert main(["init", str(folder), "--pictures", pictures(tmp_path / "cats", 50), "--gpu", gpu]) == 0
    files: list[Any] = [load(job, str(folder / f"{job}.yaml")) for job in ("process", "train", "generate")]
    process, train, generate = files
    assert estimate(train, find(gpu), 1, embedded=False).fits
    chosen = train.lora.rank, train.strategy.activation_checkpointing, train.data.batch_size
    assert chosen == (rank, checkpointed, at_once)
    assert (train.data.global_batch_size, train.precision) == (16, "bf16")
    assert process.resolutions == (train.data.resolution,) == (generate.resolution,)
    assert train.samples.prompts == generate.prompts == ("cat 0", "cat 1")
    assert parse(process.model.source) == parse(train.model.source), "a revision that cannot move"
    assert {process.encode.accelerator, train.scaling.accelerator, generate.scaling.accelerator} == {"gpu"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--gpu", "3GB"], "--gpu: expected 4 GB or more, got a GPU of 3 GB"),
        (["--gpu", "RTX 4900"], "got 'RTX 4900'; did you mean 4090?"),
        (["--gpu", "auto"], "nvidia-smi finds no GPU here; name one or its size, such as 24GB"),
        (["--gpu", "24GB", "--store", "s3://bucket/my"], "on one machine; leave it out, or --store and --family"),
    ],
)
def test_a_gpu_that_cannot_be_served_is_refused(
    options: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["init", str(tmp_path / "my"), *options]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(("number", "share"), [(12, 0.0), (20, 0.1)])
def test_few_pictures_are_all_trained_on(number: int, share: float, tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "my"), "--pictures", pictures(tmp_path / "cats", number)]) == 0
    train: Any = load("train", str(tmp_path / "my/train.yaml"))
    assert (train.data.holdout, train.evaluate.every_steps is None) == (share, not share)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("3060", 12), ("RTX4090", 24), ("GeForce RTX 3070 Ti", 8), ("NVIDIA RTX A6000", 48), ("24", 24), ("T4", 16)],
)
def test_a_card_is_known_as_people_write_it(name: str, gigabytes: int) -> None:
    assert find(name).memory_bytes == gigabytes << 30
