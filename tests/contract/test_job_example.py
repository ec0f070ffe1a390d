"""The stages in docs/architecture.md run as they stand there."""

import re
from pathlib import Path
from typing import Any

from PIL import Image
from pyroaring import BitMap64

from sdp.datasets.output import Head, open_output
from sdp.encode.recipe import EncoderSettings, Recipe
from sdp.sources.pictures import Selection, open_pictures
from sdp.storage import StorageOptions, open_storage

PAGE = Path(__file__).resolve().parents[2] / "docs/architecture.md"
IMPORTS = """
from dataclasses import dataclass
import numpy as np
import pyarrow as pa
from sdp.datasets.parts import Layout
from sdp.encode.chunk import Chunk
from sdp.encode.transform import Crops, Transform
from sdp.encode.work import PieceRows, RowsSpec, WorkItem, reason_to_skip
from sdp.imaging import fit
from sdp.runners.stages import PrepareStats
"""


def test_the_stages_of_a_job_to_add_measure_good_pictures_and_account_for_the_others(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"__name__": __name__}
    exec(IMPORTS + code[1], names)
    (tmp_path / "pictures").mkdir()
    for number, grey in enumerate((40, 200, 90)):
        Image.new("RGB", (80, 70), (grey,) * 3).save(tmp_path / f"pictures/{number}.png")
    (tmp_path / "pictures/3.png").write_bytes(b"no picture")
    options = StorageOptions()
    pictures = open_pictures("source", str(tmp_path / "pictures"), options, Selection())
    output = open_output(open_storage(str(tmp_path / "out")), Head("brightness", 9, False, {}))
    output = pictures.freeze(output, None)
    spec = names["BrightnessSpec"](
        columns=pictures.columns, storage=options, output=output.storage, recipe=Recipe((64,)),
        settings=EncoderSettings(dtype="fp32", batch_sizes={64: 8}), taken_down=BitMap64([1]).serialize(),
    )  # fmt: skip
    (work,) = output.pending()
    (piece,) = pictures.planner(output, 9, options)(work)
    chunk, stats = spec.prepare((piece, None))
    rows, outcomes = spec.work(spec.load(), chunk)
    assert rows.to_pydict() == {"row": [0, 2], "brightness": [40.0, 90.0]}
    assert [(each.row, each.reason) for each in outcomes] == [(1, "tombstone"), (3, "not_an_image")]
    assert stats.items == 2
