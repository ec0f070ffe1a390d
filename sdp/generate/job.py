"""`sdp generate`: units of addresses, drawn in batches through the stages of a runner, each written as one part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sdp.config import identity
from sdp.config.generate import GenerateConfig
from sdp.console import counted, say, size, starting, table
from sdp.datasets import manifest, tombstones
from sdp.datasets.manifest import Dataset
from sdp.datasets.outcomes import FAILED, FILTERED, Outcome
from sdp.datasets.output import HEAD, Head, Output, open_output, parts_in, read_head
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Work
from sdp.generate.layout import IMAGES, KIND
from sdp.generate.prompts import FOLDER, Prompt, Prompts, freeze, frozen_prompts, read_prompts
from sdp.generate.source import GenerateModel, choose, settled
from sdp.generate.worker import Drawn, GenerateStages, Prompted, write_unit
from sdp.lease import Lease
from sdp.model.checkpoints import newer_than
from sdp.ray import cluster
from sdp.runners.blocks import Note
from sdp.runners.desk import State
from sdp.runners.progress import Tracker
from sdp.runners.units import crashed, run_units
from sdp.runners.where import runner_for
from sdp.sources.pieces import Piece
from sdp.storage import open_storage


def run(config: GenerateConfig, *, dry_run: bool = False) -> Dataset | None:
    """Draw the missing pictures; return the dataset, or None after a dry run."""
    prompts = read_prompts(config)
    config = settled(config)
    storage = open_storage(config.output.uri, config.storage.options())
    begun = read_head(storage).identity.get("checkpoint") if storage.exists(HEAD) else None
    model = choose(config, begun)
    head = Head(KIND, config.output.rows_per_file, False, _identity(config, model))
    planned = freeze(open_output(storage, head, writes=False), prompts.texts, config)
    if dry_run:
        say(table(_forecast(config, planned, model, prompts)))
        return None
    cluster.require_gpu_setting("scaling", config.scaling)
    cluster.require_reachable()
    with Lease.acquire(storage, "sdp generate") as lease:
        output = freeze(open_output(storage, head), prompts.texts, config)
        before = parts_in(output.storage)
        infos, summary = _generate(config, output, prompts, model, lease)
        base = f"{model.base} sha256:{model.base.sha256}"
        models = {"checkpoint": f"{model.uri} sha256:{model.digest}", "model": base}
        source = {"uri": config.source.uri or storage.uri_of(FOLDER.rstrip("/"))}
        dumped = config.model_dump(mode="json")
        dataset = manifest.finish(output, infos=infos, config=dumped, models=models, input=source, check=lease.confirm)
        _take_down(output, before, prompts.taken_down, config.images_per_prompt)
    say(table(_closing(dataset, summary, config.output.image_files)))
    if newer := newer_than(model.uri, config.storage.options()):
        uri = f"{config.output.uri.rstrip('/')}-{{step}}"
        say(f"generate: {newer} is newer than {model.uri}; draw with it by --set 'output.uri={uri}'")
    if dataset.manifest.counts.failed:
        dataset.require_rows("choose another output.uri")
    return dataset


def _forecast(config: GenerateConfig, output: Output, model: GenerateModel, prompts: Prompts) -> list[tuple[str, str]]:
    """Return the dry run's table: what a run would do."""
    works, pending = output.index.works(), output.pending()
    sampler, scaling = config.sampler, config.scaling
    guidance = f"guidance {sampler.guidance_scale:g}" if sampler.guidance_scale > 1 else "no guidance"
    weights = ", its moving average" if model.ema else ""
    gone = f" ({len(prompts.taken_down):,} of them taken down and not drawn)" if prompts.taken_down else ""
    return [
        ("prompts", f"{len(prompts.texts):,}{gone}, {counted(config.images_per_prompt, 'picture')} each"),
        ("drawn with", f"{model.uri}{weights} (sha256 {model.digest[:16]}…)"),
        ("model", f"{model.base} (sha256 {(model.base.sha256 or '')[:16]}…)"),
        ("sampler", f"{sampler.scheduler}, {counted(sampler.steps, 'step')}, {guidance}, {config.resolution} px"),
        ("output", f"{config.output.uri}: {len(works) - len(pending)} of {counted(len(works), 'part')} written"),
        ("to do", f"{counted(len(pending), 'part')}, {counted(sum(len(work.unit) for work in pending), 'picture')}"),
        ("generators", f"{scaling.num_workers} on {scaling.accelerator or 'any node'}"),
    ]


def _closing(dataset: Dataset, run: str, image_files: bool) -> Iterator[tuple[str, str]]:
    """Yield the closing table: the dataset's counts, this run's figures, where to look."""
    counts = dataset.manifest.counts
    yield "drawn with", dataset.manifest.models["checkpoint"].rpartition(" sha256:")[0]
    yield "written", f"{counts.written:,} of {counted(counts.input, 'picture')}, {size(dataset.manifest.size)}"
    yield from ((f"  {reason}", f"{count:,}") for reason, count in counts.reasons.items())
    yield "this run", run
    if image_files:
        yield "pictures", dataset.storage.uri_of(IMAGES.rstrip("/"))
    yield "dataset", dataset.storage.uri


def _identity(config: GenerateConfig, model: GenerateModel) -> dict[str, Any]:
    """Return the keys that decide the pictures, with the checkpoint that the URI stands for now."""
    return {
        **identity(config),
        "checkpoint": model.uri.rpartition("/")[2] if model.checkpoint else None,
        "checkpoint.digest": model.digest,
        "model.digest": model.base.sha256,
    }


def _take_down(output: Output, before: set[tuple[int, int]], taken_down: frozenset[int], per_prompt: int) -> None:
    """Take down pictures that were drawn before the image of their prompt was taken down."""
    units = [work.unit for work in output.index.works() if (work.unit.number, work.attempt) in before]
    rows = [row for unit in units for row in range(unit.start, unit.stop) if row // per_prompt in taken_down]
    if rows:
        tombstones.add(output.storage, [tombstones.Takedown("row", str(row)) for row in rows])


def _generate(
    config: GenerateConfig, output: Output, prompts: Prompts, model: GenerateModel, lease: Lease
) -> tuple[list[PartInfo], str]:
    """Write all missing parts; return them, and a summary of this run."""
    pending = output.pending()
    if not pending:
        return [], "nothing to do: all parts existed"
    say(f"generate: {len(pending)} of {counted(len(output.index.works()), 'part')} to write, with {model.uri}")
    stages, uri = GenerateStages(config, model, output.storage), config.output.uri
    frozen = frozen_prompts(output.storage, output.index)  # also those that a lower limit leaves out now
    run = _Run(config, frozen, prompts.taken_down)
    planned = [(work, run.pieces(work)) for work in pending]
    batches, isolate = sum(len(pieces) for _, pieces in planned), lease.follows_a_crash
    runner = runner_for(stages, "generate", "generator", config.scaling, uri, batches, isolate=isolate)
    total = sum(len(work.unit) for work in pending)
    with (
        starting("generate", "starting: loading the model") as run.begun,
        Tracker("generate", uri, total, "sdp_generate_images_total") as run.tracker,
    ):
        return run_units(runner, iter(planned), run, lease.check), run.tracker.summary


class _Run:
    """The `runners.units.Job` of one run: its pieces, which are batches, and its progress."""

    write = staticmethod(write_unit)
    tracker: Tracker
    begun: Callable[[], None]

    def __init__(self, config: GenerateConfig, prompts: Sequence[Prompt], taken_down: frozenset[int]) -> None:
        self._per_prompt, self._batch = config.images_per_prompt, config.scaling.batch_size
        self._prompts, self._taken_down = prompts, taken_down
        self._done = 0

    def pieces(self, work: Work) -> list[Piece]:
        """Cut a unit into batches by itself alone, so that the same pictures share a batch in every run."""
        rows = range(work.unit.start, work.unit.stop)
        drawn = [number for number, row in enumerate(rows) if isinstance(self._prompt(row), str)]
        edges = [0, *drawn[self._batch :: self._batch], len(rows)]
        return [Piece(work, 0, (), first, stop - first) for first, stop in pairwise(edges)]

    def item(self, piece: Piece) -> Prompted:
        first = piece.work.unit.start + piece.skip
        return [(row, self._prompt(row)) for row in range(first, first + piece.take)]

    def crashed(self, piece: Piece, detail: str) -> Drawn:
        self._done += piece.take
        return [], crashed([row for row, _ in self.item(piece)], detail)

    def retried(self, _: Work) -> Mapping[str, int]:
        return {}

    def receive(self, piece: Piece, _: Note) -> None:
        self.begun()
        self._done += piece.take

    def finish(self, *_: object) -> None:
        """Count nothing more."""

    def show(self, state: State) -> None:
        self.tracker.show(state, self._done)

    def _prompt(self, row: int) -> str | Outcome:
        number = row // self._per_prompt
        if number in self._taken_down:
            return Outcome(row, FILTERED, "tombstone", attempts=0)
        return self._prompts[number] or Outcome(row, FAILED, "no_caption", attempts=0)
