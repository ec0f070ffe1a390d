"""Trainers under Ray Train, started again after failures and lost nodes.

Each attempt is a fixed number of workers, and ends with the first that fails. The number is chosen before each attempt,
by the places that the cluster has: Ray's own elasticity counts GPUs of any type, and restarts without a checkpoint. A
worker that starts looks for the newest complete checkpoint in the run's folder itself.
"""

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig

from sdp.config.train import TrainConfig
from sdp.console import Progress, counted, duration, say
from sdp.errors import LeaseLost, SdpError, UserError
from sdp.lease import Generation, Lease
from sdp.model.checkpoints import read_state
from sdp.model.sources import resolve
from sdp.ray import cluster, internals, lost
from sdp.ray.waiting import Place, PlaceRequest, Stall, own_groups, place_of, release_places, repeating, wait_for
from sdp.runners.placement import Placement, plan_placement
from sdp.train import group, online
from sdp.train.board import RESIZE, Board, WorkerReport
from sdp.train.data.images import ImagesDataset, open_images, slices_ahead
from sdp.train.data.pinned import open_pinned
from sdp.train.driver import TrainSummary, on_signals
from sdp.train.messages import progress_line
from sdp.train.plan import TrainPlan
from sdp.train.run_folder import RunFolder

_POLL_S = 1.0
_BEGIN_S = 300.0
"""Time without a running trainer, although all have places, after which Ray must have lost what starts them."""
_AGAIN = "run the same command again, it continues from the newest checkpoint"
_SETTLE_S = 60.0
"""Time for which places for more trainers must stay free before training is interrupted for them."""


def train_on_ray(config: TrainConfig, plan: TrainPlan, folder: RunFolder, lease: Lease) -> TrainSummary:
    """Train with workers on the cluster, until the run ends, is stopped or has failed too often."""
    cluster.connect()
    scaling = config.scaling
    trainers = place_of("scaling", scaling)

    def room(*beside: Place, grows: bool) -> int:
        """Wait for places for trainers, and for any others; return how many trainers have places."""
        return wait_for("train", [*beside, trainers], scaling.wait_s, grows=grows, check=lease.check)[-1]

    images = _images(config, plan)
    encoders = [] if images is None else _placement(config).places(prepares=True)
    workers = room(*encoders, grows=cluster.joined())  # the nodes of a new head join one after another
    folder.record("start", workers=(scaling.least, scaling.most), from_step=plan.state.step)
    # On this driver's node, so that the loss of another node does not end the job.
    board = cluster.start_beside_driver(Board)
    pool: Any = None
    held = Generation(folder.storage, lease.generation)
    loop_config = {"config": config.model_dump(mode="json"), "board": board, "held": held}
    failures = 0
    try:
        while True:
            if images is not None and pool is None:
                beside = replace(trainers, least=workers, most=workers)
                placement = _with_count(_placement(config), beside, lease)
                requests = scaling.most * (slices_ahead(config, images, scaling.most) + 1)
                pool = online.start_pool(images, placement, board, requests)
            more = replace(trainers, least=0, most=scaling.most - workers)
            with _follow_attempt(board, lease, plan, more):
                error = _attempt({**loop_config, "pool": pool}, trainers, workers)
            report: WorkerReport = ray.get(board.report.remote(None if error is None else _cause(error)))
            if error is not None and not _was_preempted(error):
                failures += 1
            if report.fatal is not None or failures > config.max_failures:
                folder.record("gave_up", failures=report.failures)
                raise report.fatal or SdpError(_gave_up(config, report)) from error
            if error is None and not report.resizing:
                break
            lost_encoders = pool is not None and _has_failed(pool)
            if lost_encoders:
                ray.kill(pool)
                pool = None
            try:
                workers = room(*(encoders if lost_encoders else ()), grows=scaling.can_grow)
            except UserError as missing:
                raise SdpError(str(missing)) from missing  # not the user's fault: there was room before
    finally:
        if pool is not None:
            ray.kill(pool)
    checkpoint = folder.newest()
    if checkpoint is None:
        events = f"{folder.storage.uri}/events.jsonl"
        raise SdpError(f"{config.output.uri}: training ended without a checkpoint; see {events}")
    state = read_state(checkpoint)
    folder.record("end", reason=report.reason, step=state.step)
    return TrainSummary(config.output.uri, checkpoint.uri, state, report.reason, report.attempts - 1)


def train_worker(loop_config: dict[str, Any]) -> None:
    """Train as one of the workers."""
    cluster.hide_gpus_unless_granted()
    from sdp.train.worker import train

    train(loop_config)


def _attempt(loop_config: dict[str, Any], trainers: Place, workers: int) -> Exception | None:
    """Run `workers` workers to their end; return the error if they failed."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    scaling: Any = ray.train.ScalingConfig  # the annotations of both are out of date in Ray
    failures: Any = FailureConfig
    use_gpu = "GPU" in trainers.bundle
    with tempfile.TemporaryDirectory(prefix="sdp-train-") as scratch:
        trainer = internals.trainer_class()(
            train_worker,
            train_loop_config=loop_config,
            scaling_config=scaling(
                num_workers=workers,
                use_gpu=use_gpu,
                resources_per_worker=dict(trainers.bundle),
                label_selector=dict(trainers.labels) or None,
            ),
            run_config=RunConfig(
                name="run",
                storage_path=scratch,
                failure_config=failures(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
            ),
            backend_config=internals.process_group(group, gpu=use_gpu),
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            with suppress(ray.exceptions.RayError):  # the head is lost, too
                # Ray Train keeps them until the job's end if a worker dies while it connects the workers.
                release_places()
            return error
    return None


def _cause(error: Exception) -> str:
    """Return Ray's reason for the end of an attempt, as one line."""
    failure: Any = next(iter(getattr(error, "worker_failures", {}).values()), error)
    for inner in ("health_check_failure", "controller_failure"):
        failure = getattr(failure, inner, failure)
    return lost.reason_of(failure)


def _was_preempted(error: Exception) -> bool:
    """Return whether workers ended because their node was taken away, which does not count as a failure."""
    failures = getattr(error, "worker_failures", {})
    return type(error).__name__ == "PreemptionError" or any(getattr(e, "preempted", False) for e in failures.values())


def _images(config: TrainConfig, plan: TrainPlan) -> ImagesDataset | None:
    """Return the images to encode, if data.mode is online."""
    if config.data.mode != "online":
        return None
    dataset = open_pinned(config, 0, config.source.uri, "images")
    model = resolve(config.model.source, storage=config.storage.options())
    return open_images(config, dataset, model, plan.columns)


def _placement(config: TrainConfig) -> Placement:
    """Return where images are encoded, beside the trainers."""
    scaling, encode, transform = config.scaling, config.encode, config.transform
    cluster.require_accelerator("encode.accelerator", encode.gpu_type)
    cluster.require_labels("transform.node_labels", transform.node_labels)
    resources = cluster.connect()
    return plan_placement(encode, transform, config.output.uri, resources, beside=scaling.most, grows=scaling.can_grow)


def _with_count(placement: Placement, trainers: Place, lease: Lease) -> Placement:
    """Return the placement of a fixed number of encoders: as many as have places beside the trainers."""
    count, place = placement.least, replace(placement.workers, most=placement.most)
    if place.bundle and count < placement.most:
        places = [trainers, place]
        count = wait_for("train", places, placement.wait_s, grows=cluster.joined(), check=lease.check)[-1]
    return replace(placement, least=count, most=count)


def _check_start(stall: Stall, now: float) -> None:
    """Say each half minute that no trainer runs yet; end the job if Ray has lost what starts them."""
    missing = _places_are_missing()  # another job may have taken them meanwhile
    stall.wait_s = math.inf if missing else _BEGIN_S
    reason = "their places are in use" if missing else "all have places"
    try:
        stall.check(missing, now, f"no trainer runs yet; {reason}", busy=lambda: False)
    except SdpError:
        cluster.give_up(f"train: no trainer ran within {duration(_BEGIN_S)}; {_AGAIN}")


def _check_first_steps(stall: Stall, now: float, announced: int) -> None:
    """Say each half minute that trainers run, and have no figures and no further message (`announced`) yet."""
    stall.check(announced, now, "trainers load, compile or do their first steps", busy=lambda: False)


def _places_are_missing() -> bool:
    """Return whether workers wait for places; True also where Ray does not answer, which others notice."""
    try:
        return "PENDING" in own_groups().values()
    except ray.exceptions.RayError:
        return True


@contextmanager
def _follow_attempt(board: Any, lease: Lease, plan: TrainPlan, more: Place) -> Iterator[None]:
    """Show an attempt's progress, and tell the board of SIGTERM, Ctrl-C, a lost lease and room for more trainers."""
    start, first_steps = Stall("train", []), Stall("train", [])
    announced, ready, changed, request, stopping = 0, 0, time.monotonic(), None, False

    def follow() -> None:
        nonlocal announced, ready, changed, request, stopping
        try:
            lease.check()
        except LeaseLost as error:
            stopping = True
            board.stop.remote(error)
        line, messages, begun = ray.get(board.progress.remote(), timeout=10)
        now = time.monotonic()
        for message in messages:
            say(f"train: {message}")
        announced += len(messages)
        if not begun:
            _check_start(start, now)
        elif line is None:
            _check_first_steps(first_steps, now, announced)
        if line is None:
            return
        progress.update(progress_line(line, plan.last_step))
        if request is None:  # the present trainers have their places
            request = stack.enter_context(PlaceRequest(more, [1] * more.most))
        if ready != (ready := request.ready):
            changed = now
        if ready and not stopping and (ready == more.most or now - changed > _SETTLE_S):
            stopping = True
            more_trainers = counted(ready, "more trainer")
            say(f"train: there is room for {more_trainers}: saving a checkpoint to continue with them")
            board.stop.remote(RESIZE)

    def stop(name: str) -> None:
        answer, training = board.stop.remote(name), True
        with suppress(ray.exceptions.RayError):
            training = ray.get(answer, timeout=_POLL_S)
        if not training:
            raise KeyboardInterrupt(name)

    following = repeating(follow, _POLL_S, ray.exceptions.RayError)
    with Progress("train") as progress, ExitStack() as stack, following, on_signals(stop):
        yield


def _has_failed(pool: Any) -> bool:
    """Return whether a pool of encoders answers with errors, or not at all."""
    try:
        return bool(ray.get(pool.has_failed.remote(), timeout=10))
    except ray.exceptions.RayError:
        return True


def _gave_up(config: TrainConfig, report: WorkerReport) -> str:
    times, last = counted(config.max_failures + 1, "time"), report.failures[-1]
    return (
        f"{config.output.uri}: training failed {times}, last: {last}; run the job again to continue from the newest "
        "checkpoint"
    )
