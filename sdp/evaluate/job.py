"""`sdp evaluate`: writes the features of pictures, a part for each unit, then computes all figures from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sdp.config import EvaluateConfig
from sdp.console import counted, say, table
from sdp.datasets import manifest
from sdp.datasets.output import Output
from sdp.datasets.parts import PartInfo
from sdp.errors import DatasetError
from sdp.evaluate.layout import GENERATED, REFERENCE, RESULT
from sdp.evaluate.loss import LossWorker
from sdp.evaluate.messages import closing, forecast
from sdp.evaluate.prepare import EvaluatePlan, PictureSet, ReadTask, pinned, prepare, taken_down
from sdp.evaluate.result import FeatureSet, clip_score, distances, loss_figures, notes, similarity, to_bytes
from sdp.lease import Lease
from sdp.pool import PoolFigures, Tracker, WorkerPool
from sdp.storage import open_storage

_PIECE_ROWS = 256
"""Pictures of a piece, which is read at once."""


@dataclass(frozen=True, slots=True)
class EvaluateSummary:
    """The result of a run."""

    figures: dict[str, Any]
    """The content of evaluation.json; empty after a dry run."""
    looked: int = 0
    """Pictures whose features this run computed."""


def run(config: EvaluateConfig, *, dry_run: bool = False) -> EvaluateSummary:
    """Compute the missing features, then all figures."""
    plan = prepare(config)
    if dry_run:
        say(table(forecast(plan)))
        return EvaluateSummary({})
    storage = open_storage(config.output.uri, config.storage.options())
    _pool(config).require_reachable()
    with Lease.acquire(storage, "sdp evaluate") as lease:
        sets, counts = _feature_sets(plan, lease)
        if plan.reused is not None:
            sets[REFERENCE] = FeatureSet(plan.reused, taken_down(plan.reused, plan.options))
        figures = _figures(plan, sets)
        storage.publish_held(RESULT, to_bytes(figures, config), lease.check)
    say(table(closing(figures, counts, notes(figures, config), storage.uri_of(RESULT))))
    return EvaluateSummary(figures, counts.done)


def _figures(plan: EvaluatePlan, sets: dict[str, FeatureSet]) -> dict[str, Any]:
    config = plan.config
    figures: dict[str, Any] = {name: _entry(features) for name, features in sets.items()}
    if plan.clip is not None:
        figures["clip"] = {"model": pinned(plan.clip), **clip_score(sets[GENERATED])}
    if plan.features is not None:
        figures["features"] = {"model": pinned(plan.features), "kind": plan.features.kind}
        if plan.features.kind == "inception":
            figures["features"]["resize"] = config.features.resize
        say("evaluate: comparing the features")
        figures |= distances(sets[GENERATED], sets[REFERENCE], config)
        if plan.features.kind != "inception":
            figures["similarity"] = similarity(sets[GENERATED], sets[REFERENCE])
    if plan.loss is not None:
        say(f"evaluate: the loss of {plan.loss.checkpoint.uri} on {plan.loss.dataset}")
        pool = _pool(config)
        pool.join()
        (loss,) = pool.run(LossWorker, [plan.loss])
        figures["loss"] = loss_figures(plan.loss, loss)
    return figures


def _entry(features: FeatureSet) -> dict[str, Any]:
    """Return the entry of a set in evaluation.json."""
    dataset = features.dataset
    source = (dataset.manifest.input or {}).get("uri")
    return {"uri": source, "features": dataset.storage.uri, **dataset.manifest.counts.to_json()}


def _feature_sets(plan: EvaluatePlan, lease: Lease) -> tuple[dict[str, FeatureSet], PoolFigures]:
    """Write the missing features of all sets in one pool; return every set by name, and this run's figures."""
    outputs = [(picture_set, picture_set.begin()) for picture_set in plan.sets]
    tasks: list[ReadTask] = []
    for picture_set, output in outputs:
        pending, works = output.pending(), output.index.works()
        if pending:
            say(f"evaluate: {picture_set.name}: {len(pending)} of {counted(len(works), 'part')} to write")
        planner = picture_set.pictures.planner(output, _PIECE_ROWS, plan.options)
        tasks += [(picture_set.name, work, planner(work)) for work in pending]
    infos, figures = _write_features(plan, tasks, lease) if tasks else ([], PoolFigures())
    return {
        picture_set.name: _finish(
            plan, picture_set, output, [info for name, info in infos if name == picture_set.name], lease
        )
        for picture_set, output in outputs
    }, figures


def _write_features(
    plan: EvaluatePlan, tasks: Sequence[ReadTask], lease: Lease
) -> tuple[list[tuple[str, PartInfo]], PoolFigures]:
    from sdp.evaluate.worker import EvaluateWorker  # imports torch

    pool = _pool(plan.config)
    pool.join()
    make_worker = partial(EvaluateWorker, {picture_set.name: picture_set.spec for picture_set in plan.sets})
    infos: list[tuple[str, PartInfo]] = []
    with Tracker(pool, lease, sum(len(work.unit) for _, work, _ in tasks)) as tracker:
        for info in pool.run(make_worker, tasks, tracker.add):
            infos.append(info)
            tracker.add(sum(len(info.unit) for _, info in infos) - tracker.figures.done)
    return infos, tracker.figures


def _finish(
    plan: EvaluatePlan, picture_set: PictureSet, output: Output, infos: Sequence[PartInfo], lease: Lease
) -> FeatureSet:
    models = {"features": plan.features, "clip": picture_set.spec.clip}
    dataset = manifest.finish(
        output,
        infos=infos,
        config=plan.config.model_dump(mode="json"),
        models={name: pinned(network) for name, network in models.items() if network is not None},
        input=picture_set.pictures.input,
        check=lease.check,
    )
    counts = dataset.manifest.counts
    if counts.written < 2:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.reasons.items()) or "there are no others"
        raise DatasetError(
            f"{picture_set.pictures.uri}: expected 2 readable pictures or more, got {counts.written} ({reasons}); see "
            f"`sdp inspect {dataset.storage.uri}`"
        )
    return FeatureSet(dataset, taken_down(picture_set.pictures.dataset, plan.options))


def _pool(config: EvaluateConfig) -> WorkerPool:
    return WorkerPool("evaluate", "evaluators", config.scaling, config.output.uri)
