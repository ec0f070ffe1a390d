"""`sdp.open`: datasets, runs and evaluations as rows and tables."""

import json
import sys
from pathlib import Path

import pytest

import sdp
from sdp.datasets import tombstones
from sdp.datasets.tombstones import Takedown
from sdp.errors import UserError
from sdp.storage import open_storage
from tests.kit import default_outcome, make_images, make_latents
from tests.programs import ended
from tests.unit.test_inspect_run import make_run


def test_a_datasets_rows_are_those_that_count_and_its_failures_have_names(tmp_path: Path) -> None:
    dataset = make_images(tmp_path)
    written = [row for row in range(42) if default_outcome(row).outcome == "written"]
    tombstones.add(dataset.storage, [Takedown("row", str(written[0]))])
    images = sdp.open(str(tmp_path / "images"))
    assert [row["row"] for row in images.rows()] == written[1:]
    urls = [f"http://host/{row}" for row in written[1:]]
    assert images.table(["url"]).to_pydict() == {"row": written[1:], "url": urls}
    failures = images.failures()
    assert failures["row"].to_pylist() == [row for row in range(42) if row % 7 == 3]
    first = {"row": 3, "reason": "http_status", "detail": "404", "attempts": 1, "name": None}
    assert failures.to_pylist()[0] == first
    assert images.facts["counts"]["failed"] == failures.num_rows
    assert "404" in str(images)
    with pytest.raises(UserError, match="columns: expected some of image, row, sha256, url, got 'caption'"):
        images.table(["caption"])
    with pytest.raises(UserError, match="draw: expected a run or checkpoint, got the dataset "):
        images.draw("a cat")


def test_metrics_of_runs_and_evaluations_are_tables(tmp_path: Path) -> None:
    make_images(tmp_path)
    make_latents(tmp_path)
    run = sdp.open(make_run(tmp_path).uri)
    assert run.metrics().select(["step", "slowest.host"]).to_pylist() == [{"step": 8, "slowest.host": "node-1"}]
    assert run.facts["step"] == 8
    result = {"fid": {"value": 1.5, "generated": 20}, "similarity": 0.5, "config": {}}
    open_storage(str(tmp_path / "e")).publish("evaluation.json", json.dumps(result).encode())
    (figures,) = sdp.open(str(tmp_path / "e")).metrics().to_pylist()
    assert figures == {"fid.value": 1.5, "fid.generated": 20, "similarity": 0.5}


def test_an_unknown_job_is_named_and_the_import_loads_nothing_else() -> None:
    with pytest.raises(UserError, match=r"run: expected download, .* or dreambooth, got 'trian'"):
        sdp.run("trian", {})
    code = "import sys, sdp; print([name for name in sys.modules if name.startswith('sdp.')])"
    assert ended([sys.executable, "-c", code], cwd=Path(sdp.__file__).parents[1]).stdout == "[]\n"
