"""The export of a checkpoint as a folder that diffusers loads."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

from sdp.cli import main
from sdp.errors import DatasetError, ModelError, UserError
from sdp.model.export import export
from sdp.storage import open_storage
from tests.latents import make_latents
from tests.tiny_model import make_tiny_model
from tests.training import config, train, weights


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of four steps, from a model that names the text encoder's dtype, as published ones do."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("export")
    make_tiny_model(root / "model")
    text_encoder = root / "model/text_encoder/config.json"
    text_encoder.write_text(json.dumps({**json.loads(text_encoder.read_text()), "torch_dtype": "float16"}))
    make_latents(root, 40, vocabulary=50)
    return root


@pytest.fixture(scope="module")
def trained(root: Path) -> dict[str, torch.Tensor]:
    return weights(train(config(root, max_steps=4)))


@pytest.mark.parametrize(("ema", "prefix"), [(True, "ema."), (False, "model.")])
def test_the_pipeline_loads_what_was_trained(
    root: Path, trained: dict[str, torch.Tensor], tmp_path: Path, ema: bool, prefix: str
) -> None:
    done = export(str(root / "run/checkpoints/step-000000004"), str(tmp_path / "out"), ema=ema)
    assert (done.step, done.ema) == (4, ema)
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "out")
    state = pipeline.unet.state_dict()
    assert {prefix + name for name in state} == {name for name in trained if name.startswith(prefix)}
    for name, tensor in state.items():
        assert torch.equal(tensor, trained[prefix + name]), name
    picture = pipeline("a", num_inference_steps=1, height=64, width=64, output_type="np").images
    assert picture.shape == (1, 64, 64, 3)


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("which", ["run", "run/checkpoints/latest", "run/checkpoints"])
def test_a_runs_newest_checkpoint_can_be_named_by_the_run(root: Path, tmp_path: Path, which: str) -> None:
    assert export(str(root / which), str(tmp_path / "out")).checkpoint.endswith("run/checkpoints/step-000000004")


@pytest.mark.usefixtures("trained")
def test_a_checkpoint_that_has_learned_nothing_is_not_exported(root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "run/checkpoints/step-000000004", tmp_path / "checkpoint")
    marker = json.loads((folder / "complete.json").read_text())
    (folder / "complete.json").write_text(json.dumps({**marker, "state": {**marker["state"], "step": 0}}))
    with pytest.raises(UserError, match="step 0, which has learned nothing"):
        export(str(folder), str(tmp_path / "out"))


def test_the_exported_sampler_knows_what_the_model_predicts(root: Path, tmp_path: Path) -> None:
    changes = {"objective__prediction": "v", "objective__zero_terminal_snr": True, "max_steps": 1}
    train(config(root, "velocity", **changes))
    export(str(root / "velocity"), str(tmp_path / "out"))
    scheduler = json.loads((tmp_path / "out/scheduler/scheduler_config.json").read_text())
    assert (scheduler["prediction_type"], scheduler["rescale_betas_zero_snr"]) == ("v_prediction", True)
    StableDiffusionPipeline.from_pretrained(tmp_path / "out")


@pytest.mark.usefixtures("trained")
def test_what_cannot_be_exported_is_told_in_one_line(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no complete checkpoint there"):
        export(str(tmp_path / "nothing"), str(tmp_path / "out"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(UserError, match="the folder is not empty"):
        export(str(root / "run"), str(tmp_path / "full"))
    train(config(root, "raw", ema__decay=None, max_steps=1))
    with pytest.raises(DatasetError, match="no moving average in it"):
        export(str(root / "raw"), str(tmp_path / "out"))


@pytest.mark.usefixtures("trained")
def test_a_model_source_that_has_changed_since_is_refused(root: Path, tmp_path: Path) -> None:
    tokens = root / "model/tokenizer/tokenizer_config.json"
    content = tokens.read_text()
    try:
        tokens.write_text(content + " ")
        with pytest.raises(ModelError, match="its content has changed since"):
            export(str(root / "run"), str(tmp_path / "out"))
    finally:
        tokens.write_text(content)


@pytest.mark.usefixtures("trained")
def test_a_folder_in_fp16_is_half_as_large_and_loads_as_it_is(root: Path, tmp_path: Path) -> None:
    run = str(root / "run")
    for dtype in ("fp32", "fp16"):
        assert main(["export", run, str(tmp_path / dtype), "--dtype", dtype]) == 0
    sizes = {
        dtype: sum(file.stat().st_size for file in (tmp_path / dtype).rglob("*.safetensors"))
        for dtype in ("fp32", "fp16")
    }
    assert sizes["fp16"] == pytest.approx(sizes["fp32"] / 2, rel=0.1)  # headers stay as long
    whole = StableDiffusionPipeline.from_pretrained(tmp_path / "fp32").unet.state_dict()
    half = StableDiffusionPipeline.from_pretrained(tmp_path / "fp16", dtype=torch.float16)
    for name, tensor in half.unet.state_dict().items():
        assert torch.equal(tensor, whole[name].half()), name
    assert {next(getattr(half, part).parameters()).dtype for part in ("unet", "vae", "text_encoder")} == {torch.float16}
    plain = StableDiffusionPipeline.from_pretrained(tmp_path / "fp16", dtype=torch.float32)
    picture = plain("a", num_inference_steps=1, height=64, width=64, output_type="np").images
    assert picture.shape == (1, 64, 64, 3)


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_line_that_an_export_prints_draws_a_picture(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    out = tmp_path / "my model's"
    assert main(["export", str(root / "run"), str(out), "--dtype", dtype]) == 0
    line = capsys.readouterr().err.splitlines()[-1].removeprefix("sdp: draw with it: ")
    python, *words = shlex.split(line)
    assert python == "python"
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.size == (64, 64)


@pytest.mark.usefixtures("trained")
def test_the_command_writes_raw_or_averaged_weights_and_says_which(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(root / "run/checkpoints/step-000000004")
    assert main(["export", checkpoint, str(tmp_path / "raw"), "--raw"]) == 0
    assert capsys.readouterr().err.splitlines()[-2] == (
        f"sdp: wrote step 4 of {checkpoint}, raw weights in fp32, to {tmp_path / 'raw'}"
    )
    assert main(["export", checkpoint, str(tmp_path / "averaged")]) == 0
    raw, averaged = (
        StableDiffusionPipeline.from_pretrained(tmp_path / name).unet.state_dict() for name in ("raw", "averaged")
    )
    assert not torch.equal(raw["conv_in.weight"], averaged["conv_in.weight"])


@pytest.mark.usefixtures("trained")
def test_what_the_command_refuses_is_one_line_and_exit_code_2(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for arguments, message in (
        ([str(root / "run"), str(tmp_path / "full")], "the folder is not empty; choose an empty one"),
        ([str(tmp_path / "nothing"), str(tmp_path / "out")], "no complete checkpoint there"),
        (
            [str(root / "run"), str(tmp_path / "out"), "--dtype", "fp8"],
            "export: --dtype: expected fp32 or fp16, got 'fp8'",
        ),
    ):
        assert main(["export", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


@pytest.mark.usefixtures("trained")
def test_a_folder_that_was_not_finished_is_no_model(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = type(open_storage(str(tmp_path)))
    publish = storage.publish

    def failing(self: object, path: str, data: object) -> object:
        if path.startswith("vae/"):
            raise OSError("no space left")
        return publish(self, path, data)  # type: ignore[arg-type]

    monkeypatch.setattr(storage, "publish", failing)
    with pytest.raises(OSError, match="no space left"):
        export(str(root / "run"), str(tmp_path / "out"))
    assert not (tmp_path / "out/model_index.json").exists()


def test_a_single_file_says_what_its_model_predicts_and_how_to_load_it(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.safetensors"
    train(config(root, "single", objective__prediction="v", objective__zero_terminal_snr=True, max_steps=1))
    assert main(["export", str(root / "single"), str(file), "--single-file"]) == 0
    folder = root / "single/checkpoints/step-000000001"
    assert capsys.readouterr().err.splitlines()[-1] == (
        f'sdp: load it in diffusers: StableDiffusionPipeline.from_single_file("{file}", config=FOLDER), '
        f"where FOLDER is written by: sdp export {folder} FOLDER"
    )
    data = file.read_bytes()
    header = int.from_bytes(data[:8], "little")
    marker = json.loads((folder / "complete.json").read_text())
    assert json.loads(data[8 : 8 + header])["__metadata__"] == {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "stable-diffusion-v2-768-v",
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        "modelspec.title": "mine",
        "modelspec.date": marker["created"],
        "modelspec.resolution": "64x64",
        "modelspec.prediction_type": "v",
        "modelspec.hash_sha256": "0x" + hashlib.sha256(data[8 + header :]).hexdigest(),
        "sdp.step": "1",
        "sdp.zero_terminal_snr": "true",
        "sdp.model": marker["model"]["digest"],
        "sdp.dataset": marker["dataset"]["manifest_digest"],
    }


def test_a_single_file_holds_the_trained_weights_and_is_never_written_over(
    root: Path, trained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "mine.safetensors"
    assert main(["export", str(root / "run"), str(file), "--single-file"]) == 0
    name = "model.diffusion_model.input_blocks.0.0.weight"
    assert torch.equal(load_file(file)[name], trained["ema.conv_in.weight"])
    with pytest.raises(UserError, match="already exists; choose another name"):
        export(str(root / "run"), str(file), form="single-file")
    with pytest.raises(UserError, match=r"expected a file name that ends with .safetensors"):
        export(str(root / "run"), str(tmp_path / "folder"), form="single-file")
