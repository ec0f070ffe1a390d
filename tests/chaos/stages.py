"""The stages that are disturbed: their configurations, and what a disturbed one must have in common with another."""

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from sdp.datasets.manifest import open_dataset
from sdp.dreambooth.template import fill
from sdp.model.checkpoints import find_checkpoint, read_ledger, read_marker
from sdp.model.sharded import read_tensors
from sdp.model.tensor_index import read_tensor_index
from sdp.storage import open_storage

IMAGES, STEPS = 160, 24
_TIMES_AND_PLACES = re.compile(r"(_run|metrics|events|stacks|history|samples)\b|(^|/)_lease")
"""Names of files that each attempt writes again: histories, metrics, leases."""


@dataclass(frozen=True)
class Stage:
    """A job that reads the reference's inputs and writes to an output of its own."""

    name: str
    job: str
    config: Mapping[str, Any]
    reads: Sequence[str] = ()
    """The stages whose references it needs, directly or not."""

    def write(self, folder: Path, output: str) -> Path:
        """Write the configuration for an output, and return the file."""
        file = folder / f"{self.name}.yaml"
        file.write_text(self.text(output))
        return file

    def text(self, output: str) -> str:
        return yaml.safe_dump({**self.config, "output": {**self.config["output"], "uri": output}})


def stages(root: str) -> dict[str, Stage]:
    """Return the stages, in an order in which each finds its inputs below `root`."""
    described = fill(Path(__file__).with_suffix(".yaml"), {"root": root})
    return {name: Stage(name=name, **stage) for name, stage in described.items()}


def fingerprint(stage: Stage, output: str) -> dict[str, Any]:
    """Return all that must not depend on what was killed: bytes of parts, accounts, weights, rows trained on."""
    storage = open_storage(output)
    if stage.job != "train":
        dataset = open_dataset(storage)
        counts = dataset.manifest.counts
        assert counts.input == counts.written + counts.filtered + counts.failed
        parts = {file.path: hashlib.sha256(storage.read(file.path)).hexdigest() for file in storage.list("parts/")}
        listed = sorted(dataset.parts["path"].to_pylist())
        assert listed == sorted(parts), "the manifest lists other parts than there are"
        for path in listed:
            pq.ParquetFile(io.BytesIO(storage.read(path))).read()
        return {"counts": {**asdict(counts), "reasons": dict(counts.reasons)}, "parts": parts}
    checkpoint = find_checkpoint(output)
    marker, ledger = read_marker(checkpoint), read_ledger(checkpoint)
    tensors = read_tensors(checkpoint, sorted(read_tensor_index(checkpoint).tensors))
    return {
        "step": marker["state"]["step"],
        "rows": {epoch: list(ledger.rows(epoch)) for epoch in ledger.epochs()},
        "tensors": {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()},
    }


def names(output: str) -> set[str]:
    """Return the names in an output, except those that each attempt writes again."""
    storage = open_storage(output)
    return {file.path for file in storage.list("") if not _TIMES_AND_PLACES.search(file.path)}
