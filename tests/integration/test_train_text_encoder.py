"""Training the text encoder with the U-Net: the same promises hold for both networks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, StableDiffusionPipeline
from safetensors.torch import load_file
from torch import Tensor

from sdp.cli import main
from sdp.config.train import TrainConfig
from sdp.errors import ConfigError, DatasetError
from sdp.families.sd import SD
from sdp.families.tokenizer import load_tokenizer, token_ids
from sdp.generate.painter import load_painter
from sdp.generate.source import choose
from sdp.model import load
from sdp.model.sources import resolve
from sdp.model.trained import load_trained
from sdp.storage import open_storage
from sdp.train.assemble import assemble
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.callbacks.samples import DrawSamples
from sdp.train.plan import make_plan
from sdp.train.randomness import Purpose, RowRandom
from sdp.train.settle import settled
from sdp.train.world import World
from tests.generate_kit import generate_config
from tests.latents import latent_of, make_latents, tokens_of
from tests.training import Watch, config, tiny_inputs, train, weights

STEPS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_inputs(tmp_path_factory.mktemp("text-encoder"))


def how(root: Path, run: str = "run", **changes: Any) -> TrainConfig:
    usual = {"model__train_text_encoder": True, "model__denoiser": "pretrained", "max_steps": STEPS}
    return config(root, run, **{**usual, **changes})


@pytest.fixture(scope="module")
def trained(root: Path) -> dict[str, Tensor]:
    return weights(train(how(root)))


def checkpoint(root: Path, run: str = "run") -> Path:
    return root / run / f"checkpoints/step-{STEPS:09d}"


def own_text_encoder(root: Path) -> dict[str, Tensor]:
    return dict(load.load_text_encoder(root / "model").named_parameters())


def test_a_step_is_a_plain_diffusers_step_on_the_parameters_of_both(root: Path) -> None:
    parsed, watch = how(root, "plain", max_steps=1, optimizer__warmup_steps=0, optimizer__clip_norm=0.3), Watch()
    trainer = assemble(*settled(parsed), World(), callbacks=[watch])
    batch = next(trainer.reader.batches(0, 0, 8, trainer.state.start))
    trainer.train()

    model = resolve(str(root / "model")).path
    unet, encoder = load.load_denoiser(model, pretrained=True), load.load_text_encoder(model).requires_grad_(True)
    random = RowRandom(0, torch.zeros_like(batch.rows), batch.rows)
    latents = torch.stack([torch.from_numpy(latent_of(row, 8)) for row in batch.rows.tolist()]).float()
    ids = torch.stack([torch.from_numpy(tokens_of(row, 50).astype("int64")) for row in batch.rows.tolist()])
    empty = token_ids(load_tokenizer(model), [""])
    ids = torch.where(random.chance(Purpose.CAPTION_DROPOUT, 0.1)[:, None], empty, ids)
    noise, timesteps = random.normal(Purpose.NOISE, 4, 8, 8), random.integers(Purpose.TIMESTEP, 1000)
    noisy = DDPMScheduler.from_pretrained(model / "scheduler").add_noise(latents, noise, timesteps)
    parameters = {**dict(unet.named_parameters()), **{f"text_encoder.{n}": p for n, p in encoder.named_parameters()}}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    loss = F.mse_loss(unet(noisy, timesteps, encoder(ids).last_hidden_state).sample, noise)
    loss.backward()
    assert torch.nn.utils.clip_grad_norm_(parameters.values(), 0.3) > 0.3
    optimizer.step()

    assert watch.losses == pytest.approx([loss.item()], abs=1e-5)
    result = weights(trainer)
    assert {name for name in result if name.startswith("model.")} == {f"model.{name}" for name in parameters}
    for name, parameter in parameters.items():
        clear = parameter.grad.abs() > 1e-5  # Adam's first step is the gradient's sign
        assert torch.allclose(result[f"model.{name}"][clear], parameter[clear], atol=1e-5), name
        assert torch.allclose(result[f"exp_avg.{name}"], 0.1 * parameter.grad, atol=1e-6), name
    for kind in ("exp_avg.", "exp_avg_sq.", "ema."):
        assert {name.removeprefix(kind) for name in result if name.startswith(kind)} == set(parameters)


def test_a_resumed_run_ends_as_one_that_was_not_stopped(root: Path, trained: dict[str, Tensor]) -> None:
    train(how(root, "stopped", max_steps=2))
    resumed = weights(train(how(root, "stopped")))
    assert resumed.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(resumed[name], tensor), name
    own = own_text_encoder(root)
    assert all(not torch.equal(trained[f"model.text_encoder.{name}"], value) for name, value in own.items())


def test_exports_have_the_trained_text_encoder_and_draw(root: Path, trained: dict[str, Tensor], tmp_path: Path) -> None:
    assert main(["export", str(root / "run"), str(tmp_path / "out")]) == 0
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "out")
    own = own_text_encoder(root)
    for name, parameter in pipeline.text_encoder.named_parameters():
        assert torch.equal(parameter, trained[f"ema.text_encoder.{name}"]), name
        assert not torch.equal(parameter, own[name])
    for name, parameter in pipeline.unet.named_parameters():
        assert torch.equal(parameter, trained[f"ema.{name}"]), name
    picture = pipeline("a", num_inference_steps=1, height=64, width=64, output_type="np").images
    assert picture.shape == (1, 64, 64, 3)
    file = tmp_path / "model.safetensors"
    assert main(["export", str(root / "run"), str(file), "--single-file", "--raw"]) == 0
    name = "token_embedding.weight"
    expected = trained[f"model.text_encoder.embeddings.{name}"]
    assert torch.equal(load_file(file)[f"cond_stage_model.model.{name}"], expected)


@pytest.mark.usefixtures("trained")
def test_generate_encodes_prompts_with_the_trained_text_encoder(root: Path, tmp_path: Path) -> None:
    networks = load_trained(open_storage(str(checkpoint(root))), root / "model", ema=True, name="model")
    how = generate_config(tmp_path / "out", root / "run")
    painter = load_painter(choose(how), how)
    ids = token_ids(load_tokenizer(root / "model"), ["a b"])
    with torch.no_grad():
        expected = SD.encode_text(networks.text_encoder.eval(), ids)
        own = SD.encode_text(load.load_text_encoder(root / "model"), ids)
    assert torch.equal(painter.encode(["a b"]), expected)
    assert not torch.allclose(expected, own, atol=1e-4)
    assert painter.paint(["a b"], [0])[0] is not None


def test_samples_are_drawn_with_the_text_encoder_of_their_step(root: Path) -> None:
    settings = {"every_steps": STEPS, "prompts": ["a b"], "steps": 1}
    parsed = how(root, "drawn", samples=settings)
    drawer = DrawSamples(parsed)
    trainer = train(parsed, callbacks=[drawer])
    assert drawer._painter is not None
    networks = load_trained(open_storage(str(checkpoint(root, "drawn"))), root / "model", ema=True, name="model")
    ids = token_ids(load_tokenizer(root / "model"), ["a b"])
    with torch.no_grad():
        assert torch.equal(drawer._painter.encode(["a b"]), SD.encode_text(networks.text_encoder.eval(), ids))
    assert trainer.checkpointer.run.storage.exists(f"samples/step-{STEPS:09d}/000.png")


# --- LoRA ------------------------------------------------------------------------------------------------------------


def test_lora_on_both_resumes_and_diffusers_loads_it(root: Path, tmp_path: Path) -> None:
    lora = {"lora__rank": 3, "ema__decay": None}
    result = weights(
        train(how(root, "lora", **lora, output__uri=str(tmp_path / "run")), callbacks=[SaveCheckpoints(2)])
    )
    assert all(".lora_" in name for name in result)
    layers = [name for name in result if name.startswith("model.text_encoder.") and "lora_B" in name]
    assert {name.split(".")[-3] for name in layers} == {"q_proj", "k_proj", "v_proj", "out_proj"}
    assert all(result[name].abs().max() > 0 for name in layers)
    train(how(root, "lora", **lora, max_steps=2, output__uri=str(tmp_path / "resumed")))
    resumed = weights(train(how(root, "lora", **lora, output__uri=str(tmp_path / "resumed"))))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in result.items())

    file = tmp_path / "subject.safetensors"
    assert main(["export", str(tmp_path / "run"), str(file), "--lora", "--raw"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "whole"), "--raw"]) == 0
    pipeline = StableDiffusionPipeline.from_pretrained(root / "model")
    before = drawn(pipeline)
    pipeline.load_lora_weights(tmp_path, weight_name=file.name)
    merged = StableDiffusionPipeline.from_pretrained(tmp_path / "whole")
    for a, b, changed in zip(drawn(pipeline), drawn(merged), before, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
        assert not torch.allclose(a, changed, atol=1e-4)


def drawn(pipeline: StableDiffusionPipeline) -> tuple[Tensor, Tensor]:
    """Return a prompt's encoding, and the U-Net's prediction for it."""
    ids = torch.tensor([[52, *range(10, 20), *[53] * 66]])
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        text = pipeline.text_encoder(ids).last_hidden_state
        return text, pipeline.unet(latents, torch.tensor([500]), text).sample


# --- refusals --------------------------------------------------------------------------------------------------------


def test_captions_that_are_encoded_already_are_refused_before_anything_is_taken(root: Path, tmp_path: Path) -> None:
    make_latents(tmp_path, 40, text_width=16)
    line = r"^model.train_text_encoder: expected token ids, got embeddings in .*/latents; .* or set it to false"
    parsed = how(root, "refused", source__uri=str(tmp_path / "latents"))
    with pytest.raises(DatasetError, match=line):
        make_plan(parsed)
    measured = {"evaluate__every_steps": 1, "evaluate__source": str(tmp_path / "latents")}
    with pytest.raises(DatasetError, match=line):
        make_plan(how(root, "refused", **measured))
    assert not (root / "refused").exists()


def test_images_are_read_with_token_ids(root: Path) -> None:
    assert not how(root, data__mode="online").text_encoded
    assert config(root, data__mode="online").text_encoded
    with pytest.raises(ConfigError, match=r"^encode.text: expected token_ids or null while model.train_text_encoder"):
        how(root, data__mode="online", encode__text="text_embedding")


@pytest.mark.usefixtures("trained")
def test_a_run_begins_with_weights_of_the_same_networks_only(root: Path) -> None:
    train(config(root, "unet-alone", max_steps=STEPS))
    for value, changed in (
        ("true", config(root, "next", model__start_from=str(checkpoint(root)))),
        ("false", how(root, "next", model__start_from=str(checkpoint(root, "unet-alone")))),
    ):
        with pytest.raises(ConfigError, match=rf"^model.train_text_encoder: expected {value}, as in "):
            make_plan(changed)
    begun = assemble(*settled(how(root, "next", model__start_from=str(checkpoint(root)), max_steps=1)), World())
    begun._restore()
    expected = load_trained(open_storage(str(checkpoint(root))), root / "model", ema=False, name="model").weights()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in begun.trained.items())
