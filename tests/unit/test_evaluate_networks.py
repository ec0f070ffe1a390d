"""Feature networks: they are found by their files, and their features are the libraries' own."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdp.errors import ModelError
from sdp.evaluate.networks import Transformers, load_network, square
from sdp.model import networks
from sdp.model.networks import FeatureNetwork
from tests.evaluate_kit import caption_of, picture, tiny_clip, tiny_dino, tiny_first_dino

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def copy(clip: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(clip, tmp_path / "copy"))


def find(folder: Path) -> FeatureNetwork:
    return networks.find(str(folder), "features.model")


def test_other_files_in_the_folder_are_ignored(clip: Path, copy: Path) -> None:
    (copy / "README.md").write_text("hello")
    (copy / "pytorch_model.bin").write_bytes(b"not read")
    assert find(copy).digest == find(clip).digest
    (copy / "preprocessor_config.json").write_text("{}")
    assert find(copy).digest != find(clip).digest
    with pytest.raises(ModelError, match="its content changed while it was in use"):
        networks.find(replace(find(copy).source, sha256=find(clip).digest), "clip.model")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "", "no feature network: expected config.json or one file *inception*.pth, got neither"),
        ("model.safetensors", "", "model.safetensors is missing; a clip network needs"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", "[" * 100_000, "not JSON"),
        ("config.json", '{"model_type": ["clip"]}', "unknown network type ['clip']: expected clip"),
    ],
)
def test_a_folder_without_a_network_is_refused_in_one_line(copy: Path, file: str, text: str, message: str) -> None:
    (copy / file).unlink()
    if text:
        (copy / file).write_text(text)
    with pytest.raises(ModelError) as refused:
        find(copy)
    assert str(refused.value).startswith(f"features.model: model source {copy}: {message}")
    assert "\n" not in str(refused.value)


def test_a_relative_folder_means_the_same_to_a_worker_that_is_elsewhere(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    network = networks.find("./copy", "clip.model")
    monkeypatch.chdir("/")
    assert networks.find(network.source, "clip.model").digest == network.digest


@pytest.mark.parametrize("source", ["builtin:tiny", "owner/name", "ftp://host/x", "/no/such/folder"])
def test_a_source_that_cannot_be_one_is_refused_with_its_key(source: str) -> None:
    with pytest.raises(ModelError, match=r"^clip\.model: model source "):
        networks.find(source, "clip.model")


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("config.json", '"projection_dim": 12', '"projection_dim": 14', "2 weights are of other shapes"),
        ("preprocessor_config.json", '"shortest_edge"', '"x"', "copy: cannot be loaded .*; compare it with the"),
        ("tokenizer.json", '"a</w>": ', '"a</w>": 9', "copy: has the id 9[0-9]+, but the text encoder has 54 embedd"),
    ],
)
def test_files_of_a_clip_that_do_not_fit_each_other_are_refused(
    copy: Path, file: str, old: str, new: str, says: str
) -> None:
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    with pytest.raises(ModelError, match=says):
        load_network(find(copy), CPU)


def test_clip_scores_are_the_cosines_of_transformers_own_forward(clip: Path) -> None:
    from transformers import CLIPModel, CLIPProcessor

    pictures = [picture(number, 40, wide=6 * number) for number in range(3)]
    captions = [caption_of(0), "b " * 200, ""]  # one is longer than 77 tokens
    network = load_network(find(clip), CPU)
    assert isinstance(network, Transformers)
    rows = network.embed([network.prepare(pixels) for pixels in pictures])
    assert rows.shape == (3, 12)
    model: Any = CLIPModel.from_pretrained(clip)
    inputs = CLIPProcessor.from_pretrained(clip)(
        text=captions, images=pictures, padding=True, truncation=True, max_length=77, return_tensors="pt"
    )
    with torch.no_grad():
        expected = (model(**inputs).logits_per_image / model.logit_scale.exp()).diagonal().numpy()
    assert network.scores(rows, captions) == pytest.approx(100 * expected, abs=1e-4)
    assert network.scores(rows[:0], []).shape == (0,)


@pytest.mark.parametrize(("kind", "write"), [("dinov2", tiny_dino), ("vit", tiny_first_dino)])
def test_dino_features_are_those_of_the_whole_picture(kind: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    from transformers import Dinov2Model, ViTModel

    folder = write(tmp_path)
    assert find(folder).kind == kind
    network = load_network(find(folder), CPU)
    view = network.prepare(picture(3))
    network_class: Any = Dinov2Model if kind == "dinov2" else ViTModel
    options = {} if kind == "dinov2" else {"add_pooling_layer": False}  # the DreamBooth paper's has no pooling
    with torch.no_grad():
        states = network_class.from_pretrained(folder, **options)(torch.from_numpy(view[None])).last_hidden_state
    assert np.allclose(network.embed([view]), states[:, 0].numpy(), atol=1e-6)


def test_the_square_is_in_the_middle() -> None:
    pixels = np.arange(4 * 7 * 3, dtype=np.uint8).reshape(4, 7, 3)
    assert np.array_equal(square(pixels), pixels[:, 1:5])
    assert np.array_equal(square(pixels.transpose(1, 0, 2)), pixels.transpose(1, 0, 2)[1:5])
    assert np.array_equal(square(pixels[:, :4]), pixels[:, :4])
