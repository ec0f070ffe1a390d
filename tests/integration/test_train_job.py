"""`sdp train` on a local Ray."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray.train import UserCallback

from sdp.errors import DatasetError, LeaseHeld, LeaseLost, ModelError, SdpError, UserError
from sdp.lease import Lease
from sdp.ray import internals
from sdp.storage import open_storage
from sdp.train import group
from sdp.train.callbacks.watchdog import Watchdog
from sdp.train.job import run
from sdp.train.run_folder import RunFolder
from sdp.train.settle import _absolute
from sdp.train.trainer import Callback, StepReport, Trainer
from tests.local_ray import one_node
from tests.training import config, ledger, tiny_inputs, train, when

_DEADLINE_S = 240


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_inputs(tmp_path_factory.mktemp("job"), 120, unit_rows=30, group_rows=5)


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file: if it exists, the next group of trainers loses one while they connect, and the file."""
    return tmp_path_factory.mktemp("fragile") / "next"


@pytest.fixture(scope="module")
def cluster(fragile: Path) -> Iterator[None]:
    path = str(fragile)
    with one_node(cpus=4, setup=lambda: lose_one_while_they_connect(Path(path))):
        yield


def lose_one_while_they_connect(fragile: Path) -> None:
    connect = group.join

    def join(rank: int, *how: Any) -> None:
        connect(rank, *how)
        if rank == 1 and fragile.exists():
            fragile.unlink()
            os._exit(1)

    group.join = join


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_a_killed_worker_costs_a_restart_and_no_row(root: Path) -> None:
    how = config(
        root, max_steps=None, max_epochs=1, checkpoint__every_steps=2, scaling__num_workers=2, data__batch_size=3,
        log__every_steps=1,
    )  # fmt: skip
    folder = RunFolder(open_storage(how.output.uri))
    pids: list[int] = []
    when(folder, "training", lambda event: pids.extend(int(w.rpartition(" ")[2]) for w in event["workers"]))
    killer = when(folder, "checkpoint", lambda _: os.kill(pids[1], signal.SIGKILL))
    summary = run(how)
    killer.join(timeout=1)
    assert summary.recoveries == 1
    assert (summary.state.epoch, summary.state.step, summary.state.samples) == (1, 20, 120)
    assert list(ledger(summary).rows(0)) == list(range(120))
    assert [line["step"] for line in folder.metrics()] == list(range(1, 21))
    recovered = next(event for event in folder.events() if event["event"] == "recovered")
    assert recovered["from_step"] >= 2
    assert recovered["failures"]
    assert folder.events()[-1]["event"] == "end"

    second = run(how)  # there is nothing left to do, and it says so without starting a worker
    assert (second.state, second.reason) == (summary.state, "max_epochs: 1 pass over the data")


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_trainers_that_lose_one_while_they_connect_leave_their_places_to_the_next(root: Path, fragile: Path) -> None:
    fragile.touch()
    summary = run(config(root, max_steps=2, scaling__num_workers=3, scaling__wait_s=30))
    assert summary.state.step == 2
    assert not fragile.exists()


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_sigterm_to_the_driver_makes_a_checkpoint_and_another_run_goes_on_with_more_workers(root: Path) -> None:
    how = config(root, max_steps=None, max_epochs=1, data__batch_size=2)
    folder = RunFolder(open_storage(how.output.uri))
    when(folder, "training", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    stopped = run(how)
    assert stopped.reason == "asked to stop: SIGTERM"
    assert 0 < stopped.state.step < 60
    finished = run(
        config(root, max_steps=None, max_epochs=1, data__batch_size=2, scaling__num_workers={"min": 1, "max": 2})
    )
    assert finished.state.samples == 120
    assert list(ledger(finished).rows(0)) == list(range(120))
    assert [len(event["workers"]) for event in folder.events() if event["event"] == "training"] == [1, 2]


@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
def test_ray_train_has_the_figures_of_each_checkpoint_and_says_how_to_watch_them(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_class, notes = internals.trainer_class(), root / "reported"

    def watched(*arguments: Any, run_config: Any, **options: Any) -> Any:
        run_config.callbacks = [NoteReports(notes)]
        return trainer_class(*arguments, run_config=run_config, **options)

    monkeypatch.setattr(internals, "trainer_class", lambda: watched)
    state = run(config(root, max_steps=6, checkpoint__every_steps=2, scaling__num_workers=2)).state
    reports = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [[worker["step"] for worker in report] for report in reports] == [[2, 2], [4, 4], [6, 6], [6, 6]]
    assert f": sdp report {root}/run --watch\n" in capsys.readouterr().err
    assert reports[-1] == 2 * [{"step": 6, "epoch": 0, "samples": state.samples, "loss": state.loss}]


@dataclass
class NoteReports(UserCallback):
    """Notes what the workers report, in Ray Train's controller."""

    notes: Path

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:  # noqa: ARG002
        with self.notes.open("a") as file:
            file.write(f"{json.dumps(metrics)}\n")


@pytest.mark.usefixtures("cluster")
def test_workers_that_diverge_are_not_started_again_and_the_user_is_told(root: Path) -> None:
    how = config(root, max_steps=40, optimizer__learning_rate=1e30)
    with pytest.raises(UserError, match="20 bad steps in a row") as error:
        run(how)
    assert error.value.exit_code == 2
    history = [event["event"] for event in RunFolder(open_storage(how.output.uri)).events()]
    assert history == ["start", "training", *["bad_step"] * 20, "gave_up"]


def test_in_the_driver_a_run_needs_no_ray_and_is_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.ray.cluster.connect", lambda **_: pytest.fail("Ray was asked for"))
    monkeypatch.setattr("sdp.train.job._trains_here", lambda _: True)
    how = config(root, max_steps=5)
    folder = RunFolder(open_storage(how.output.uri))
    when(folder, "training", lambda _: os.kill(os.getpid(), signal.SIGINT))
    first = run(how)
    assert (first.reason, first.state.step < 5) == ("asked to stop: SIGINT", True)
    finished = run(how)
    assert (finished.reason, finished.state.step) == ("max_steps: 5 steps", 5)
    alone = train(config(root, "alone", max_steps=5))
    assert finished.state.loss == alone.state.loss
    assert [event["event"] for event in folder.events()] == [
        "start", "training", "checkpoint", "end", "start", "training", "checkpoint", "end",
    ]  # fmt: skip


def test_a_job_whose_lease_is_taken_over_stops_writing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.lease._BEAT_S", 0.5)
    monkeypatch.setattr("sdp.train.job._trains_here", lambda _: True)
    how = config(root, max_steps=500)
    run_folder = open_storage(how.output.uri)
    when(RunFolder(run_folder), "training", lambda _: run_folder.publish("_lease/0000000002.json", b"another's"))
    with pytest.raises(LeaseLost, match="lease is lost"):
        run(how)
    assert RunFolder(run_folder).latest() is None


def test_a_worker_that_hangs_leaves_its_stacks_and_ends(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    class Hang(Callback):
        def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
            if report.step == 2:
                assert ended.wait(_DEADLINE_S)

    # The limit falls from a time that the test would not wait for.
    watchdog = Watchdog(10 * _DEADLINE_S, then=3.0)

    def end(_: int) -> None:
        watchdog._done.set()
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    train(config(root, max_steps=3), callbacks=[Hang(), watchdog])
    (stacks,) = (root / "run/stacks").iterdir()
    assert stacks.name.endswith("-worker-00000.txt")
    assert "in on_step" in stacks.read_text()


class TestBeforeAnyWork:
    """Errors before any work: one clear line, and Ray is not started."""

    @pytest.fixture(autouse=True)
    def _no_ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sdp.ray.cluster.connect", lambda **_: pytest.fail("Ray was asked for"))

    @pytest.mark.parametrize(
        ("changes", "error", "line"),
        [
            ({"data__resolution": 256}, DatasetError, r"data\.resolution: expected one that .* has \(64\), got 256"),
            ({"data__global_batch_size": 121}, DatasetError, r"expected at least 121 rows, one step's, got 120"),
            ({"model__source": "./nowhere"}, ModelError, r"model source \./nowhere: no such folder"),
            ({"source__uri": "./nowhere"}, SdpError, r"nowhere: not a dataset of sdp"),
            ({"model__start_from": "./nowhere"}, DatasetError, r"nowhere: no complete checkpoint there"),
        ],
    )
    def test_bad_input_is_told(self, root: Path, changes: dict[str, Any], error: type[Exception], line: str) -> None:
        with pytest.raises(error, match=line):
            run(config(root, **changes))
        assert not (root / "run").exists()

    def test_addresses_mean_the_same_in_a_worker_whose_folder_is_another(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "model").mkdir()
        monkeypatch.chdir(tmp_path)
        keys = ("source__uri", "output__uri", "model__source", "model__start_from", "evaluate__source")
        images = {"data__mode": "collocated", "source__tables": [{"uri": "./table/*.parquet"}]}
        parsed = config(tmp_path, **(dict.fromkeys(keys, "./model") | {"output__uri": "./run", **images}))
        meant = _absolute(parsed).model_dump(mode="json")
        assert meant["source"]["tables"][0]["uri"] == str(tmp_path / "table/*.parquet")
        for section, name in (key.split("__") for key in keys):
            expected = tmp_path / ("run" if section == "output" else "model")
            assert meant[section][name] == str(expected), (section, name)

    def test_a_second_job_is_refused_while_the_first_lives(self, root: Path) -> None:
        first = Lease.acquire(open_storage(str(root / "run")), "the first", ttl_s=3.0)
        with first, pytest.raises(LeaseHeld, match="the first"):
            run(config(root))


@pytest.mark.usefixtures("cluster")
def test_more_workers_than_the_cluster_holds_are_refused(root: Path) -> None:
    with pytest.raises(UserError, match=r"scaling\.num_workers: expected at most 4, got 9"):
        run(config(root, scaling__num_workers=9))
