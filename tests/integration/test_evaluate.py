"""The evaluate stage end to end, in one process."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sdp.cli import main
from sdp.datasets import tombstones
from sdp.datasets.tombstones import Takedown
from sdp.errors import DatasetError
from sdp.evaluate import job
from sdp.evaluate.networks import Transformers
from sdp.evaluate.prepare import EvaluateSpec, prepare
from sdp.evaluate.worker import Evaluator
from sdp.generate import job as generate
from sdp.model import networks
from sdp.report.sections import gather
from sdp.storage import open_storage
from tests.deadly import DEADLY, obey
from tests.evaluate_kit import caption_of, encoded, evaluate_config, picture, tiny_clip, tiny_dino, write_pictures
from tests.generate_kit import generate_config, tiny_model
from tests.local_ray import one_node
from tests.sandbox_kit import write_poison

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks, 20 pictures to judge with captions, and 30 to compare them with."""
    root = tmp_path_factory.mktemp("inputs")
    tiny_clip(root / "clip")
    tiny_dino(root / "dino")
    write_pictures(root / "pictures", range(20))
    write_pictures(root / "references", range(100, 130), captions=False)
    return root


def settings_for(inputs: Path, **more: Any) -> dict[str, Any]:
    return {
        "source": {"uri": inputs / "pictures"},
        "reference": {"uri": inputs / "references"},
        "clip": {"model": inputs / "clip"},
        "features": {"model": inputs / "dino"},
        **more,
    }


@pytest.fixture(scope="module")
def done(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("done") / "out"
    return out, job.run(evaluate_config(out, **settings_for(inputs)))


def frechet(a: Any, b: Any) -> float:
    """The Fréchet distance without any covariance: Tr √(C₁C₂) is the sum of the singular values of the two sets'
    centred rows times each other."""
    mean_a, mean_b = a.mean(0), b.mean(0)
    rows_a, rows_b = (a - mean_a) / (len(a) - 1) ** 0.5, (b - mean_b) / (len(b) - 1) ** 0.5
    between = np.linalg.svd(rows_a @ rows_b.T, compute_uv=False).sum()
    return float(((mean_a - mean_b) ** 2).sum() + (rows_a**2).sum() + (rows_b**2).sum() - 2 * between)


def clip_of(inputs: Path) -> Transformers:
    return Transformers(networks.find(str(inputs / "clip"), "clip.model"), torch.device("cpu"))


def by_hand(inputs: Path) -> dict[str, float]:
    """The same figures from the networks alone: no datasets, no batches, no units."""
    from transformers import BitImageProcessor, Dinov2Model

    dino, prepare = Dinov2Model.from_pretrained(inputs / "dino"), BitImageProcessor.from_pretrained(inputs / "dino")
    clip = clip_of(inputs)

    def features(numbers: range) -> Any:
        pixels = prepare([picture(n) for n in numbers], return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            return dino(pixels).pooler_output.numpy()

    drawn, reference = features(range(20)), features(range(100, 130))
    rows = clip.embed([clip.prepare(picture(n)) for n in range(20)])
    scores = clip.scores(rows, [caption_of(n) for n in range(20)])
    return {
        "fid": frechet(drawn.astype(np.float64), reference.astype(np.float64)),
        "clip": float(scores.astype(np.float64).mean()),
        "error": float(scores.astype(np.float64).std(ddof=1) / 20**0.5),
    }


def test_the_figures_are_those_of_the_networks_by_hand(inputs: Path, done: tuple[Path, dict[str, Any]]) -> None:
    out, figures = done
    expected = by_hand(inputs)
    assert figures["fid"]["value"] == pytest.approx(expected["fid"], rel=1e-4)
    assert (figures["fid"]["generated"], figures["fid"]["reference"]) == (20, 30)
    assert figures["clip"]["score"] == pytest.approx(expected["clip"], rel=1e-4)
    assert figures["clip"]["standard_error"] == pytest.approx(expected["error"], rel=1e-4)
    assert figures["kid"]["size"] == 20, "all of the smaller set"
    written = json.loads((out / "evaluation.json").read_text())
    assert written["fid"] == figures["fid"]
    assert any("FID of 20 pictures is biased upwards" in note for note in written["notes"])
    assert written["config"]["features"]["model"] == str(inputs / "dino")
    assert written["generated"]["written"] == 20
    assert [path.name for path in out.iterdir() if path.name != "_lease"] == ["evaluation.json"]


def test_pictures_that_cannot_be_used_are_accounted_for(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_pictures(tmp_path / "pictures", range(4))
    monkeypatch.setenv("PYTHONPATH", str(write_poison(tmp_path)))
    (folder / "000005.png").write_bytes(encoded(picture(5)) + b"SEGFAULT")
    (folder / "000006.png").write_bytes(encoded(picture(6)))
    (folder / "000001.png").write_bytes(b"no picture")
    (folder / "000002.png").write_bytes(b"")
    (folder / "000004.jpg").write_bytes(encoded(picture(4, 50, 20), "JPEG"))
    (folder / "notes.md").write_text("not a picture")
    out = tmp_path / "out"
    figures = job.run(evaluate_config(out, **settings_for(inputs, source={"uri": folder})))
    counts = {key: figures["generated"][key] for key in ("input", "written", "filtered", "failed", "reasons")}
    reasons = {"not_an_image": 1, "empty": 1, "crashed": 1}
    assert counts == {"input": 7, "written": 4, "filtered": 0, "failed": 3, "reasons": reasons}
    assert figures["fid"]["generated"] == 4
    assert figures["clip"]["pictures"] == 2  # one has no text beside it


def test_a_picture_at_which_its_evaluator_fails_is_isolated(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, decode = write_pictures(tmp_path / "pictures", range(5)), Evaluator._decode
    unlucky = (folder / "000003.png").read_bytes()

    def failing(evaluator: Evaluator, spec: EvaluateSpec, data: bytes | memoryview) -> Any:
        if bytes(data) == unlucky:
            raise ValueError("no such luck")
        return decode(evaluator, spec, data)

    monkeypatch.setattr(Evaluator, "_decode", failing)
    figures = job.run(evaluate_config(tmp_path / "out", **settings_for(inputs, source={"uri": folder})))
    check_isolated(figures, inputs)
    line = f"evaluate: row 3 of {folder} crashes its evaluators (ValueError: no such luck), and is left out"
    assert line in capsys.readouterr().err


@pytest.mark.slow
def test_a_picture_that_kills_its_evaluator_is_isolated(inputs: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures", range(5))
    with (folder / "000003.png").open("ab") as file:
        file.write(DEADLY.encode())
    with one_node(cpus=3, setup=obey):
        figures = job.run(evaluate_config(tmp_path / "out", **settings_for(inputs, source={"uri": folder})))
    check_isolated(figures, inputs)


def check_isolated(figures: dict[str, Any], inputs: Path) -> None:
    """Check that of five pictures all but the fourth are judged, in their order."""
    assert (figures["generated"]["written"], figures["generated"]["reasons"]) == (4, {"crashed": 1})
    assert (figures["fid"]["generated"], figures["clip"]["pictures"]) == (4, 4)
    clip, numbers = clip_of(inputs), [0, 1, 2, 4]
    scores = clip.scores(clip.embed([clip.prepare(picture(n)) for n in numbers]), [caption_of(n) for n in numbers])
    assert figures["clip"]["score"] == pytest.approx(float(scores.mean()), rel=1e-4)


def test_samples_are_scored_by_their_prompts_and_reported_without_those_taken_down(
    inputs: Path, tmp_path: Path
) -> None:
    drawn, model = tmp_path / "samples", tiny_model(tmp_path / "model")
    generate.run(generate_config(drawn, model, ["a", "b c", "d"], images_per_prompt=2))
    config = evaluate_config(tmp_path / "out", **settings_for(inputs, source={"uri": drawn}))
    figures = job.run(config)
    assert (figures["clip"]["pictures"], figures["fid"]["generated"]) == (6, 6)
    clip = clip_of(inputs)
    rows = [row for part in (drawn / "parts").iterdir() for row in pq.read_table(part).to_pylist()]
    from sdp.imaging import decode

    views = [clip.prepare(decode(row["image"]).pixels) for row in rows]
    scores = clip.scores(clip.embed(views), [row["prompt"] for row in rows])
    assert figures["clip"]["score"] == pytest.approx(float(scores.mean()), rel=1e-4)
    sections = gather([str(tmp_path / "out")], pictures=3)
    assert [section.title for section in sections] == ["Pictures drawn", "Evaluation"]
    assert dict(sections[-1].figures)["FID"] == f"{figures['fid']['value']:.3f}"
    tombstones.add(open_storage(str(drawn)), [Takedown("row", "3")])
    after = job.run(config)
    assert after["clip"]["pictures"] == 5
    assert after["generated"]["reasons"] == {"tombstone": 1}


def test_a_dry_run_prints_its_plan_and_writes_nothing(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = evaluate_config(tmp_path / "out", **settings_for(inputs))
    assert job.run(config, dry_run=True) == {}
    assert pickle.loads(pickle.dumps(prepare(config).sets)), "Ray's workers need it"
    shown = capsys.readouterr().err
    assert "20 pictures" in shown
    assert "dinov2" in shown
    assert not (tmp_path / "out").exists()


def test_errors_are_one_line_and_nothing_is_written(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    pictures, reference, dino = (f"{inputs / name}" for name in ("pictures", "references", "dino"))
    source, clip, plain = f"source.uri={pictures}", f"clip.model={inputs / 'clip'}", tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [encoded(picture(1))]}), plain)
    for keys, line in (
        ([clip], "source.uri: expected a URI"),
        ([source], "clip.model: expected a value while features.model is null"),
        ([source, f"features.model={dino}"], "reference.uri: expected a value while features.model is"),
        ([f"source.uri={reference}", clip], f"source.uri: {reference} has no captions for a CLIP score"),
        ([source, f"clip.model={dino}"], f"clip.model: expected a CLIP model, got {dino}"),
        ([source, f"clip.model={pictures}"], f"clip.model: model source {pictures}: no feature network"),
        ([f"source.uri={tmp_path / 'empty'}", clip], f"{tmp_path / 'empty'}: no such file"),
        ([f"source.uri={plain}", "source.image_column=jpg", clip], f"source.image_column: no column jpg in {plain}"),
    ):
        words = [word for key in [f"output.uri={tmp_path / 'out'}", *keys] for word in ("--set", key)]
        assert main(["evaluate", *words]) == 2, line
        (shown,) = capsys.readouterr().err.splitlines()
        assert shown.startswith(f"sdp: {line}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("usable", [0, 1])
def test_a_set_without_usable_pictures_is_refused(inputs: Path, tmp_path: Path, usable: int) -> None:
    folder = write_pictures(tmp_path / "pictures", range(2))
    for number in range(usable, 2):
        (folder / f"{number:06d}.png").write_bytes(b"no picture")
    line = rf"expected 2 readable pictures or more, got {usable} \(not_an_image {2 - usable}\)"
    with pytest.raises(DatasetError, match=line):
        job.run(evaluate_config(tmp_path / "out", **settings_for(inputs, source={"uri": folder})))
