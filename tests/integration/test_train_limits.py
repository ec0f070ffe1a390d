"""The end of a run, refused settings, and reports of skipped steps."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from sdp.config.train import TrainConfig
from sdp.datasets.audit import audit
from sdp.datasets.ledger import Ledger
from sdp.errors import ConfigError, DatasetError, UserError
from sdp.families.sd import SD2
from sdp.model import sources
from sdp.report.run import checkpoint_section
from sdp.storage import open_storage
from sdp.telemetry import Telemetry
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.callbacks.telemetry import EmitMetrics
from sdp.train.job import run
from sdp.train.messages import summary_lines
from sdp.train.run_folder import RunFolder
from tests.registry import RegistryBackend
from tests.training import Poison, Watch, config, train


def how(root: Path, **changes: Any) -> TrainConfig:
    """Return a configuration that runs in this process."""
    return config(root, **{"max_steps": 2, **changes})


def folder(root: Path) -> RunFolder:
    return RunFolder(open_storage(str(root / "run")))


def events(root: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in folder(root).events() if event["event"] == kind]


# --- the learning rate's end ------------------------------------------------------------------------------------------


def test_another_max_steps_of_a_falling_learning_rate_is_said_and_stays_in_the_history(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    falling = {"optimizer__schedule": "cosine"}
    run(how(root, **falling, max_steps=10, limit=32, max_epochs=1))
    longer = how(root, **falling, max_steps=20, limit=32, max_epochs=2)
    run(longer, dry_run=True)
    assert "max_steps changes from 10 to 20" in capsys.readouterr().err
    run(longer)
    (changed,) = events(root, "changed")
    assert changed["keys"] == {"max_steps": [10, 20]}


# --- nothing to train on ---------------------------------------------------------------------------------------------


def test_a_run_in_which_no_row_counts_ends_in_a_line_and_leaves_no_checkpoint(root: Path) -> None:
    """For example if all rows are taken down, which no plan can know."""
    with pytest.raises(DatasetError, match="no row that counts: all are held out"):
        train(config(root, data__holdout=0.9999, max_steps=3))
    assert folder(root).latest() is None


def test_steps_without_a_row_that_counts_are_not_called_bad_ones(root: Path) -> None:
    watch = Watch()
    state = train(config(root, data__holdout=0.9, data__batch_size=4, max_steps=15), callbacks=[watch]).state
    empty = [report.verdict for report in watch.reports].count("empty")
    assert (state.step, state.empty, state.skipped) == (15, empty, 0)
    assert 0 < empty < 15
    text = "\n".join(summary_lines(state, None, "why"))
    assert f"{empty} steps had no row that counts" in text
    assert "bad steps" not in text


def test_an_epoch_that_has_shrunk_below_its_position_is_told_in_a_line(root: Path) -> None:
    train(config(root, max_steps=4))
    with pytest.raises(DatasetError, match=r"epoch 0 is at position 32, but has only 20 rows now; undo"):
        train(config(root, max_steps=6, limit=16))


# --- bad steps -------------------------------------------------------------------------------------------------------


def test_a_skipped_step_is_recorded_and_its_rows_count_as_consumed(root: Path) -> None:
    how_ = config(root, max_steps=5)
    folder(root).claim({"datasets": [how_.source.uri], "identity": {}})
    emit = EmitMetrics(Telemetry(RegistryBackend(), "run"))
    poison = Poison(3)
    state = train(how_, callbacks=[SaveCheckpoints(2), emit, poison]).state
    assert (state.samples, state.skipped_samples, state.skipped) == (32, 8, 1)
    counter: Any = emit.telemetry.backend
    assert counter.registry.get_sample_value("sdp_train_samples_total", {"run": "run"}) == 32
    newest = folder(root).checkpoint(5)
    ledger = Ledger.from_bytes(newest.read("ledger.roaring"))
    assert ledger.consumed(0) == 40
    assert checkpoint_section(newest).problems == []
    (skipped,) = events(root, "bad_step")
    assert (skipped["step"], skipped["verdict"], skipped["epoch"], skipped["position"]) == (3, "not_finite", 0, 16)
    (trace,) = audit([str(root / "run")], row=poison.rows[0])
    assert [use["checkpoint"] for use in trace.checkpoints] == ["step-000000004", "step-000000005"]


def test_a_run_that_diverges_is_the_users_to_mend_and_goes_on_with_another_learning_rate(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdp.train.trainer.MOST_BAD_STEPS", 2)
    run(how(root))
    with pytest.raises(UserError, match="2 bad steps in a row") as error:
        run(how(root, max_steps=20, optimizer__learning_rate=1e30))
    assert error.value.exit_code == 2
    tuned: dict[str, Any] = {"optimizer__learning_rate": 5e-4, "optimizer__clip_norm": 1.0}
    done = run(how(root, max_steps=4, optimizer__warmup_steps=0, **tuned))
    assert (done.state.step, done.state.skipped) == (4, 0)
    assert [event["keys"] for event in events(root, "changed")] == [
        {"optimizer.learning_rate": [1e-3, 1e30]},
        {
            "optimizer.learning_rate": [1e-3, 5e-4],
            "optimizer.warmup_steps": [2, 0],
            "optimizer.clip_norm": [None, 1.0],
        },
    ]


# --- before anything begins ------------------------------------------------------------------------------------------


def test_a_budget_that_is_used_up_is_seen_before_anything_is_started(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spent = run(how(root, max_steps=100, max_hours=1e-9))
    assert len(events(root, "start")) == 1
    second = run(how(root, max_steps=100, max_hours=1e-9))
    assert (second.state, second.reason) == (spent.state, "max_hours is reached; raise it to continue")
    paid = how(root, max_steps=100, max_cost=1.0, prices__trainer_hour=3604 / spent.state.seconds)
    assert run(paid).reason == "max_hours or max_cost is reached; raise it to continue"
    assert len(events(root, "start")) == 1
    assert "nothing to do: max_hours or max_cost is reached" in capsys.readouterr().err


def test_a_job_that_cannot_fit_its_accelerator_ends_before_anything_is_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "known", lambda *_, **__: SD2)
    with pytest.raises(ConfigError, match=r"data\.batch_size: expected at most \d+ on an A100-40G"):
        run(config(root, scaling__accelerator="A100-40G", data__batch_size=1000))
    assert not (root / "run").exists()


def test_each_line_of_the_metrics_tells_when_the_run_ends(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.time()
    summary = run(how(root, max_steps=6, log__every_steps=2, prices__trainer_hour=3600.0))
    _, line, last = folder(root).metrics()
    assert last["left_s"] == 0
    assert began + line["left_s"] - 1 < line["finish_time"] < time.time() + line["left_s"] + 1
    err = capsys.readouterr().err
    assert re.search(r" · ETA [\d.:]+ ?s?, at \w{3} \d\d \d\d:\d\d UTC", err)
    assert f", cost {summary.state.seconds:,.2f}, loss" in err  # one a second


def test_a_dry_run_tells_what_a_run_would(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(how(root))
    with pytest.raises(DatasetError, match=r"another configuration \(seed was 0 and is 1 now\)"):
        run(how(root, seed=1), dry_run=True)
    capsys.readouterr()
    run(how(root, max_steps=1), dry_run=True)
    assert "done at step 2, since max_steps is 1 step" in capsys.readouterr().err
    run(how(root, max_steps=4, data__batch_size=16), dry_run=True)
    output = capsys.readouterr().err
    assert "from step 2 to step 4" in output
    assert "data.global_batch_size changes from 8 to 16" in output
    run(how(root, max_steps=4), dry_run=True)
    assert "global_batch_size" not in capsys.readouterr().err
