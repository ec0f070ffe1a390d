"""`python -m scripts.demo --dreambooth`: teach the demo's model a new shape from five pictures."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.demo.shapes import dominant_shape_color, is_ring, render, sample
from sdp.console import say, table
from sdp.errors import SdpError

if TYPE_CHECKING:
    from PIL.Image import Image

SHAPE, COLOR, BACKGROUND = "ring", "blue", "white"
CAPTION = f"a {COLOR} zwx on a {BACKGROUND} background"
"""The subject's caption. The tokenizer does not know zwx and spells it out."""
_PICTURES = 5
_BASE, _OWN, _BEFORE, _OUT = "base", "subject", "before", "dreambooth"


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
    before = [is_ring(picture, BACKGROUND) for _, picture in pictures(folder / _BEFORE)]
    learnt, correct, leaked, rows = list[bool](), list[bool](), 0, list[tuple[str, str, str]]()
    for prompt, picture in pictures(folder / _OUT / "pictures"):
        background = prompt.split()[-2]
        ring = is_ring(picture, background)
        if prompt == CAPTION:
            learnt.append(ring)
            rows.append((prompt, SHAPE if ring else f"no {SHAPE}", "yes" if ring else "NO"))
        else:
            color = dominant_shape_color(picture, background)
            leaked += ring
            correct.append(color == prompt.split()[1])
            rows.append((prompt, color, "yes" if correct[-1] else "NO"))
    say("\n── did it learn? The subject's shape, and the colours of the class\n")
    say(table(rows, ("prompt", "drawn", "correct")))
    say(
        f"\nbefore training {sum(before)} of {len(before)} pictures showed a {SHAPE}, now {sum(learnt)} of "
        f"{len(learnt)} do; the class's colour is correct in {sum(correct)} of {len(correct)}, of which {leaked} show "
        f"a {SHAPE}; see {folder / _OUT / 'report.html'}"
    )
    if sum(learnt) < 0.75 * len(learnt) or sum(before) > 0.25 * len(before) or sum(correct) < 0.8 * len(correct):
        raise SdpError(
            f"demo: expected a {SHAPE} in three of four pictures, in none before, and the class's colour in eight of "
            "ten: fine-tuning did not work"
        )


def pictures(samples: Path) -> "Iterator[tuple[str, Image]]":
    """Yield the prompts and pictures of a samples dataset."""
    from PIL import Image

    from sdp.datasets.manifest import open_dataset
    from sdp.datasets.parts import read_rows
    from sdp.storage import open_storage

    dataset = open_dataset(open_storage(str(samples)))
    for path in dataset.parts["path"].to_pylist():
        for row in read_rows(dataset.storage, path, ["prompt", "image"]).to_pylist():
            yield row["prompt"], Image.open(io.BytesIO(row["image"])).convert("RGB")
