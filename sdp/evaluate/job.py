"""`sdp evaluate`: first features of the pictures, a part for each unit; then all figures, anew each time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sdp import telemetry
from sdp.config import EvaluateConfig
from sdp.console import Progress, say, table
from sdp.datasets import manifest
from sdp.datasets.manifest import Dataset
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.errors import DatasetError
from sdp.evaluate.layout import GENERATED, REFERENCE, RESULT
from sdp.evaluate.loss import LossFound, LossOrders, LossWorker
from sdp.evaluate.prepare import Plan, Side, pinned, prepare
from sdp.evaluate.report import Figures, closing, emit, forecast, progress_line
from sdp.evaluate.result import Looked, clip_score, distances, loss_figures, notes, similarity, to_bytes
from sdp.lease import Lease
from sdp.pool import Crew
from sdp.storage import open_storage

if TYPE_CHECKING:
    from sdp.evaluate.worker import Orders, Task

_PIECE_ROWS = 256
"""Pictures that are read one after another."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run has come to."""

    figures: dict[str, Any]
    """As in evaluation.json; nothing after a dry run."""
    looked: int = 0
    """Pictures that this run had to look at."""


def run(config: EvaluateConfig, *, dry_run: bool = False) -> Summary:
    """Look at what has not been looked at yet, and work the figures out."""
    plan = prepare(config)
    if dry_run:
        say(table(forecast(plan)))
        return Summary({})
    storage = open_storage(config.output.uri, config.storage.options())
    _crew(config).require_reachable()
    with Lease.acquire(storage, "sdp evaluate") as lease:
        counts = Figures()
        looked = _Looking(plan, lease, counts).at(plan.sides)
        if plan.made is not None:
            looked[REFERENCE] = Looked(plan.made)
        figures = _figures(plan, looked)
        lease.check()
        storage.publish(RESULT, to_bytes(figures, config))
    say(table(closing(figures, notes(figures, config), storage.uri_of(RESULT))))
    return Summary(figures, counts.done)


def _figures(plan: Plan, looked: dict[str, Looked]) -> dict[str, Any]:
    config = plan.config
    figures: dict[str, Any] = {name: _told(side) for name, side in looked.items()}
    if plan.clip is not None:
        figures["clip"] = {"model": pinned(plan.clip), **clip_score(looked[GENERATED])}
    if plan.features is not None:
        figures["features"] = {"model": pinned(plan.features), "kind": plan.features.kind}
        if plan.features.kind == "inception":
            figures["features"]["resize"] = config.features.resize
        say("evaluate: comparing the features")
        figures |= distances(looked[GENERATED], looked[REFERENCE], config)
        if plan.features.kind != "inception":
            figures["similarity"] = similarity(looked[GENERATED], looked[REFERENCE])
    if plan.loss is not None:
        say(f"evaluate: the loss of {plan.loss.checkpoint.uri} on {plan.loss.dataset}")
        figures["loss"] = loss_figures(plan.loss, _measured(config, plan.loss))
    return figures


def _told(looked: Looked) -> dict[str, Any]:
    """What a result says of a set."""
    source = (looked.dataset.manifest.input or {}).get("uri")
    return {"uri": source, "features": looked.dataset.storage.uri, **looked.dataset.manifest.counts.to_json()}


class _Looking:
    """Pictures to features: all sets at once, so that an evaluator is started for all of them."""

    def __init__(self, plan: Plan, lease: Lease, counts: Figures) -> None:
        self._plan, self._lease, self._counts = plan, lease, counts
        self._began = time.monotonic()

    def at(self, sides: Sequence[Side]) -> dict[str, Looked]:
        """Look at what has not been looked at yet."""
        options = self._plan.options
        outputs = {side.name: side.begin(options) for side in sides}
        tasks: list[Task] = []
        for side in sides:
            output = outputs[side.name]
            pending = output.pending()
            if pending:
                say(f"evaluate: {side.name}: {len(pending)} of {len(output.index.works())} parts to make")
            planner = side.pictures.planner(output, _PIECE_ROWS, options)
            tasks += [(side.name, work, planner(work)) for work in pending]
        made = self._work_off(sides, tasks) if tasks else []
        return {
            side.name: self._finish(side, outputs[side.name], [info for name, info in made if name == side.name])
            for side in sides
        }

    def _work_off(self, sides: Sequence[Side], tasks: "Sequence[Task]") -> list[tuple[str, PartInfo]]:
        from sdp.evaluate.worker import Worker  # brings torch

        config = self._plan.config
        crew = _crew(config)
        crew.join()
        self._telemetry = telemetry.begin(config.output.uri)
        self._counts.total = sum(len(work.unit) for _, work, _ in tasks)
        hire = partial(Worker, {side.name: self._orders(side) for side in sides})
        made: list[tuple[str, PartInfo]] = []
        with Progress("evaluate") as self._progress:
            for one in crew.work_off(hire, tasks, self._seen):
                made.append(one)
                self._seen(sum(len(info.unit) for _, info in made) - self._counts.done)
        return made

    def _orders(self, side: Side) -> "Orders":
        from sdp.evaluate.worker import Orders

        config, upstream = self._plan.config, side.pictures.dataset
        return Orders(
            features=self._plan.features,
            clip=side.clip,
            columns=side.pictures.columns,
            resize=config.features.resize,
            batch_size=config.scaling.batch_size,
            threads=config.scaling.threads,
            output=side.storage,
            storage=self._plan.options,
            taken_down=side.taken_down(self._plan.options),
            repeated=upstream.repeated_rows if upstream is not None else None,
            foreign=upstream is None,
        )

    def _finish(self, side: Side, output: Output, infos: Sequence[PartInfo]) -> Looked:
        models = {"features": self._plan.features, "clip": side.clip}
        dataset = manifest.finish(
            output,
            infos=infos,
            config=self._plan.config.model_dump(mode="json"),
            models={name: pinned(network) for name, network in models.items() if network is not None},
            input=side.pictures.input,
        )
        _refuse_empty(dataset, side)
        return Looked(dataset, side.taken_down(self._plan.options))

    def _seen(self, pictures: int) -> None:
        self._lease.check()
        self._counts.done += pictures
        self._counts.elapsed_s = time.monotonic() - self._began
        self._progress.update(progress_line(self._counts))
        emit(self._telemetry, self._counts)


def _refuse_empty(dataset: Dataset, side: Side) -> None:
    counts = dataset.manifest.counts
    if counts.written < 2:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.reasons.items()) or "there are no more"
        raise DatasetError(
            f"{side.pictures.uri}: {counts.written} of its pictures could be looked at ({reasons}); see "
            f"`sdp inspect {dataset.storage.uri}`"
        )


def _measured(config: EvaluateConfig, orders: LossOrders) -> LossFound:
    crew = _crew(config)
    crew.join()
    (found,) = crew.work_off(LossWorker, [orders])
    return found


def _crew(config: EvaluateConfig) -> Crew:
    return Crew("evaluate", "evaluators", config.scaling, config.output.uri)
