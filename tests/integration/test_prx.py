"""PRX in every stage: images, latents, training, export, pictures; against diffusers and plain torch."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, PRXPipeline
from diffusers.pipelines.prx import pipeline_prx
from transformers import Qwen3ForCausalLM

from sdp.encode.recipe import Recipe
from sdp.encode.transform import crop_image
from sdp.errors import ConfigError, ModelError, UserError
from sdp.families import TICKS, prx
from sdp.families.prx import PRX, lengths
from sdp.generate.source import choose
from sdp.model.export import export
from sdp.model.latents import to_pixels
from sdp.model.load import load_text_encoder, load_vae
from sdp.model.schedule import Flow
from sdp.model.sources import check, resolve
from sdp.process.job import run as process
from sdp.train import step
from sdp.train.assemble import make_networks, make_objective
from sdp.train.plan import make_plan
from sdp.train.settle import settled
from sdp.train.world import World
from tests.flow_kit import MODES, altered, check_step, first_step, make_inputs, mode, noisy, painted, table_of, teach
from tests.generate_kit import generate_config
from tests.latents import make_latents
from tests.process_kit import config_of, picture
from tests.tiny_model import make_tiny_model
from tests.training import Watch, config, train, weights

MODEL = "builtin:tiny-prx"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images, and their latents with token ids and with embeddings."""
    torch.set_num_threads(1)
    return make_inputs(tmp_path_factory.mktemp("prx"), MODEL, 40)


@pytest.fixture
def ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the library with which diffusers' pipeline cleans prompts, which is not needed for these."""
    monkeypatch.setattr(pipeline_prx, "ftfy", SimpleNamespace(fix_text=str), raising=False)


@pytest.fixture
def pipeline(ftfy: None) -> Any:  # noqa: ARG001
    """Return diffusers' pipeline."""
    return PRXPipeline.from_pretrained(resolve(MODEL).path)


def settings(root: Path, run: str, **more: Any) -> Any:
    return config(root, run, **{"model__source": MODEL, "model__denoiser": "pretrained", "max_steps": 3, **more})


def test_a_dataset_has_token_ids_of_32_bits_and_lengths_and_zeros_for_padding(root: Path) -> None:
    ids, embedded = table_of(root / "token_ids"), table_of(root / "text_embedding")
    (row, *_), (states, *_) = ids["token_ids"].to_pylist(), embedded["text_embedding"].to_pylist()
    count = len(b"picture number 0")
    assert np.frombuffer(row, np.uint32).tolist()[count:] == [256] * (32 - count)
    values = np.frombuffer(states, np.float16).reshape(32, 32)
    assert values[:count].any(1).all()
    assert not values[count:].any()
    assert ids["tokens"].to_pylist() == embedded["tokens"].to_pylist()
    assert ids["tokens"][0].as_py() == count
    assert json.loads(ids.schema.field("moments_64").metadata[b"shape"]) == [32, 8, 8]


def test_latents_are_shifted_and_scaled(root: Path) -> None:
    stored = np.frombuffer(table_of(root / "token_ids")["moments_64"][0].as_py(), np.float16).reshape(1, 32, 8, 8)[
        :, :16
    ]
    mean = load_vae(resolve(MODEL).path).encode(to_pixels(pixels_of(0))).latent_dist.mean
    assert np.allclose(stored, (mean - 0.1159) * 0.3611, atol=2e-3)


def pixels_of(number: int) -> torch.Tensor:
    return torch.from_numpy(crop_image(picture(number), Recipe((64,)), 0)[1][64])[None]


def test_a_step_has_the_loss_and_the_gradient_of_a_loop_of_diffusers_alone(
    root: Path, pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = settings(
        root, "step", source__uri=str(root / "token_ids"), max_steps=1, objective__caption_dropout=0.0,
        objective__times="uniform", data__batch_size=16,
    )  # fmt: skip
    report, batch, draws, _ = first_step(how, monkeypatch)
    ids = batch.token_ids.long()
    mask = torch.arange(32) < lengths(ids, 256).unsqueeze(1)
    text = pipeline.text_encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    latents, times, target = noisy(batch, draws)
    network = pipeline.transformer.float()
    predicted = network(latents, times, text, mask).sample
    check_step(report, (predicted - target).square().mean(), network)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_pictures_are_those_of_diffusers_pipeline(tmp_path: Path, pipeline: Any, guidance: float) -> None:
    how = generate_config(tmp_path / "out", MODEL, sampler={"guidance_scale": guidance, "steps": 4})
    prompts, seeds = ["a cat", "a much longer caption"], [7, 8]
    for prompt, seed, actual in zip(prompts, seeds, painted(how, prompts, seeds), strict=True):
        expected = drawn_by(pipeline, prompt, seed, steps=4, guidance=guidance)
        assert np.abs(actual - expected).max() <= 1


def drawn_by(pipeline: Any, prompt: str, seed: int, *, steps: int, guidance: float) -> Any:
    """Return the picture that diffusers draws, as whole numbers."""
    drawn = pipeline(
        prompt, num_inference_steps=steps, guidance_scale=guidance, height=64, width=64, output_type="np",
        generator=torch.Generator().manual_seed(seed), use_resolution_binning=False, skip_text_cleaning=True,
    )  # fmt: skip
    return np.round(drawn.images[0] * 255).astype(int)


def test_text_changes_the_prediction_and_padding_does_not(pipeline: Any) -> None:
    network, encoder = pipeline.transformer.float(), pipeline.text_encoder
    encoder.config.pad_token_id = 256
    ids = torch.tensor([[65, 66, 67, *[256] * 5], [65, 66, 68, *[256] * 5], [256] * 8])
    latents, times = torch.randn(1, 16, 8, 8).expand(3, -1, -1, -1), torch.tensor([500.0] * 3)
    with torch.no_grad():
        states = PRX.encode_text(encoder, ids)
        assert states.isfinite().all()
        one, other, empty = PRX.predict(network, latents, times, states)
        short = PRX.predict(network, latents[:1], times[:1], PRX.encode_text(encoder, ids[:1, :3]))
    assert (one - other).abs().max() > 1e-3
    assert (one - empty).abs().max() > 1e-3
    assert torch.allclose(one, short[0], atol=1e-5)


@pytest.mark.parametrize("how", ["ids", "text", "embeddings", "collocated"])
def test_captions_are_cut_to_a_batchs_longest_and_losses_stay(
    root: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, tokens, losses = step.losses_at, set(), []

    def spy(networks: Any, objective: Any, batch: Any, draws: Any, text: Any) -> Any:
        tokens.add(text.shape[1])
        return own(networks, objective, batch, draws, text)

    monkeypatch.setattr(step, "losses_at", spy)
    for multiple, expected in ((64, {32}), (8, {16, 24})):  # "picture number 0" to "picture number 39"
        monkeypatch.setattr(prx, "_STEP", multiple)
        watch = Watch()
        train(settings(tmp_path, f"cut-{multiple}", **mode(root, how)), callbacks=[watch])
        losses.append([report.loss for report in watch.reports])
        assert max(expected) in tokens
        assert tokens <= expected
        tokens.clear()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("how", MODES)
def test_training_learns_and_an_export_loads_in_diffusers(root: Path, tmp_path: Path, how: str, pipeline: Any) -> None:
    trained = weights(train(settings(root, how, **mode(root, how))))
    assert all(tensor.isfinite().all() for tensor in trained.values())
    assert "skip_text_cleaning=True" in export(str(root / how), str(tmp_path / "out")).hint
    loaded = PRXPipeline.from_pretrained(tmp_path / "out")
    state = loaded.transformer.state_dict()
    assert all(torch.equal(tensor, trained[f"ema.{name}"]) for name, tensor in state.items())
    changed = [
        name for name, tensor in pipeline.transformer.state_dict().items() if not torch.equal(tensor, state[name])
    ]
    assert len(changed) > len(state) / 2
    assert isinstance(loaded.scheduler, FlowMatchEulerDiscreteScheduler)


def test_lora_is_merged_into_an_export_and_not_written_alone(root: Path, tmp_path: Path, pipeline: Any) -> None:
    train(settings(root, "lora", source__uri=str(root / "token_ids"), lora__rank=4, lora__alpha=64.0))
    with pytest.raises(UserError, match="no other program reads such a file of PRX; export a folder"):
        export(str(root / "lora"), str(tmp_path / "lora.safetensors"), form="lora")
    export(str(root / "lora"), str(tmp_path / "out"))
    before, after = (
        each.transformer.state_dict() for each in (pipeline, PRXPipeline.from_pretrained(tmp_path / "out"))
    )
    changed = {name.split(".", 2)[2] for name in after if not torch.equal(before[name], after[name])}
    attention = ("img_qkv_proj", "txt_kv_proj", "to_out.0")
    assert changed == {f"attention.{layer}.weight" for layer in attention}


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """Return a PRX whose VAE makes one latent of 32 pixels, without a distribution."""
    torch.manual_seed(0)
    library: Any = diffusers
    blocks = 6
    folder = Path(shutil.copytree(resolve(MODEL).path, tmp_path / "deep"))
    vae = library.AutoencoderDC(
        latent_channels=8, attention_head_dim=4, scaling_factor=0.41407,
        **{
            f"{side}_{name}": (value,) * blocks
            for side in ("encoder", "decoder")
            for name, value in (
                ("block_types", "ResBlock"), ("block_out_channels", 8),
                ("layers_per_block", 1), ("qkv_multiscales", ()),
            )
        },
    )  # fmt: skip
    config = {**json.loads((folder / "transformer/config.json").read_text()), "in_channels": 8, "patch_size": 1}
    transformer = library.PRXTransformer2DModel.from_config(config)
    for part, network in (("vae", vae), ("transformer", transformer)):
        shutil.rmtree(folder / part)
        network.save_pretrained(folder / part)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "vae": ["diffusers", "AutoencoderDC"]}))
    return folder


@pytest.mark.usefixtures("ftfy")
def test_a_vae_of_32_pixels_a_latent_encodes_trains_and_draws(root: Path, tmp_path: Path, deep: Path) -> None:
    how = root / "images", tmp_path / "latents", deep
    with pytest.raises(UserError, match=r"^encode\.latents: expected sample, since the VAE of .*deep has no moments"):
        process(config_of(*how, "encode.latents=moments"))
    process(config_of(*how))
    vae, table = load_vae(deep), table_of(tmp_path / "latents")
    expected = vae.encode(to_pixels(pixels_of(0))).latent * 0.41407
    stored = np.frombuffer(table["latents_64"][0].as_py(), np.float16).reshape(1, 8, 2, 2)
    assert np.allclose(stored, expected.numpy(), atol=2e-3)
    offline = {"source__uri": str(tmp_path / "latents")}
    for run, more in (("offline", offline), ("collocated", mode(root, "collocated"))):
        trained = weights(train(settings(root, f"deep-{run}", **{"model__source": str(deep), **more})))
        assert all(tensor.isfinite().all() for tensor in trained.values())
    how_drawn = generate_config(tmp_path / "out", deep, sampler={"guidance_scale": 5.0, "steps": 3})
    (actual,) = painted(how_drawn, ["a cat"], [7])
    picture_of_diffusers = drawn_by(PRXPipeline.from_pretrained(deep), "a cat", 7, steps=3, guidance=5.0)
    assert np.abs(actual - picture_of_diffusers).max() <= 1


def test_what_makes_no_sense_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"objective\.prediction: expected flow for a model of PRX, got 'v'"):
        train(settings(root, "v", source__uri=str(root / "token_ids"), objective__prediction="v"))
    with pytest.raises(UserError, match=r"sampler\.scheduler: expected ddim, which means Euler's steps for a flow"):
        choose(generate_config(tmp_path / "out", MODEL, sampler={"scheduler": "unipc"}))
    with pytest.raises(UserError, match=r"^resolution: expected multiples of 16 pixels for this model, got 72"):
        choose(generate_config(tmp_path / "out", MODEL, resolution=72))
    with pytest.raises(UserError, match=r"^resolutions: expected multiples of 128 pixels .* buckets, got 64"):
        process(config_of(root / "images", tmp_path / "latents", MODEL, "transform.crop=buckets"))


@pytest.mark.parametrize(
    ("file", "key", "value", "line"),
    [
        ("text_encoder/config.json", "model_type", "t5", "expected 'qwen3', got 't5'"),
        ("text_encoder/config.json", "hidden_size", 64, "expected 32, as the transformer needs, got 64"),
        ("vae/config.json", "latent_channels", 4, "expected 16, as the transformer needs, got 4"),
        ("tokenizer/tokenizer_config.json", "model_max_length", 131072, "expected 1 to 1024 tokens a caption"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, file: str, key: str, value: object, line: str) -> None:
    folder = altered(tmp_path, MODEL, file, **{key: value})
    with pytest.raises(ModelError, match=rf"{file}: {key}: {line}"):
        PRX.text(resolve(check(str(folder))).path, embedded=False)


def test_the_encoder_may_be_a_language_model_with_its_head(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(resolve(MODEL).path, tmp_path / "model"))
    causal = Qwen3ForCausalLM.from_pretrained(folder / "text_encoder")
    causal.save_pretrained(folder / "text_encoder")
    ids = torch.tensor([[65, 66, 256]])
    mine, own = (PRX.encode_text(load_text_encoder(path), ids) for path in (folder, resolve(MODEL).path))
    assert torch.equal(mine, own)


def test_dreambooth_teaches_it_and_names_only_what_can_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teach(tmp_path, MODEL)
    hints = capsys.readouterr()
    assert f"sdp export {tmp_path}/out/run FOLDER --raw" in hints.out + hints.err
    assert "single-file" not in hints.out + hints.err


def test_a_new_transformer_predicts_zero_and_times_move_with_the_resolution(root: Path) -> None:
    how = settings(root, "new", source__uri=str(root / "token_ids"), model__denoiser="new", data__resolution=512)
    model = resolve(MODEL)
    networks = make_networks(how, model, World())
    with torch.no_grad():
        predicted = networks(torch.randn(1, 16, 8, 8), torch.tensor([TICKS // 2]), torch.randn(1, 4, 32))
    assert not predicted.any()
    process_of_times = make_objective(settled(how)[0], model, World()).process
    assert isinstance(process_of_times, Flow)
    assert process_of_times.shift == 2


def test_a_run_of_another_family_is_no_beginning(root: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    make_latents(tmp_path, 16, unit_rows=16, vocabulary=50)
    train(config(tmp_path, max_steps=1))
    how = settings(root, "across", source__uri=str(root / "token_ids"), model__start_from=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"^model\.start_from: expected a run of PRX, got .*/step-000000001"):
        make_plan(how.replaced(objective=how.objective.replaced(prediction="flow")))
