"""The CPU's half of encoding: image bytes to uint8 crops, captions to token ids.

Pixels leave this step as uint8, a quarter of their size as float32; the device normalises them. A row that cannot be
used travels on as an outcome with its reason.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdp.datasets.draws import place
from sdp.datasets.outcomes import FAILED, FILTERED, Outcome
from sdp.encode.chunk import Chunk, ShapeGroup
from sdp.encode.recipe import Recipe
from sdp.errors import SdpError
from sdp.families.tokenizer import tokenize, tokens_of
from sdp.imaging import Box, Image, OnHeader, Pixels, RowError, centre_box, cut, decode, placed_box, read_header, shrink
from sdp.sandbox.decoders import Sandbox
from sdp.sources.reading import SourceRow

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Crops = tuple[int, dict[int, Pixels]]
"""An image's bucket, and its crops by resolution."""

_ROW_BYTES = 8


def bucket_shapes(resolution: int) -> list[tuple[int, int]]:
    """Return the shapes (width, height) of crops that keep their aspect: whole eighths, of about the square's area.

    >>> bucket_shapes(512)[0], bucket_shapes(512)[4]
    ((256, 1024), (512, 512))
    """
    tallest = {(wide, 64 // wide) for wide in range(4, 17) if 64 // wide >= 4}
    eighths = sorted({(max(w for w, h in tallest if h == tall), tall) for _, tall in tallest})
    step = resolution // 8
    return [(wide * step, tall * step) for wide, tall in eighths]


def choose_bucket(width: int, height: int) -> int:
    """Return the number of the shape whose aspect is nearest to an image's."""
    aspects = np.array([wide / tall for wide, tall in bucket_shapes(64)])
    return int(np.argmin(np.abs(np.log(aspects) - math.log(width / height))))


def crop_image(data: bytes | memoryview, recipe: Recipe, row: int, on_header: OnHeader = lambda _: None) -> Crops:
    """Return an image's crops, all from one decode."""
    header = read_header(data)
    on_header(header)
    width, height = header.width, header.height
    bucket = choose_bucket(width, height) if recipe.crop == "buckets" else 0
    shapes = _shapes(recipe, bucket)
    largest = max(recipe.resolutions)
    aspect = shapes[largest][0] / shapes[largest][1]
    enlarged = shapes[largest][0] / centre_box(width, height, aspect).width
    if enlarged > recipe.max_upscale:
        raise RowError("too_small", f"{width} × {height} pixels would be enlarged {enlarged:.1f} times")
    needed = math.ceil(min(width, height) * min(1.0, enlarged))
    image = decode(data, min_side=needed, header=header)
    if recipe.crop == "random":
        box = placed_box(width, height, *place(recipe.seed, row), aspect)
    else:
        box = centre_box(width, height, aspect)
    return bucket, _crops(image, box, shapes)


class SandboxedCrops:
    """Crops of images from unknown sources, made by decoders that have no files, network or secrets."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._sandbox = recipe, Sandbox(partial(_crop_in_sandbox, recipe))

    def __call__(self, data: bytes | memoryview, row: int) -> Crops:
        """Return the same crops as `crop_image`."""
        reply, pixels = self._sandbox(row.to_bytes(_ROW_BYTES, "little"), data)
        crops, at = {}, 0
        for side, (wide, tall) in _shapes(self._recipe, reply["bucket"]).items():
            crops[side] = np.frombuffer(pixels, np.uint8, tall * wide * 3, at).reshape(tall, wide, 3)
            at += crops[side].nbytes
        return reply["bucket"], crops


def _crop_in_sandbox(recipe: Recipe, data: memoryview, on_header: OnHeader) -> tuple[dict[str, Any], bytes]:
    """Make the crops of an image; the data begins with its row's number."""
    bucket, crops = crop_image(data[_ROW_BYTES:], recipe, int.from_bytes(data[:_ROW_BYTES], "little"), on_header)
    return {"bucket": bucket}, b"".join(crops[side].tobytes() for side in recipe.resolutions)


def _shapes(recipe: Recipe, bucket: int) -> dict[int, tuple[int, int]]:
    """Return the (width, height) of crops by resolution."""
    if recipe.crop != "buckets":
        return {side: (side, side) for side in recipe.resolutions}
    return {side: bucket_shapes(side)[bucket] for side in recipe.resolutions}


def _crops(image: Image, box: Box, shapes: dict[int, tuple[int, int]]) -> dict[int, Pixels]:
    """Cut the largest crop from the image, and shrink it to the others."""
    sides = sorted(shapes, reverse=True)
    first = cut(image, box, *shapes[sides[0]])
    return {sides[0]: first} | {side: shrink(first, *shapes[side]) for side in sides[1:]}


@dataclass(frozen=True, slots=True)
class Transform:
    """The step from source rows to a chunk."""

    recipe: Recipe
    tokenizer: "Tokenizer | None"
    """None for a chunk without tokens."""
    reason_to_skip: Callable[[int], str | None] = lambda _: None
    """Returns the reason to leave an address out, if there is one."""
    crop: Callable[[bytes | memoryview, int], Crops] | None = None
    """Makes an image's crops; None for `crop_image`, which decodes in this process."""
    captioned: bool = True
    """True if a row without a caption fails; False if it has zeros for tokens."""

    def __call__(self, source: Iterable[SourceRow]) -> Chunk:
        outcomes: list[Outcome] = []
        items: list[_Item] = []
        for row in source:
            if reason := self.reason_to_skip(row.row) or row.filtered:
                outcomes.append(Outcome(row.row, FILTERED, reason))
                continue
            try:
                items.append(self._item(row))
            except RowError as error:
                outcomes.append(Outcome(row.row, FAILED, error.reason, error.detail))
            except SdpError:  # its decoder does not start, which is not the row's fault
                raise
            except Exception as error:  # noqa: BLE001 (recorded: one bad row must not fail the others)
                outcomes.append(Outcome(row.row, FAILED, "internal", f"{type(error).__name__}: {error}"))
        return Chunk(
            rows=np.array([item.row for item in items], np.int64),
            keys=[item.key for item in items],
            tokens=self._tokens([item.caption for item in items]),
            buckets=np.array([item.bucket for item in items], np.int16),
            captions=[item.caption for item in items if self.tokenizer is None],
            crops={side: _grouped(items, side) for side in self.recipe.resolutions},
            outcomes=outcomes,
        )

    def _tokens(self, captions: list[str]) -> NDArray[np.uint32]:
        if self.tokenizer is None:
            return np.zeros((len(captions), 0), np.uint32)
        tokens = np.zeros((len(captions), tokens_of(self.tokenizer)), np.uint32)
        present = [number for number, caption in enumerate(captions) if caption.strip()]
        if present:
            tokens[present] = tokenize(self.tokenizer, [captions[number] for number in present])
        return tokens

    def _item(self, source: SourceRow) -> "_Item":
        if source.image is None:
            raise RowError("empty", "the row has no image")
        caption = source.caption or ""
        if self.captioned and not caption.strip():
            raise RowError("no_caption", "")
        if self.crop is None:
            bucket, crop = crop_image(source.image, self.recipe, source.row)
        else:
            bucket, crop = self.crop(source.image, source.row)
        # The item leaves out the image's bytes, which would keep their whole row group in memory.
        return _Item(source.row, source.key, caption, bucket, crop)


@dataclass(frozen=True, slots=True)
class _Item:
    row: int
    key: str
    caption: str
    bucket: int
    crop: dict[int, Pixels]


def _grouped(items: Sequence[_Item], side: int) -> list[ShapeGroup]:
    """Stack crops of one shape in one array, which crosses the object store without copies."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for number, item in enumerate(items):
        by_shape.setdefault(item.crop[side].shape, []).append(number)
    return [
        ShapeGroup(np.array(positions, np.int64), np.stack([items[n].crop[side] for n in positions]))
        for _, positions in sorted(by_shape.items())
    ]
