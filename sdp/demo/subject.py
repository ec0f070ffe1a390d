"""`python -m sdp.demo --dreambooth`: teach the demo's model a new shape from five pictures."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdp.console import say, table
from sdp.demo.shapes import dominant_shape_color, render, sample, shape_of
from sdp.errors import SdpError

if TYPE_CHECKING:
    from PIL.Image import Image

SHAPE, COLOR, BACKGROUND = "ring", "blue", "white"
CAPTION = f"a {COLOR} zwx on a {BACKGROUND} background"
"""The subject's caption. The tokenizer does not know zwx and spells it out."""
_PICTURES, _DRAWN = 5, 4
_BASE, _OWN, _OUT = "base", "subject", "dreambooth"


def write_pictures(folder: Path) -> None:
    """Paint and save the five pictures of the subject."""
    (folder / _OWN).mkdir(parents=True, exist_ok=True)
    for number in range(_PICTURES):
        shape = replace(sample(1000 + number), shape=SHAPE, color=COLOR, background=BACKGROUND)
        render(shape, 128).save(folder / _OWN / f"{number}.png")


def export_command(folder: Path) -> tuple[str, ...]:
    """Return the arguments of `sdp` that export the demo's run."""
    return "export", str(folder / "run"), str(folder / _BASE)


def has_base(folder: Path) -> bool:
    """Return true if the demo's model has been exported."""
    return (folder / _BASE / "model_index.json").exists()


def judge(folder: Path) -> None:
    """Check that the subject is drawn for its own caption, and the class as before for the others."""
    from PIL import Image

    before = [shape_of(Image.fromarray(pixels), BACKGROUND) for pixels in _painted(folder)]
    shapes, correct, leaked, rows = [], [], 0, list[tuple[str, str, str]]()
    for prompt, picture in pictures(folder / _OUT / "pictures"):
        if prompt == CAPTION:
            shapes.append(shape_of(picture, BACKGROUND))
            rows.append((prompt, shapes[-1], "yes" if shapes[-1] == SHAPE else "NO"))
        else:
            background = prompt.split()[-2]
            color = dominant_shape_color(picture, background)
            leaked += shape_of(picture, background) == SHAPE
            correct.append(color == prompt.split()[1])
            rows.append((prompt, color, "yes" if correct[-1] else "NO"))
    say("\n── did it learn? The subject's shape, and the colours of the class\n")
    say(table(rows, ("prompt", "drawn", "correct")))
    learnt = shapes.count(SHAPE)
    say(
        f"\nbefore training {before.count(SHAPE)} of {len(before)} pictures showed a {SHAPE}, now {learnt} of "
        f"{len(shapes)} do; the class's colour is correct in {sum(correct)} of {len(correct)}, of which {leaked} show "
        f"a {SHAPE}; see {folder / _OUT / 'report.html'}"
    )
    if learnt < 0.75 * len(shapes) or before.count(SHAPE) > 0.25 * len(before) or sum(correct) < 0.8 * len(correct):
        raise SdpError(
            f"demo: expected a {SHAPE} in three of four pictures, in none before, and the class's colour in eight of "
            "ten: fine-tuning did not work"
        )


def pictures(samples: Path) -> "Iterator[tuple[str, Image]]":
    """Yield the prompts and pictures of a samples dataset."""
    from PIL import Image

    from sdp.datasets.manifest import open_dataset
    from sdp.generate.job import drawn
    from sdp.storage import open_storage

    for row in drawn(open_dataset(open_storage(str(samples)))):
        yield row["prompt"], Image.open(io.BytesIO(row["image"])).convert("RGB")


def _painted(folder: Path) -> list[Any]:
    """Return what the demo's model draws for the subject's caption before it is trained on it."""
    from sdp.config import GenerateConfig, parse_into
    from sdp.generate.painter import load_painter
    from sdp.generate.sample import Sampling
    from sdp.generate.source import choose

    settings = {"prompts": [CAPTION], "output": {"uri": str(folder)}, "checkpoint": str(folder / _BASE)}
    painter = load_painter(
        choose(parse_into(GenerateConfig, settings)), Sampling(steps=20, guidance_scale=2.0, resolution=64)
    )
    return [pixels for pixels in painter.paint([CAPTION] * _DRAWN, range(_DRAWN)) if pixels is not None]
