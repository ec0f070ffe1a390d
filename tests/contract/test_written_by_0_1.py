"""Datasets and a run that sdp 0.1 wrote are read, checked and continued by this version.

tests/fixtures/v0.1 holds twelve images (one of which could not be fetched), their latents of builtin:tiny, and a run of
four steps on these, without its tensors. 0.1's own functions wrote all of it.
"""

import io
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from sdp.cli import main
from sdp.config import load, parse
from sdp.config.removed import without_removed
from sdp.config.train import TrainConfig
from sdp.datasets import parts
from sdp.datasets.manifest import open_dataset
from sdp.datasets.output import open_output
from sdp.datasets.source import order_retry
from sdp.model.checkpoints import read_ledger, read_marker
from sdp.process.prepare import begin, prepare
from sdp.storage import open_storage
from sdp.train import plan
from sdp.train.run_folder import RunFolder

FIXTURES = Path(__file__).parents[1] / "fixtures" / "v0.1"
PROCESS = (
    "source.uri=images",
    "output.uri=latents",
    "model.source=builtin:tiny",
    "resolutions=[64]",
    "output.rows_per_file=6",
    "encode.accelerator=cpu",
)
TRAIN = (
    "source.uri=latents",
    "output.uri=run",
    "model.source=builtin:tiny",
    "data.resolution=64",
    "data.batch_size=4",
    "precision=fp32",
    "scaling.in_driver=true",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what 0.1 wrote, as the current folder."""
    shutil.copytree(FIXTURES, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.parametrize(("kind", "counts"), [("images", (11, 0, 1)), ("latents", (11, 0, 0))])
def test_a_dataset_of_0_1_has_its_rows_and_its_account(kind: str, counts: tuple[int, int, int]) -> None:
    dataset = open_dataset(open_storage(kind), kind)
    written = dataset.manifest.counts
    assert (written.written, written.filtered, written.failed) == counts
    assert dataset.manifest.sdp == "0.1.0"
    paths = dataset.parts["path"].to_pylist()
    rows = [row for path in paths for row in parts.read_rows(dataset.storage, path).to_pylist()]
    assert [row["row"] for row in rows] == [row for row in range(12) if row != 7]
    account = parts.resolve([parts.read_account(dataset.storage, path) for path in paths]).to_pylist()
    failed = {entry["row"]: (entry["reason"], entry["detail"]) for entry in account if entry["outcome"] == "failed"}
    assert failed == ({7: ("http_status", "404")} if kind == "images" else {})
    if kind == "images":
        assert {Image.open(io.BytesIO(row["image"])).size for row in rows} == {(64, 64)}
        assert rows[3]["caption"] == "picture number 3"


def test_latents_of_0_1_name_the_images_that_they_are_of() -> None:
    images, latents = (open_dataset(open_storage(kind)) for kind in ("images", "latents"))
    assert latents.manifest.input is not None
    assert latents.manifest.input["manifest_digest"] == images.digest


def test_process_finds_nothing_left_to_do_in_latents_of_0_1() -> None:
    """A key that came later must have had its default then, or every dataset would be refused."""
    output = begin(prepare(load("process", None, list(PROCESS))), only_failed=False)
    assert output.pending() == []


def test_failed_rows_of_0_1_can_be_retried() -> None:
    dataset = open_dataset(open_storage("images"), "images")
    output = order_retry(open_output(dataset.storage, dataset.head), dataset)
    (work,) = output.pending()
    assert (work.unit.number, work.attempt) == (1, 1)


def test_a_run_of_0_1_is_continued_from_its_checkpoint() -> None:
    config = load("train", None, [*TRAIN, "max_steps=6"])
    planned = plan.make_plan(config)
    assert (planned.state.step, planned.state.samples, planned.rows, planned.last_step) == (4, 15, 11, 6)
    assert planned.changed == {}
    run = RunFolder(open_storage("run"))
    assert run.steps() == {4: True}
    problems: list[str] = []
    assert run.metrics(problems) == []
    run.events(problems)
    assert problems == []
    assert [event["event"] for event in run.events()] == ["start", "training", "checkpoint", "checkpoint", "end"]
    checkpoint = run.checkpoint(4)
    assert read_marker(checkpoint)["sdp"] == "0.1.0"
    ledger = read_ledger(checkpoint)
    assert (ledger.consumed(0), ledger.consumed(1)) == (11, 4)


def test_train_takes_the_run_for_the_same_and_reads_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """Keys that decide a run's weights keep their names and values, or the run would be refused as another one."""
    words = [word for setting in (*TRAIN, "max_steps=6") for word in ("--set", setting)]
    assert main(["train", "--dry-run", *words]) == 0
    assert "from step 4 to step 6" in capsys.readouterr().err
    saved = json.loads(Path("run/checkpoints/step-000000004/config.json").read_text())
    assert isinstance(parse("train", without_removed("train", saved)), TrainConfig)
    assert main(["train", "--dry-run", *words, "--set", "seed=1"]) == 2, "another run is refused"


@pytest.mark.parametrize("name", ["images", "latents", "run"])
def test_inspect_and_report_describe_what_0_1_wrote(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["inspect", name])
    printed = capsys.readouterr()
    assert "0.1.0" in printed.out
    assert (code, name) in ((0, "images"), (0, "latents"), (1, "run")), "the run's tensors were left out"
    assert main(["report", name, "--out", "report.html"]) == 0
