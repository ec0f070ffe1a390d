"""The training loop of one worker. Read it from top to bottom."""

import gc
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sdp.config import TrainConfig
from sdp.datasets.audit import BAD_STEPS
from sdp.datasets.ledger import Ledger
from sdp.datasets.outcomes import Outcome
from sdp.device import Mark, out_of_memory
from sdp.errors import DatasetError, UserError, one_line
from sdp.model import sharded
from sdp.model.checkpoints import EMA, MODEL, EpochStart
from sdp.model.ema import Ema
from sdp.model.trained import TrainedNetworks
from sdp.plan.model import Group
from sdp.storage import Storage
from sdp.train.callbacks.base import Callback, Saved, StepReport
from sdp.train.checkpoint import Checkpointer, Saving, read_state
from sdp.train.data.batch import Batch
from sdp.train.optimizer import AdamW, Guard, LossScale, learning_rate
from sdp.train.randomness import RowRandom, seed_of_phase
from sdp.train.state import TrainState
from sdp.train.step import Conditioning, Objective, weighted_losses
from sdp.train.stopwatch import Stopwatch
from sdp.train.strategies import make_strategy
from sdp.train.world import World

COLLECT_STEPS = 100
"""Steps from one collection of garbage to the next."""


class TrainingDiverged(UserError):
    """Too many bad steps in a row: trying again unchanged would end in the same way."""


def bad_step_name(step: int) -> str:
    """Where the rows of a step that was not taken are kept."""
    return f"{BAD_STEPS}step-{step:09d}.json"


class Reader(Protocol):
    """A way to read data; every one yields the same batches."""

    @property
    def rows(self) -> int:
        """Rows of an epoch."""

    def positions(self, start: EpochStart) -> int:
        """Return how many positions an epoch has."""

    def batches(self, epoch: int, position: int, batch_size: int, start: EpochStart) -> Iterator[Batch]:
        """This worker's share of each batch that the epoch has left: equally many and equally long on all workers."""

    def after(self, epoch: int, start: EpochStart) -> EpochStart:
        """Return what the epoch after this one begins with."""


@dataclass
class Stop:
    """A wish to end early; any worker may have it, all follow at the next step."""

    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """What a trainer is made from."""

    config: TrainConfig
    world: World
    networks: TrainedNetworks
    objective: Objective
    conditioning: Conditioning
    reader: Reader
    checkpointer: Checkpointer
    begin_from: Storage | None = None
    """Another run's checkpoint, whose weights and average a new run begins with."""
    callbacks: Sequence[Callback] = ()
    stop: Stop = field(default_factory=Stop)


@dataclass
class _Pending:
    """A checkpoint on its way."""

    saving: Saving
    began: float
    stalled_s: float
    """How long training has stood still for it."""
    committed: "Future[None] | None" = None
    """On the main worker, once all have written."""


@contextmanager
def _collecting() -> Iterator[None]:
    """Leave garbage to the steps that collect it: wherever Python stops one worker, all others wait for it."""
    gc.collect()
    gc.freeze()  # what is there by now stays, and need not be looked at
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class Trainer:
    """One worker's share of a run, from the newest checkpoint to the end."""

    def __init__(self, given: TrainerParts) -> None:
        self.config = config = given.config
        self.world = world = given.world
        self.state = TrainState()
        self.stop = given.stop
        self.callbacks = given.callbacks

        self.objective = given.objective
        self.conditioning = given.conditioning
        self.reader = given.reader
        self.batch_size = config.data.global_batch_size or config.data.batch_size * world.size
        """Samples of a step, over all workers."""

        self.networks = given.networks
        self.strategy = make_strategy(config.strategy, self.networks, world, config.precision)
        self.trained = self.networks.trained()
        """Every parameter that is trained, as the strategy has left it, by its name in checkpoints."""
        self.ema = Ema(self.trained, config.ema.decay) if config.ema.decay is not None else None
        self.optimizer = AdamW(self.trained, config.optimizer)
        self.scale = LossScale(world.device, enabled=config.precision == "fp16")
        self.guard = Guard(config.guard.spike)
        self._figures = torch.empty(6, pin_memory=world.device.type == "cuda")
        """A step's figures on the host."""
        self._asked_to_stop = False

        self.begin_from = given.begin_from
        self.checkpointer = given.checkpointer
        self.consumed = Ledger()
        """What this worker has consumed since the last checkpoint."""
        self.bad: list[Outcome] = []
        """Rows that turned out bad since then."""
        self.saved_step: int | None = None
        """Of the newest checkpoint, which may be on its way."""
        self._saving: _Pending | None = None
        self.save_wanted = False
        """Set by callbacks, on all workers at the same step: a checkpoint when all of them have seen the step."""
        self.resumed = False
        self._bad_before: set[str] = set()
        """On the main worker: steps that were bad, in an earlier try, after the checkpoint that is gone on from."""
        self.reason = ""
        self.gauges: dict[str, Any] = {}
        """What callbacks add to each line of metrics."""
        self.stopwatch = Stopwatch(world.device)

    def train(self) -> str:
        """Train until there is a reason to end; returns the reason."""
        try:
            self.resumed = self._restore()
            for callback in self.callbacks:
                callback.on_start(self)
            with _collecting():
                self.reason = self._steps()
            if not self.state.consumed and self._over():
                raise self._nothing_counts("it has had")
            self.save()
            self.finish_save()
            for callback in self.callbacks:
                callback.on_end(self)
            return self.reason
        finally:
            for callback in self.callbacks:
                callback.close()
            self.checkpointer.close()

    def _steps(self) -> str:
        while (reason := self._finished()) is None:
            state = self.state
            if not state.position:  # an epoch that is under way keeps its order
                lanes = max(self.config.data.shuffle.lanes, self.world.size)
                state.start = replace(state.start, lanes=lanes)
            batches = self.reader.batches(state.epoch, state.position, self.batch_size, state.start)
            with closing(batches):  # type: ignore[type-var]  # all readers are generators
                epoch, ended = state.epoch, time.perf_counter()
                while state.epoch == epoch and (reason := self._finished()) is None:
                    if self._asked_to_stop or (self.world.size == 1 and self.stop.reason is not None):
                        return f"asked to stop: {self.stop.reason or 'by another worker'}"
                    with self.stopwatch.measure("data", host=True):
                        batch = next(batches, None)
                    if batch is None:
                        raise DatasetError(
                            f"{self.config.source.uri}: epoch {epoch} is at position {state.position:,} and has only "
                            f"{self.reader.rows:,} rows by now; set back what has changed (a lower limit, another "
                            "dataset), or begin a new run from this one's weights by model.start_from"
                        )
                    if not state.step % COLLECT_STEPS:
                        gc.collect()
                    report = self._step(batch, ended)
                    ended = time.perf_counter()
                    for callback in self.callbacks:
                        callback.on_step(self, report)
                    if self.save_wanted:
                        self.save()
        return reason

    def _step(self, batch: Batch, ended: float) -> StepReport:
        """Take one step.

        The host waits for the device once: for the figures of the backward pass, while the optimizer works.
        """
        state, clock, epoch = self.state, self.stopwatch, self.state.epoch
        with clock.measure("copy"):
            micro_batches = list(batch.to(self.world.device).split(self.config.data.batch_size))
            weight = sum((m.weights.sum() for m in micro_batches), torch.zeros((), device=self.world.device))
        # Outside of the measurement: on CPUs it waits for the slowest worker.
        total = self.world.sum(weight.clone())
        counted = total.clamp(min=1.0)
        # Strategies average gradients over workers; what is wanted is the mean over samples that count.
        share = self.world.size * self.scale.factor / counted

        summed = torch.zeros((), device=self.world.device)
        for number, micro_batch in enumerate(micro_batches, 1):
            try:
                summed += self._learn(micro_batch, share, last=number == len(micro_batches))
                continue
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                cause = one_line(error, 200)
            # Outside of the handler, which would keep the failed attempt's tensors alive.
            raise self._too_large(micro_batch, cause)

        self._wait_for_copy()
        with clock.measure("optimizer"):
            norm = self.strategy.norm(self.optimizer.gradients()) / self.scale.factor
            stopping, written = (
                torch.full_like(summed, float(flag)) for flag in (self.stop.reason is not None, self._is_written())
            )
            # Every worker judges by the same numbers, to the last bit.
            figures = self.world.sum(torch.stack([summed / counted, norm / self.world.size, stopping, written]))
            loss, norm = figures[:2]
            skip = self.guard.skips(loss, norm, total)
            self._figures.copy_(torch.cat([figures, torch.stack([total, skip])]), non_blocking=True)
            copied = Mark(self.world.device)
            rate = learning_rate(state.step + 1, self.config.optimizer, self.config.max_steps)
            self.optimizer.step(rate, skip=skip, divisor=self._divisor(norm))
            self.scale.update(norm)
            self.optimizer.zero_grad()
            copied.wait()
            loss_value, norm_value, stoppers, writers, samples, skipped = self._figures.tolist()
            verdict = self.guard.judge(loss_value, norm_value, samples, skipped=bool(skipped))
            if verdict == "good":
                state.taken += 1
                state.optimized += 1
                if self.ema is not None:
                    state.averaged += 1
                    self.ema.update(state.averaged)
        self._asked_to_stop = stoppers > 0
        self._follow_save(all_written=writers == self.world.size)

        for each, rows in batch.counted_by_epoch(epoch):
            self.consumed.add(each, rows.numpy())
        self.bad += batch.bad
        state.step += 1
        state.position += self.batch_size
        state.count(round(samples), taken=verdict == "good")
        done = min(1.0, state.position / self.reader.positions(state.start))
        if done == 1.0:
            if not state.counted_in_epoch:
                raise self._nothing_counts(f"epoch {epoch} had")
            state.start = self.reader.after(epoch, state.start)
            state.epoch, state.position, state.counted_in_epoch = epoch + 1, 0, 0
        if verdict == "good":
            state.smooth(loss_value)
        if verdict in ("good", "empty"):
            self._forget_bad_step()
        else:
            self._refuse(batch, epoch, loss_value, norm_value, verdict)
        seconds = time.perf_counter() - ended
        held = self.held()
        state.seconds += seconds
        state.gpu_hours += seconds / 3600 * held.gpus
        state.cost += seconds / 3600 * held.per_hour
        return StepReport(
            step=state.step,
            epoch=epoch,
            epoch_done=done,
            samples=round(samples),
            loss=loss_value,
            norm=norm_value,
            learning_rate=rate,
            verdict=verdict,
            seconds=seconds,
            parts=clock.lap(),
        )

    @property
    def _seed(self) -> int:
        return seed_of_phase(self.config.seed, self.state.start.phase)

    def _divisor(self, norm: Tensor) -> Tensor | None:
        """Return what gradients of this norm are divided by: the loss's scale, and what clipping takes off."""
        limit = self.config.optimizer.clip_norm
        if limit is None:
            return self.scale.factor if self.scale.enabled else None
        return self.scale.factor * ((norm + 1e-6) / limit).clamp(min=1.0)

    def _learn(self, micro_batch: Batch, share: Tensor, *, last: bool) -> Tensor:
        """Add the gradients of a micro-batch, times `share`, to those of the step; return the sum of its losses."""
        own = self.state.epoch if micro_batch.epochs is None else micro_batch.epochs
        random = RowRandom(self._seed, own, micro_batch.rows)
        with self.strategy.backward(last=last):
            with self.stopwatch.measure("forward"), self.strategy.forward():
                losses = weighted_losses(self.strategy.model, self.objective, self.conditioning, micro_batch, random)
            with self.stopwatch.measure("backward"):
                (losses.sum() * share).backward()  # type: ignore[no-untyped-call]
        return losses.detach().sum()

    def _too_large(self, batch: Batch, cause: str) -> UserError:
        """Return the error for a micro-batch that memory has no room for, with the largest half of it that fits."""
        size, known = len(batch) // 2, not self.strategy.needs_others
        self.optimizer.zero_grad()
        while known and size and not self._fits(next(batch.split(size))):
            size //= 2
        if not size:
            advice = "not even one sample does; train on a larger GPU (scaling.accelerator)"
            if not self.config.strategy.activation_checkpointing:
                advice += ", or set strategy.activation_checkpointing: true"
        else:
            advice = f"{size} do" if known else f"try {size}"
            advice += f" (and keep data.global_batch_size: {self.batch_size}, or the training changes)"
        return UserError(
            f"data.batch_size: {len(batch)} samples do not fit into the memory of {self.world.device} ({cause}); "
            f"{advice}"
        )

    def _fits(self, batch: Batch) -> bool:
        """Return whether memory has room for the gradients of a micro-batch; nothing is exchanged for that."""
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        random = RowRandom(self._seed, 0, batch.rows)
        try:
            with self.strategy.forward():
                losses = weighted_losses(self.networks, self.objective, self.conditioning, batch, random)
            torch.autograd.grad(losses.sum(), list(self.trained.values()))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return False
        return True

    def _nothing_counts(self, what: str) -> DatasetError:
        return DatasetError(
            f"{self.config.source.uri}: {what} no row that counts: all are held out, taken down, beyond limit or bad; "
            "lower data.holdout, raise limit, or take another dataset"
        )

    def _over(self) -> str | None:
        """The limit that the run has reached, if it has."""
        config, state = self.config, self.state
        if config.max_steps is not None and state.step >= config.max_steps:
            return f"max_steps: {config.max_steps} steps"
        if config.max_epochs is not None and state.epoch >= config.max_epochs:
            return f"max_epochs: {config.max_epochs} passes over the data"
        if config.max_samples is not None and state.samples >= config.max_samples:
            return f"max_samples: {state.samples} samples"
        return None

    def _finished(self) -> str | None:
        """The same; a used up budget becomes a wish to stop."""
        config, state = self.config, self.state
        if (reason := self._over()) is not None:
            return reason
        if config.max_hours is not None and self.world.is_main and state.seconds >= config.max_hours * 3600:
            self.stop.reason = self.stop.reason or f"max_hours: {config.max_hours} hours of training are used up"
        if config.max_cost is not None and self.world.is_main and state.cost >= config.max_cost:
            self.stop.reason = self.stop.reason or f"max_cost: {config.max_cost:g} are spent"
        return None

    def _refuse(self, batch: Batch, epoch: int, loss: float, norm: float, verdict: str) -> None:
        """Write down a step that was not taken, with its rows; give up if there have been too many."""
        told = self.world.gather({each: rows.tolist() for each, rows in batch.counted_by_epoch(epoch)})
        step = self.state.step
        name = bad_step_name(step)
        if self.world.is_main:
            rows = {each: [row for some in told for row in some.get(each, [])] for each in set().union(*told)}
            self.checkpointer.run.record_bad_step(name, verdict, loss, norm, rows)
        if self.guard.bad_in_a_row >= self.config.guard.bad_steps:
            raise TrainingDiverged(
                f"step {step}: {self.guard.bad_in_a_row} steps in a row without a finite loss and gradient; their rows "
                f"are in {self.checkpointer.run.storage.uri_of(name)} and those before it; lower "
                "optimizer.learning_rate, set optimizer.clip_norm, or look at the rows, and run the job again"
            )

    def _forget_bad_step(self) -> None:
        """A step that was bad in an earlier try went well in this one: the rows of today's were trained on."""
        name = bad_step_name(self.state.step)
        if name in self._bad_before:
            self.checkpointer.run.storage.delete(name)

    def save(self) -> None:
        """Begin a checkpoint, unless there is one of this step."""
        self.save_wanted = False
        if self.saved_step == self.state.step:
            return
        began = time.perf_counter()
        self.finish_save()
        self.state.usual_norm = self.guard.usual_norm
        if self.scale.enabled:
            self.state.scale, self.state.scale_growth = self.scale.state()
        saving = self.checkpointer.stage(self.tensors(), self.state, self.consumed, self.bad)
        self.consumed, self.bad = Ledger(), []
        self.saved_step = self.state.step
        self._saving = _Pending(saving, began, time.perf_counter() - began)

    def _wait_for_copy(self) -> None:
        """Until the checkpoint under way has all that the optimizer is about to change."""
        if self._saving is not None:
            began = time.perf_counter()
            self._saving.saving.copied.result()
            self._saving.stalled_s += time.perf_counter() - began

    def _is_written(self) -> bool:
        """Whether this worker's share of the checkpoint under way is in the storage."""
        if self._saving is None or not self._saving.saving.written.done():
            return False
        self._saving.saving.written.result()
        return True

    def _follow_save(self, *, all_written: bool) -> None:
        """The checkpoint under way, in passing."""
        pending = self._saving
        if pending is None:
            return
        if all_written and pending.committed is None:
            if self.world.is_main:
                pending.committed = self.checkpointer.commit_later(pending.saving)
            else:
                self._saved(pending)
        elif pending.committed is not None and pending.committed.done():
            pending.committed.result()
            self._saved(pending)

    def finish_save(self) -> None:
        """Wait for the checkpoint under way, all workers together."""
        # A worker forgets it when all have written, the main one when it has committed it.
        if self.world.agree([self._saving is not None])[0]:
            if (pending := self._saving) is not None:
                pending.saving.written.result()
            self.world.wait()
            if pending is not None:
                if pending.committed is not None:
                    pending.committed.result()
                elif self.world.is_main:
                    self.checkpointer.commit(pending.saving)
                self._saved(pending)
            self.world.wait()  # until it is complete

    def _saved(self, pending: "_Pending") -> None:
        self._saving = None
        saving = pending.saving
        done = Saved(
            saving.folder.uri,
            saving.state.step,
            pending.stalled_s,
            time.perf_counter() - pending.began,
            saving.state.consumed,
            saving.ledger_rows,
        )
        for callback in self.callbacks:
            callback.on_checkpoint(self, done)

    def _restore(self) -> bool:
        state = self.checkpointer.restore(self.tensors())
        if self.world.is_main:
            self._bad_before = set(self.checkpointer.run.storage.names(BAD_STEPS))
        if state is None:
            if self.begin_from is not None:
                self._begin_with(self.begin_from)
            return False
        self.state, self.saved_step = state, state.step
        self.optimizer.set_steps_taken(state.optimized)
        self.guard.usual_norm, self.guard.good_steps = state.usual_norm, state.taken
        if self.scale.enabled and state.scale is not None:
            self.scale.restore(state.scale, state.scale_growth)
        return True

    def _begin_with(self, other: Storage) -> None:
        """Take over what another run has learned."""
        before, keep = read_state(other), self.config.model.start_optimizer
        tensors = {n: t for n, t in self.tensors().items() if keep or n.startswith((MODEL, EMA))}
        sharded.load(other, tensors, alone=self.world.size == 1)
        # Or the average, which is short-sighted at first, would forget at once what it was begun with.
        self.state.averaged = before.averaged
        self.state.start = EpochStart(phase=before.start.phase + 1)
        if keep:
            self.state.optimized = before.optimized
            self.optimizer.set_steps_taken(before.optimized)

    def held(self) -> Group:
        """Return the trainers and encoders that the run has now: their GPUs, and what an hour of them costs."""
        prices, encode, encoders = self.config.prices, self.config.encode, self.gauges.get("encoders", 0)
        gpus: float = self.world.size * self.config.scaling.gpus_per_worker * (self.world.device.type == "cuda")
        gpus += encoders * encode.gpus_per_worker * bool(encode.gpu_each)
        per_hour = self.world.size * (prices.trainer_hour or 0.0) + encoders * (prices.encoder_hour or 0.0)
        return Group("", self.world.size, gpus, per_hour)

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, by name: the tensors in use, to be saved from and loaded into."""
        tensors = {f"{MODEL}{name}": weights.detach() for name, weights in self.trained.items()}
        if self.ema is not None:
            tensors |= {f"{EMA}{name}": average for name, average in self.ema.state_dict().items()}
        return tensors | self.optimizer.state_dict()
