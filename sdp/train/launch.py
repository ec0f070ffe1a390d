"""Trainers under Ray Train, in as many attempts as failures and lost nodes make necessary.

Ray Train starts a fixed number of workers and ends with the first that fails. How many there are is settled before each
attempt, by the places that the cluster has: Ray's own elasticity counts GPUs of any type, and restarts without a
checkpoint. A worker that starts looks for the newest complete checkpoint in the run's folder, without asking Ray.
"""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend

from sdp import cluster, telemetry
from sdp.config import TrainConfig, parse
from sdp.console import Progress, say
from sdp.encode.placement import Placement, plan_placement
from sdp.errors import LeaseLost, SdpError, UserError
from sdp.lease import Lease
from sdp.model.sources import resolve
from sdp.train import online
from sdp.train.board import RESIZE, Board, Told
from sdp.train.callbacks.base import Callback, StepReport
from sdp.train.callbacks.preemption import SaveBeforePreemption
from sdp.train.callbacks.telemetry import EmitMetrics
from sdp.train.callbacks.usual import make_callbacks
from sdp.train.checkpoint import read_state
from sdp.train.data.images import ImagesDataset, open_images
from sdp.train.data.pinned import open_pinned
from sdp.train.driver import TrainSummary, failure_line, on_signals, record_start
from sdp.train.fp8 import refuse_cluster
from sdp.train.network import network_error
from sdp.train.plan import DATASET_KINDS, Plan, progress_line
from sdp.train.run_folder import RunFolder
from sdp.train.trainer import Stop, Trainer, TrainingDiverged
from sdp.train.world import World, choose_device
from sdp.waiting import Place, Request, place_of, wait_for

_POLL_S = 1.0
_SETTLE_S = 60.0
"""How long places for further trainers have to stay free before training is interrupted for them."""
_MORE = "set scaling.can_grow where nodes are added on demand"
_FATAL = (UserError, TrainingDiverged, LeaseLost)
"""Errors that starting the workers again would not cure."""


def train_on_ray(config: TrainConfig, plan: Plan, folder: RunFolder, lease: Lease) -> TrainSummary:
    """Train with workers on the cluster, until the run is finished, stopped or given up."""
    resources = cluster.connect()
    scaling = config.scaling
    trainers = place_of("scaling", scaling, grows=scaling.can_grow, more=_MORE, gpus=scaling.gpus_per_worker)
    if config.strategy.fp8.enabled:
        refuse_cluster(config, cluster.accelerators(), resources.get("GPU", 0))

    def room(*beside: Place) -> int:
        """Wait for trainers' places, and any others; return how many trainers there are places for."""
        places = [*beside, trainers]
        return wait_for("train", places, scaling.wait_s, grows=scaling.can_grow, check=lease.check)[-1]

    images = _images(config)
    workers = room(*([] if images is None else _placement(config, resources).places))
    resources = cluster.connect()
    folder.record("start", workers=(scaling.least, scaling.most), from_step=plan.state.step)
    # Beside this driver, so that no other node's end is the job's.
    board: Any = ray.remote(num_cpus=0)(Board).options(scheduling_strategy=cluster.this_node()).remote()
    pool = None
    if images is not None:
        pool = online.start_pool(images, _placement(config, resources))
    loop_config = {"config": config.model_dump(mode="json"), "board": board, "pool": pool}
    failures = 0
    try:
        while True:
            with _following(board, lease, plan, replace(trainers, least=0, most=scaling.most - workers)):
                error = _attempt(loop_config, trainers, workers)
            told: Told = ray.get(board.told.remote())
            failures += error is not None and not _preempted(error)
            if told.fatal is not None or failures > config.max_failures:
                folder.record("gave_up", failures=told.failures)
                raise told.fatal or SdpError(_gave_up(config, told, error)) from error
            if error is None and not told.resizing:
                break
            try:
                workers = room()
            except UserError as missing:
                raise SdpError(str(missing)) from missing  # the same configuration had a place before
    finally:
        if pool is not None:
            ray.kill(pool)
    step = folder.latest()
    if step is None:
        raise SdpError(
            f"{config.output.uri}: training ended without a checkpoint; see {folder.storage.uri}/events.jsonl"
        )
    checkpoint = folder.checkpoint(step)
    folder.record("end", reason=told.reason, step=step)
    return TrainSummary(config.output.uri, checkpoint.uri, read_state(checkpoint), told.reason, told.attempts - 1)


def work(loop_config: dict[str, Any]) -> None:
    """Train as one of the workers."""
    cluster.hide_gpus_unless_granted()
    from sdp.train.assemble import assemble

    config, board = parse("train", loop_config["config"]), loop_config["board"]
    gpus = config.scaling.gpus_per_worker
    context = ray.train.get_context()
    rank = context.get_world_rank()
    told: Told = ray.get(board.begin.remote(rank))
    if told.fatal is not None:
        return
    # Ray lets each trainer see all GPUs of its node's trainers.
    *others, first = (choose_device(context.get_local_rank() * gpus + n) for n in reversed(range(gpus)))
    world = World(rank, context.get_world_size(), context.get_local_world_size(), first, *others)
    stop = Stop()
    try:
        emit = EmitMetrics(telemetry.begin(config.output.uri), recoveries=max(0, told.attempts - 1))
        callbacks = [*make_callbacks(config, world, emit, board.push.remote), FollowBoard(board, stop)]
        callbacks.append(SaveBeforePreemption(lambda: ray.train.get_preemption_info() is not None))
        submit = None
        if (pool := loop_config["pool"]) is not None:
            callbacks.append(online.FollowPool(pool, board.announce.remote))
            submit = online.submitter(pool)
        reason = assemble(config, world, submit=submit, callbacks=callbacks, stop=stop).train()
    except Exception as error:
        fatal = error if isinstance(error, _FATAL) else network_error(error)
        ray.get(board.failed.remote(rank, failure_line(error), fatal))
        if fatal is not None and world.size == 1:
            return  # no other worker waits for this one
        raise
    if world.is_main:
        ray.get(board.ended.remote(reason))


@dataclass
class FollowBoard(Callback):
    """Stops a worker when the driver asks for it, and writes each start to the run's events."""

    board: Any
    stop: Stop
    _asked_at: float = 0.0
    _asked: Any = None

    def on_start(self, trainer: Trainer) -> None:
        workers = trainer.world.gather(f"{socket.gethostname()} pid {os.getpid()}")
        if trainer.world.is_main:
            told: Told = ray.get(self.board.work.remote(workers))
            details = {"failures": told.failures} if told.attempts > 1 else {}
            record_start(trainer, "recovered" if details else "training", workers, **details)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if not trainer.world.is_main:
            return
        now = time.monotonic()
        if self._asked is None and now - self._asked_at > _POLL_S:
            self._asked, self._asked_at = self.board.wishes.remote(report.step), now
        elif self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            wish, lost = ray.get(self._asked)
            self._asked = None
            if lost:
                raise LeaseLost(lost)
            self.stop.reason = self.stop.reason or wish


class _Trainer(TorchTrainer):
    def _register_sigint_handler(self, controller: Any) -> None:
        """Leave Ctrl-C to us: Ray Train aborts the run without a checkpoint, and with exit code 0."""


class TorchByDevice(TorchConfig):
    """A process group over NCCL where every worker's torch sees a GPU, else over gloo.

    Ray goes by the GPUs that it has granted, which torch may be unable to use.
    """

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _BackendByDevice


class _BackendByDevice(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        cuda = all(worker_group.execute(torch.cuda.is_available))
        super().on_start(worker_group, replace(backend_config, backend="cpu:gloo,cuda:nccl" if cuda else "gloo"))


def _attempt(loop_config: dict[str, Any], trainers: Place, workers: int) -> Exception | None:
    """Run so many workers to their end; return the error of those that failed."""
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    scaling: Any = ray.train.ScalingConfig  # the annotations of both are those of the version before
    failures: Any = FailureConfig
    use_gpu = "GPU" in trainers.bundle
    with tempfile.TemporaryDirectory(prefix="sdp-train-") as scratch:
        trainer = _Trainer(
            work,
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
            torch_config=TorchByDevice() if use_gpu else TorchConfig("gloo"),
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            return error
    return None


def _preempted(error: Exception) -> bool:
    """Whether workers ended because their node was taken away, which is no failure of theirs."""
    failures = getattr(error, "worker_failures", {})
    return type(error).__name__ == "PreemptionError" or any(getattr(e, "preempted", False) for e in failures.values())


def _images(config: TrainConfig) -> ImagesDataset | None:
    """The images to encode, where data.mode is online."""
    if config.data.mode != "online":
        return None
    dataset = open_pinned(config, 0, config.source.uri, DATASET_KINDS[config.data.mode])
    return open_images(config, dataset, resolve(config.model.source, storage=config.storage.options()))


def _placement(config: TrainConfig, resources: dict[str, float]) -> Placement:
    """Return where images are encoded, beside the trainers."""
    scaling, encode, transform = config.scaling, config.encode, config.transform
    cluster.require_accelerator("encode.accelerator", encode.accelerator, can_grow=scaling.can_grow)
    cluster.require_labels("transform.node_labels", transform.node_labels, can_grow=scaling.can_grow)
    return plan_placement(encode, transform, config.output.uri, resources, beside=scaling.most, grows=scaling.can_grow)


@contextmanager
def _following(board: Any, lease: Lease, plan: Plan, more: Place) -> Iterator[None]:
    """Show an attempt's progress; hand on SIGTERM, Ctrl-C, a lost lease, and places that come for more trainers."""
    done = threading.Event()

    def follow() -> None:
        lost = resizing = False
        ready, changed, request = 0, time.monotonic(), None
        with Progress("train") as progress, ExitStack() as stack:
            while not done.wait(_POLL_S):
                try:
                    line, said = ray.get(board.line.remote(), timeout=10)
                    if line is not None and request is None:  # these trainers have their places by now
                        request = stack.enter_context(Request(more, [1] * more.most))
                    if request is not None and ready != (ready := request.ready):
                        changed = time.monotonic()
                except ray.exceptions.RayError:
                    continue  # the cluster is busy or ending, and the main thread notices
                for text in said:
                    say(f"train: {text}")
                if line is not None:
                    progress.update(progress_line(line, plan))
                settled = ready == more.most or time.monotonic() - changed > _SETTLE_S
                if ready and settled and not resizing:
                    resizing = True
                    say(f"train: there is room for {ready} more trainers: a checkpoint, and on with them")
                    board.stop.remote(RESIZE)
                try:
                    if not lost:
                        lease.check()
                except LeaseLost as error:
                    lost = True
                    board.lose.remote(str(error))

    thread = threading.Thread(target=follow, name="sdp-follow", daemon=True)
    thread.start()
    try:
        with on_signals(board.stop.remote):
            yield
    finally:
        done.set()
        thread.join(timeout=30)


def _gave_up(config: TrainConfig, told: Told, error: Exception | None) -> str:
    last = told.failures[-1] if told.failures else failure_line(error) if error else "no error"
    return (
        f"{config.output.uri}: training failed {config.max_failures + 1} times and was given up, last: {last}; run the "
        "job again to go on from the newest checkpoint"
    )
