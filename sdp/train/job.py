"""`sdp train`: checks first, then workers under Ray Train, and the run's folder as the only memory.

Ray Train places the workers, starts them again when one dies, and is told nothing of checkpoints: a worker that starts
looks for the newest complete one in the run's folder. Running the job again continues the run in the same way.
"""

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend

from sdp import cluster, telemetry
from sdp.config import TrainConfig, identity, parse
from sdp.console import Progress, say
from sdp.errors import LeaseLost, SdpError, UserError, one_line
from sdp.lease import Lease
from sdp.model.load import load_unet_config
from sdp.model.sources import resolve
from sdp.storage import is_read_only, open_storage
from sdp.telemetry.registry import forget, serve
from sdp.train import online
from sdp.train.board import Board, Told
from sdp.train.callbacks.base import Callback, StepReport
from sdp.train.callbacks.checkpoints import SaveCheckpoints
from sdp.train.callbacks.metrics import RecordMetrics
from sdp.train.callbacks.preemption import SaveBeforePreemption
from sdp.train.callbacks.profile import Profile
from sdp.train.callbacks.stragglers import NameSlowest
from sdp.train.callbacks.telemetry import EmitMetrics
from sdp.train.callbacks.tensorboard import WriteEvents
from sdp.train.callbacks.watchdog import Watchdog
from sdp.train.callbacks.weights_and_biases import TellWandb, require_wandb
from sdp.train.checkpoint import read_state
from sdp.train.data.images import open_images
from sdp.train.data.pinned import open_pinned
from sdp.train.data.sources import open_sources, uris_of
from sdp.train.fp8 import refuse_cluster, require_fp8
from sdp.train.network import network_error
from sdp.train.phases import over, phases_of, refuse_other_shape, with_budget_left
from sdp.train.plan import DATASET_KINDS, Plan, finished, make_plan, progress_line, summary_lines
from sdp.train.run_folder import RunFolder
from sdp.train.state import TrainState
from sdp.train.trainer import Stop, Trainer, TrainingDiverged
from sdp.train.world import World, choose_device

_POLL_S = 1.0
_FATAL = (UserError, TrainingDiverged, LeaseLost)
"""What starting the workers again would not mend."""


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """What a run came to."""

    run: str
    checkpoint: str | None
    state: TrainState
    reason: str
    """Why it ended."""
    recoveries: int = 0
    """How often the workers were started again."""


def run(config: TrainConfig, *, dry_run: bool = False) -> TrainSummary:
    """Train, or go on training."""
    require_wandb(config.log.wandb.project)
    require_fp8(config)
    config = _absolute(config)
    refuse_other_shape(config)
    phases = phases_of(config)
    done = over(phases)
    for number, phase in enumerate(phases[len(done) :]):
        make_plan(phase, begun=number == 0)  # what is wrong with the last one is told before the first begins
    spent = TrainState(seconds=sum(state.seconds for state in done), cost=sum(state.cost for state in done))
    with _metrics(config, dry_run=dry_run):
        for number, phase in enumerate(phases, 1):
            if number <= len(done):
                say(f"train: phase {number} of {len(phases)} is over: {phase.output.uri}")
                continue
            if len(phases) > 1:
                say(f"train: phase {number} of {len(phases)}: {phase.output.uri}")
            phase = with_budget_left(phase, spent)
            summary = _run(phase, dry_run=dry_run, begun=not dry_run or number == len(done) + 1)
            spent = TrainState(seconds=spent.seconds + summary.state.seconds, cost=spent.cost + summary.state.cost)
            if not dry_run and finished(phase, summary.state) is None:
                break
            if number < len(phases):
                forget()  # or this phase's processes would seem to be there still
    return summary


@contextmanager
def _metrics(config: TrainConfig, *, dry_run: bool) -> Iterator[None]:
    """Offered on a port of our own, if one is asked for, as long as all phases take."""
    if dry_run or not config.scaling.in_driver or config.log.metrics_port is None:
        yield
        return
    server = serve(config.log.metrics_port, "log.metrics_port")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _run(config: TrainConfig, *, dry_run: bool, begun: bool) -> TrainSummary:
    """One phase."""
    plan = make_plan(config, begun=begun)
    folder = RunFolder(open_storage(config.output.uri, config.storage.options()))
    head = {"datasets": uris_of(config), "identity": identity(config)}
    folder.refuse_another(head)
    for line in plan.lines():
        say(line)
    if dry_run:
        return TrainSummary(config.output.uri, plan.checkpoint, plan.state, "dry run")
    if not config.scaling.in_driver:
        cluster.require_gpu_setting("scaling", config.scaling)
        if config.data.mode == "online":
            cluster.require_gpu_setting("encode", config.encode)
        cluster.require_reachable()
    with Lease.acquire(folder.storage, "sdp train") as lease:
        folder.claim(head)
        if folder.newest() != plan.checkpoint:  # another job has gone on until its lease ended
            plan = make_plan(config, begun=begun)
        _note_sources(config, newest=plan.state.position == 0)
        if plan.finished:
            say(f"{config.output.uri}: nothing to do: {plan.finished}")
            return TrainSummary(config.output.uri, plan.checkpoint, plan.state, plan.finished)
        if plan.changed:
            folder.record(
                "changed", from_step=plan.state.step, keys={k: list(both) for k, both in plan.changed.items()}
            )
        train = _train_here if config.scaling.in_driver else _train_on_ray
        summary = train(config, plan, folder, lease)
    for line in summary_lines(summary.state, summary.checkpoint, summary.reason):
        say(line)
    return summary


def _note_sources(config: TrainConfig, *, newest: bool) -> None:
    """What is read is settled once, and not by each trainer: an epoch's order is everybody's."""
    if config.data.mode == "offline":
        open_sources(config, write=True, newest=newest)
    else:
        open_pinned(config, 0, config.source.uri, DATASET_KINDS[config.data.mode], newest=newest, write=True)


def _train_here(config: TrainConfig, plan: Plan, folder: RunFolder, lease: Lease) -> TrainSummary:
    """In this process."""
    from sdp.train.assemble import assemble

    world, stop = World(device=choose_device()), Stop()
    folder.record("start", workers=(1, 1), from_step=plan.state.step)
    with Progress("train") as progress:

        def show(line: dict[str, Any]) -> None:
            progress.update(progress_line(line, plan))

        emit = EmitMetrics(telemetry.begin(config.output.uri))
        callbacks = [*_callbacks(config, world, emit, show), CheckLease(lease)]
        with _on_signals(lambda name: setattr(stop, "reason", name)):
            try:
                trainer = assemble(config, world, callbacks=callbacks, stop=stop)
                reason = trainer.train()
            except Exception as error:
                lease.check()  # what is another job's by now is not written to
                folder.record("gave_up", failures=[_line(error)])
                raise
    folder.record("end", reason=reason, step=trainer.state.step)
    return TrainSummary(config.output.uri, folder.checkpoint(trainer.state.step).uri, trainer.state, reason)


def _train_on_ray(config: TrainConfig, plan: Plan, folder: RunFolder, lease: Lease) -> TrainSummary:
    resources = cluster.connect()
    use_gpu = cluster.on_gpus("scaling", config.scaling)
    _refuse_more_workers_than_there_can_be(config, resources, "GPU" if use_gpu else "CPU")
    if config.strategy.fp8.enabled:
        refuse_cluster(config, cluster.accelerators(), resources.get("GPU", 0))
    folder.record("start", workers=(config.scaling.least, config.scaling.most), from_step=plan.state.step)
    # Beside this driver: no other node's end shall be the job's.
    board: Any = ray.remote(num_cpus=0)(Board).options(scheduling_strategy=online.here()).remote()
    pool = _start_pool(config, resources)
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    with tempfile.TemporaryDirectory(prefix="sdp-train-") as scratch, _following(board, lease, plan):
        trainer = _Trainer(
            work,
            train_loop_config={
                "config": config.model_dump(mode="json"),
                "board": board,
                "pool": pool,
            },
            scaling_config=_scaling(config, use_gpu),
            run_config=RunConfig(
                name="run", storage_path=scratch, failure_config=FailureConfig(max_failures=config.max_failures)
            ),
            torch_config=TorchByDevice() if use_gpu else TorchConfig("gloo"),
        )
        try:
            trainer.fit()
        except ray.train.TrainingFailedError as error:
            told: Told = ray.get(board.told.remote())
            folder.record("gave_up", failures=told.failures)
            raise told.fatal or SdpError(_gave_up(config, told, error)) from error
        finally:
            if pool is not None:
                ray.kill(pool)
    told = ray.get(board.told.remote())
    if told.fatal is not None:
        folder.record("gave_up", failures=told.failures)
        raise told.fatal
    step = folder.latest()
    if step is None:
        raise SdpError(
            f"{config.output.uri}: training ended without a checkpoint; see {folder.storage.uri}/events.jsonl"
        )
    checkpoint = folder.checkpoint(step)
    folder.record("end", reason=told.reason, step=step)
    return TrainSummary(config.output.uri, checkpoint.uri, read_state(checkpoint), told.reason, told.attempts - 1)


def _start_pool(config: TrainConfig, resources: dict[str, float]) -> Any:
    """The encoders' pool, where data.mode is online."""
    if config.data.mode != "online":
        return None
    dataset = open_pinned(config, 0, config.source.uri, DATASET_KINDS[config.data.mode])
    images = open_images(config, dataset, resolve(config.model.source, storage=config.storage.options()))
    return online.start_pool(images, online.plan_staff(config, images, resources, config.scaling.most))


def work(given: dict[str, Any]) -> None:
    """What runs in each worker."""
    cluster.hide_gpus_unless_granted()
    from sdp.train.assemble import assemble

    config, board = parse("train", given["config"]), given["board"]
    context = ray.train.get_context()
    rank = context.get_world_rank()
    told: Told = ray.get(board.begin.remote(rank))
    if told.fatal is not None:
        return  # another start mends nothing
    world = World(
        rank, context.get_world_size(), context.get_local_world_size(), choose_device(context.get_local_rank())
    )
    stop = Stop()
    try:
        emit = EmitMetrics(telemetry.begin(config.output.uri), recoveries=max(0, told.attempts - 1))
        callbacks = [*_callbacks(config, world, emit, board.push.remote), FollowBoard(board, stop)]
        callbacks.append(SaveBeforePreemption(lambda: ray.train.get_preemption_info() is not None))
        ask = None
        if (pool := given["pool"]) is not None:
            callbacks.append(online.FollowPool(pool, board.announce.remote))
            ask = online.asker(pool)
        reason = assemble(config, world, ask=ask, callbacks=callbacks, stop=stop).train()
    except Exception as error:
        fatal = error if isinstance(error, _FATAL) else network_error(error)
        ray.get(board.failed.remote(rank, _line(error), fatal))
        if fatal is not None and world.size == 1:
            return  # nobody waits for this worker, and another start would mend nothing
        raise
    if world.is_main:
        ray.get(board.ended.remote(reason))


def _callbacks(
    config: TrainConfig, world: World, emit: EmitMetrics, publish: Callable[[dict[str, Any]], Any]
) -> list[Callback]:
    """What every worker does beside training."""

    told: list[Callable[[dict[str, Any]], Any]] = [emit.line, publish]
    beside: list[Callback] = []
    if config.log.tensorboard:
        beside.append(events := WriteEvents())
        told.append(events.line)
    if config.log.wandb.project is not None:
        beside.append(wandb := TellWandb(config.log.wandb.project))
        told.append(wandb.line)

    def tell(line: dict[str, Any]) -> None:
        for hear in told:
            hear(line)

    callbacks: list[Callback] = [
        SaveCheckpoints(config.checkpoint.every_steps),
        *_looking(config),
        NameSlowest(config.log.every_steps),
        RecordMetrics(config.log.every_steps, _flops(config, world), tell),
        emit,
        *beside,
    ]
    if config.watchdog_s is not None:
        callbacks.append(Watchdog(config.watchdog_s))
    if config.profile.steps is not None:
        callbacks.append(Profile(config.profile.steps, config.profile.start))
    return callbacks


def _looking(config: TrainConfig) -> list[Callback]:
    """What shows how good the model is by now."""
    looking: list[Callback] = []
    if config.evaluate.every_steps is not None:
        from sdp.train.callbacks.validation import MeasureUnseen

        looking.append(MeasureUnseen(config))
    if config.samples.every_steps is not None:
        from sdp.train.callbacks.samples import DrawSamples

        looking.append(DrawSamples(config))
    return looking


def _flops(config: TrainConfig, world: World) -> float | None:
    """What a sample costs, where a share of a GPU's peak is to be told: counting takes some seconds."""
    if not world.is_main or world.device.type != "cuda":
        return None
    from sdp.train.flops import unet_flops

    model = resolve(config.model.source, storage=config.storage.options())
    return unet_flops(load_unet_config(model.path), config.data.resolution)


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


@dataclass
class FollowBoard(Callback):
    """Keeps a worker in touch with the driver, and the history with its restarts."""

    board: Any
    stop: Stop
    _asked_at: float = 0.0
    _asked: Any = None

    def on_start(self, trainer: Trainer) -> None:
        workers = trainer.world.gather(f"{socket.gethostname()} pid {os.getpid()}")
        if trainer.world.is_main:
            told: Told = ray.get(self.board.work.remote(workers))
            again = {"failures": told.failures} if told.attempts > 1 else {}
            _record_start(trainer, "recovered" if again else "training", workers, **again)

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


def _record_start(trainer: Trainer, event: str, workers: list[str], **details: Any) -> None:
    """In the history; if there are more workers than the last time, or fewer, that as well."""
    run, step = trainer.checkpointer.run, trainer.state.step
    before = [found.get("workers") for found in run.events() if found["event"] in ("training", "recovered")]
    if before and isinstance(before[-1], list) and len(before[-1]) != len(workers):
        run.record("resize", from_step=step, workers=[len(before[-1]), len(workers)])
    run.record(event, from_step=step, workers=workers, **details)


@dataclass
class CheckLease(Callback):
    """Ends training in the driver when another job has taken the run over."""

    lease: Lease

    def on_start(self, trainer: Trainer) -> None:
        _record_start(trainer, "training", [f"{socket.gethostname()} pid {os.getpid()}"])

    def on_step(self, trainer: Trainer, report: StepReport) -> None:  # noqa: ARG002 (each step)
        self.lease.check()


@contextmanager
def _following(board: Any, lease: Lease, plan: Plan) -> Iterator[None]:
    """Meanwhile show the progress, hand on SIGTERM and Ctrl-C, and tell the workers if the lease is lost."""
    done = threading.Event()

    def follow() -> None:
        lost = False
        with Progress("train") as progress:
            while not done.wait(_POLL_S):
                try:
                    line, said = ray.get(board.line.remote(), timeout=10)
                except ray.exceptions.RayError:
                    continue  # the cluster is busy or ending; the main thread hears of it
                for text in said:
                    say(f"train: {text}")
                if line is not None:
                    progress.update(progress_line(line, plan))
                try:
                    if not lost:
                        lease.check()
                except LeaseLost as error:
                    lost = True
                    board.lose.remote(str(error))

    thread = threading.Thread(target=follow, name="sdp-follow", daemon=True)
    thread.start()
    try:
        with _on_signals(board.stop.remote):
            yield
    finally:
        done.set()
        thread.join(timeout=30)


@contextmanager
def _on_signals(then: Callable[[str], Any]) -> Iterator[None]:
    """Call `then` with the name of a SIGINT or SIGTERM; a second Ctrl-C interrupts. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def handle(number: int, _: object) -> None:
        nonlocal asked
        name = signal.Signals(number).name
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt(name)
        if not asked:
            say(f"train: {name}: ends after this step, with a checkpoint; Ctrl-C now ends it without")
            then(name)
        asked = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Trainer(TorchTrainer):
    def _register_sigint_handler(self, controller: Any) -> None:
        """Leave Ctrl-C to us: Ray Train aborts the run without a checkpoint, and with exit code 0."""


def _scaling(config: TrainConfig, use_gpu: bool) -> Any:
    low, high = config.scaling.least, config.scaling.most
    label = {cluster.ACCELERATOR_LABEL: config.scaling.accelerator} if config.scaling.accelerator else None
    scaling: Any = ray.train.ScalingConfig  # its annotations are those of the version before
    return scaling(num_workers=high if low == high else (low, high), use_gpu=use_gpu, label_selector=label)


def _refuse_more_workers_than_there_can_be(config: TrainConfig, resources: dict[str, float], what: str) -> None:
    cluster.require_accelerator("scaling.accelerator", config.scaling.accelerator, can_grow=config.scaling.can_grow)
    low, there = config.scaling.least, int(resources.get(what, 0))
    if low > there and not config.scaling.can_grow:
        raise UserError(
            f"scaling.num_workers: expected at most {there}, got {low}: the cluster has {there} {what}s; lower it, or "
            "set scaling.can_grow where nodes are added on demand"
        )


def _absolute(config: TrainConfig) -> TrainConfig:
    """The same with addresses that mean the same in a worker, whose working directory is another."""
    options = config.storage.options()

    def absolute(uri: str | None) -> str | None:
        if uri is None or is_read_only(uri):
            return uri
        return open_storage(uri, options).uri

    source, model, second = config.source, config.model, config.phase_2
    also = tuple(other.model_copy(update={"uri": absolute(other.uri)}) for other in source.also)
    local = Path(model.source)
    changes: dict[str, Any] = {
        "source": source.model_copy(update={"uri": absolute(source.uri), "also": also}),
        "output": config.output.model_copy(update={"uri": absolute(config.output.uri)}),
        "model": model.model_copy(
            update={
                "source": str(local.absolute()) if local.is_dir() else model.source,
                "start_from": absolute(model.start_from),
            }
        ),
        "evaluate": config.evaluate.model_copy(update={"source": absolute(config.evaluate.source)}),
        "phase_2": second.model_copy(update={"source": absolute(second.source)}),
    }
    return config.model_copy(update=changes)


def _gave_up(config: TrainConfig, told: Told, error: Exception) -> str:
    last = told.failures[-1] if told.failures else _line(error)
    return (
        f"{config.output.uri}: training failed {config.max_failures + 1} times and was given up, last: {last}; run the "
        "job again to go on from the newest checkpoint"
    )


def _line(error: Exception) -> str:
    text = one_line(error, 300)
    return text if isinstance(error, SdpError) else f"{type(error).__name__}: {text}"
