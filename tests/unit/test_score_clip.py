"""CLIP's scores are those of transformers' own model, and predictors those of LAION's layers."""

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from sdp.encode.chunk import Chunk, ShapeGroup
from sdp.encode.recipe import TEXT, EncoderSettings
from sdp.errors import ModelError
from sdp.families.tokenizer import load_clip_tokenizer, tokenize
from sdp.model import networks
from sdp.model.clip import View, find_predictor, view_of
from sdp.model.load import load_network
from sdp.model.networks import FeatureNetwork
from sdp.score.scorer import Scorer
from sdp.score.stages import HASH
from tests.evaluate_kit import caption_of, picture, tiny_clip
from tests.score_kit import write_predictor


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> FeatureNetwork:
    return networks.find(str(tiny_clip(tmp_path_factory.mktemp("clip"))), "score.clip_model")


@pytest.fixture(scope="module")
def model(clip: FeatureNetwork) -> Any:
    from transformers import CLIPModel

    return load_network(CLIPModel, clip.path)


def pictures_of(count: int) -> list[Any]:
    return [picture(number, 40 + number % 3, 17 * (number % 4)) for number in range(count)]


def chunk_of(clip: FeatureNetwork, view: View, captions: list[str]) -> Chunk:
    pixels = np.stack([view.cut(each) for each in pictures_of(len(captions))])
    tokens = np.zeros((len(captions), 77), np.uint16)
    present = [number for number, caption in enumerate(captions) if caption]
    tokens[present] = tokenize(load_clip_tokenizer(clip.path), [captions[number] for number in present])
    rows = np.arange(len(captions))
    crops = {view.side: [ShapeGroup(rows, pixels)], HASH: [ShapeGroup(rows, np.zeros((len(captions), 8), np.uint8))]}
    return Chunk(rows, [f"k{row}" for row in rows], tokens, crops, np.zeros(len(captions), np.int16))


def settings_of(view: View, dtype: str = "fp32", batch: int = 4) -> EncoderSettings:
    return EncoderSettings(dtype=dtype, batch_sizes={view.side: batch, TEXT: batch})


CAPTIONS = [caption_of(number) for number in range(11)]


def expected_of(clip: FeatureNetwork, model: Any) -> tuple[Any, Any]:
    """Normalised embeddings and cosines by transformers' own processor, tokenizer and forward."""
    from transformers import CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    kind: Any = CLIPImageProcessorPil
    pixels = kind.from_pretrained(clip.path)(images=pictures_of(len(CAPTIONS)), return_tensors="pt")["pixel_values"]
    tokens = CLIPTokenizer.from_pretrained(clip.path)(CAPTIONS, padding=True, return_tensors="pt")
    with torch.no_grad():
        output = model(pixel_values=pixels, input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    return output.image_embeds, (output.logits_per_image / model.logit_scale.exp()).diagonal().numpy()


def test_scores_do_not_depend_on_the_batch(clip: FeatureNetwork, model: Any) -> None:
    view = view_of(clip)
    one, many = (Scorer(model, view, settings_of(view, batch=size))(chunk_of(clip, view, CAPTIONS)) for size in (1, 64))
    np.testing.assert_allclose(one.similarity, many.similarity, atol=1e-6)


def test_a_row_without_a_caption_leaves_the_others_alone(clip: FeatureNetwork, model: Any) -> None:
    view = view_of(clip)
    captions = [caption if number % 3 else "" for number, caption in enumerate(CAPTIONS)]
    scores = Scorer(model, view, settings_of(view))(chunk_of(clip, view, captions))
    expected = expected_of(clip, model)[1]
    captioned = [number for number in range(len(CAPTIONS)) if number % 3]
    np.testing.assert_allclose(scores.similarity[captioned], expected[captioned], atol=1e-5)
    assert scores.good.all()


def test_the_view_is_what_the_processor_cuts_and_takes_no_memory_for_the_rest() -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    kind: Any = CLIPImageProcessorPil
    for shortest, side in ((32, 32), (40, 32)):
        view = View(shortest, side, 3, 1 / 255, (0.0,) * 3, (1.0,) * 3)
        processor = kind(size={"shortest_edge": shortest}, crop_size={"height": side, "width": side})
        for shape in ((100, 77), (33, 250), (500, 64)):
            pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
            expected = processor(images=[pixels], do_rescale=False, do_normalize=False, return_tensors="np")
            actual = view.cut(pixels).astype(int)
            assert np.abs(actual - expected["pixel_values"][0].transpose(1, 2, 0)).max() <= 1
    assert view.cut(np.zeros((1, 1_000_000, 3), np.uint8)).shape == (32, 32, 3)


def test_a_file_that_is_no_predictor_of_this_model_is_refused(clip: FeatureNetwork, tmp_path: Path) -> None:
    def refused(name: str) -> str:
        with pytest.raises(ModelError) as info:
            find_predictor(str(tmp_path / name), clip, None)
        return str(info.value)

    write_predictor(tmp_path / "other.pth", [768, 1])
    assert "expected 12 inputs, the width of" in refused("other.pth")
    write_predictor(tmp_path / "wide.pth", [12, 3])
    assert "expected linear layers, one after another, to one number" in refused("wide.pth")
    save_file({"0.weight": torch.zeros(4, 12), "1.weight": torch.zeros(1, 5)}, tmp_path / "gap.safetensors")
    assert "expected linear layers" in refused("gap.safetensors")
    torch.save(nn.Linear(12, 1), tmp_path / "pickled.pth")
    assert "not a readable file of weights" in refused("pickled.pth")
    with ZipFile(tmp_path / "forged.pth", "w") as archive:
        archive.writestr("archive/data.pkl", b"h\x05.")  # the sixth object, of none
        archive.writestr("archive/version", "3")
    assert "not a readable file of weights" in refused("forged.pth")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    assert "not a readable file of weights" in refused("torn.safetensors")


def test_a_predictor_that_changes_while_it_is_in_use_is_refused(clip: FeatureNetwork, tmp_path: Path) -> None:
    write_predictor(tmp_path / "p.pth", [12, 1])
    predictor = find_predictor(str(tmp_path / "p.pth"), clip, None)
    write_predictor(tmp_path / "p.pth", [12, 1], seed=9)
    with pytest.raises(ModelError, match="changed while it was in use"):
        predictor.load(None)


def test_pictures_of_no_finite_score_are_marked(clip: FeatureNetwork, model: Any) -> None:
    view = view_of(clip)
    scorer = Scorer(model, view, settings_of(view))
    forward = scorer._pictures

    def troubled(planes: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = forward(planes).clone()
        values[0, 0] = float("inf")
        return values

    scorer._pictures = troubled
    good = scorer(chunk_of(clip, view, CAPTIONS)).good
    assert good.tolist() == [number % 4 != 0 for number in range(11)], "the first of each batch of four"


def test_a_small_picture_is_enlarged() -> None:
    view = View(32, 32, int(Image.Resampling.BICUBIC), 1 / 255, (0.0,) * 3, (1.0,) * 3)
    assert view.cut(np.full((5, 9, 3), 7, np.uint8)).tolist() == np.full((32, 32, 3), 7).tolist()
