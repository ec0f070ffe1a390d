"""The meanings of `checkpoint`, and refusals before anything expensive begins."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sdp.config import parse_into
from sdp.config.generate import GenerateConfig
from sdp.errors import SdpError
from sdp.generate.painter import load_painter
from sdp.generate.source import choose, settled
from tests.generate_kit import generate_config, make_checkpoint, tiny_model
from tests.kit import line_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def refusal(checkpoint: object, begun: str | None = None, **more: object) -> str:
    return line_of(lambda: choose(generate_config(Path("out"), checkpoint, **more), begun))


def test_a_model_folder_is_a_model(model: Path) -> None:
    chosen = choose(generate_config(Path("out"), model))
    assert (chosen.uri, chosen.checkpoint, chosen.ema) == (str(model), None, False)
    assert chosen.base.sha256 == chosen.digest


def test_a_checkpoint_gives_its_average_or_its_raw_weights(model: Path, tmp_path: Path) -> None:
    uri = make_checkpoint(tmp_path / "run", model, prediction="v")
    original = load_file(model / "unet/diffusion_pytorch_model.safetensors")["conv_in.weight"]
    for weights, factor in (("auto", 1.0), ("ema", 1.0), ("raw", 1.03)):
        config = generate_config(tmp_path / "out", uri, weights=weights)
        chosen = choose(config)
        assert chosen.uri == uri
        assert chosen.scheduler["prediction_type"] == "v_prediction"
        unet = load_painter(chosen, config).denoiser
        assert not unet.training
        assert torch.allclose(unet.conv_in.weight, original * factor)
    plain = make_checkpoint(tmp_path / "plain", model, ema=False)
    assert not choose(generate_config(tmp_path / "out", plain)).ema
    assert "has no moving average" in refusal(plain, weights="ema")


def test_a_run_means_its_newest_checkpoint_and_a_begun_output_keeps_the_one_it_was_begun_with(
    model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    older, newer = make_checkpoint(run, model, 3), make_checkpoint(run, model, 5)
    for name in (run, run / "checkpoints", run / "checkpoints" / "latest"):
        assert choose(generate_config(tmp_path / "out", name)).uri == newer
        assert choose(generate_config(tmp_path / "out", name), begun=Path(older).name).uri == older
    drawer = choose(generate_config(tmp_path / "out", newer), begun=Path(older).name)
    assert drawer.uri == newer  # and the output refuses it
    (Path(older) / "complete.json").unlink()
    assert f"was begun with {older}, which no longer exists" in refusal(run, begun=Path(older).name)


def test_a_checkpoint_decides_the_resolution_that_is_not_set_and_the_step_in_the_outputs_name(
    model: Path, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "run", model, 5)  # at 256 px
    data = {"checkpoint": str(tmp_path / "run"), "output": {"uri": "out-{step}"}, "prompts": ["a"]}
    config = settled(parse_into(GenerateConfig, data))
    assert (config.output.uri, config.resolution) == ("out-5", 256)
    assert settled(parse_into(GenerateConfig, data | {"resolution": 64})).resolution == 64
    assert settled(parse_into(GenerateConfig, data | {"checkpoint": str(model)})).resolution == 512


def test_a_marker_alone_is_no_checkpoint(model: Path, tmp_path: Path) -> None:
    """As where a suspended job goes on after another one has deleted its checkpoint."""
    run = tmp_path / "run"
    older, newer = make_checkpoint(run, model, 3), make_checkpoint(run, model, 5)
    marker = (Path(newer) / "complete.json").read_bytes()
    for uri in (newer, older):
        shutil.rmtree(uri)
        Path(uri).mkdir()
        (Path(uri) / "complete.json").write_bytes(marker)
        assert refusal(uri).startswith(f"checkpoint: {uri}: neither a complete checkpoint of sdp train")
        if uri == newer:
            assert choose(generate_config(tmp_path / "out", run)).uri == older
            assert f"was begun with {newer}, which no longer exists" in refusal(run, begun=Path(newer).name)


def test_a_model_that_was_moved_can_be_named_and_one_that_changed_is_refused(model: Path, tmp_path: Path) -> None:
    elsewhere = tiny_model(tmp_path / "model")
    uri = make_checkpoint(tmp_path / "run", elsewhere)
    moved = elsewhere.rename(tmp_path / "moved")
    assert "no such folder" in refusal(uri)
    assert choose(generate_config(tmp_path / "out", uri, model=str(moved))).base.uri == str(moved)
    config = moved / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"force_upcast": False}))
    assert "its content has changed" in refusal(uri, model=str(moved))
    assert refusal(model, model=str(model)).startswith("model: expected null")
    assert refusal(model, weights="raw").startswith("weights: expected auto")


def test_a_folder_that_is_neither_a_checkpoint_nor_a_model_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    uri = Path(make_checkpoint(tmp_path / "run", model))
    (uri / "complete.json").unlink()
    file = tmp_path / "weights.ckpt"
    file.write_bytes(b"x")
    for what in (tmp_path / "nothing", tmp_path, file, uri, tmp_path / "run"):
        line = refusal(what)
        assert line.startswith(f"checkpoint: {what}: neither a complete checkpoint of sdp train")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "model_index.json").write_text("{}")
    assert "is missing" in refusal(tmp_path / "half")
    assert "no such folder, and a hub repository needs a revision" in refusal("my/run")


def test_a_checkpoint_without_its_configuration_is_refused(model: Path, tmp_path: Path) -> None:
    uri = Path(make_checkpoint(tmp_path / "run", model))
    (uri / "config.json").write_text('{"model": {"source": "x"}}')
    assert f"{uri}: its config.json is not one of this version of sdp (source.uri: expected a URI" in refusal(uri)
    (uri / "config.json").unlink()
    assert f"{uri}: no config.json; use another" in refusal(uri)


def test_weights_that_are_not_finite_or_of_another_model_are_refused(model: Path, tmp_path: Path) -> None:
    spoilt = make_checkpoint(tmp_path / "spoilt", model, spoil="ema.conv_in.weight")
    config = generate_config(tmp_path / "out", spoilt)
    with pytest.raises(SdpError, match="has NaN or infinite weights"):
        load_painter(choose(config), config)
