"""A generator's work on a unit: draw its pictures and publish their part."""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from sdp.config.generate import GenerateConfig
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome, account_table
from sdp.datasets.parts import Layout, PartInfo, write_part
from sdp.datasets.units import Work
from sdp.generate.layout import KIND, image_name
from sdp.generate.prompts import Prompt
from sdp.generate.sample import image_seed
from sdp.generate.source import GenerateModel
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


@dataclass(frozen=True, slots=True)
class Task:
    """A unit, and the prompt of each of its addresses."""

    work: Work
    prompts: tuple[str | Outcome, ...]
    """An outcome where nothing is drawn."""


def tasks_of(
    pending: Sequence[Work], prompts: Sequence[Prompt], per_prompt: int, taken_down: frozenset[int]
) -> list[Task]:
    """Return the units with their prompts; `taken_down` are numbers of prompts."""

    def prompt_of(row: int) -> str | Outcome:
        prompt = prompts[row // per_prompt]
        if row // per_prompt in taken_down:
            return Outcome(row, FILTERED, "tombstone", attempts=0)
        return Outcome(row, FAILED, "no_caption", attempts=0) if prompt is None else prompt

    return [Task(work, tuple(map(prompt_of, range(work.unit.start, work.unit.stop)))) for work in pending]


class GenerateWorker:
    """A generator; it loads its networks with its first unit."""

    def __init__(self, config: GenerateConfig, model: GenerateModel, output: Storage) -> None:
        self._config, self._model, self._output = config, model, output

    def make(self, task: Task, on_rows: Callable[[int], None] = lambda _: None) -> PartInfo:
        """Draw a unit and publish it; call `on_rows` with the number of pictures after each batch."""
        config, unit = self._config, task.work.unit
        rows: list[dict[str, object]] = []
        outcomes = [prompt for prompt in task.prompts if isinstance(prompt, Outcome)]
        to_draw = [(row, prompt) for row, prompt in enumerate(task.prompts, unit.start) if isinstance(prompt, str)]
        # Batches depend on the unit alone, so that the same pictures share a batch in every run.
        for start in range(0, len(to_draw), config.scaling.batch_size):
            batch = to_draw[start : start + config.scaling.batch_size]
            seeds = [image_seed(config.seed, row) for row, _ in batch]
            pictures = self._painter.paint([prompt for _, prompt in batch], seeds)
            for (row, prompt), seed, picture in zip(batch, seeds, pictures, strict=True):
                if picture is None:
                    outcomes.append(Outcome(row, FAILED, "not_finite"))
                else:
                    rows.append(self._row(row, prompt, seed, picture))
                    outcomes.append(Outcome(row, WRITTEN))
            on_rows(len(batch))
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        return write_part(self._output, KIND, task.work, table, account_table(outcomes), layout=LAYOUT)

    def _row(self, row: int, prompt: str, seed: int, picture: "Picture") -> dict[str, object]:
        data = encode_png(picture)
        if self._config.output.image_files:  # before the part, so that an existing part implies its files
            self._output.publish(image_name(row), data)
        return {
            "row": row,
            "prompt": prompt,
            "image": data,
            "seed": seed,
            "checkpoint": self._model.uri,
            **self._config.sampler.model_dump(),
            "width": picture.shape[1],
            "height": picture.shape[0],
            "sha256": hashlib.sha256(data).hexdigest(),
        }

    @cached_property
    def _painter(self) -> "Painter":
        from sdp.generate.painter import load_painter  # imports torch, which drivers do not need

        return load_painter(self._model, self._config)


def encode_png(picture: "Picture") -> bytes:
    """Return a picture as PNG; equal pictures give equal bytes."""
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(picture).save(sink, "PNG")
    return sink.getvalue()
