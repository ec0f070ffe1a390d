"""`sdp inspect` of training runs and checkpoints: what a person and a program learn, without torch."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdp.cli import main
from sdp.config import parse
from sdp.datasets.ledger import Ledger
from sdp.datasets.manifest import open_dataset
from sdp.errors import DatasetError
from sdp.lease import Lease
from sdp.report.page import PageSection
from sdp.report.sections import describe
from sdp.storage import Storage, open_storage
from tests.kit import make_images, make_latents, text_at
from tests.unit.test_cli import loaded_by

CREATED = datetime(2026, 1, 1, 0, 5, tzinfo=UTC)
EPOCH_ROWS = 40


def when(minutes: int) -> str:
    return (CREATED + timedelta(minutes=minutes)).isoformat(timespec="seconds")


def publish(folder: Storage, name: str, content: Any) -> None:
    folder.publish(name, json.dumps(content).encode())


def publish_lines(folder: Storage, name: str, lines: list[dict[str, Any]]) -> None:
    folder.publish(name, b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def make_checkpoint(root: Path, run: str, step: int) -> Storage:
    """Make a checkpoint of 8 samples per step: two tensors, in a file each."""
    folder = open_storage(str(root / run / f"checkpoints/step-{step:09d}"))
    samples = 8 * step
    ledger = Ledger()
    for epoch in range(samples // EPOCH_ROWS + 1):
        left = min(EPOCH_ROWS, samples - epoch * EPOCH_ROWS)
        if left:
            ledger.add(epoch, np.arange(left))
    tensors = {}
    for number, name in enumerate(("model.w", "exp_avg.w")):
        file = f"worker-{number:05d}.000.bin"
        folder.publish(file, b"\0" * 24)
        tensors[name] = {"dtype": "float32", "size": [2, 3], "chunks": [[[0, 0], [2, 3], file, 0]]}
    folder.publish("ledger.roaring", ledger.to_bytes())
    publish(folder, "tensors.json", {"format": 1, "tensors": tensors})
    settings = {
        "source": {"uri": str(root / "latents")}, "output": {"uri": str(root / run)}, "data": {"batch_size": 8},
        "model": {"source": "builtin:tiny"}, "prices": {"trainer_hour": 52.5},  # of two trainers for a minute
    }  # fmt: skip
    config = parse("train", settings)
    publish(folder, "config.json", config.model_dump(mode="json"))
    dataset = root / "latents"
    marker = {
        "format": 1, "sdp": "0.1.0", "created": when(step), "workers": 2, "tensors": 2, "bytes": 48,
        "epoch_rows": EPOCH_ROWS,
        "model": {"source": "builtin:tiny", "digest": "ab" * 32},
        "dataset": open_dataset(open_storage(str(dataset))).lineage if dataset.exists() else {"uri": str(dataset)},
        "state": {
            "step": step, "taken": step - 1, "samples": samples, "epoch": samples // EPOCH_ROWS,
            "position": samples % EPOCH_ROWS, "seconds": 60.0, "trainer_hours": 2 / 60, "loss": 0.25,
        },
    }  # fmt: skip
    publish(folder, "complete.json", marker)
    return folder


def make_run(root: Path, run: str = "run", *, last: dict[str, Any] | None = None) -> Storage:
    """Two checkpoints with a recovery between them, and a bad step after them."""
    folder = open_storage(str(root / run))
    publish(folder, "_run.json", {"format": 1, "kind": "run", "datasets": [str(root / "latents")]})
    for step in (4, 7):
        make_checkpoint(root, run, step)
    events = [
        {"time": when(0), "event": "start", "workers": [2, 2]},
        {"time": when(4), "event": "checkpoint", "step": 4, "seconds": 0.075, "whole_s": 0.431, "workers": 2},
        {
            "time": when(5),
            "event": "recovered",
            "from_step": 4,
            "workers": ["node-1 pid 7"],
            "failures": ["worker 1: killed"],
        },
        {"time": when(7), "event": "checkpoint", "step": 7},
        {"time": when(8), "event": "bad_step", "verdict": "not_finite", "step": 8},
        *([{"time": when(9), **last}] if last else []),
    ]
    publish_lines(folder, "events.jsonl", events)
    line = {
        "step": 8, "samples": 64, "epoch": 1, "epoch_done": 0.6, "loss_smoothed": 0.2, "samples_per_s": 90.0,
        "workers": 2, "seconds": 70.0,
        "slowest": {"rank": 1, "host": "node-1", "seconds": 0.5, "others": 0.4, "part": "data"},  # of version 0.2
    }  # fmt: skip
    publish_lines(folder, "metrics/000001-000000000.jsonl", [line])
    publish_lines(folder, "bad_rows/step-000000007.jsonl", [{"row": 3, "reason": "undecodable"}] * 2)
    return folder


def described(uri: Path) -> PageSection:
    (section,) = describe(open_storage(str(uri)))
    return section


def test_a_checkpoints_description_has_its_epoch_contents_and_lineage(tmp_path: Path) -> None:
    make_images(tmp_path)
    latents = make_latents(tmp_path)
    make_run(tmp_path)
    facts = described(tmp_path / "run/checkpoints/latest").facts
    assert [facts[name] for name in ("step", "samples", "skipped", "epoch")] == [7, 56, 1, 1]
    assert facts["consumed"] == {0: 40, 1: 16}
    keys = {"source.uri", "output.uri", "model.source", "data.batch_size", "prices.trainer_hour"}
    assert facts["changed"].keys() == keys
    text = text_at(tmp_path / "run/checkpoints/step-000000007")
    assert "1, 40.0% of 40 rows consumed" in text
    assert "Written 2026-01-01T00:12:00+00:00 by 2 workers" in text
    assert "in the ledger  56 rows of 2 epochs" in text
    assert "Problems" not in text
    assert re.search(r"^data.batch_size +8$", text, re.MULTILINE)
    assert re.search(rf"^trained on +{latents.storage.uri} +{latents.digest}$", text, re.MULTILINE)


def test_the_cost_of_a_run_is_by_the_price_that_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path).uri
    marker = tmp_path / "run/checkpoints/step-000000007/config.json"
    marker.write_text(marker.read_text().replace("52.5", "null"))
    assert main(["inspect", run]) == 0
    assert "the cost is not known, since the run was given no prices; --trainer-hour" in capsys.readouterr().err
    assert main(["inspect", run, "--trainer-hour", "90"]) == 0
    seen = capsys.readouterr()
    assert "cost 3.00" in seen.out
    assert "--trainer-hour" not in seen.err


def test_a_runs_description_has_its_state_checkpoints_and_history(tmp_path: Path) -> None:
    make_run(tmp_path, last={"event": "end", "reason": "max_steps: 8 steps", "step": 8})
    (tmp_path / "run/checkpoints/step-000000009").mkdir()
    (tmp_path / "run/checkpoints/step-000000009/worker-00000.000.bin").write_bytes(b"half")
    facts = described(tmp_path / "run").facts
    assert (facts["state"], facts["step"], facts["checkpoints"]) == ("ended: max_steps: 8 steps", 8, [4, 7])
    assert facts["bad_rows"] == {"undecodable": 2}
    assert (facts["history"]["bad_step"], facts["newest"]["step"]) == (1, 7)
    text = text_at(tmp_path / "run")
    for part in (
        "Finished: 8 of 8 steps, after 1 recovery.",
        "9  incomplete\n   7  complete\n",
        "⚠ recovered  from step 4 on node-1 pid 7: worker 1: killed",
        "checkpoint   of step 4, written in 0.431 s",
        "⚠ bad step   verdict not_finite · step 8",
        "end          Finished: 8 of 8 steps\n",
        "undecodable     2",
        "cost 1.75",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        ("max_epochs: 2 passes over the data", "Finished: 2 passes over the data, at step 8"),
        ("asked to stop: SIGINT", "Ended at step 8: asked to stop: SIGINT"),
        ("max_cost is reached; raise it to continue", "Ended at step 8: max_cost is reached; raise it to continue"),
    ],
)
def test_the_end_of_a_run_is_named_in_words(tmp_path: Path, reason: str, verdict: str) -> None:
    make_run(tmp_path, last={"event": "end", "reason": reason, "step": 8})
    assert described(tmp_path / "run").verdict == f"{verdict}, after 1 recovery."


def test_the_headline_is_the_newest_step_even_without_metrics_for_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    make_checkpoint(tmp_path, "run", 9)
    section = described(tmp_path / "run")
    facts, figures = section.facts, dict(section.figures)
    assert (facts["step"], facts["last"]["step"]) == (9, 8)
    assert (figures["step"], figures["samples"]) == ("9", "72")
    assert figures["trained for"].startswith("1:00")
    publish_lines(run, "metrics/000002-000000008.jsonl", [{**facts["last"], "step": 10}])
    facts = described(tmp_path / "run").facts
    assert (facts["step"], facts["last"]["step"]) == (10, 10)


def test_two_phases_are_described_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "both/phase-1", last={"event": "end", "reason": "max_steps: 8 steps"})
    make_run(tmp_path, "both/phase-2", last={"event": "gave_up", "failures": ["worker 0: out of memory"]})
    first, second = describe(open_storage(str(tmp_path / "both")))
    assert (first.title, second.title) == ("Training, phase 1", "Training, phase 2")
    assert second.facts["state"] == "given up: worker 0: out of memory"
    assert main(["inspect", str(tmp_path / "both"), "--json"]) == 0
    phases = json.loads(capsys.readouterr().out)
    assert [(phase["kind"], phase["newest"]["position"]) for phase in phases] == [("run", 16)] * 2
    assert phases[0]["newest"]["config"]["data"]["batch_size"] == 8


def test_the_holder_of_a_run_is_read_from_its_lease(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with Lease.acquire(run, "sdp train"):
        assert described(tmp_path / "run").facts["state"].startswith("not ended; under way: ")
    section = described(tmp_path / "run")
    assert section.facts["state"] == "not ended; its lease is free: run its job again to continue"
    assert not section.good


def test_damage_of_a_checkpoint_is_a_problem_and_exit_code_1_and_without_its_marker_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    folder = tmp_path / "run/checkpoints/step-000000007"
    (folder / "worker-00000.000.bin").write_bytes(b"\0" * 23)
    (folder / "worker-00001.000.bin").unlink()
    assert main(["inspect", str(folder)]) == 1
    out = capsys.readouterr().out
    assert f"{folder}/worker-00000.000.bin: 23 bytes, expected 24; use another checkpoint" in out
    assert f"{folder}/worker-00001.000.bin: 0 bytes, expected 24; use another checkpoint" in out
    ledger = Ledger()
    ledger.add(0, np.arange(40))
    (folder / "ledger.roaring").write_bytes(ledger.to_bytes())
    message = f"{folder}: 56 samples counted, but 40 rows in its ledger; use another checkpoint"
    assert message in described(tmp_path / "run").problems
    (folder / "complete.json").unlink()
    assert main(["inspect", str(folder)]) == 2
    assert "no complete.json: incomplete" in capsys.readouterr().err


def test_neither_torch_nor_ray_is_needed(tmp_path: Path) -> None:
    make_run(tmp_path)
    loaded = loaded_by(f"from sdp.cli import main; main(['inspect', {str(tmp_path / 'run')!r}])")
    assert not {"torch", "ray", "diffusers"} & loaded


def test_an_evaluation_is_described_by_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fid, drawn = {"value": 1.5, "generated": 20, "reference": 30}, {"written": 20, "uri": "a"}
    result = {"fid": fid, "config": {"seed": 1}, "created": "2026-01-01T00:00:00", "generated": drawn}
    publish(open_storage(str(tmp_path / "e")), "evaluation.json", result)
    make_images(tmp_path / "e")
    assert main(["inspect", str(tmp_path / "e")]) == 0
    assert "FID  1.500" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "e"), "--verify"]) == 2
    assert f"--verify: expected a dataset, got the evaluation {tmp_path}/e" in capsys.readouterr().err
    with pytest.raises(DatasetError, match="neither a dataset of sdp"):
        describe(open_storage(str(tmp_path / "nothing")))
