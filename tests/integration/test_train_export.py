"""The export of a checkpoint as a folder that diffusers loads."""

import hashlib
import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

from sdp.cli import main
from sdp.errors import DatasetError, ModelError
from sdp.model.export import export
from sdp.model.sources import resolve
from sdp.storage import open_storage
from sdp.train.data.latents import refuse_another_encoder
from sdp.train.data.sources import open_sources
from tests.training import config, tiny_inputs, train, weights


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of four steps, from a model that names the text encoder's dtype, as published ones do."""
    root = tiny_inputs(tmp_path_factory.mktemp("export"))
    text_encoder = root / "model/text_encoder/config.json"
    text_encoder.write_text(json.dumps({**json.loads(text_encoder.read_text()), "torch_dtype": "float16"}))
    return root


@pytest.fixture(scope="module")
def trained(root: Path) -> dict[str, torch.Tensor]:
    return weights(train(config(root, max_steps=4)))


@pytest.mark.parametrize(("options", "prefix", "kind"), [([], "ema.", "averaged"), (["--raw"], "model.", "raw")])
def test_the_pipeline_loads_what_was_trained(
    root: Path,
    trained: dict[str, torch.Tensor],
    tmp_path: Path,
    options: list[str],
    prefix: str,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["export", str(root / "run"), str(tmp_path / "out"), *options]) == 0
    wrote = f"step 4 of {root}/run/checkpoints/step-000000004, {kind} weights in fp32, to {tmp_path / 'out'}"
    assert f"sdp: wrote {wrote}\n" in capsys.readouterr().err
    assert f"| {root}/latents | " in (tmp_path / "out/README.md").read_text()
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "out")
    state = pipeline.unet.state_dict()
    assert {prefix + name for name in state} == {name for name in trained if name.startswith(prefix)}
    for name, tensor in state.items():
        assert torch.equal(tensor, trained[prefix + name]), name
    picture = pipeline("a", num_inference_steps=1, height=64, width=64, output_type="np").images
    assert picture.shape == (1, 64, 64, 3)


@pytest.mark.usefixtures("trained")
def test_an_export_is_known_to_have_the_encoders_of_the_model_that_was_trained(root: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    export(str(root / "run"), str(first))
    train(config(root, max_steps=1, output__uri=str(tmp_path / "more"), model__source=str(first)))
    export(str(tmp_path / "more"), str(second))
    model = resolve(str(root / "model"))
    assert resolve(str(first)).digest != model.digest == resolve(str(first)).encoder_digest
    (source,) = open_sources(config(root), write=lambda: None).all
    made: Any = SimpleNamespace(manifest=SimpleNamespace(models={"encoder": f"model sha256:{model.digest}"}))
    refuse_another_encoder(config(root), made, source.dataset, resolve(str(first)))
    (first / "model_index.json").write_text("{}")
    with pytest.raises(DatasetError, match=r"or set data\.trust_encoder"):
        refuse_another_encoder(config(root), made, source.dataset, resolve(str(first)))
    assert resolve(str(second)).encoder_digest == model.digest  # of an export's export, too


def test_a_run_without_an_average_is_exported_with_its_own_weights(root: Path, tmp_path: Path) -> None:
    trained = weights(train(config(root, "raw", ema__decay=None, max_steps=1)))
    assert not export(str(root / "raw"), str(tmp_path / "out")).ema
    state = StableDiffusionPipeline.from_pretrained(tmp_path / "out").unet.state_dict()
    assert all(torch.equal(tensor, trained[f"model.{name}"]) for name, tensor in state.items())


@pytest.mark.usefixtures("trained")
def test_what_cannot_be_exported_is_told_in_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, full, out = root / "run", tmp_path / "full", tmp_path / "out"
    full.mkdir()
    file = full / "taken.safetensors"
    file.touch()
    unlearned = shutil.copytree(run / "checkpoints/step-000000004", tmp_path / "checkpoint")
    marker = json.loads((unlearned / "complete.json").read_text())
    (unlearned / "complete.json").write_text(json.dumps({**marker, "state": {**marker["state"], "step": 0}}))
    for arguments, message in (
        ([run, full], f"choose an empty one, or name it by the step ({full}-{{step}})"),
        ([tmp_path / "nothing", out], "no complete checkpoint there"),
        ([unlearned, out], "step 0, which has learned nothing"),
        ([run, out, "--dtype", "fp8"], "export: --dtype: expected fp32 or fp16, got 'fp8'"),
        ([run, file, "--single-file"], f"name it by the step ({full}/taken-{{step}}.safetensors)"),
        ([run, out, "--push", "me/mine", "--yes"], "expected hf://USER/NAME, and a local OUT, got me/mine"),
        ([run, out, "--push", "hf://me/mine"], "nothing was written (--yes says y)"),
        ([run, out, "--single-file"], "expected a file name that ends with .safetensors"),
    ):
        assert main(["export", *map(str, arguments)]) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert message in line
    assert not out.exists()


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("content", ["{}", '{"ema": null}', '{"model": {"source": 5}}'])
def test_a_checkpoint_whose_configuration_is_damaged_is_refused(root: Path, tmp_path: Path, content: str) -> None:
    copy = shutil.copytree(root / "run/checkpoints/step-000000004", tmp_path / "run/checkpoints/step-000000004")
    (copy / "config.json").write_text(content)
    with pytest.raises(DatasetError, match=r"its config\.json is not one of this version of sdp"):
        export(str(copy), str(tmp_path / "out"))


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


@pytest.mark.usefixtures("trained")
def test_the_line_that_an_export_prints_draws_a_picture(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["export", str(root / "run"), str(tmp_path / "my model's"), "--dtype", "fp16"]) == 0
    line = capsys.readouterr().err.splitlines()[-1].removeprefix("sdp: draw with it: ")
    python, option, code = shlex.split(line)
    assert (python, option) == ("python", "-c")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.size == (64, 64)


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


def test_a_single_file_has_the_weights_what_its_model_predicts_and_how_to_load_it(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.safetensors"
    trainer = train(config(root, "single", objective__prediction="v", objective__zero_terminal_snr=True, max_steps=1))
    assert main(["export", str(root / "single"), str(file), "--single-file"]) == 0
    folder = root / "single/checkpoints/step-000000001"
    assert capsys.readouterr().err.splitlines()[-1] == (
        f'sdp: load it in diffusers: StableDiffusionPipeline.from_single_file("{file}", config=FOLDER), '
        f"where FOLDER is written by: sdp export {folder} FOLDER"
    )
    name = "model.diffusion_model.input_blocks.0.0.weight"
    assert torch.equal(load_file(file)[name], weights(trainer)["ema.conv_in.weight"])
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
