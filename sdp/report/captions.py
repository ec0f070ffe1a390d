"""Pictures beside their captions, old and new, read from the source of a captions dataset."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

import numpy as np

from sdp.config import parse
from sdp.config.caption import RESERVED, CaptionConfig
from sdp.datasets.inspect import Description
from sdp.datasets.parts import PartInfo, iter_rows
from sdp.errors import SdpError
from sdp.imaging import RowError, fit
from sdp.report.page import Block, Gallery, Tile, listing
from sdp.sandbox import child
from sdp.sandbox.decoders import Sandbox
from sdp.sources.pictures import open_section
from sdp.sources.pieces import Piece
from sdp.sources.reading import Columns, SourceRow, read_piece

_EDGE = 512
_PIECE = 32
"""Rows that are read at once."""


def captioned(dataset: Description, parts: Sequence[PartInfo], pictures: int) -> Block:
    """Return some pictures with their old and new captions, without those taken down."""
    if dataset.dataset is None or dataset.taken_down is None:
        return listing("Captions", ["not shown before the dataset is complete"])
    config, gone, tiles = parse("caption", dataset.dataset.manifest.config), dataset.taken_down.rows, list[Tile]()
    assert isinstance(config, CaptionConfig)
    sandbox, options = Sandbox(partial(child.pixels, min_side=_EDGE)), config.storage.options()
    try:
        source = open_section(config.source, options)
        planner = source.planner(dataset.output, _PIECE, options)
        for number, part in enumerate(parts, 1):
            batches = iter_rows(dataset.output.storage, part.path, None, _PIECE)
            usable = (row for batch in batches for row in batch.to_pylist() if row["row"] not in gone)
            new = {row["row"]: row for row in islice(usable, pictures * number // len(parts) - len(tiles))}
            for row in _first_rows(planner(part.work) if new else (), [*new], source.columns, config):
                texts = [str(text) for name, text in new[row.row].items() if name not in RESERVED]
                with suppress(RowError):
                    picture = _thumbnail(sandbox, row.image or b"")
                    tiles.append(Tile(picture, " · ".join(texts), f"row {row.row}, was: {row.caption or 'no caption'}"))
    except SdpError as error:  # the source has moved, perhaps
        return listing("Captions", [f"not shown: {error}"])
    return Gallery("New captions, above the old", [("", tiles)])


def _first_rows(
    pieces: Iterable[Piece], rows: Sequence[int], columns: Columns, config: CaptionConfig
) -> Iterator[SourceRow]:
    """Yield the source's rows with these addresses, which are among the first of some pieces."""
    options, left = config.storage.options(), set(rows)
    for piece in pieces:
        for row in read_piece(piece, columns, options=options, only=np.array(rows), seed=config.seed):
            left.discard(row.row)
            yield row
        if not left:
            return


def _thumbnail(sandbox: Sandbox, data: bytes | memoryview) -> bytes:
    """Return a picture from an unknown source as a small JPEG."""
    import simplejpeg

    pixels = fit(child.unpacked(*sandbox(data)), _EDGE)
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), 85))
