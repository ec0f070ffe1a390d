"""What a generator does with a unit: draw its pictures and publish their part."""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Outcome, account_table
from sdp.datasets.parts import Layout, PartInfo, write_part
from sdp.datasets.units import Work
from sdp.generate.layout import KIND, image_name
from sdp.generate.painter import Painter, Picture, load_painter
from sdp.generate.prompts import Prompt
from sdp.generate.sample import Sampling, image_seed
from sdp.generate.source import Drawer
from sdp.storage import Storage, StorageOptions

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


@dataclass(frozen=True)
class Orders:
    """What every generator is told."""

    drawer: Drawer
    how: Sampling
    negative_prompt: str
    seed: int
    batch_size: int
    precision: str
    output: Storage
    image_files: bool
    """Each picture also as a file of its own."""
    storage: StorageOptions


@dataclass(frozen=True, slots=True)
class Task:
    """A unit, with the prompt of each of its addresses."""

    work: Work
    prompts: tuple[Prompt, ...]
    taken_down: frozenset[int] = frozenset()
    """Of its addresses those whose prompt is the caption of an image that is taken down."""


def tasks_of(
    pending: Sequence[Work], prompts: Sequence[Prompt], per_prompt: int, taken_down: frozenset[int] = frozenset()
) -> list[Task]:
    """Units with their prompts, of which those of some numbers are taken down."""
    rows = [(work, range(work.unit.start, work.unit.stop)) for work in pending]
    return [
        Task(
            work,
            tuple(prompts[row // per_prompt] for row in some),
            frozenset(row for row in some if row // per_prompt in taken_down),
        )
        for work, some in rows
    ]


class Worker:
    """One generator: its networks are loaded with its first unit."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._painter: Painter | None = None

    def make(self, task: Task, drawn: Callable[[int], None] = lambda _: None) -> PartInfo:
        """Draw a unit and publish it; `drawn` is called with the number of pictures now and then."""
        orders, unit = self._orders, task.work.unit
        rows: list[dict[str, object]] = []
        outcomes: list[Outcome] = []
        wanted: list[tuple[int, str]] = []
        for row, prompt in zip(range(unit.start, unit.stop), task.prompts, strict=True):
            if row in task.taken_down:
                outcomes.append(Outcome(row, FILTERED, "tombstone", attempts=0))
            elif prompt is None:
                outcomes.append(Outcome(row, FAILED, "no_caption", attempts=0))
            else:
                wanted.append((row, prompt))
        # Cut by the unit alone, so that a picture is drawn with the same others whoever draws it.
        for start in range(0, len(wanted), orders.batch_size):
            batch = wanted[start : start + orders.batch_size]
            seeds = [image_seed(orders.seed, row) for row, _ in batch]
            pictures = self._load().paint([prompt for _, prompt in batch], seeds)
            for (row, prompt), seed, picture in zip(batch, seeds, pictures, strict=True):
                if picture is None:
                    outcomes.append(Outcome(row, FAILED, "not_finite"))
                else:
                    rows.append(self._row(row, prompt, seed, picture))
                    outcomes.append(Outcome(row, WRITTEN))
            drawn(len(batch))
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        return write_part(orders.output, KIND, task.work, table, account_table(outcomes), layout=LAYOUT)

    def _row(self, row: int, prompt: str, seed: int, picture: Picture) -> dict[str, object]:
        orders, data = self._orders, encode_png(picture)
        if orders.image_files:  # before the part, so that a part that is there has its files
            orders.output.publish(image_name(row), data)
        return {
            "row": row,
            "prompt": prompt,
            "image": data,
            "seed": seed,
            "checkpoint": orders.drawer.uri,
            "scheduler": orders.how.scheduler,
            "steps": orders.how.steps,
            "guidance_scale": orders.how.guidance_scale,
            "negative_prompt": orders.negative_prompt,
            "width": picture.shape[1],
            "height": picture.shape[0],
            "sha256": hashlib.sha256(data).hexdigest(),
        }

    def _load(self) -> Painter:
        if self._painter is None:
            orders = self._orders
            self._painter = load_painter(
                orders.drawer,
                orders.how,
                negative_prompt=orders.negative_prompt,
                batch_size=orders.batch_size,
                precision=orders.precision,
                options=orders.storage,
            )
        return self._painter


def encode_png(picture: Picture) -> bytes:
    """A picture's PNG; the same picture gives the same bytes."""
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(picture).save(sink, "PNG")
    return sink.getvalue()
