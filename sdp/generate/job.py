"""`sdp generate`: units of addresses, each drawn and written whole by one generator, on Ray Data.

A single generator that may run anywhere draws in this process: no cluster is started for it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sdp import telemetry
from sdp.config import GenerateConfig, identity
from sdp.console import Progress, say, table
from sdp.datasets import manifest, runs, tombstones
from sdp.datasets.manifest import Dataset
from sdp.datasets.output import HEAD, Head, Output, open_output, peek_output, read_head
from sdp.datasets.parts import PartInfo, iter_rows
from sdp.generate.layout import KIND, SHEET
from sdp.generate.prompts import FOLDER, Prompt, freeze, frozen_prompts, read_prompts, taken_down
from sdp.generate.report import Figures, closing, emit, forecast, progress_line
from sdp.generate.source import Drawer, choose
from sdp.lease import Lease
from sdp.pool import Crew
from sdp.storage import open_storage

if TYPE_CHECKING:
    from sdp.generate.worker import Orders

_STRIP = 8
"""Pictures of a prompt on the contact sheet."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run has come to."""

    dataset: Dataset | None
    """None after a dry run."""
    figures: Figures
    """Of this run."""
    sheet: str | None = None
    """Where the contact sheet is."""


def run(config: GenerateConfig, *, dry_run: bool = False) -> Summary:
    """Draw what is not drawn yet."""
    storage = open_storage(config.output.uri, config.storage.options())
    prompts, withheld = read_prompts(config), taken_down(config)
    begun = read_head(storage).identity.get("checkpoint") if storage.exists(HEAD) else None
    drawer = choose(config, begun)
    head = Head(KIND, config.output.rows_per_file, False, _identity(config, drawer))
    planned = freeze(peek_output(storage, head), prompts, config, publish=False)
    if dry_run:
        say(table(forecast(config, planned, drawer, len(prompts), len(withheld))))
        return Summary(None, Figures())
    _crew(config).require_reachable()
    with Lease.acquire(storage, "sdp generate") as lease:
        output = freeze(open_output(storage, head), prompts, config)
        noted = runs.begin("generate")
        before = output.done()
        infos, figures = _Run(config, output, _Told(prompts, withheld), drawer, lease).work_off()
        lease.check()
        dataset = manifest.finish(
            output,
            infos=infos,
            config=config.model_dump(mode="json"),
            models={
                "checkpoint": f"{drawer.uri} sha256:{drawer.digest}",
                "model": f"{drawer.model} sha256:{drawer.model.sha256}",
            },
            input={"uri": config.source.uri or storage.uri_of(FOLDER.rstrip("/"))},
        )
        _leave_out(output, before, withheld, config.images_per_prompt)
        runs.keep(storage, noted.ended(infos, workers={"generators": config.scaling.most}))
        sheet = _write_sheet(dataset, _Told(prompts, withheld), config)
    say(table(closing(dataset, figures, sheet, config.output.image_files)))
    return Summary(dataset, figures, sheet)


def _identity(config: GenerateConfig, drawer: Drawer) -> dict[str, Any]:
    """What decides the pictures: the checkpoint counts by what it has turned out to be."""
    return {
        **identity(config),
        "checkpoint": drawer.uri.rpartition("/")[2] if drawer.checkpoint else None,
        "checkpoint.digest": drawer.digest,
        "model.digest": drawer.model.sha256,
    }


@dataclass(frozen=True, slots=True)
class _Told:
    """What to draw."""

    prompts: Sequence[Prompt]
    taken_down: frozenset[int]
    """The numbers of those for which nothing is drawn any more."""


def _leave_out(output: Output, before: set[tuple[int, int]], taken_down: frozenset[int], per_prompt: int) -> None:
    """Take down what was drawn before its prompt's image was: whoever reads the pictures then leaves it out."""
    units = [work.unit for work in output.index.works() if (work.unit.number, work.attempt) in before]
    rows = [row for unit in units for row in range(unit.start, unit.stop) if row // per_prompt in taken_down]
    if rows:
        tombstones.add(output.storage, [tombstones.Takedown("row", str(row)) for row in rows])


class _Run:
    """One run over the pending works."""

    def __init__(self, config: GenerateConfig, output: Output, told: _Told, drawer: Drawer, lease: Lease) -> None:
        self._config, self._output, self._told = config, output, told
        self._drawer, self._lease = drawer, lease
        self._figures = Figures()
        self._began = time.monotonic()

    def work_off(self) -> tuple[list[PartInfo], Figures]:
        """Make all parts that are missing."""
        pending = self._output.pending()
        if not pending:
            return [], self._figures
        works = len(self._output.index.works())
        say(f"generate: {len(pending)} of {works} parts to make, with {self._drawer.uri}")
        from sdp.generate.worker import Worker, tasks_of  # brings torch

        known = [*self._told.prompts, *self._held_back()]
        tasks = tasks_of(pending, known, self._config.images_per_prompt, self._told.taken_down)
        self._figures.total = sum(len(work.unit) for work in pending)
        crew = _crew(self._config)
        crew.join()
        self._telemetry = telemetry.begin(self._config.output.uri)
        with Progress("generate") as progress:
            self._progress, infos = progress, list[PartInfo]()
            for info in crew.work_off(partial(Worker, self._orders()), tasks, self._drawn):
                infos.append(info)
                self._figures.parts += 1
                self._drawn(sum(len(each.unit) for each in infos) - self._figures.done)
        return infos, self._figures

    def _held_back(self) -> list[Prompt]:
        """Prompts that a lower limit leaves out, and that have addresses from before."""
        return frozen_prompts(self._output.storage, self._output.index)[len(self._told.prompts) :]

    def _orders(self) -> "Orders":
        from sdp.generate.sample import Sampling
        from sdp.generate.worker import Orders

        config = self._config
        sampler = config.sampler
        return Orders(
            drawer=self._drawer,
            how=Sampling(sampler.scheduler, sampler.steps, sampler.guidance_scale, config.resolution),
            negative_prompt=sampler.negative_prompt,
            seed=config.seed,
            batch_size=config.scaling.batch_size,
            precision=config.precision,
            output=self._output.storage,
            image_files=config.output.image_files,
            storage=config.storage.options(),
        )

    def _drawn(self, pictures: int) -> None:
        self._lease.check()
        self._figures.done += pictures
        self._show()

    def _show(self) -> None:
        self._figures.elapsed_s = time.monotonic() - self._began
        self._progress.update(progress_line(self._figures))
        emit(self._telemetry, self._figures)


def _crew(config: GenerateConfig) -> Crew:
    return Crew("generate", "generators", config.scaling, config.output.uri)


def _write_sheet(dataset: Dataset, told: _Told, config: GenerateConfig) -> str | None:
    """The first prompts' pictures on one sheet, written anew by every run."""
    per_prompt, shown = config.images_per_prompt, min(config.output.sheet_prompts, len(told.prompts))
    if not shown:
        return None
    from sdp.generate.sheet import Strip, contact_sheet

    seen = [p for p in range(shown) if p not in told.taken_down]
    wanted = {p * per_prompt + k for p in seen for k in range(min(per_prompt, _STRIP))}
    pictures = _pictures(dataset, wanted)
    strips = [
        Strip(_caption(told, p), [pictures.get(p * per_prompt + k) for k in range(min(per_prompt, _STRIP))])
        for p in range(shown)
    ]
    dataset.storage.publish(SHEET, contact_sheet(strips, side=max(128, min(256, config.resolution))))
    return dataset.storage.uri_of(SHEET)


def _caption(told: _Told, number: int) -> str:
    return "(taken down)" if number in told.taken_down else told.prompts[number] or "(no caption)"


def _pictures(dataset: Dataset, wanted: set[int]) -> dict[int, bytes]:
    """The pictures of some addresses."""
    found: dict[int, bytes] = {}
    columns = (dataset.parts[name].to_pylist() for name in ("path", "start", "stop"))
    for path, start, stop in zip(*columns, strict=True):
        if wanted.isdisjoint(range(start, stop)):
            continue
        for batch in iter_rows(dataset.storage, path, ["row", "image"], 64):
            rows = zip(batch["row"].to_pylist(), batch["image"].to_pylist(), strict=True)
            found |= {row: image for row, image in rows if row in wanted}
    return found
