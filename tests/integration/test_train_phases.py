"""Two phases in one configuration."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from sdp.config.train import TrainConfig
from sdp.errors import ConfigError, DatasetError
from sdp.model.checkpoints import find_checkpoint, read_state, read_weights
from sdp.storage import open_storage
from sdp.train.job import run
from sdp.train.randomness import Purpose, RowRandom
from sdp.train.run_folder import RunFolder
from tests.latents import make_latents
from tests.training import config, linked
from tests.waiting import as_soon_as

DEADLINE_S = 120


@pytest.fixture(scope="module")
def inputs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return latents of the same pictures at two resolutions."""
    torch.set_num_threads(1)
    root = linked(inputs, tmp_path_factory.mktemp("phases"))
    make_latents(root, 60, unit_rows=20, group_rows=5, vocabulary=50, resolution=128, uri=str(root / "larger"))
    return root


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.ray.cluster.connect", lambda **_: pytest.fail("Ray was asked for"))


def how(root: Path, **changes: Any) -> TrainConfig:
    usual: dict[str, Any] = {
        "max_steps": 4, "phase_2__max_steps": 3, "phase_2__resolution": 128,
        "phase_2__batch_size": 4, "phase_2__source": str(root / "larger"),
    }  # fmt: skip
    return config(root, **{**usual, **changes})


def folder(root: Path, phase: int) -> RunFolder:
    return RunFolder(open_storage(str(root / f"run/phase-{phase}")))


def events(root: Path, phase: int) -> list[str]:
    return [event["event"] for event in folder(root, phase).events()]


def test_the_second_phase_begins_with_what_the_first_has_learned(root: Path) -> None:
    done = run(how(root))
    assert (done.run, done.state.step, done.state.samples) == (str(root / "run/phase-2"), 3, 12)
    first, second = folder(root, 1), folder(root, 2)
    assert first.latest() == 4
    begun = run(how(root, output__uri=str(root / "short"), phase_2__max_steps=1, optimizer__warmup_steps=10**9))
    assert begun.checkpoint is not None
    for ema in (True, False):  # one step at a learning rate of all but nothing: still those of the first phase
        before = read_weights(open_storage(str(root / "short/phase-1/checkpoints/step-000000004")), ema=ema)
        after = read_weights(open_storage(begun.checkpoint), ema=ema)
        for name, tensor in before.items():
            assert torch.allclose(tensor, after[name], atol=1e-6), name
    state = read_state(second.checkpoint(3))
    assert (state.taken, state.averaged) == (3, 7)
    assert find_checkpoint(str(root / "run")).uri == done.checkpoint


def test_the_second_phase_draws_other_timesteps_for_the_same_rows_also_when_it_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, int]] = []
    integers = RowRandom.integers

    def record(random: RowRandom, purpose: Purpose, high: int) -> torch.Tensor:
        timesteps = integers(random, purpose, high)
        drawn.extend(zip(random.rows.tolist(), timesteps.tolist(), strict=True))
        return timesteps

    monkeypatch.setattr(RowRandom, "integers", record)
    same = {"phase_2__resolution": 64, "phase_2__batch_size": 8, "phase_2__source": str(root / "latents")}
    run(how(root, **same, max_steps=6, phase_2__max_steps=3))
    run(how(root, **same, max_steps=6, phase_2__max_steps=6))
    first, second = dict(drawn[:48]), dict(drawn[48:])
    assert first.keys() == second.keys()
    assert len(first) == 48
    assert sum(first[row] == second[row] for row in first) < 5
    assert folder(root, 2).latest() == 6


def test_a_retry_in_the_second_phase_goes_on_with_the_second(root: Path) -> None:
    long = how(root, phase_2__max_steps=5000, checkpoint__every_steps=2)

    as_soon_as(lambda: "checkpoint" in events(root, 2), lambda _: os.kill(os.getpid(), signal.SIGTERM))
    stopped = run(long)
    assert stopped.reason == "asked to stop: SIGTERM"
    assert stopped.run.endswith("phase-2")
    once = events(root, 1)
    seconds = stopped.state.seconds + read_state(folder(root, 1).checkpoint(4)).seconds
    second = run(how(root, phase_2__max_steps=5000, max_hours=seconds / 3600 + 1e-6))
    assert second.reason.startswith("asked to stop: max_hours")
    assert second.state.step >= stopped.state.step > 0
    assert events(root, 1) == once  # the first phase was not begun again
    starts = [event["from_step"] for event in folder(root, 2).events() if event["event"] == "training"]
    assert starts == [0, stopped.state.step]


def test_once_the_second_phase_has_a_checkpoint_the_first_is_over_whatever_its_limits_are(root: Path) -> None:
    run(how(root, max_steps=2, phase_2__max_steps=2))
    once = events(root, 1)
    second = run(how(root, max_steps=4, phase_2__max_steps=3))
    assert (second.run, second.state.step) == (str(root / "run/phase-2"), 3)
    assert events(root, 1) == once
    spent = sum(read_state(folder(root, n).checkpoint(step)).seconds for n, step in ((1, 2), (2, 3)))
    used_up = run(how(root, max_steps=4, phase_2__max_steps=9, max_hours=0.999 * spent / 3600))
    assert (used_up.state.step, used_up.reason) == (3, "max_hours is reached; raise it to continue")


def test_a_run_of_one_phase_does_not_become_the_first_of_two_nor_the_other_way_round(root: Path) -> None:
    one: dict[str, Any] = {"phase_2": {}, "max_steps": 1}
    RunFolder(open_storage(str(root / "run"))).claim({})
    with pytest.raises(ConfigError, match=r"phase_2\.max_steps: expected .*run of one phase\), got 3; .*start_from"):
        run(how(root))
    assert [file.name for file in (root / "run").iterdir()] == ["_run.json"]
    RunFolder(open_storage(str(root / "two/phase-1"))).claim({})
    two = config(root, "two", **one)
    with pytest.raises(
        ConfigError, match=r"phase_2\.max_steps: expected .*run of two phases\), got null; .*start_from"
    ):
        run(two)


def test_what_is_wrong_with_the_second_phase_is_told_before_the_first_begins(root: Path) -> None:
    with pytest.raises(DatasetError, match=r"data\.resolution: expected one that .* has \(128\), got 256"):
        run(how(root, phase_2__resolution=256))
    assert not (root / "run").exists()


def test_a_stopped_first_phase_is_not_followed_by_the_second(root: Path) -> None:
    stopped = run(how(root, max_hours=1e-9))
    assert stopped.run.endswith("phase-1")
    assert not (root / "run/phase-2").exists()
    dry = run(how(root), dry_run=True)
    assert dry.run.endswith("phase-2")
