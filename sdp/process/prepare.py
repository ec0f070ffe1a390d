"""Checks and decisions before anything costly begins: source, model, output, and the units left to do."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pyroaring import BitMap64

from sdp.config import identity
from sdp.config.caption import CaptionConfig
from sdp.config.process import ProcessConfig
from sdp.config.score import ScoreConfig
from sdp.console import rerun, say
from sdp.datasets import tombstones
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.output import Head, Output, open_output
from sdp.datasets.parts import failed_before
from sdp.datasets.scores import scores_of
from sdp.datasets.source import order_retry
from sdp.datasets.tombstones import Takedown
from sdp.datasets.units import Addresses, Work
from sdp.encode.recipe import EncoderSettings, Recipe
from sdp.encode.table import RowShape, bytes_per_row
from sdp.encode.work import EncodeSpec, RowsSpec
from sdp.errors import UserError
from sdp.families import read_latent_space, refuse_sides
from sdp.model import sources
from sdp.sources.changes import changes_of, superseded
from sdp.sources.joined import contents_of
from sdp.sources.pictures import Pictures, open_section
from sdp.sources.reading import stem_of
from sdp.storage import open_storage

PART_BYTES = 256_000_000
"""Size of a part where output.rows_per_file is null: few enough objects for two billion images, and read in ranges."""
_PIECE_BYTES = 1024 * 3 * 256 * 256
"""Most bytes of pixels in a piece, about 200 MB: a piece costs the driver some 11 ms, however large it is."""
_PIECE_ROWS = 256
"""Most rows of a piece at lower resolutions, where the transform of 256 rows takes about a second of a core."""


AnyConfig = ProcessConfig | ScoreConfig | CaptionConfig
Config = TypeVar("Config", bound=AnyConfig, covariant=True)
Spec = TypeVar("Spec", bound=RowsSpec, covariant=True)


@dataclass(frozen=True)
class Prepared(Generic[Config, Spec]):
    """A checked job."""

    config: Config
    spec: Spec
    pictures: Pictures
    head: Head
    models: Mapping[str, str]
    """Model sources by role, with the digest of their content."""

    @property
    def piece_rows(self) -> int:
        """The number of rows in a piece; it depends on the recipe alone, so that every run cuts a unit the same way."""
        resolutions = self.spec.recipe.resolutions
        fits = _PIECE_BYTES // sum(3 * side * side for side in resolutions)
        return 1 << max(1, fits if max(resolutions) >= 256 else min(fits, _PIECE_ROWS)).bit_length() - 1

    def images_of(self, rows: int) -> int:
        """Estimate the images among this many addresses: rows that failed upstream have none."""
        upstream = self.pictures.dataset
        share = upstream.manifest.counts.written / max(1, upstream.rows) if upstream else 1.0
        return round(rows * share)


def prepare(config: ProcessConfig) -> Prepared[ProcessConfig, EncodeSpec]:
    """Check everything that is cheap to check. Writes nothing."""
    options = config.storage.options()
    output = open_storage(config.output.uri, options)
    needed = ("vae", "tokenizer", "text_encoder") if config.encode.text == "text_embedding" else ("vae", "tokenizer")
    source = sources.check(config.model.source, needed, storage=options)
    encode = config.encode
    pictures = open_section(config.source, options, required=True, scores=scores_of(config.filters))
    model = sources.resolve(source, storage=options)
    shape, batch_sizes = _shape(config, model), encode.batch_sizes(config.resolutions)
    spec = EncodeSpec(
        model=replace(source, sha256=model.digest),
        recipe=Recipe(tuple(config.resolutions), config.transform.crop, config.seed),
        settings=EncoderSettings(config.seed, encode.latents, encode.dtype, batch_sizes, encode.compile),
        shape=shape,
        columns=pictures.columns,
        storage=options,
        output=output,
        foreign=pictures.dataset is None,
    )
    unit_rows = config.output.rows_per_file or _unit_rows(shape, pictures.dataset)
    identifying = {"filters": identity(config)["filters"] or None, "model.digest": model.digest}
    head = head_of(config, EncodeSpec.kind, unit_rows, pictures, identifying)
    models = {"encoder": f"{config.model.source} sha256:{model.digest}"}
    return Prepared(config, spec, pictures, head, models)


def head_of(config: AnyConfig, kind: str, unit_rows: int, pictures: Pictures, identifying: Mapping[str, Any]) -> Head:
    """Return the identity of an output, in which these keys take the place of the configuration's own."""
    # A higher limit extends the same dataset, and a table may move.
    own = {path: value for path, value in identity(config).items() if path != "limit"}
    tables = contents_of(pictures.columns.tables) or None
    return Head(kind, unit_rows, pictures.dataset is not None, {**own, "source.tables": tables, **identifying})


def begin(prepared: Prepared[Config, Spec], *, only_failed: bool, changed: bool = False, write: bool = True) -> Output:
    """Open the output and assign addresses to the source's new rows; without `write`, only in memory.

    With `changed`, so do pictures of a folder that have changed, or their captions; say so otherwise.
    """
    output = open_output(prepared.spec.output, prepared.head, writes=write)
    if only_failed:
        dataset = open_dataset(prepared.spec.output, prepared.head.kind)
        return order_retry(output, dataset, prepared.pictures.files)
    pictures, limit = prepared.pictures, prepared.config.limit
    if changed:
        _refuse_changed(prepared)
    if pictures.kind != "pictures" or not isinstance(prepared.config, ProcessConfig):
        return pictures.freeze(output, limit)
    taken_down = tombstones.load(output.storage).rows
    changes = changes_of(output, pictures, taken_down)
    if changed:
        say(f"process: {changes}" if str(changes) else "process: no picture or caption has changed")
    elif str(changes):
        say(f"{changes}; {rerun('process', '--changed')} does these rows again, and takes down what is gone")
        waiting = {stem_of(uri) for uri in changes.captioned}  # listed once their pictures are done
        pictures = replace(pictures, texts=tuple(t for t in pictures.texts if stem_of(t.uri) not in waiting))
    output = pictures.freeze(output, limit, changes.renewed if changed else ())
    if changed and changes.captioned:
        dataset = open_dataset(output.storage, prepared.head.kind)
        output = order_retry(output, dataset, pictures.files)
    # A run that was interrupted here may have left superseded rows that are not taken down.
    rows = (superseded(output.index) | BitMap64(changes.gone_rows if changed else ())) - taken_down
    if rows and write:
        tombstones.add(output.storage, [Takedown("row", str(row)) for row in rows])
    return output


def _refuse_changed(prepared: Prepared[AnyConfig, RowsSpec]) -> None:
    """Refuse --changed where rows cannot get further addresses."""
    source, by = prepared.pictures, [table.by for table in prepared.pictures.columns.tables]
    if source.kind != "pictures":
        raise UserError(f"process: --changed: expected a folder of pictures, got {source.uri}; choose a new output.uri")
    if prepared.config.limit is not None:
        raise UserError(f"process: --changed: expected limit null, got {prepared.config.limit}; remove it")
    if "row" in by:
        raise UserError("process: --changed: a table of source.tables is joined by row; choose a new output.uri")


def with_tombstones(prepared: Prepared[Config, Spec]) -> Spec:
    """Return the workers' settings with the source's and the output's current takedowns."""
    upstream = prepared.pictures.dataset
    folders = [prepared.spec.output, *([upstream.storage] if upstream else [])]
    rows = BitMap64.union(*(tombstones.load(folder).rows for folder in folders))
    repeated = upstream.repeated_rows if upstream else None
    return replace(prepared.spec, taken_down=rows.serialize(), repeated=repeated)


@dataclass(frozen=True)
class Retry:
    """The rows that another attempt at a unit retries."""

    rows: Addresses
    reasons: dict[str, int]
    """Their earlier failures by reason, recorded in the part that supersedes them."""


def retry_of(output: Output, work: Work) -> Retry | None:
    """Return the rows that failed here, for a retry; None for a first attempt, and for rows that upstream retried."""
    if not work.attempt:
        return None
    version = next(v for v in output.index.versions if v.attempt == work.attempt)
    if version.files.num_rows and output.head.derived:  # else they are files that were replaced
        return None
    return Retry(*failed_before(output.storage, work))


def _shape(config: ProcessConfig, model: sources.LocalModel) -> RowShape:
    space = read_latent_space(model.path, config.model.source)
    if config.encode.latents == "moments" and not space.drawn:
        raise UserError(f"encode.latents: expected sample, since the VAE of {config.model.source} has no moments")
    buckets = config.transform.crop == "buckets"
    refuse_sides("resolutions", model.path, config.resolutions, buckets=buckets)
    text = model.family.text(model.path, embedded=config.encode.text == "text_embedding")
    return RowShape(tuple(config.resolutions), space, config.encode.latents, text, buckets)


def _unit_rows(shape: RowShape, upstream: Dataset | None) -> int:
    """Return the rows of a part of about the target size; whole units of upstream if it holds any."""
    rows = max(1, PART_BYTES // bytes_per_row(shape))
    upstream_rows = upstream.head.unit_rows if upstream else 1
    return rows - rows % upstream_rows if rows > upstream_rows else rows
