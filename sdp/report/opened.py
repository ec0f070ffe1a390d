"""`import sdp`: what lies at a URI and what the jobs do, for Python and notebooks."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sdp.config import JOBS, parse, read
from sdp.config.load import Source
from sdp.console import either
from sdp.datasets import tombstones
from sdp.datasets.inspect import accounts, with_names
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.outcomes import FAILED
from sdp.datasets.output import read_json
from sdp.datasets.parts import iter_rows
from sdp.errors import DatasetError, UserError
from sdp.evaluate.layout import RESULT
from sdp.report.page import Gallery, text_of
from sdp.report.sections import SubjectKind, describe, identify, phases_of
from sdp.storage import Storage, StorageOptions, open_source, open_storage
from sdp.train.run_folder import RunFolder

if TYPE_CHECKING:
    from PIL.Image import Image

_FIGURES = ("clip", "fid", "kid", "similarity")


@dataclass(frozen=True, slots=True)
class Opened:
    """A dataset, a run, a checkpoint or an evaluation; printed, it is the text of `sdp inspect`.

    A method that its kind does not have raises UserError.
    """

    kind: SubjectKind
    storage: Storage

    @property
    def uri(self) -> str:
        return self.storage.uri

    @property
    def facts(self) -> dict[str, Any]:
        """The description that `sdp inspect --json` prints; for a run of two phases, the second one's."""
        return describe(self.storage)[-1].to_json()

    def __str__(self) -> str:
        return "\n\n".join(map(text_of, describe(self.storage)))

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of a dataset that count, neither taken down nor repeats, with `row` and these columns."""
        for batch in self._batches(columns):
            yield from batch.to_pylist()

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a dataset that count, in memory."""
        batches = list(self._batches(columns))
        return pa.Table.from_batches(batches) if batches else pa.table({})

    def failures(self) -> pa.Table:
        """Return a dataset's rows that failed: `row`, `reason`, `detail`, `attempts`, and the `name` in the source."""
        self._require("failures", "dataset")
        problems: list[str] = []
        failed = (table.filter(pc.field("outcome") == FAILED) for table in accounts(self.storage, problems))
        tables = list(with_names(self.storage, failed))
        if problems:
            raise DatasetError(problems[0])
        return pa.concat_tables(tables).drop_columns(["outcome"]) if tables else pa.table({})

    def metrics(self) -> pa.Table:
        """Return a run's metrics, a row for each line, or an evaluation's figures in one row."""
        self._require("metrics", "run", "evaluation")
        if self.kind == "evaluation":
            lines = [{name: value for name, value in read_json(self.storage, RESULT).items() if name in _FIGURES}]
        else:
            lines = [line for phase in phases_of(self.storage) or [self.storage] for line in RunFolder(phase).metrics()]
        return pa.Table.from_struct_array(pa.array(lines)).flatten() if lines else pa.table({})

    def pictures(self, limit: int = 48) -> "list[Image]":
        """Return the pictures that `sdp report` shows; `info["caption"]` is what one shows, or its prompt."""
        self._require("pictures", "dataset", "run")
        blocks = (block for section in describe(self.storage, pictures=limit) for block in section.blocks)
        tiles = (tile for block in blocks if isinstance(block, Gallery) for _, row in block.rows for tile in row)
        return [_image(tile.data, tile.caption) for tile in tiles][:limit]

    def draw(self, *prompts: str, n: int = 1, **settings: Any) -> "list[Image]":
        """Draw `n` pictures of each prompt as `sdp generate RUN PROMPT` does, which also keeps them in files.

        `settings` are those of generate.yaml, such as `resolution=64` or `sampler={"steps": 20}`.
        """
        self._require("draw", "run", "checkpoint")
        _import_diffusers()
        from sdp.generate.draw import draw

        with_prompts = zip(draw(self.uri, prompts, n, settings), np.repeat(prompts, n), strict=True)
        return [_image(open_source(uri).read(), prompt) for uri, prompt in with_prompts]

    def _require(self, method: str, *kinds: SubjectKind) -> None:
        if self.kind not in kinds:
            raise UserError(f"{method}: expected a {either(kinds)}, got the {self.kind} {self.uri}; open another URI")

    def _batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        self._require("rows", "dataset")
        dataset = open_dataset(self.storage)
        if unknown := set(columns or ()) - dataset.manifest.schema.keys():
            raise UserError(f"columns: expected some of {', '.join(dataset.manifest.schema)}, got {min(unknown)!r}")
        gone, repeats = tombstones.load(self.storage), dataset.repeated_rows
        read = None if columns is None else [*dict.fromkeys(("row", *columns))]
        for path in dataset.parts["path"].to_pylist():
            for batch in iter_rows(self.storage, path, read, 256):
                left_out = np.asarray(gone.mask(batch["row"].to_pylist()), bool)
                left_out |= False if repeats is None else repeats.mask(np.asarray(batch["row"]))
                yield batch.filter(pa.array(~left_out))


def open_uri(uri: str, options: StorageOptions | None = None) -> Opened:
    """Return what lies at a URI; see `sdp.open`."""
    return Opened(*identify(open_storage(uri, options)))


def run(job: str, config: str | Mapping[str, Any]) -> Opened:
    """Run a job and return its output; see `sdp.run`."""
    if job not in JOBS:
        raise UserError(f"run: expected {either([*JOBS])}, got {job!r}; name a job")
    source = read(config) if isinstance(config, str) else Source(dict(config))
    with source.placed():
        parsed: Any = parse(job, source.data)
        if job != "download":
            _import_diffusers()
        result = import_module(f"sdp.{job}.job").run(parsed)
    uri = result.storage.uri if isinstance(result, Dataset) else parsed.output.uri  # it may have had {step}
    return open_uri(f"{uri}/run" if job == "dreambooth" else uri, parsed.storage.options())


def _import_diffusers() -> None:
    """Import diffusers whole: networks that are loaded without it leave its pipelines unusable in this process."""
    if find_spec("diffusers"):
        import_module("diffusers")


def _image(data: bytes, caption: str) -> "Image":
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    image.info["caption"] = caption
    return image
