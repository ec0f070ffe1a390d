"""The generate stage end to end, in one process and after an interruption."""

import io
import signal
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from sdp.cli import main
from sdp.config import dump_yaml
from sdp.datasets import tombstones
from sdp.datasets.inspect import describe
from sdp.datasets.manifest import Dataset, finish, open_dataset
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome, account_table
from sdp.datasets.parts import write_part
from sdp.errors import DatasetError, SdpError
from sdp.generate import job
from sdp.generate.painter import Painter, Picture
from sdp.generate.sample import image_seed
from sdp.report.data import dataset_section
from sdp.report.page import text_of
from sdp.storage import open_storage
from tests.deadly import DEADLY
from tests.generate_kit import generate_config, make_checkpoint, tiny_model
from tests.kit import LAYOUT, account_of, begin_images, not_none, rows_of
from tests.programs import ended
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a red circle", "a blue square", "z"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trained")
    return make_checkpoint(folder / "run", tiny_model(folder / "model"))


@pytest.fixture(scope="module")
def done(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Three prompts, two pictures each, drawn in this process without a stop."""
    return draw(tmp_path_factory.mktemp("done") / "out", checkpoint, PROMPTS, images_per_prompt=2)


def draw(out: Path, checkpoint: str, prompts: Sequence[str] = (), **more: Any) -> Dataset:
    return not_none(job.run(generate_config(out, checkpoint, prompts, **more)))


def rows(dataset: Dataset) -> dict[int, dict[str, Any]]:
    return {row["row"]: row for row in rows_of(dataset).to_pylist()}


def hashes(dataset: Dataset) -> dict[int, str]:
    return {number: row["sha256"] for number, row in rows(dataset).items()}


def outcomes(dataset: Dataset) -> dict[int, tuple[str, str | None]]:
    return {row["row"]: (row["outcome"], row["reason"]) for row in account_of(dataset).to_pylist()}


def test_each_prompt_has_its_pictures_with_all_that_made_them(done: Dataset, checkpoint: str) -> None:
    out = Path(done.storage.uri)
    drawn = rows(done)
    assert sorted(drawn) == list(range(6))
    assert len({row["sha256"] for row in drawn.values()}) == 6
    for number, row in drawn.items():
        assert row["prompt"] == PROMPTS[number // 2]
        assert row["seed"] == image_seed(0, number)
        assert (row["checkpoint"], row["scheduler"], row["steps"]) == (checkpoint, "ddim", 3)
        assert (row["guidance_scale"], row["negative_prompt"]) == (7.5, "")
        assert (out / "images" / f"{number:09d}.png").read_bytes() == row["image"]
        with Image.open(io.BytesIO(row["image"])) as picture:
            assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (64, 64))
            assert (row["width"], row["height"]) == picture.size
    assert set(outcomes(done).values()) == {(WRITTEN, None)}
    assert len(list((out / "parts").iterdir())) == 2
    assert checkpoint in done.manifest.models["checkpoint"]
    description = describe(done.storage, verify=True)
    assert description.complete
    assert description.counts.written == 6


def test_what_was_drawn_before_an_interruption_is_kept_and_the_pictures_are_the_same(
    done: Dataset, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, prompts, paint, batches = tmp_path / "out", tmp_path / "prompts.txt", Painter.paint, count()

    def dying(painter: Painter, prompts: Sequence[str], seeds: Sequence[int]) -> list[Picture | None]:
        if next(batches) == 2:  # the first of the second part
            until(lambda: list((out / "parts").glob("*.parquet")), "the first part")
            raise SdpError("no such luck")
        return paint(painter, prompts, seeds)

    prompts.write_text("\n".join(PROMPTS))
    config = generate_config(out, checkpoint, (), source={"uri": str(prompts)}, images_per_prompt=2)
    with monkeypatch.context() as patch:
        patch.setattr(Painter, "paint", dying)
        with pytest.raises(SdpError, match=r"^no such luck$"):
            job.run(config)
    assert not (out / "_manifest.json").exists()
    before = parts(out)
    assert list(before) == ["000000000.parquet"]
    monkeypatch.setattr("sdp.ray.cluster.connect", lambda **_: pytest.fail("a single generator needs no Ray"))
    resumed = not_none(job.run(config))
    assert parts(out).items() > before.items()
    assert hashes(resumed) == hashes(done)


def test_a_picture_at_which_its_generator_fails_is_isolated(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint = Painter.paint

    def failing(painter: Painter, prompts: Sequence[str], seeds: Sequence[int]) -> list[Picture | None]:
        if "b" in prompts:
            raise ValueError("no such luck")
        return paint(painter, prompts, seeds)

    monkeypatch.setattr(Painter, "paint", failing)
    dataset = draw(tmp_path / "out", checkpoint, ["a", "b", "c"])
    assert outcomes(dataset) == {0: (WRITTEN, None), 1: (FAILED, "crashed"), 2: (WRITTEN, None)}
    assert account_of(dataset).to_pylist()[1]["detail"] == "ValueError: no such luck"
    assert sorted(path.stem for path in (tmp_path / "out/images").iterdir()) == ["000000000", "000000002"]
    with pytest.raises(DatasetError, match=r"no row was written, 1 failed .*crashed 1.*choose another output\.uri$"):
        draw(tmp_path / "none", checkpoint, ["b"])


@pytest.mark.slow
def test_a_picture_that_kills_its_generator_is_isolated_by_the_run_after(checkpoint: str, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "generate.yaml"
    file.write_text(dump_yaml(generate_config(out, checkpoint, ["a", DEADLY, "c"])))
    program = (
        "from sdp.config import load\nfrom sdp.generate import job\nfrom sdp.ray import cluster\n"
        "from tests.deadly import obey\nobey()\nenvironment = cluster.worker_environment()\n"
        "cluster.worker_environment = lambda: {**environment, 'worker_process_setup_hook': obey}\n"
        f"job.run(load('generate', {str(file)!r}, []))"
    )
    runs = [ended([sys.executable, "-c", program], timeout=300) for _ in range(2)]
    assert runs[0].returncode == -signal.SIGKILL
    assert "the run before ended without a word" not in runs[0].stderr
    assert runs[1].returncode == 0, runs[1].stderr
    assert "the run before ended without a word" in runs[1].stderr
    dataset = open_dataset(open_storage(str(out)))
    assert outcomes(dataset) == {0: (WRITTEN, None), 1: (FAILED, "crashed"), 2: (WRITTEN, None)}
    assert account_of(dataset).to_pylist()[1]["attempts"] == 2
    assert len(list((out / "images").iterdir())) == 2


def parts(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}


def test_only_new_prompts_are_drawn_in_an_output_that_is_there(
    done: Dataset, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    how = {"source": {"uri": str(prompts)}, "images_per_prompt": 2}
    prompts.write_text("\n".join(PROMPTS[:2]))
    draw(out, checkpoint, **how)
    before = parts(out)
    prompts.write_text("\n".join(PROMPTS))
    assert hashes(draw(out, checkpoint, **how)) == hashes(done)
    assert parts(out).items() > before.items()
    after = parts(out)
    draw(out, checkpoint, **how)
    assert parts(out) == after
    assert "nothing to do" in capsys.readouterr().err


def test_a_prompt_is_drawn_beside_the_run_without_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for step in (3, 5):
        make_checkpoint(run, tiny_model(tmp_path / "model"), step)
    how = ["-n", "2", "--set", "sampler.steps=2", "--set", "resolution=64"]
    assert main(["generate", str(run), "A cat, on the moon", *how]) == 0
    out, err = capsys.readouterr()
    files = [run / f"drawn/a-cat-on-the-moon-step-000000005-{number}.png" for number in (0, 1)]
    assert out.splitlines() == [str(file) for file in files]
    assert len({file.read_bytes() for file in files}) == 2
    assert "is newer" not in err
    assert main(["generate", f"{run}/checkpoints/step-000000003", "z", *how]) == 0
    assert "step-000000003, though step-000000005 is newer" in capsys.readouterr().err
    assert main(["generate", str(run)]) == 2
    assert "generate: expected prompts" in capsys.readouterr().err


def test_a_newer_checkpoint_is_named_and_has_a_folder_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = tmp_path / "run", tiny_model(tmp_path / "model")
    make_checkpoint(run, model, 3)
    draw(tmp_path / "out", str(run), PROMPTS[:1])
    assert "is newer" not in capsys.readouterr().err
    make_checkpoint(run, model, 5)
    draw(tmp_path / "out", str(run), PROMPTS[:1])
    hint = f"--set 'output.uri={tmp_path / 'out'}-{{step}}'"
    err = capsys.readouterr().err
    assert "step-000000005 is newer than" in err
    assert hint in err
    assert "step-000000005 is newer" in text_of(dataset_section(open_storage(str(tmp_path / "out"))))
    assert draw(Path(f"{tmp_path}/out-{{step}}"), str(run), PROMPTS[:1]).storage.uri == f"{tmp_path}/out-5"


def test_captions_taken_down_or_missing_are_accounted_for_and_not_drawn(checkpoint: str, tmp_path: Path) -> None:
    dataset = make_captioned_images(tmp_path, ["a", "b", "c", None])
    tombstones.add(dataset.storage, [tombstones.Takedown("row", "1")])
    how = {"source": {"uri": dataset.storage.uri}, "images_per_prompt": 2, "output": {"rows_per_file": 2}}
    first = draw(tmp_path / "out", checkpoint, **how)
    drawn, left = (WRITTEN, None), (FILTERED, "tombstone")
    none = (FAILED, "no_caption")
    assert outcomes(first) == {0: drawn, 1: drawn, 2: left, 3: left, 4: drawn, 5: drawn, 6: none, 7: none}
    assert sorted(rows(first)) == [0, 1, 4, 5]

    tombstones.add(dataset.storage, [tombstones.Takedown("row", "2")])
    second = draw(tmp_path / "out", checkpoint, **how)
    assert outcomes(second) == outcomes(first)
    assert {4, 5} <= set(tombstones.load(second.storage).rows)
    assert 0 not in tombstones.load(second.storage).rows


def make_captioned_images(root: Path, captions: list[str | None]) -> Dataset:
    """Rows of an images dataset by their captions."""
    output = begin_images(root, files=[("a.parquet", len(captions))])
    for work in output.pending():
        table = pa.table({"row": pa.array(range(len(captions)), pa.int64()), "caption": captions})
        account = account_table([Outcome(row, WRITTEN) for row in range(len(captions))])
        write_part(output.storage, "images", work, table, account, layout=LAYOUT)
    return finish(output, input={"uri": str(root / "source")})


def test_a_dry_run_prints_its_plan_and_writes_nothing(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.run(generate_config(tmp_path / "out", checkpoint, PROMPTS), dry_run=True)
    output = capsys.readouterr().err
    assert "1 part, 3 pictures" in output
    assert checkpoint in output
    assert not (tmp_path / "out").exists()
