"""The stages that draw pictures, and the task that writes a unit of them."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sdp.config.generate import GenerateConfig
from sdp.datasets.outcomes import FAILED, WRITTEN, Outcome, account_table
from sdp.datasets.parts import Layout, PartInfo, write_part
from sdp.datasets.units import Work
from sdp.generate.layout import KIND, image_name
from sdp.generate.sample import image_seed
from sdp.generate.source import GenerateModel
from sdp.runners.stages import Stages
from sdp.storage import Storage

if TYPE_CHECKING:
    from sdp.generate.painter import Painter, Picture

SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("image", pa.binary(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("checkpoint", pa.string(), nullable=False),
        pa.field("scheduler", pa.string(), nullable=False),
        pa.field("steps", pa.int32(), nullable=False),
        pa.field("guidance_scale", pa.float32(), nullable=False),
        pa.field("negative_prompt", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("sha256", pa.string(), nullable=False),
    ]
)
_SAME = ("checkpoint", "scheduler", "steps", "guidance_scale", "negative_prompt", "width", "height")
LAYOUT = Layout(row_group_rows=64, dictionary=("prompt", *_SAME))


Prompted = Sequence[tuple[int, str | Outcome]]
"""Addresses with their prompts; an outcome where nothing is drawn."""
Drawn = tuple[list[dict[str, Any]], list[Outcome]]
"""Rows to store, and the outcomes of the other addresses."""


@dataclass(frozen=True)
class GenerateStages(Stages):
    """The stages that draw."""

    config: GenerateConfig
    model: GenerateModel
    output: Storage

    def load(self) -> "Painter":
        """Load the networks."""
        from sdp.generate.painter import load_painter  # imports torch, which drivers do not need

        return load_painter(self.model, self.config)

    def work(self, worker: "Painter", value: Prompted) -> Drawn:
        """Draw the pictures of a batch."""
        to_draw = [(row, prompt) for row, prompt in value if isinstance(prompt, str)]
        rows, outcomes = list[dict[str, Any]](), [prompt for _, prompt in value if isinstance(prompt, Outcome)]
        seeds = [image_seed(self.config.seed, row) for row, _ in to_draw]
        pictures = worker.paint([prompt for _, prompt in to_draw], seeds)
        for (row, prompt), seed, picture in zip(to_draw, seeds, pictures, strict=True):
            if picture is None:
                outcomes.append(Outcome(row, FAILED, "not_finite"))
            else:
                rows.append(self._row(row, prompt, seed, picture))
        return rows, outcomes

    def _row(self, row: int, prompt: str, seed: int, picture: "Picture") -> dict[str, Any]:
        data = encode_png(picture)
        return {
            "row": row,
            "prompt": prompt,
            "image": data,
            "seed": seed,
            "checkpoint": self.model.uri,
            **self.config.sampler.model_dump(),
            "width": picture.shape[1],
            "height": picture.shape[0],
            "sha256": hashlib.sha256(data).hexdigest(),
        }


def write_unit(stages: GenerateStages, pieces: Sequence[Drawn], work: Work, retried: Mapping[str, int]) -> PartInfo:
    """Publish the part of a unit, and its pictures as files."""
    rows = [row for drawn, _ in pieces for row in drawn]
    outcomes = [outcome for _, others in pieces for outcome in others]
    account = account_table([*outcomes, *(Outcome(row["row"], WRITTEN) for row in rows)])
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    if stages.config.output.image_files:  # before the part, so that an existing part implies its files
        for row in rows:
            stages.output.publish(image_name(row["row"]), row["image"])
    return write_part(stages.output, KIND, work, table, account, layout=LAYOUT, retried=retried)


def encode_png(picture: "Picture") -> bytes:
    """Return a picture as PNG; equal pictures give equal bytes."""
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(picture).save(sink, "PNG")
    return sink.getvalue()
