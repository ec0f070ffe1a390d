"""`sdp evaluate`: computes the features of pictures in a pool of evaluators, then all figures from them."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sdp.config.evaluate import EvaluateConfig
from sdp.console import say, table
from sdp.datasets.audit import RUN
from sdp.datasets.manifest import Dataset
from sdp.errors import DatasetError, SdpError
from sdp.evaluate.layout import GENERATED, REFERENCE, RESULT, headlines
from sdp.evaluate.prepare import EvaluatePlan, pinned, prepare
from sdp.evaluate.result import Features, clip_score, distances, notes, similarity, to_bytes
from sdp.evaluate.worker import EvaluateWorker
from sdp.lease import Lease
from sdp.model.checkpoints import run_of
from sdp.pool import PoolFigures, Tracker, WorkerPool
from sdp.storage import StorageOptions, open_storage
from sdp.train.run_folder import RunFolder


def run(config: EvaluateConfig, *, dry_run: bool = False) -> dict[str, Any]:
    """Compute all figures and write them; return the content of evaluation.json, which a dry run leaves empty."""
    plan = prepare(config)
    if dry_run:
        say(table(_forecast(plan)))
        return {}
    storage = open_storage(config.output.uri, config.storage.options())
    _pool(config).require_reachable()
    with Lease.acquire(storage, "sdp evaluate") as lease:
        sets, counts = _features(plan, lease)
        figures = _figures(plan, sets)
        storage.publish_held(RESULT, to_bytes(figures, config), lease.confirm)
    record_in_run(plan.sets[0].pictures.dataset, storage.uri, config.storage.options())
    say(table(_closing(figures, counts, storage.uri_of(RESULT))))
    return figures


def record_in_run(pictures: Dataset | None, uri: str, options: StorageOptions) -> None:
    """Record an evaluation in the run whose checkpoint drew the pictures, if any; its model cards list it."""
    checkpoint = pictures.manifest.models.get("checkpoint", "").rpartition(" sha256:")[0] if pictures else ""
    if pictures is None or (run := run_of(checkpoint)) == checkpoint:  # files, or pictures of a whole model
        return
    weights = pictures.manifest.config.get("weights", "auto")
    try:
        folder = RunFolder(open_storage(run, options))
        if folder.storage.exists(RUN):
            folder.record_evaluation(checkpoint.rpartition("/")[2], weights, uri)
    except SdpError as error:
        say(f"evaluate: model cards of {run} will not name this evaluation: {error}")


def _forecast(plan: EvaluatePlan) -> Iterator[tuple[str, str]]:
    """Yield the dry run's table: what a run would do."""
    for each in plan.sets:
        limit = f", at most {each.limit:,}" if each.limit is not None else ""
        yield each.name, f"{each.pictures.uri}: {each.pictures.size}{limit}"
    if plan.clip is not None:
        yield "CLIP score", f"by {pinned(plan.clip)}"
    if plan.features is not None:
        yield "FID, KID", f"by the features of {pinned(plan.features)}, {plan.features.kind}"
    scaling = plan.config.scaling
    yield "evaluators", f"{scaling.num_workers} on {scaling.accelerator or 'any node'}"
    yield "output", plan.config.output.uri


def _closing(figures: Mapping[str, Any], run: PoolFigures, uri: str) -> Iterator[tuple[str, str]]:
    """Yield the closing table: the figures, the notes, and the URI of the evaluation."""
    yield "this run", run.summary
    for name, value, explanation in headlines(figures):
        yield name, f"{value}, {explanation}" if value else explanation
    yield from (("note", line) for line in notes(figures))
    yield "evaluation", uri


def _figures(plan: EvaluatePlan, sets: Mapping[str, Features]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        each.name: {"uri": each.pictures.uri, **sets[each.name].counts.to_json()} for each in plan.sets
    }
    if plan.clip is not None:
        figures["clip"] = {"model": pinned(plan.clip), **clip_score(sets[GENERATED].scores)}
    if plan.features is not None:
        figures["features"] = {"model": pinned(plan.features), "kind": plan.features.kind}
        say("evaluate: comparing the features")
        figures |= distances(sets[GENERATED], sets[REFERENCE])
        if plan.features.kind != "inception":
            figures["similarity"] = similarity(sets[GENERATED], sets[REFERENCE])
    return figures


def _features(plan: EvaluatePlan, lease: Lease) -> tuple[dict[str, Features], PoolFigures]:
    """Compute the features of all sets in one pool; return every set by name, and this run's figures."""
    tasks = [task for each in plan.sets for task in each.tasks()]
    pool = _pool(plan.config)
    pool.join()
    make_worker = partial(EvaluateWorker, {each.name: each.spec for each in plan.sets})
    units: dict[tuple[str, int], Features] = {}
    with Tracker(pool, lease, sum(piece.take for _, _, pieces in tasks for piece in pieces)) as tracker:
        for name, number, features in pool.run(make_worker, tasks, tracker.add):
            units[name, number] = features
            tracker.add(sum(unit.counts.input for unit in units.values()) - tracker.figures.done)
    sets = {}
    for each in plan.sets:
        numbers = sorted(number for name, number in units if name == each.name)
        sets[each.name] = joined = Features.join([units[each.name, number] for number in numbers])
        if (written := joined.counts.written) < 2:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in joined.counts.reasons.items())
            raise DatasetError(
                f"{each.pictures.uri}: expected 2 readable pictures or more, got {written} "
                f"({reasons or 'there are no others'}); add pictures"
            )
    return sets, tracker.figures


def _pool(config: EvaluateConfig) -> WorkerPool:
    return WorkerPool("evaluate", "evaluators", config.scaling, config.output.uri)
