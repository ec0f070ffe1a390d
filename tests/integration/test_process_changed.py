"""A folder of pictures that its owner edits after `sdp process`."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sdp.config.process import ProcessConfig
from sdp.datasets import tombstones
from sdp.datasets.audit import audit
from sdp.datasets.inspect import accounts
from sdp.datasets.ledger import Ledger
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.parts import read_rows
from sdp.errors import UserError
from sdp.families.tokenizer import load_tokenizer, tokenize
from sdp.process import job
from sdp.storage import Storage, open_storage
from tests.kit import not_none, rows_of
from tests.process_kit import config_of, picture

NAMES = ("a", "b", "c", "d", "e")


@pytest.fixture
def config(tmp_path: Path, model: Path) -> ProcessConfig:
    """The job of a folder of five pictures, which has run."""
    (tmp_path / "own").mkdir()
    for number, name in enumerate(NAMES):
        (tmp_path / f"own/{name}.jpg").write_bytes(picture(number))
        (tmp_path / f"own/{name}.txt").write_text(f"picture {name}")
    config = config_of(tmp_path / "own", tmp_path / "out", model)
    job.run(config)
    return config


def edit(folder: Path) -> None:
    (folder / "a.txt").write_text("another caption")
    (folder / "b.jpg").write_bytes(picture(77))
    (folder / "c.jpg").unlink()


def rows_in(storage: Storage, part: str) -> list[int]:
    return list(read_rows(storage, part, ["row"])["row"].to_pylist())


def used(dataset: Dataset) -> dict[str, int]:
    """Return the rows that readers use, by key."""
    taken_down = tombstones.load(dataset.storage).rows
    table = rows_of(dataset)
    rows = zip(table["key"].to_pylist(), table["row"].to_pylist(), strict=True)
    present = [(key, row) for key, row in rows if row not in taken_down]
    assert len({key for key, _ in present}) == len(present), "no picture twice"
    return dict(present)


def test_what_changed_is_said_and_nothing_is_done_without_the_word(
    config: ProcessConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(tmp_path / "own")
    capsys.readouterr()
    dataset = job.run(config).dataset
    err = capsys.readouterr().err
    assert "1 caption changed (a.jpg), 1 picture replaced (b.jpg), 1 picture gone (c.jpg); sdp process --changed" in err
    assert dataset is not None
    assert used(dataset) == {name: row for row, name in enumerate(NAMES)}


def test_changed_rows_get_new_addresses_and_their_old_ones_are_taken_down(
    config: ProcessConfig, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(tmp_path / "own")
    assert job.run(config, changed=True).figures.images_encoded == 2
    dataset = open_dataset(job.run(config).dataset.storage)  # type: ignore[union-attr]  # no dry run
    assert used(dataset) == {"d": 3, "e": 4, "a": 5, "b": 6}
    table = rows_of(dataset)
    tokens = table.filter(pc.field("row") == 5)["token_ids"][0].as_py()
    assert tokens == tokenize(load_tokenizer(model), ["another caption"])[0].astype("uint16").tobytes()
    outcomes = [outcome for account in accounts(dataset.storage, []) for outcome in account["outcome"].to_pylist()]
    assert outcomes == ["taken_down"] * 3 + ["written"] * 4
    run = open_storage(str(tmp_path / "run"))
    run.publish("_run.json", json.dumps({"datasets": ["../out"], "identity": {"data.holdout": 0.6}}).encode())
    ledger = Ledger()
    ledger.add(0, np.array([0], dtype=np.int64))
    run.publish("checkpoints/step-000000010/ledger.roaring", ledger.to_bytes())
    former, present = audit([run.uri], file="a.jpg")
    assert (former.row, former.taken_down, len(former.checkpoints)) == (0, True, 1)
    assert (present.row, present.taken_down, len(present.checkpoints)) == (5, False, 0)
    assert present.unused == {run.uri: "never used: held out by data.holdout"}
    (part,) = (outcome["part"] for outcome in present.datasets)
    assert present.row in rows_in(dataset.storage, part)
    capsys.readouterr()
    repeated = job.run(config, changed=True)
    assert repeated.figures.images_encoded == 0
    err = capsys.readouterr().err
    assert "--changed" not in err
    assert "3 of the written, left out" in err


def test_an_interrupted_change_is_completed_by_the_next_run(
    config: ProcessConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(tmp_path / "own")
    monkeypatch.setattr(tombstones, "add", lambda *_: pytest.fail("interrupted"))
    with pytest.raises(pytest.fail.Exception):
        job.run(config, changed=True)
    monkeypatch.undo()
    dataset = not_none(job.run(config).dataset)
    assert used(dataset) == {"c": 2, "d": 3, "e": 4, "a": 5, "b": 6}


def test_a_picture_that_was_taken_down_stays_out_when_its_caption_is_edited(
    config: ProcessConfig, tmp_path: Path
) -> None:
    dataset = not_none(job.run(config).dataset)
    tombstones.add(dataset.storage, [tombstones.Takedown("row", "0")])
    edit(tmp_path / "own")
    dataset = not_none(job.run(config, changed=True).dataset)
    assert used(dataset) == {"d": 3, "e": 4, "b": 5}


def test_a_caption_that_was_missing_is_used_once_it_is_there(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir()
    for number, name in enumerate(NAMES[:2]):
        (tmp_path / f"own/{name}.jpg").write_bytes(picture(number))
    (tmp_path / "own/a.txt").write_text("picture a")
    config = config_of(tmp_path / "own", tmp_path / "out", model)
    assert job.run(config).figures.counts.reasons == {"no_caption": 1}
    (tmp_path / "own/b.txt").write_text("picture b")
    (tmp_path / "own/a.jpg").unlink()
    for dry_run in (True, False):  # a plain run says it, each time
        job.run(config, dry_run=dry_run)
        said = "1 caption added (b.jpg), 1 picture gone (a.jpg); sdp process --changed does these rows again"
        assert said in capsys.readouterr().err
    job.run(config, changed=True, dry_run=True)
    assert "process: 1 caption added (b.jpg), 1 picture gone (a.jpg)\n" in (err := capsys.readouterr().err)
    assert re.search(r"to do +1 part, 2 rows", err)
    dataset = not_none(job.run(config, changed=True).dataset)
    assert used(dataset) == {"b": 1}
    capsys.readouterr()
    job.run(config, changed=True)
    assert "process: no picture or caption has changed" in capsys.readouterr().err


def test_a_picture_that_is_gone_before_its_turn_ends_no_job(config: ProcessConfig, tmp_path: Path, model: Path) -> None:
    config = config_of(tmp_path / "own", tmp_path / "part", model)
    job.run(config.replaced(limit=3))
    (tmp_path / "own/e.jpg").unlink()
    dataset = not_none(job.run(config, changed=True).dataset)
    assert used(dataset) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert dataset.manifest.counts.reasons == {"tombstone": 1}


def test_new_addresses_are_refused_where_others_depend_on_them(
    config: ProcessConfig, tmp_path: Path, model: Path
) -> None:
    with pytest.raises(UserError, match="--changed: expected limit null, got 3"):
        job.run(config.replaced(limit=3), changed=True)
    with pytest.raises(UserError, match="--changed: expected no --only-failed"):
        job.run(config, only_failed=True, changed=True)
    pq.write_table(pa.table({"row": [0], "caption": ["new"]}), tmp_path / "new.parquet")
    tables = f"source.tables=[{{uri: {tmp_path / 'new.parquet'}}}]"
    with pytest.raises(UserError, match=r"--changed: a table of source\.tables is joined by row"):
        job.run(config_of(tmp_path / "own", tmp_path / "other", model, tables), changed=True)
    pq.write_table(pa.table({"image": [picture(0)], "caption": ["new"]}), tmp_path / "pictures.parquet")
    with pytest.raises(UserError, match=r"--changed: expected a folder of pictures, got .*pictures\.parquet"):
        job.run(config_of(tmp_path / "pictures.parquet", tmp_path / "third", model), changed=True)
