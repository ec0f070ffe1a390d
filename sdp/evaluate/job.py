"""`sdp evaluate`: computes the features of pictures in a pool of evaluators, then all figures from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sdp.config import EvaluateConfig
from sdp.console import say, table
from sdp.errors import DatasetError
from sdp.evaluate.layout import GENERATED, REFERENCE, RESULT
from sdp.evaluate.loss import LossWorker
from sdp.evaluate.messages import closing, forecast
from sdp.evaluate.prepare import EvaluatePlan, PictureSet, pinned, prepare
from sdp.evaluate.result import SetFeatures, clip_score, distances, loss_figures, notes, similarity, to_bytes
from sdp.lease import Lease
from sdp.pool import PoolFigures, Tracker, WorkerPool
from sdp.storage import open_storage


@dataclass(frozen=True, slots=True)
class EvaluateSummary:
    """The result of a run."""

    figures: dict[str, Any]
    """The content of evaluation.json; empty after a dry run."""


def run(config: EvaluateConfig, *, dry_run: bool = False) -> EvaluateSummary:
    """Compute all figures and write them."""
    plan = prepare(config)
    if dry_run:
        say(table(forecast(plan)))
        return EvaluateSummary({})
    storage = open_storage(config.output.uri, config.storage.options())
    _pool(config).require_reachable()
    with Lease.acquire(storage, "sdp evaluate") as lease:
        sets, counts = _features(plan, lease)
        figures = _figures(plan, sets)
        storage.publish_held(RESULT, to_bytes(figures, config), lease.confirm)
    say(table(closing(figures, counts, notes(figures), storage.uri_of(RESULT))))
    return EvaluateSummary(figures)


def _figures(plan: EvaluatePlan, sets: Mapping[str, SetFeatures]) -> dict[str, Any]:
    config = plan.config
    figures: dict[str, Any] = {each.name: {"uri": each.pictures.uri, **sets[each.name].counts} for each in plan.sets}
    if plan.clip is not None:
        figures["clip"] = {"model": pinned(plan.clip), **clip_score(sets[GENERATED].scores)}
    if plan.features is not None:
        figures["features"] = {"model": pinned(plan.features), "kind": plan.features.kind}
        say("evaluate: comparing the features")
        figures |= distances(sets[GENERATED], sets[REFERENCE])
        if plan.features.kind != "inception":
            figures["similarity"] = similarity(sets[GENERATED], sets[REFERENCE])
    if plan.loss is not None:
        say(f"evaluate: the loss of {plan.loss.checkpoint.uri} on {plan.loss.dataset}")
        pool = _pool(config)
        pool.join()
        (loss,) = pool.run(LossWorker, [plan.loss])
        figures["loss"] = loss_figures(plan.loss, loss)
    return figures


def _features(plan: EvaluatePlan, lease: Lease) -> tuple[dict[str, SetFeatures], PoolFigures]:
    """Compute the features of all sets in one pool; return every set by name, and this run's figures."""
    tasks = [task for each in plan.sets for task in each.tasks()]
    if not tasks:
        return {}, PoolFigures()
    from sdp.evaluate.worker import EvaluateWorker  # imports torch

    pool = _pool(plan.config)
    pool.join()
    make_worker = partial(EvaluateWorker, {each.name: each.spec for each in plan.sets})
    units = []
    with Tracker(pool, lease, sum(piece.take for _, _, pieces in tasks for piece in pieces)) as tracker:
        for unit in pool.run(make_worker, tasks, tracker.add):
            units.append(unit)
            tracker.add(sum(unit.written + unit.others.total() for unit in units) - tracker.figures.done)
    sets = {each.name: SetFeatures.of(unit for unit in units if unit.set == each.name) for each in plan.sets}
    for each in plan.sets:
        _refuse_few(each, sets[each.name])
    return sets, tracker.figures


def _refuse_few(each: PictureSet, features: SetFeatures) -> None:
    if features.counts["written"] < 2:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in features.counts["reasons"].items())
        raise DatasetError(
            f"{each.pictures.uri}: expected 2 readable pictures or more, got {features.counts['written']} "
            f"({reasons or 'there are no others'}); add pictures"
        )


def _pool(config: EvaluateConfig) -> WorkerPool:
    return WorkerPool("evaluate", "evaluators", config.scaling, config.output.uri)
