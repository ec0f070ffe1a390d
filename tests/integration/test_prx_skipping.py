"""Image tokens that skip PRX's middle blocks in training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from sdp.errors import ConfigError
from sdp.families.classes import network_class
from sdp.families.prx import PRX
from sdp.model.sources import resolve
from sdp.process.job import run as process
from sdp.train.settle import settled
from sdp.train.world import World
from tests.process_kit import config_of, make_images
from tests.training import Watch, config, train
from tests.workers import run_workers

TINY = "builtin:tiny-prx"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with latents, and a PRX of seven blocks with random weights, as fresh ones ignore the text."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("skipping")
    make_images(root, 24, unit_rows=12)
    process(config_of(root / "images", root / "latents", TINY, "encode.text=text_embedding"))
    folder = Path(shutil.copytree(resolve(TINY).path, root / "model"))
    small = json.loads((folder / "transformer/config.json").read_text())
    network = network_class(PRX.denoiser_class).from_config({**small, "depth": 7})
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    shutil.rmtree(folder / "transformer")
    network.save_pretrained(folder / "transformer")
    return root


@pytest.fixture
def network(root: Path) -> Any:
    return network_class(PRX.denoiser_class).from_pretrained(root / "model/transformer")


def how(root: Path, name: str, **more: Any) -> Any:
    usual = {
        "model__source": str(root / "model"), "model__denoiser": "pretrained", "max_steps": 2,
        "data__trust_encoder": True, "objective__skipped_tokens": 0.5,
    }  # fmt: skip
    return config(root, name, **{**usual, **more})


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    text = torch.randn(3, 5, 32)
    text[1, 3:] = 0
    return torch.randn(3, 16, 8, 12), torch.tensor([100.0, 500.0, 900.0]), text


KEPT = torch.tensor([[0, 3, 5, 8, 20, 23], [1, 2, 3, 4, 5, 6], [18, 19, 20, 21, 22, 23]])


def by_hand(network: Any, latents: torch.Tensor, times: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the prediction, one sample after another, by calls of diffusers' blocks."""
    results = []
    for sample, time, words, kept in zip(latents, times, text, KEPT, strict=True):
        seen = words[(words != 0).any(1)][None]
        patches = functional.unfold(sample[None], 2, stride=2).mT.reshape(1, 24, 16, 4).flatten(2)
        image, said = network.img_in(patches), network.txt_in(seen)
        place = network.pe_embedder(torch.cartesian_prod(torch.arange(4.0), torch.arange(6.0))[None])
        moment = network._compute_timestep_embedding(time[None] / 1000, image.dtype)
        for number, block in enumerate(network.blocks):
            among = kept if 2 <= number <= 3 else torch.arange(24)
            changed = block(image[:, among], said, moment, place[:, :, among])
            image = image.clone()
            image[:, among] = changed
        patches = network.final_layer(image, moment).reshape(1, 24, 16, 4).flatten(2).mT
        results.append(functional.fold(patches, (8, 12), 2, stride=2)[0])
    return torch.stack(results)


def test_only_the_kept_tokens_pass_the_middle_blocks(network: Any) -> None:
    with torch.no_grad():
        skipping, expected = PRX.predict(network, *inputs(), KEPT), by_hand(network, *inputs())
        assert torch.allclose(skipping, expected, atol=1e-4)
        whole = PRX.predict(network, *inputs())
        assert (skipping - whole).abs().max() > 1e-3
        assert torch.equal(PRX.predict(network, *inputs(), torch.arange(24).expand(3, -1)), whole)


def worker(world: World, root: Path, name: str, changes: dict[str, Any]) -> list[float]:
    watch = Watch()
    train(how(root, name, **changes), world, [watch])
    return watch.losses


@pytest.mark.parametrize(
    "changes", [{}, {"strategy__kind": "fsdp", "strategy__activation_checkpointing": True}], ids=["ddp", "fsdp"]
)
def test_workers_together_learn_what_one_learns(root: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    alone = worker(World(), root, str(tmp_path / "alone"), {})
    assert alone != worker(World(), root, str(tmp_path / "whole"), {"objective__skipped_tokens": 0.0})
    for losses in run_workers(
        2, worker, root, str(tmp_path / "run"), {"data__batch_size": 4, "data__global_batch_size": 8, **changes}
    ):
        assert losses == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("model", "key"), [("builtin:tiny", "objective.skipped_tokens"), (TINY, "phase_2.skipped_tokens")]
)
def test_a_model_without_middle_blocks_refuses_it_before_the_first_phase(model: str, key: str, tmp_path: Path) -> None:
    skipping = {"phase_2__max_steps": 1, "objective__skipped_tokens": 0.0, key.replace(".", "__"): 0.5}
    with pytest.raises(ConfigError, match=rf"^{key}: expected 0, got 0\.5; this model of .* has no blocks"):
        settled(how(tmp_path, "run", model__source=model, **skipping))
