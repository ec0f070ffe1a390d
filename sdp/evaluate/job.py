"""`sdp evaluate`: computes the features of pictures through the stages of a runner, then all figures from them."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sdp.config.evaluate import EvaluateConfig
from sdp.console import say, table
from sdp.datasets.audit import RUN
from sdp.datasets.manifest import Dataset
from sdp.datasets.outcomes import Counts
from sdp.errors import DatasetError, SdpError
from sdp.evaluate.layout import GENERATED, REFERENCE, RESULT, headlines
from sdp.evaluate.prepare import EvaluatePlan, PictureSet, Task, pinned, prepare
from sdp.evaluate.result import Features, clip_score, distances, notes, similarity, to_bytes
from sdp.evaluate.worker import EvaluateStages
from sdp.lease import Lease
from sdp.model.checkpoints import run_of
from sdp.ray import cluster
from sdp.runners.progress import Tracker
from sdp.runners.runner import Feed, RowsLost
from sdp.runners.where import runner_for
from sdp.sources.pieces import Piece
from sdp.sources.reading import addresses
from sdp.storage import StorageOptions, open_storage
from sdp.train.run_folder import RunFolder

_WAIT_S = 0.5


def run(config: EvaluateConfig, *, dry_run: bool = False) -> dict[str, Any]:
    """Compute all figures and write them; return the content of evaluation.json, which a dry run leaves empty."""
    plan = prepare(config)
    if dry_run:
        say(table(_forecast(plan)))
        return {}
    storage = open_storage(config.output.uri, config.storage.options())
    cluster.require_gpu_setting("scaling", config.scaling)
    cluster.require_reachable()
    with Lease.acquire(storage, "sdp evaluate") as lease:
        sets, summary = _features(plan, lease)
        figures = _figures(plan, sets)
        storage.publish_held(RESULT, to_bytes(figures, config), lease.confirm)
    record_in_run(plan.sets[0].pictures.dataset, storage.uri, config.storage.options())
    say(table(_closing(figures, summary, storage.uri_of(RESULT))))
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


def _closing(figures: Mapping[str, Any], run: str, uri: str) -> Iterator[tuple[str, str]]:
    """Yield the closing table: the figures, the notes, and the URI of the evaluation."""
    yield "this run", run
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


def _features(plan: EvaluatePlan, lease: Lease) -> tuple[dict[str, Features], str]:
    """Compute the features of all sets; return every set by name, and a summary of this run."""
    scaling, uri, isolate = plan.config.scaling, plan.config.output.uri, lease.follows_a_crash
    sets = {each.name: each for each in plan.sets}
    tasks = deque(task for each in plan.sets for task in each.tasks())
    total = sum(piece.take for _, piece in tasks)
    stages = EvaluateStages({each.name: each.spec for each in plan.sets})
    runner = runner_for(stages, "evaluate", "evaluator", scaling, uri, len(tasks), isolate=isolate)
    done: dict[Task, Features] = {}
    with Tracker("evaluate", uri, total) as tracker, runner:
        feed = Feed(runner, lambda: (tasks[0], tasks.popleft()) if tasks else None)
        while tasks or feed.under_way:
            lease.check()
            for (name, piece), note, rows in feed.results(_WAIT_S):
                if note.died is None:
                    try:
                        done[name, piece] = runner.value(rows)
                    except RowsLost:
                        tasks.append((name, piece))
                elif piece.take > 1:
                    tasks.extend((name, smaller) for smaller in piece.narrow())
                else:
                    done[name, piece] = _crashed(sets[name], piece, note.died)
            tracker.show(runner.state(), sum(features.counts.input for features in done.values()))
    return {name: _joined(each, done) for name, each in sets.items()}, tracker.summary


def _crashed(pictures: PictureSet, piece: Piece, detail: str) -> Features:
    """Return the features of a picture that kills its workers, and name it."""
    rows = addresses(piece, pictures.spec.storage).tolist()
    for row in rows:
        say(f"evaluate: row {row} of {pictures.pictures.uri} crashes its evaluators ({detail}), and is left out")
    return replace(Features.join([]), counts=Counts(failed=len(rows), reasons={"crashed": len(rows)} if rows else {}))


def _joined(pictures: PictureSet, done: Mapping[Task, Features]) -> Features:
    """Return the features of a set, by address; refuse a set of fewer than two pictures."""
    joined = Features.join([done[task] for task in sorted(done) if task[0] == pictures.name])
    if (written := joined.counts.written) < 2:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in joined.counts.reasons.items())
        raise DatasetError(
            f"{pictures.pictures.uri}: expected 2 readable pictures or more, got {written} "
            f"({reasons or 'there are no others'}); add pictures"
        )
    return joined
