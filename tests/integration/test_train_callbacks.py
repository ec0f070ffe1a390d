"""The results of callbacks: profiles, TensorBoard's files, what trackers get, the record of a hang."""

import gzip
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest
import torch
from torch import distributed

from sdp.datasets.outcomes import FAILED, Outcome
from sdp.errors import UserError
from sdp.report.run import run_section
from sdp.storage import open_storage
from sdp.telemetry import Telemetry
from sdp.train.assemble import assemble
from sdp.train.callbacks import metrics, tensorboard
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.callbacks.metrics import RecordMetrics
from sdp.train.callbacks.profile import Profile
from sdp.train.callbacks.telemetry import EmitMetrics
from sdp.train.callbacks.tensorboard import WriteEvents
from sdp.train.callbacks.watchdog import save_flight_record
from sdp.train.data.batch import Batch
from sdp.train.data.reader import Reader
from sdp.train.job import run
from sdp.train.run_folder import RunFolder
from sdp.train.settle import settled
from sdp.train.trainer import Callback, StepReport, Trainer
from sdp.train.world import World
from tests.registry import RegistryBackend
from tests.training import Crash, CrashAt, Watch, config, train
from tests.waiting import until
from tests.workers import run_workers

# --- profile ---------------------------------------------------------------------------------------------------------


def test_a_profile_says_where_the_time_and_memory_of_a_step_goes(root: Path) -> None:
    train(config(root, max_steps=6), callbacks=[Profile(steps=2, start=3)])
    head, operations = (root / "run/profile/summary.txt").read_text().split("\n\n", 1)
    assert head == "step 5, 2 steps on cpu"
    rows = {line.split()[0]: line.split() for line in operations.splitlines() if line.strip()}
    assert {"sdp.forward", "sdp.backward"} <= rows.keys()
    assert rows["sdp.backward"][-1] == "2", "the calls"
    assert "CPU Mem" in operations
    trace = json.loads(gzip.decompress((root / "run/profile/trace.json.gz").read_bytes()))
    assert len([e for e in trace["traceEvents"] if e["name"] == "sdp.backward"]) == 2
    (event,) = [e for e in RunFolder(open_storage(str(root / "run"))).events() if e["event"] == "profile"]
    assert event["step"] == 5
    section = run_section(open_storage(str(root / "run")))
    assert "Where a step's time and memory go" in [block.title for block in section.details]


@pytest.mark.parametrize(("max_steps", "steps"), [(4, 2), (2, None)])
def test_a_run_that_ends_before_its_profile_does_keeps_the_whole_steps(
    root: Path, max_steps: int, steps: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    train(config(root, max_steps=max_steps), callbacks=[Profile(steps=50, start=2)])
    file = root / "run/profile/summary.txt"
    assert (f", {steps} steps on cpu" in file.read_text() if file.exists() else None) is (steps and True)
    assert ("nothing was profiled: the first 2 steps of a job are not" in caplog.text) is (steps is None)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_on_a_disk_are_written_soon(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_WRITE_HERE_S", 0.0)
    folder, seen = RunFolder(open_storage(str(root / "run"))), list[int]()

    class Look(Callback):
        def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002
            if report.step == 3:
                until(folder.metrics, "a line while training goes on", deadline_s=20)
                seen.extend(line["step"] for line in folder.metrics())

    train(config(root, max_steps=4), callbacks=[RecordMetrics(1), Look()])
    assert seen[0] == 1


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def events_of(root: Path) -> Iterator[Any]:
    """Return the events of all files in the order of their names, as TensorBoard reads them."""
    from tensorboardX.proto import event_pb2 as protos

    for file in sorted((root / "run/tensorboard").iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            yield protos.Event.FromString(data[at + 12 : at + 12 + length])
            at += length + 16


def test_tensorboards_files_hold_every_line_and_say_where_a_run_went_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def callbacks(seconds: float) -> list[Callback]:
        monkeypatch.setattr(tensorboard, "time", SimpleNamespace(time=lambda: seconds))
        return [SaveCheckpoints(2), RecordMetrics(1), WriteEvents()]

    with pytest.raises(Crash):
        train(config(root, max_steps=5), callbacks=[*callbacks(1000.0), CrashAt(3)])
    watch = Watch()
    train(config(root, max_steps=5), callbacks=[*callbacks(2000.0), watch])
    steps: dict[int, float] = {}
    begun: list[int] = []
    for event in events_of(root):
        if event.HasField("session_log"):  # what TensorBoard does with it
            begun.append(event.step)
            steps = {step: loss for step, loss in steps.items() if step < event.step}
        for value in event.summary.value:
            if value.tag == "loss":
                steps[event.step] = value.simple_value
    assert begun == [1, 3]  # the second job goes on from the checkpoint of step 2
    assert list(steps) == [1, 2, 3, 4, 5]
    assert [steps[step] for step in (3, 4, 5)] == pytest.approx(watch.losses, rel=1e-6)


# --- W&B and MLflow --------------------------------------------------------------------------------------------------


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stand in for the library."""
    library = Mock(Image=lambda picture, caption: (caption, picture.size))
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setattr("sdp.train.job.find_spec", lambda _: True)
    return library


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stand in for the library; return its client, for which the first run exists from then on."""
    client, known = Mock(), SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client.get_experiment_by_name.return_value.experiment_id = "7"
    client.search_runs.side_effect, client.create_run.return_value = [[], [known]], known
    entities = SimpleNamespace(Metric=lambda name, value, _time, step: (name, value, step))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return client


def test_trackers_get_each_line_and_the_samples_and_find_the_run_again(root: Path, wandb: Mock, mlflow: Mock) -> None:
    mlflow.log_batch.side_effect = [None, RuntimeError("503"), None]  # which costs only a line
    changes = {"log__every_steps": 2}
    changes |= {"log__wandb__project": "sd2", "log__mlflow__experiment": "sd2"}
    changes |= {"samples__every_steps": 5, "samples__prompts": ["a: b"], "samples__steps": 1}
    for steps in (2, 6):
        run(config(root, max_steps=steps, **changes))
    first, second = (one.kwargs for one in wandb.init.call_args_list)
    assert (first["project"], first["name"], first["resume"]) == ("sd2", "run", "allow")
    assert first["id"] == second["id"]
    assert second["config"]["max_steps"] == 6
    lines = [(one.kwargs["step"], one.args[0]) for one in wandb.init.return_value.log.call_args_list]
    drawn = [("a: b", (64, 64))]  # at the end of the first run, which is shorter than every_steps, and at step 5
    assert [(step, line.get("pictures")) for step, line in lines] == [(2, drawn), (4, None), (6, drawn)]
    assert {"loss", "time/data", "samples_per_s"} <= lines[0][1].keys()

    tags = mlflow.create_run.call_args.kwargs["tags"]
    assert mlflow.search_runs.call_args_list == 2 * [call(["7"], f"tags.sdp_run = '{tags['sdp_run']}'", max_results=1)]
    assert mlflow.create_run.call_count == 1
    parameters = [one.args for one in mlflow.log_param.call_args_list]
    assert [each for each in parameters if "max_steps" in each] == [("r1", "max_steps", 2)]
    assert [one.args[1]["max_steps"] for one in mlflow.log_dict.call_args_list] == [2, 6]
    sent = [{name: step for name, _, step in one.args[1]} for one in mlflow.log_batch.call_args_list]
    assert [line["time/data"] for line in sent] == [2, 4, 6]
    assert mlflow.log_image.call_args == call("r1", ANY, key="000 a  b", step=6)
    assert mlflow.update_run.call_args == call("r1", status="RUNNING")
    assert wandb.init.return_value.finish.call_count == mlflow.set_terminated.call_count == 2


def test_a_refusal_of_a_tracker_is_one_line(root: Path, wandb: Mock) -> None:
    wandb.init.side_effect = RuntimeError("api_key not configured")
    with pytest.raises(UserError, match=r"log\.wandb\.project: sd2: wandb refused \(api_key not configured\)"):
        run(config(root, log__wandb__project="sd2"))


def test_a_missing_library_is_told_before_anything_is_begun(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.train.job.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"log\.wandb\.project: .* needs wandb, which is not installed") as refusal:
        run(config(root, log__wandb__project="sd2"))
    assert refusal.value.exit_code == 2
    assert not (root / "run").exists()


# --- a worker that hangs ---------------------------------------------------------------------------------------------


def exchange(world: World, root: Path) -> None:
    distributed.all_reduce(torch.ones(3))
    distributed.barrier()
    save_flight_record(open_storage(str(root)), f"{world.rank}.json")


def test_a_worker_that_hangs_records_its_last_collectives(tmp_path: Path) -> None:
    save_flight_record(open_storage(str(tmp_path)), "alone.json")
    assert not (tmp_path / "alone.json").exists(), "a worker alone takes part in none"
    run_workers(2, exchange, tmp_path)
    entries = json.loads((tmp_path / "1.json").read_text())["entries"]
    assert [entry["profiling_name"] for entry in entries] == ["gloo:all_reduce", "gloo:barrier"]
    assert entries[0]["input_sizes"] == [[3]]


def test_every_bad_row_is_counted_however_many_checkpoints_come_between(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint stores the list of bad rows, so that bad rows before and after it are both counted."""
    shown, read, bad = RegistryBackend(), Reader.batches, iter((5, 0, 3, 3, 1, 0))

    def spoilt(*place: Any) -> Iterator[Batch]:
        for batch in read(*place):
            yield replace(batch, bad=(Outcome(0, FAILED, "undecodable"),) * next(bad, 0))

    monkeypatch.setattr(Reader, "batches", spoilt)
    callbacks = [EmitMetrics(Telemetry(shown, "run")), SaveCheckpoints(2)]
    trainer = assemble(*settled(config(root, max_steps=6)), World(), callbacks=callbacks)
    trainer.train()
    assert len(trainer.checkpointer.run.bad_rows()) == 12
    assert shown.registry.get_sample_value("sdp_train_bad_rows_total", {"run": "run", "rank": "0"}) == 12
    assert shown.registry.get_sample_value("sdp_train_info", {"run": "run", "data_mode": "offline"}) == 1


def test_a_run_that_goes_on_tells_of_the_checkpoint_that_it_goes_on_from(root: Path) -> None:
    """Otherwise the gauge would be missing until the next checkpoint."""
    train(config(root, max_steps=2), callbacks=[SaveCheckpoints(100)])
    shown, seen = RegistryBackend(), list[float | None]()
    names = ("sdp_train_checkpoint_step", "sdp_train_checkpoint_time_seconds")
    first = Callback()
    first.on_start = lambda _: seen.extend(  # type: ignore[method-assign]
        shown.registry.get_sample_value(name, {"run": "run"}) for name in names
    )
    train(config(root, max_steps=3), callbacks=[EmitMetrics(Telemetry(shown, "run")), first])
    step, created = seen
    assert step == 2
    assert abs(time.time() - (created or 0)) < 60
