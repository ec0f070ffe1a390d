"""The generate stage end to end: in one process, after a sudden end, and on a Ray of several nodes."""

import errno
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sdp.cli import main
from sdp.datasets import runs, tombstones
from sdp.datasets.inspect import describe
from sdp.datasets.manifest import Dataset, finish, open_dataset
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome, account_table
from sdp.datasets.parts import read_account, read_rows, write_part
from sdp.errors import StorageError, UserError
from sdp.generate import job
from sdp.generate.sample import image_seed
from sdp.storage import open_storage
from tests.generate_kit import generate_config, make_checkpoint, tiny_model
from tests.kit import LAYOUT, begin_images
from tests.programs import WATCHED, run_program

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["a red circle", "a blue square", "z"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trained")
    return make_checkpoint(folder / "run", tiny_model(folder / "model"))


@pytest.fixture(scope="module")
def done(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Three prompts, two pictures each, drawn in this process without a stop."""
    out = tmp_path_factory.mktemp("done") / "out"
    dataset = job.run(generate_config(out, checkpoint, PROMPTS, images_per_prompt=2)).dataset
    assert dataset is not None
    return dataset


def rows(dataset: Dataset) -> dict[int, dict[str, Any]]:
    tables = [read_rows(dataset.storage, path) for path in dataset.parts["path"].to_pylist()]
    return {row["row"]: row for table in tables for row in table.to_pylist()}


def hashes(dataset: Dataset) -> dict[int, str]:
    return {number: row["sha256"] for number, row in rows(dataset).items()}


def outcomes(dataset: Dataset) -> dict[int, tuple[str, str | None]]:
    tables = [read_account(dataset.storage, path) for path in dataset.parts["path"].to_pylist()]
    return {row["row"]: (row["outcome"], row["reason"]) for table in tables for row in table.to_pylist()}


def parts(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}


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


def test_running_again_does_nothing(done: Dataset, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = Path(done.storage.uri)
    before = parts(out)
    second = job.run(generate_config(out, checkpoint, PROMPTS, images_per_prompt=2))
    assert parts(out) == before
    assert second.dataset is not None
    assert second.dataset.digest == done.digest
    assert second.figures.done == 0
    assert "nothing to do" in capsys.readouterr().err


DIES = """
import os, sys
from sdp.cli import main
from sdp.generate.painter import Painter
paint, painted = Painter.paint, []
def dying(self, prompts, seeds):
    painted.extend(seeds)
    if len(painted) > 4:
        os._exit(9)
    return paint(self, prompts, seeds)
Painter.paint = dying
sys.exit(main(sys.argv[1:]))
"""


def test_after_a_sudden_end_the_same_command_does_the_rest_and_the_pictures_are_the_same(
    done: Dataset, checkpoint: str, tmp_path: Path
) -> None:
    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    settings = [f"output.uri={out}", "output.rows_per_file=4", f"checkpoint={checkpoint}", f"source.uri={prompts}"]
    settings += ["images_per_prompt=2", "resolution=64", "sampler.steps=3", "scaling.batch_size=2"]
    arguments = ["generate", *(word for key in settings for word in ("--set", key))]
    died = run_program(DIES, arguments)
    assert died.returncode == 9, died.stderr.decode()
    before = parts(out)
    assert list(before) == ["000000000.parquet"]
    assert not (out / "_manifest.json").exists()
    # That a single generator starts no Ray is seen by what its process has imported.
    ended = run_program(WATCHED, arguments)
    assert ended.returncode == 0, ended.stderr.decode()
    after = parts(out)
    assert after["000000000.parquet"] == before["000000000.parquet"]
    assert hashes(open_dataset(open_storage(str(out)), "samples")) == hashes(done)


def test_more_prompts_are_drawn_without_drawing_the_others_again(
    done: Dataset, checkpoint: str, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "p.txt", tmp_path / "out"
    prompts.write_text("\n".join(PROMPTS[:2]))
    config = generate_config(out, checkpoint, (), source={"uri": str(prompts)}, images_per_prompt=2)
    job.run(config)
    before = parts(out)
    prompts.write_text("\n".join(PROMPTS))
    dataset = job.run(config).dataset
    assert dataset is not None
    assert {name: at for name, at in parts(out).items() if name in before} == before
    assert len(before) == 1
    assert hashes(dataset) == hashes(done)


def test_a_row_without_a_caption_is_accounted_for(checkpoint: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"caption": ["a", None, "c"]}), tmp_path / "p.parquet")
    config = generate_config(tmp_path / "out", checkpoint, (), source={"uri": str(tmp_path / "p.parquet")})
    dataset = job.run(config).dataset
    assert dataset is not None
    assert outcomes(dataset) == {0: (WRITTEN, None), 1: (FAILED, "no_caption"), 2: (WRITTEN, None)}
    assert sorted(rows(dataset)) == [0, 2]


def test_no_picture_is_drawn_of_what_is_taken_down_and_one_drawn_before_is_left_out(
    checkpoint: str, tmp_path: Path
) -> None:
    dataset = make_captioned_images(tmp_path)
    tombstones.add(dataset.storage, [tombstones.Takedown("row", "1")])
    how = {"source": {"uri": dataset.storage.uri}, "images_per_prompt": 2, "output": {"rows_per_file": 2}}
    first = job.run(generate_config(tmp_path / "out", checkpoint, (), **how)).dataset
    assert first is not None
    drawn, left = (WRITTEN, None), (FILTERED, "tombstone")
    assert outcomes(first) == {0: drawn, 1: drawn, 2: left, 3: left, 4: drawn, 5: drawn}
    (record,), _ = runs.read(first.storage)
    assert (record.job, record.counts.input, record.counts.reasons) == ("generate", 6, {"tombstone": 2})

    tombstones.add(dataset.storage, [tombstones.Takedown("row", "2")])
    second = job.run(generate_config(tmp_path / "out", checkpoint, (), **how)).dataset
    assert second is not None
    assert outcomes(second) == outcomes(first)
    assert {4, 5} <= set(tombstones.load(second.storage).rows)
    assert 0 not in tombstones.load(second.storage).rows
    assert len(runs.read(first.storage)[0]) == 1, "there was nothing to draw"


def make_captioned_images(root: Path) -> Dataset:
    """Rows 0, 1 and 2 of an images dataset, each with a caption."""
    output = begin_images(root, files=[("a.parquet", 3)])
    for work in output.pending():
        table = pa.table({"row": pa.array(range(3), pa.int64()), "caption": [f"caption {row}" for row in range(3)]})
        account = account_table([Outcome(row, WRITTEN) for row in range(3)])
        write_part(output.storage, "images", work, table, account, layout=LAYOUT)
    return finish(output, input={"uri": str(root / "source")})


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(
    done: Dataset, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdp.storage import local

    write = local._write

    def full(draft: Path, content: memoryview) -> None:
        if "images" in draft.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(draft, content)

    config = generate_config(tmp_path / "out", checkpoint, PROMPTS, images_per_prompt=2)
    monkeypatch.setattr(local, "_write", full)
    with pytest.raises(StorageError, match=r"images/000000000\.png: no space left on the device; free some") as error:
        job.run(config)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(local, "_write", write)
    dataset = job.run(config).dataset
    assert dataset is not None
    assert hashes(dataset) == hashes(done)


def test_a_dry_run_prints_its_plan_and_writes_nothing(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.run(generate_config(tmp_path / "out", checkpoint, PROMPTS), dry_run=True)
    output = capsys.readouterr().err
    assert "1 part, 3 pictures" in output
    assert checkpoint in output
    assert not (tmp_path / "out").exists()


def test_an_output_of_other_settings_is_refused_in_a_line(done: Dataset, checkpoint: str) -> None:
    with pytest.raises(UserError, match=r"sampler\.guidance_scale was 7\.5 and is 2\.0 now"):
        job.run(
            generate_config(
                Path(done.storage.uri), checkpoint, PROMPTS, images_per_prompt=2, sampler={"guidance_scale": 2.0}
            )
        )


def test_what_is_wrong_is_told_by_the_command_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    base = ["generate", "--set", f"output.uri={tmp_path / 'out'}", "--set", f"checkpoint={tmp_path}"]
    for key, line in (
        (f"source.uri={tmp_path / 'empty.txt'}", f"source.uri: {tmp_path / 'empty.txt'}: no prompts; expected one"),
        ("prompts=[a]", f"checkpoint: {tmp_path}: neither a complete checkpoint of sdp train"),
    ):
        assert main([*base, "--set", key]) == 2
        (message,) = capsys.readouterr().err.splitlines()
        assert message.startswith(f"sdp: {line}")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, str]]:
    """A Ray of three nodes: a head without room for a generator, one that calls itself A10G and one A100."""
    import ray

    from tests.local_ray import several_nodes

    machines = [
        {"num_cpus": 2, "num_gpus": 2, "labels": {"ray.io/accelerator-type": kind}} for kind in ("A10G", "A100")
    ]
    with several_nodes(*machines):
        yield {node["Labels"].get("ray.io/accelerator-type", ""): node["NodeID"] for node in ray.nodes()}


def test_generators_run_on_the_accelerator_asked_for_and_draw_the_same_pictures(
    done: Dataset, nodes: dict[str, str], checkpoint: str, tmp_path: Path
) -> None:
    before = generators()
    config = generate_config(
        tmp_path / "bilder-ä",  # whose name is a tag of Ray's metrics
        checkpoint,
        PROMPTS,
        images_per_prompt=2,
        scaling={"num_workers": 2, "accelerator": "A10G"},
    )
    dataset = job.run(config).dataset
    assert dataset is not None
    assert hashes(dataset) == hashes(done)
    names = {node: name for name, node in nodes.items()}
    mine = [actor for key, actor in generators().items() if key not in before]
    assert [names[actor["Address"]["NodeID"]] for actor in mine] == ["A10G", "A10G"]


def generators() -> dict[str, Any]:
    """All that there have been on this Ray."""
    import ray

    actors = ray._private.state.actors().items()
    return {key: actor for key, actor in actors if "MapWorker" in actor["ActorClassName"]}


def test_what_a_generator_finds_wrong_is_told_in_its_own_words(
    nodes: dict[str, str], checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nodes
    model = tiny_model(tmp_path / "model")
    spoilt = make_checkpoint(tmp_path / "run", model, spoil="ema.conv_in.weight")
    with pytest.raises(UserError) as error:
        job.run(generate_config(tmp_path / "out", spoilt, scaling={"accelerator": "gpu"}))
    assert str(error.value) == f"{spoilt}: has NaN or infinite weights; use an earlier checkpoint"
    for scaling, line in (
        (
            {"num_workers": 5, "accelerator": "gpu"},
            "scaling.num_workers: expected at most 4, got 5: the cluster has 4 GPUs; lower it",
        ),
        ({"num_workers": 5}, "scaling.accelerator: expected one on a cluster, got null"),
        ({"accelerator": "H100"}, "scaling.accelerator: expected an accelerator type that a node offers, got 'H100'"),
    ):
        with pytest.raises(UserError) as refused:
            job.run(generate_config(tmp_path / "out2", checkpoint, scaling=scaling))
        assert str(refused.value).startswith(line)
    monkeypatch.setenv("RAY_ADDRESS", "a cluster that may grow")
    waiting = {"num_workers": 3, "accelerator": "A10G", "wait_s": 2.0}  # which has two GPUs
    with pytest.raises(
        UserError, match=r"^scaling\.wait_s: no node offered 3 A10G GPUs \(2 of 3 ready\) within 2\.0 s; "
    ):
        job.run(generate_config(tmp_path / "out3", checkpoint, PROMPTS, scaling=waiting, output={"rows_per_file": 1}))
