"""Newcomers are told what is wrong in the words that they came with."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sdp.cli import main
from sdp.config import load
from sdp.datasets.manifest import open_dataset
from sdp.errors import ConfigError, DatasetError, ModelError
from sdp.families import refuse_unsupported
from sdp.model.export import Exported
from sdp.model.sources import check, parse
from sdp.sources.captions import gather
from sdp.storage import open_storage
from tests.kit import write_files
from tests.unit.test_one_gpu import pictures


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--resume", "sdp continues by itself"),
        ("--max_train_steps=100", "use --set max_steps=N"),
        ("--lr", "use --set optimizer.learning_rate=1e-5"),
        ("--num-train-epochs", "use --set max_epochs=N"),
        ("--output_dir", "use --set output.uri=FOLDER"),
        ("--image_size", "use --set image.size=N"),
    ],
)
def test_an_option_of_another_trainer_leads_to_ours(option: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", option]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("stabilityai/stable-diffusion-xl-base-1.0", "SDXL"),
        ("black-forest-labs/FLUX.1-dev", "FLUX"),
        ("black-forest-labs/FLUX.2-dev", "FLUX"),
        ("black-forest-labs/FLUX.2-klein-base-9B", "FLUX.2 klein 9B"),
        ("Qwen/Qwen-Image@0123456789012345678901234567890123456789", "Qwen-Image"),
        ("Tongyi-MAI/Z-Image-Turbo", "Z-Image"),
        ("me/SDXL_Turbo", "SDXL"),
        ("PixArt-alpha/PixArt-XL-2-1024-MS", "PixArt"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_its_name(name: str, kind: str) -> None:
    with pytest.raises(ModelError, match=f"{kind} is not supported; Stable Diffusion, PRX and FLUX.2 klein are"):
        check(name)


@pytest.mark.parametrize("name", ["me/my-xlarge-sd", "me/influxdb-sd2", "me/FLUX.2-klein-base-4B", "me/flux2_klein_4B"])
def test_a_name_that_only_holds_the_letters_of_such_a_kind_is_not_refused(name: str) -> None:
    refuse_unsupported(name.partition("/")[2], name)


def test_a_network_of_another_job_may_have_the_name_of_such_a_kind() -> None:
    assert parse(f"Salesforce/blip2-flan-t5-xl@{'0' * 40}").uri == "Salesforce/blip2-flan-t5-xl"


@pytest.mark.parametrize("name", ["StableDiffusionXLPipeline", "Flux2KleinKVPipeline", None])
def test_a_folder_of_another_kind_of_model_is_refused_by_its_pipeline(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    line = f"^model source {tmp_path}: model_index.json: _class_name: expected Stable.* or Flux2Klein.*, got {name!r}"
    with pytest.raises(ModelError, match=line):
        check(str(tmp_path))


def test_pictures_given_to_train_lead_to_process(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "cats", 2)
    with pytest.raises(DatasetError, match="these are pictures; run `sdp init` and `sdp process` first"):
        open_dataset(open_storage(folder), "latents")


def test_init_of_a_folder_without_pictures_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["init", str(tmp_path / "my"), "--pictures", str(tmp_path / "empty")]) == 2
    assert "has no pictures, tars or Parquet files" in capsys.readouterr().err
    assert not (tmp_path / "my").exists()


def test_init_counts_the_caption_that_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pictures(tmp_path / "cats", 3)
    for text in Path(folder).glob("*.txt"):
        text.unlink()
    assert main(["init", str(tmp_path / "my"), "--pictures", folder, "--caption", "a cat"]) == 0
    err = capsys.readouterr().err
    assert "captions from --caption (3)" in err
    assert "without caption" not in err


def test_a_plan_of_a_builtin_model_says_that_it_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set=source.uri=latents", "--set=output.uri=run", "--set=max_steps=100"]
    assert main(["plan", *settings, "--set=model.source=builtin:tiny"]) == 0
    assert "a builtin model needs no GPU" in capsys.readouterr().err
    assert main(["plan", *settings]) == 0
    assert "builtin" not in capsys.readouterr().err


def test_the_line_after_an_export_draws_what_the_run_drew() -> None:
    exported = Exported("out", "run", 5, "", ema=True, form="folder", prompt='a "sks" dog')
    assert r"\"sks\" dog" in exported.hint.replace("'", "")


def test_the_numbers_of_kohyas_folders_are_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures(tmp_path / "img/10_ohwx dog", 4)
    pictures(tmp_path / "img/2_dog", 30)
    assert main(["init", str(tmp_path / "my"), "--pictures", str(tmp_path / "img"), "--caption", "a {class}"]) == 0
    assert "the numbers before 10_ohwx dog, 2_dog are repeats, and are weights in training" in capsys.readouterr().err
    train: Any = load("train", str(tmp_path / "my/train.yaml"))
    (other,) = train.source.also
    assert other.weight == 2 * 30 / (10 * 4)
    jobs: list[Any] = [load("process", str(tmp_path / f"my/{name}.yaml")) for name in ("process", "process-2")]
    assert [job.output.uri for job in jobs] == [train.source.uri, other.uri]
    assert [Path(job.source.uri).name for job in jobs] == ["10_ohwx dog", "2_dog"]
    captions = [pq.read_table(job.source.tables[0].uri)["caption"].unique().to_pylist() for job in jobs]
    assert captions == [["a ohwx dog"], ["a dog"]]


def test_repeats_that_are_alike_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures(tmp_path / "img/10_ohwx dog", 4)
    assert main(["init", str(tmp_path / "my"), "--pictures", str(tmp_path / "img")]) == 0
    assert "10_ohwx dog are repeats, and change nothing" in capsys.readouterr().err
    assert not (tmp_path / "my/process-2.yaml").exists()


def test_init_says_that_captions_have_several_lines(tmp_path: Path) -> None:
    folder = Path(pictures(tmp_path / "cats", 3))
    (folder / "0.txt").write_text("a cat\n\n on a mat\n")
    (folder / "2.txt").unlink()
    (folder / "2.caption").write_text("a cat\non a mat")
    seen = gather(str(folder))
    assert seen is not None
    assert "2 captions of several lines, of which each picture takes one" in str(seen)
    assert seen.captions == {"2.jpg": "a cat"}
    assert seen.examples == ("a cat", "cat 1")


@pytest.mark.parametrize(
    ("options", "sections", "needs"),
    [
        ([], ["objective", "log"], "300 steps took 2 minutes"),
        (["--family", "prx"], ["log"], "cannot be known before it runs"),
        (["--family", "klein"], ["log"], "cannot be known before it runs"),
        (["--gpu", "24GB"], ["objective", "lora", "log"], "cannot be known before it runs"),
        (["--gpu", "A10G"], ["objective", "lora", "log"], "takes 37 minutes or more on an A10G"),
        (["--gpu", "8GB"], ["objective", "log"], "cannot be known before it runs"),
        (["--store", "s3://b/c"], ["objective", "ema", "samples", "log"], "sdp plan --config"),
    ],
)
def test_init_writes_what_is_often_wanted_as_comments_and_says_what_training_needs(
    options: list[str], sections: list[str], needs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "my"), *options]) == 0
    assert needs in capsys.readouterr().err
    file = tmp_path / "my/train.yaml"
    text, _, further = file.read_text().partition("# Often wanted")
    lines = [line.removeprefix("# ") for line in further.splitlines()[1:]]
    assert [line.partition(":")[0] for line in lines] == sections
    assert all("  # " in line for line in lines), "each has its reason"
    file.write_text("\n".join([text, *lines]))
    used: Any = load("train", str(file))
    assert used.log.wandb.project == "sdp"
    assert used.samples.prompts


def test_a_lora_begins_with_pretrained_weights() -> None:
    settings = ["source.uri=a", "output.uri=b", "lora.rank=4", "model.source=c"]
    assert load("train", None, settings).model.denoiser == "pretrained"
    with pytest.raises(ConfigError, match=r"model\.denoiser: expected pretrained while lora\.rank is set, got 'new'"):
        load("train", None, [*settings, "model.denoiser=new"])


def test_a_cluster_gets_no_folder_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = write_files(tmp_path / "photos", {"a.jpg": ""})
    options = ["--pictures", str(photos), "--store", "s3://bucket/mine/"]
    assert main(["init", str(tmp_path / "my"), *options]) == 2
    assert "copy it to s3://bucket/mine/pictures, and give that" in capsys.readouterr().err
    assert not (tmp_path / "my").exists()
