"""The committed tiny model: that it is what the script makes, and that it does what the demo needs."""

from pathlib import Path

import pytest
import torch

from scripts import make_tiny_models as script
from sdp.model import load
from sdp.model.layout import present
from sdp.model.sources import resolve

HELD_OUT = script.HELD_OUT


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve("builtin:tiny").path


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.mark.parametrize(("size", "pictures", "at_least"), [(64, 100, 26.0), (256, 20, 26.0)])
def test_held_out_pictures_survive_the_vae(tiny: Path, size: int, pictures: int, at_least: float) -> None:
    with torch.no_grad():
        psnr, right = script.reconstruction(load.load_vae(tiny), size, pictures)
    assert psnr.mean() > at_least
    assert right >= 0.99


def test_colour_background_and_shape_are_read_linearly_from_the_text_encoder(tiny: Path) -> None:
    with torch.no_grad():
        assert min(script.readable(tiny)) >= 0.99


def test_the_model_is_small_and_the_script_knows_every_file_of_it(tiny: Path) -> None:
    files = [path for path in tiny.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert sorted(str(path.relative_to(tiny)) for path in files) == present(tiny)


def test_what_is_not_trained_is_exactly_what_the_script_makes(tiny: Path, tmp_path: Path) -> None:
    for part in ("tokenizer", "unet", "scheduler"):
        (tmp_path / part).mkdir()
        getattr(script, f"make_{part}")(tmp_path)
    made = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 6
    for path in made:
        assert path.read_bytes() == (tiny / path.relative_to(tmp_path)).read_bytes(), path.name


def test_training_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for folder in (tmp_path / "once", tmp_path / "again"):
        for part in ("tokenizer", "text_encoder", "vae"):
            (folder / part).mkdir(parents=True)
        script.make_tokenizer(folder)
        script.make_text_encoder(folder, steps=3, batch=8)
        script.make_vae(folder, steps=3, batch=4)
    assert script.compare(tmp_path / "once", tmp_path / "again") == 0
    (tmp_path / "again" / "vae" / "config.json").write_text("{}")
    assert script.compare(tmp_path / "once", tmp_path / "again") == 1
