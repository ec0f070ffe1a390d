"""A worker of Ray Train, and its exchange with the driver's board and the pool of encoders."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.train

from sdp import telemetry
from sdp.config import parse_into
from sdp.config.train import TrainConfig
from sdp.device import choose_device
from sdp.errors import LeaseLost, UserError
from sdp.train import online
from sdp.train.assemble import assemble
from sdp.train.board import WorkerReport
from sdp.train.callbacks.checkpoints import SaveBeforePreemption
from sdp.train.callbacks.telemetry import EmitMetrics
from sdp.train.callbacks.usual import make_callbacks
from sdp.train.driver import failure_line
from sdp.train.network import network_error
from sdp.train.trainer import Callback, StepReport, StopRequest, Trainer
from sdp.train.world import World

_LISTEN_S = 0.25
"""Time between a worker's questions whether it should stop."""
_REPORT_S = 1.0
"""Time between questions for the encoders' figures."""
_FATAL = (UserError, LeaseLost)
"""Errors that a restart of the workers would not cure."""


def train(loop_config: dict[str, Any]) -> None:
    """Train as one of the workers."""
    config, board = parse_into(TrainConfig, loop_config["config"]), loop_config["board"]
    context = ray.train.get_context()
    rank = context.get_world_rank()
    report: WorkerReport = ray.get(board.begin.remote(rank))
    if report.fatal is not None:
        return
    # Each trainer sees the GPUs of all trainers on its node.
    device = choose_device(context.get_local_rank())
    world = World(rank, context.get_world_size(), device)
    stop = StopRequest()
    try:
        callbacks = [
            *make_callbacks(config),
            EmitMetrics(telemetry.begin(config.output.uri), recoveries=max(0, report.attempts - 1)),
            FollowBoard(board, stop),
            SaveBeforePreemption(lambda: ray.train.get_preemption_info() is not None),
        ]
        submit = None
        if (pool := loop_config["pool"]) is not None:
            if world.is_main:
                callbacks.append(FollowPool(pool, board.announce.remote))
            submit = online.submitter(pool)
        check = loop_config["held"].check
        reason = assemble(config, world, submit=submit, callbacks=callbacks, stop=stop, check=check).train()
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
    """Stops a worker at the driver's request, shows metrics to it and to Ray Train, and records starts as events."""

    board: Any
    stop: StopRequest
    _polled_at: float = 0.0
    _request: Any = None
    """A reference to the board's request, while it is on the way."""

    def on_start(self, trainer: Trainer) -> None:
        workers = trainer.world.gather(f"{socket.gethostname()} pid {os.getpid()}")
        if trainer.world.is_main:
            report: WorkerReport = ray.get(self.board.train.remote(workers))
            details = {"failures": report.failures} if report.attempts > 1 else {}
            event = "recovered" if details else "training"
            trainer.checkpointer.run.record(event, from_step=trainer.state.step, workers=workers, **details)

    def on_compile(self, trainer: Trainer, progress: str) -> None:
        if trainer.world.is_main:
            self.board.announce.remote(progress)

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % trainer.config.checkpoint.every_steps == 0:
            self._report(trainer)
        if not trainer.world.is_main:
            return
        now = time.monotonic()
        if self._request is None and now - self._polled_at > _LISTEN_S:
            self._request, self._polled_at = self.board.request.remote(), now
        elif self._request is not None and ray.wait([self._request], timeout=0)[0]:
            reason, self._request = ray.get(self._request), None
            if isinstance(reason, LeaseLost):
                raise reason
            self.stop.reason = self.stop.reason or reason

    def on_metrics(self, trainer: Trainer, line: dict[str, Any]) -> None:  # noqa: ARG002
        self.board.push.remote(line)

    def on_end(self, trainer: Trainer) -> None:
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        """Give Ray Train the run's figures; all workers do so at the same step, since it waits for all."""
        state = trainer.state
        ray.train.report({"step": state.step, "epoch": state.epoch, "samples": state.samples, "loss": state.loss})


@dataclass
class FollowPool(Callback):
    """Adds the encoders' figures to the metrics, bills their time, and records their deaths; for the main worker."""

    pool: Any
    announce: Callable[[str], Any]
    _asked_at: float = 0.0
    _status: Any = None
    """A reference to the pool's status, while it is on the way."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        encoders, gpu = trainer.gauges.get("encoders", 0), bool(trainer.config.encode.gpu_each)
        trainer.state.bill(report.seconds, encoders=encoders, gpu=gpu)
        now = time.monotonic()
        if self._status is None and now - self._asked_at > _REPORT_S:
            self._status, self._asked_at = self.pool.status.remote(), now
        if self._status is not None and ray.wait([self._status], timeout=0)[0]:
            self._record_status(trainer)

    def on_end(self, trainer: Trainer) -> None:
        self._status = self._status or self.pool.status.remote()
        self._record_status(trainer)

    def _record_status(self, trainer: Trainer) -> None:
        figures, deaths = ray.get(self._status)
        self._status = None
        trainer.gauges.update(figures)
        for reason in deaths:
            trainer.checkpointer.run.record("encoders", count=figures["encoders"], reason=reason)
            self.announce(reason)
