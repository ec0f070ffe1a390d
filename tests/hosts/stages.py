"""The inputs and configurations of the jobs that run on hosts, and what their outputs have in common."""

import hashlib
from pathlib import Path
from typing import Any

from sdp.datasets.manifest import open_dataset
from sdp.dreambooth.template import fill
from sdp.storage import Storage
from tests.process_kit import make_images, picture

ROWS, UNIT, SIDE = 256, 64, 128
PIXELS = ROWS * SIDE * SIDE * 3
"""Bytes of all crops."""
MOMENTS = ROWS * (SIDE // 8) ** 2 * 2 * 4 * 2
"""Bytes of the mean and deviation of all latents, in fp16: what online training sends."""
EMBEDDINGS = ROWS * 77 * 64 * 2
"""Bytes of all captions' embeddings by the tiny model, in fp16."""


def write_images(root: Path) -> None:
    """Write an images dataset, whose row groups are large enough that their latents stay on the host that made them.

    Ray sends results of less than 100 kB to the driver's host.
    """
    make_images(root, ROWS, UNIT, lambda _: False, lambda row: picture(row, SIDE + 32, SIDE + 32), group_rows=UNIT)


def process(source: str, output: str) -> dict[str, Any]:
    """Return the configuration of a process job."""
    return _filled("process", source, output)


def online(source: str, output: str) -> dict[str, Any]:
    """Return the configuration of a training that encodes while it trains, over one epoch."""
    return _filled("online", source, output)


def _filled(job: str, source: str, output: str) -> dict[str, Any]:
    configs = fill(Path(__file__).with_suffix(".yaml"), {"source": source, "output": output})
    config: dict[str, Any] = configs[job]
    return config


def parts(storage: Storage) -> dict[str, str]:
    """Return the digests of a complete dataset's parts, by name."""
    dataset = open_dataset(storage)
    counts = dataset.manifest.counts
    assert (counts.input, counts.written) == (ROWS, ROWS)
    digests = {file.path: hashlib.sha256(storage.read(file.path)).hexdigest() for file in storage.list("parts/")}
    assert sorted(digests) == sorted(dataset.parts["path"].to_pylist())
    return digests
