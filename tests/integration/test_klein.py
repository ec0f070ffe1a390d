"""FLUX.2 klein in every stage: images, latents, training, export, LoRA, pictures; against diffusers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.loaders.lora_pipeline import Flux2LoraLoaderMixin
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from safetensors.torch import load_file, save_file
from torch import nn

from sdp.encode.recipe import Recipe
from sdp.encode.transform import crop_image
from sdp.errors import ConfigError, ModelError, UserError
from sdp.families import TICKS, flops, space_of
from sdp.families.flux2 import FLUX2
from sdp.families.tokenizer import load_tokenizer, token_ids
from sdp.generate.source import choose
from sdp.model.export import export
from sdp.model.latents import decode, to_pixels
from sdp.model.load import load_denoiser, load_text_encoder, load_vae
from sdp.model.lora import matrices_of
from sdp.model.sources import check, resolve
from sdp.process.job import run as process
from tests.flow_kit import altered, check_step, first_step, make_inputs, mode, noisy, painted, table_of, teach
from tests.generate_kit import generate_config
from tests.process_kit import config_of, picture
from tests.training import config, train, weights

MODEL = "builtin:tiny-klein"
PROMPTS = ["a cat", "", "\n a longer caption, of <b>words</b>\n", "word " * 400]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images, and their latents with token ids and with embeddings."""
    torch.set_num_threads(1)
    return make_inputs(tmp_path_factory.mktemp("klein"), MODEL, 20)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """Return diffusers' pipeline, which the tests leave as it is."""
    return loaded(resolve(MODEL).path)


def loaded(folder: Path) -> Any:
    made = Flux2KleinPipeline.from_pretrained(folder)
    made.set_progress_bar_config(disable=True)
    return made


def settings(root: Path, run: str, **more: Any) -> Any:
    return config(root, run, **{"model__source": MODEL, "model__denoiser": "pretrained", "max_steps": 2, **more})


def test_tokens_and_states_are_those_of_diffusers(pipeline: Any) -> None:
    path = resolve(MODEL).path
    encoder = load_text_encoder(path)
    ids = token_ids(load_tokenizer(path), PROMPTS)
    expected, _ = pipeline.encode_prompt(PROMPTS)
    with torch.no_grad():
        states = FLUX2.encode_text(encoder, ids)
    assert states.shape == expected.shape == (4, 512, 48)
    assert (states - expected).abs().max() < 1e-5
    assert len(encoder.layers) == 27 < len(pipeline.text_encoder.model.layers)


def test_a_dataset_has_the_latents_and_states_of_diffusers(root: Path, pipeline: Any) -> None:
    ids, embedded = table_of(root / "token_ids"), table_of(root / "text_embedding")
    assert json.loads(ids.schema.field("moments_64").metadata[b"shape"]) == [32, 4, 4]
    assert "tokens" not in ids.column_names
    pixels = to_pixels(torch.from_numpy(crop_image(picture(0), Recipe((64,)), 0)[1][64])[None])
    with torch.no_grad():
        expected = pipeline._encode_vae_image(pixels, None)
        states, _ = pipeline.encode_prompt("picture number 0")
    stored = np.frombuffer(ids["moments_64"][0].as_py(), np.float16).reshape(1, 32, 4, 4)[:, :16]
    assert np.abs(stored - expected.numpy()).max() < 2e-3
    stored = np.frombuffer(embedded["text_embedding"][0].as_py(), np.float16).reshape(512, 48)
    assert np.abs(stored - states[0].numpy()).max() < 5e-3


def test_a_caption_that_rows_share_is_stored_once(root: Path, tmp_path: Path) -> None:
    sizes = []
    for name, caption in (("own", ()), ("shared", ("source.caption=a thing", "source.caption_column=null"))):
        process(config_of(root / "images", tmp_path / name, MODEL, "encode.text=text_embedding", *caption))
        table = table_of(tmp_path / name)
        assert table.num_rows == 18
        sizes.append(sum(file.stat().st_size for file in (tmp_path / name).rglob("parts/*.parquet")))
    assert len(set(table["text_embedding"].to_pylist())) == 1
    assert sizes[0] - sizes[1] > 16 * 512 * 48 * 2
    trained = train(settings(root, "shared", source__uri=str(tmp_path / "shared")))
    assert trained.state.step == 2


def test_latents_are_decoded_as_they_were_encoded(pipeline: Any) -> None:
    vae, pixels = load_vae(resolve(MODEL).path), torch.rand(1, 3, 64, 32) * 2 - 1
    with torch.no_grad():
        latents = pipeline._encode_vae_image(pixels, None)
        expected = vae.decode(vae.encode(pixels).latent_dist.mean).sample
        assert (decode(vae, latents) - expected).abs().max() < 1e-5


def test_a_step_has_the_loss_and_the_gradient_of_a_loop_of_diffusers_alone(
    root: Path, pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = settings(
        root, "step", source__uri=str(root / "text_embedding"), max_steps=1, objective__caption_dropout=0.0,
        data__batch_size=4,
    )  # fmt: skip
    report, batch, draws, text = first_step(how, monkeypatch)
    latents, times, target = noisy(batch, draws)
    pack, network = pipeline._pack_latents, loaded(resolve(MODEL).path).transformer
    places = pipeline._prepare_latent_ids(latents), pipeline._prepare_text_ids(text)
    predicted = network(pack(latents), text, times, *places).sample
    check_step(report, (predicted - pack(target)).square().mean(), network)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_times_are_exact_in_every_precision(dtype: torch.dtype) -> None:
    # FSDP casts the inputs, DDP with autocast does not: the same seed must train the same times.
    denoiser, embedded = load_denoiser(resolve(MODEL).path, pretrained=True).to(dtype), []
    denoiser.time_guidance_embed.time_proj.register_forward_pre_hook(lambda _, inputs: embedded.append(inputs[0]))
    ticks = torch.tensor([1, TICKS // 3, TICKS - 1])
    latents, text = torch.randn(3, 16, 2, 2, dtype=dtype), torch.randn(3, 8, 48, dtype=dtype)
    assert FLUX2.predict(denoiser, latents, ticks, text).dtype == dtype
    assert torch.allclose(embedded[0].double(), ticks.double() * 1000 / TICKS, rtol=1e-6)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_pictures_are_those_of_diffusers_pipeline(tmp_path: Path, pipeline: Any, guidance: float) -> None:
    how = generate_config(tmp_path / "out", MODEL, sampler={"guidance_scale": guidance, "steps": 4})
    for prompt, seed, actual in zip(PROMPTS, [7, 8], painted(how, PROMPTS[:2], [7, 8]), strict=False):
        assert np.abs(actual - drawn_by(pipeline, prompt, seed, guidance=guidance)).max() <= 1


def drawn_by(pipeline: Any, prompt: str, seed: int, *, guidance: float = 4.0) -> Any:
    """Return the picture that diffusers draws, as whole numbers."""
    drawn = pipeline(
        prompt=prompt, num_inference_steps=4, guidance_scale=guidance, height=64, width=64, output_type="np",
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return np.round(drawn.images[0] * 255).astype(int)


@pytest.mark.parametrize(("count", "steps"), [(16, 4), (1024, 50), (4096, 28), (5000, 10)])
def test_times_move_with_the_size_of_a_picture_as_in_diffusers(count: int, steps: int, pipeline: Any) -> None:
    scheduler = pipeline.scheduler.from_config(pipeline.scheduler.config)
    FLUX2.set_timesteps(scheduler, steps, torch.empty(1, 16, 1, count))
    own = scheduler.timesteps
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=compute_empirical_mu(count, steps))
    assert torch.allclose(own, scheduler.timesteps, rtol=1e-6)


@pytest.mark.parametrize("how", ["ids", "embeddings", "collocated", "checkpointed"])
def test_training_learns_and_an_export_draws_the_same_in_diffusers(root: Path, tmp_path: Path, how: str) -> None:
    trained = weights(train(settings(root, how, **mode(root, how))))
    assert all(tensor.isfinite().all() for tensor in trained.values())
    export(str(root / how), str(tmp_path / "out"))
    exported = loaded(tmp_path / "out")
    state = exported.transformer.state_dict()
    assert all(torch.equal(tensor, trained[f"ema.{name}"]) for name, tensor in state.items())
    if how == "ids":
        how_drawn = generate_config(tmp_path / "drawn", root / how, sampler={"guidance_scale": 4.0, "steps": 4})
        (actual,) = painted(how_drawn, ["a cat"], [7])
        assert np.abs(actual - drawn_by(exported, "a cat", 7)).max() <= 1


def test_a_lora_alone_draws_in_diffusers_what_sdp_draws(root: Path, tmp_path: Path, pipeline: Any) -> None:
    how = settings(
        root, "lora", source__uri=str(root / "token_ids"), lora__rank=4, lora__alpha=64.0,
        optimizer__learning_rate=0.01,
    )  # fmt: skip
    train(how)
    export(str(root / "lora"), str(tmp_path / "lora.safetensors"), form="lora")
    how_drawn = generate_config(tmp_path / "drawn", root / "lora", sampler={"guidance_scale": 4.0, "steps": 4})
    (actual,) = painted(how_drawn, ["a cat"], [7])
    adapted = loaded(resolve(MODEL).path)
    adapted.load_lora_weights(str(tmp_path / "lora.safetensors"))
    drawn = drawn_by(adapted, "a cat", 7)
    assert np.abs(actual - drawn).max() <= 1
    assert np.abs(drawn_by(pipeline, "a cat", 7) - drawn).max() > 3, "the LoRA changes the picture"


@pytest.mark.parametrize("form", ["authors", "kohya"])
def test_a_lora_by_the_names_of_the_models_authors_is_read_as_diffusers_reads_it(form: str) -> None:
    with torch.device("meta"):
        network = load_denoiser(resolve(MODEL).path, pretrained=False, device="meta")
    layers = {f"transformer.{name}": each for name, each in network.named_modules() if isinstance(each, nn.Linear)}
    named = {name: FLUX2.authors_layer(name) for name in layers}
    sizes: dict[str, list[int]] = {}
    for name, layer in layers.items():
        size = sizes.setdefault(named[name].partition(".")[2], [layer.in_features, 0])
        size[1] += layer.out_features
    tensors: dict[str, torch.Tensor] = {}
    for name, (inputs, outputs) in sizes.items():
        if "norm_out" in name or (form == "kohya" and "modulation" in name):
            continue  # no converter has a place for these
        stem = f"diffusion_model.{name}" if form == "authors" else f"lora_unet_{name.replace('.', '_')}"
        down, up = ("lora_A", "lora_B") if form == "authors" else ("lora_down", "lora_up")
        tensors |= {f"{stem}.{down}.weight": torch.randn(2, inputs), f"{stem}.{up}.weight": torch.randn(outputs, 2)}
        if form == "kohya":
            tensors[f"{stem}.alpha"] = torch.tensor(6.0)
    expected = Flux2LoraLoaderMixin.lora_state_dict(dict(tensors))
    read = matrices_of(tensors, named)
    assert read.keys() == expected.keys()
    for stem in {name.partition(".lora_")[0] for name in read}:
        product, known = (each[f"{stem}.lora_B.weight"] @ each[f"{stem}.lora_A.weight"] for each in (read, expected))
        assert torch.allclose(product, known, atol=1e-5), stem


def test_dreambooth_teaches_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teach(tmp_path, MODEL)
    hints = capsys.readouterr()
    assert f"sdp export {tmp_path}/out/run subject.safetensors --lora --raw" in hints.out + hints.err


def test_a_distilled_model_draws_without_guidance_and_is_not_trained(root: Path, tmp_path: Path) -> None:
    folder = altered(tmp_path, MODEL, "model_index.json", is_distilled=True)
    how = generate_config(tmp_path / "out", folder, sampler={"guidance_scale": 4.0, "steps": 4})
    (actual,) = painted(how, ["a cat"], [7])
    assert np.abs(actual - drawn_by(loaded(folder), "a cat", 7)).max() <= 1
    with pytest.raises(ConfigError, match=r"model\.source: expected a base model, got .*model, which is distilled"):
        train(settings(root, "no", source__uri=str(root / "token_ids"), model__source=str(folder)))


def test_what_makes_no_sense_is_refused(root: Path, tmp_path: Path) -> None:
    for key, value, line in (
        ("objective__prediction", "v", r"objective\.prediction: expected flow for a model of FLUX\.2 klein, got 'v'"),
        ("model__train_text_encoder", True, r"model\.train_text_encoder: expected false, got true; only some layers"),
        ("objective__skipped_tokens", 0.5, r"objective\.skipped_tokens: expected 0, got 0\.5; this model of FLUX\.2"),
    ):
        with pytest.raises(ConfigError, match=line):
            train(settings(root, "no", source__uri=str(root / "token_ids"), **{key: value}))
    with pytest.raises(UserError, match=r"^resolution: expected multiples of 16 pixels for this model, got 72"):
        choose(generate_config(tmp_path / "out", MODEL, resolution=72))


@pytest.mark.parametrize(
    ("file", "key", "value", "line"),
    [
        ("text_encoder/config.json", "hidden_size", 64, "expected 16, as the transformer needs, got 64"),
        ("text_encoder/config.json", "num_hidden_layers", 27, "expected more than 27, got 27"),
        ("text_encoder/config.json", "num_hidden_layers", "30", "expected more than 27, got '30'"),
        ("vae/config.json", "patch_size", [1, 1], r"expected \[2, 2\], got \[1, 1\]"),
        ("vae/config.json", "latent_channels", 8, "expected 4, as the transformer needs, got 8"),
        ("vae/config.json", "_class_name", "AutoencoderKL", "expected 'AutoencoderKLFlux2', got 'AutoencoderKL'"),
        ("transformer/config.json", "guidance_embeds", True, "expected false, as in klein, got true"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, file: str, key: str, value: object, line: str) -> None:
    with pytest.raises(ModelError, match=rf"{file}: {key}: {line}"):
        check(str(altered(tmp_path, MODEL, file, **{key: value})))


@pytest.mark.parametrize(("name", "value"), [("mean", None), ("var", None), ("mean", torch.nan), ("var", 0.0)])
def test_a_vae_without_the_mean_and_variance_of_its_latents_is_refused(
    root: Path, tmp_path: Path, name: str, value: float | None
) -> None:
    folder = Path(shutil.copytree(resolve(MODEL).path, tmp_path / "model"))
    file = folder / "vae/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    damaged = tensors.pop(f"bn.running_{name}")
    save_file(tensors if value is None else {**tensors, f"bn.running_{name}": damaged.fill_(value)}, file)
    with pytest.raises(ModelError, match=r"^model\.source: the VAE of .* lacks bn, the finite mean and variance of"):
        process(config_of(root / "images", tmp_path / "out", folder))
    assert not (tmp_path / "out").exists()


def test_the_operations_of_a_step_are_counted() -> None:
    path = resolve(MODEL).path
    architecture = json.loads((path / "transformer/config.json").read_text())
    side = space_of(path).shape(64)[1]
    assert flops(FLUX2, architecture, side) > 1e8
