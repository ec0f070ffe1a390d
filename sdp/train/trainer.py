"""The training loop of one worker. Read it from top to bottom."""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sdp.config.train import TrainConfig
from sdp.console import counted
from sdp.datasets.ledger import Ledger
from sdp.datasets.outcomes import Outcome
from sdp.device import Mark, out_of_memory
from sdp.errors import DatasetError, OutOfMemory, UserError, one_line
from sdp.model import sharded
from sdp.model.checkpoints import EMA, MODEL, EpochStart, TrainState, read_state
from sdp.model.trained import TrainedNetworks
from sdp.storage import Storage
from sdp.train.checkpoint import CheckpointManager, SavedCheckpoint
from sdp.train.data.batch import Batch
from sdp.train.data.order import Shuffle
from sdp.train.data.reader import Reader
from sdp.train.limits import reached_limit, used_up_budget
from sdp.train.optimizer import Ema, learning_rate, skips
from sdp.train.optimizers import make_optimizer
from sdp.train.randomness import RowRandom, seed_of_phase
from sdp.train.run_folder import EVENTS
from sdp.train.step import Conditioning, Objective, weighted_losses
from sdp.train.stopwatch import Stopwatch
from sdp.train.strategies import make_strategy
from sdp.train.world import World

MOST_BAD_STEPS = 20
"""Skipped steps in a row after which a run has diverged; a bad row costs one."""

Verdict = Literal["good", "not_finite", "empty"]


@dataclass
class StopRequest:
    """A request to end early. Any worker may have one; all end at the next step."""

    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of a step; the same on all workers except for the times."""

    step: int
    epoch: int
    epoch_done: float
    """The consumed share of the epoch."""
    loss: float
    norm: float
    """The gradient's norm before clipping."""
    samples: int
    """Samples of this step, over all workers."""
    bad: int
    """Bad rows among this worker's."""
    learning_rate: float
    verdict: Verdict
    seconds: float
    """Time since the end of the previous step, waiting for data included."""
    parts: dict[str, float]
    """Seconds by activity: data, encode (if collocated), copy, forward, backward, optimizer."""


class Callback:
    """An observer of training. Every worker calls it; `trainer.world.is_main` tells the main worker.

    Each has its own file in callbacks/, and the trainer knows none of them by name.
    """

    def on_start(self, trainer: "Trainer") -> None:
        """Run before the first step, after the state is restored."""

    def on_compile(self, trainer: "Trainer", progress: str) -> None:
        """Run before the first step, each time before a form of micro-batches is compiled."""

    def on_compiled(self, trainer: "Trainer") -> None:
        """Run once all forms are compiled, to compile what the callback itself computes at steps."""

    def on_step(self, trainer: "Trainer", report: StepReport) -> None:
        """Run after each step."""

    def on_checkpoint(self, trainer: "Trainer", saved: SavedCheckpoint) -> None:
        """Run when a checkpoint is complete, or on other workers than the main one when all have written it."""

    def on_metrics(self, trainer: "Trainer", line: dict[str, Any]) -> None:
        """Run on the main worker for each line of metrics."""

    def on_end(self, trainer: "Trainer") -> None:
        """Run after the last step and its checkpoint; `trainer.reason` says why training ended."""

    def close(self) -> None:
        """Run at the very end, also after an error."""


class _Unfinished(NamedTuple):
    """A step that has updated the weights, and whose figures the host has not read."""

    batch: Batch
    learning_rate: float
    copied: Mark
    """The moment at which the figures are on the host."""


@dataclass(kw_only=True, eq=False)
class Trainer:
    """One worker's share of a run, from the newest checkpoint to the end."""

    config: TrainConfig
    world: World
    networks: TrainedNetworks
    objective: Objective
    conditioning: Conditioning
    reader: Reader
    checkpointer: CheckpointManager
    stopwatch: Stopwatch
    begin_from: Storage | None = None
    """Another run's checkpoint, whose weights and moving average a new run begins with."""
    callbacks: Sequence[Callback] = ()
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        config, world = self.config, self.world
        self.state = TrainState(0)
        self.batch_size = config.data.batch_of(world.size)
        """Samples of a step, over all workers."""

        self.strategy = make_strategy(config.strategy, self.networks, world, config.precision)
        self.trained = self.networks.trained()
        """The trained parameters, as the strategy has wrapped them, by their names in checkpoints."""
        self.ema = Ema(self.trained, config.ema.decay) if config.ema.decay is not None else None
        self.optimizer = make_optimizer(self.trained, config.optimizer)
        self._bad_in_a_row = 0
        self._figures = torch.empty(6, pin_memory=world.device.type == "cuda")
        """A step's figures on the host."""
        self._ahead = world.device.type == "cuda"
        """True if the next step is begun before a step's figures are read."""
        self._unfinished: _Unfinished | None = None
        self._ended = 0.0
        """The time at which the last step was finished."""
        self._stop_requested = False
        """True if any worker had a stop request at the last step."""

        self.checkpointer.on_saved = self._report_saved
        self.consumed = Ledger()
        """Rows that this worker has consumed since the last checkpoint."""
        self.bad: list[Outcome] = []
        """Rows that have turned out bad since the last checkpoint."""
        self.save_wanted = False
        """Set by callbacks, on all workers at the same step, to save after the step's last callback."""
        self.reason = ""
        self.gauges: dict[str, Any] = {}
        """Figures that callbacks add to each line of metrics."""

    def train(self) -> str:
        """Train until there is a reason to end; return the reason."""
        try:
            self._restore()
            for callback in self.callbacks:
                callback.on_start(self)
            with closing(self._batches()) as batches:
                self._ended = time.perf_counter()
                if self.config.strategy.compile and self._should_continue():
                    self._compile()
                while self._should_continue():
                    self._step(next(batches))
                self._finish()
            if not self.state.consumed and reached_limit(self.config, self.state):
                raise self._nothing_counts("the run had")
            self.save()
            self.checkpointer.finish()
            for callback in self.callbacks:
                callback.on_end(self)
            return self.reason
        finally:
            for callback in self.callbacks:
                callback.close()
            self.checkpointer.close()

    def _restore(self) -> None:
        """Restore the newest checkpoint; without one, begin with another run's weights and average, if there is one."""
        state = self.checkpointer.restore(self.tensors())
        if state is not None:
            self.state = state
            self.optimizer.set_steps_taken(state.taken)
        elif self.begin_from is not None:
            before = read_state(self.begin_from)
            sharded.load(self.begin_from, {n: t for n, t in self.tensors().items() if n.startswith((MODEL, EMA))})
            # A new average has a short memory, and would forget what it begins with.
            self.state.averaged = before.averaged
            self.state.start = EpochStart(phase=before.start.phase + 1)

    def _should_continue(self) -> bool:
        """Return whether there is another step, or note the reason why there is none."""
        self.reason = reached_limit(self.config, self.state) or ""
        if self.world.is_main and self.stop.reason is None:
            self.stop.reason = used_up_budget(self.config, self.state)
        if self._stop_requested or (self.world.size == 1 and self.stop.reason is not None):
            self.reason = self.reason or f"asked to stop: {self.stop.reason or 'by another worker'}"
        return not self.reason

    def _batches(self) -> Generator[Batch]:
        """Yield this worker's share of each step's batch, epoch after epoch."""
        while True:
            state, epoch = self.state, self.state.epoch
            if not state.position:  # an epoch in progress keeps its order
                lanes = max(Shuffle().lanes, self.world.size)
                state.start = replace(state.start, lanes=lanes)
            with closing(self.reader.batches(epoch, state.position, self.batch_size, state.start)) as batches:
                while state.epoch == epoch:
                    with self.stopwatch.measure("data", host=True):
                        batch = next(batches, None)
                    if batch is None:
                        raise DatasetError(
                            f"{self.config.source.uri}: epoch {epoch} is at position {state.position:,}, but has only "
                            f"{self.reader.plan.rows:,} rows now; undo the change (a lower limit, another dataset), or "
                            "begin a new run with model.start_from"
                        )
                    yield batch

    def _compile(self) -> None:
        """Compile what a step runs for every form of micro-batches, on padding, whose gradients are dropped.

        All workers do so together. At steps, each would wait for the others' compilers.
        """
        device, forms = self.world.device, self.reader.forms
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for number, form in enumerate(forms, 1):
                for callback in self.callbacks:
                    callback.on_compile(self, f"compiling for batches of shape {number} of {len(forms)}")
                blank = self.reader.blank(form, self.batch_size).to(device)
                parts = {len(part): part for part in blank.split(self.config.data.batch_size)}
                self._accumulate([*parts.values()], torch.ones((), device=device))
                self.optimizer.zero_grad()
                self.world.barrier()
            for callback in self.callbacks:
                callback.on_compiled(self)
        self.stopwatch.lap()

    def _step(self, batch: Batch) -> None:
        """Compute a step's gradients, finish the step before it, and update the weights.

        So a GPU already works on the next step when the host reads a step's figures, accounts for it and runs the
        callbacks, which see the weights of the step that they are told of.
        """
        with self.stopwatch.measure("copy"):
            micro_batches = list(batch.to(self.world.device).split(self.config.data.batch_size))
            weight = sum((m.weights.sum() for m in micro_batches), torch.zeros((), device=self.world.device))
        # The sum counts as no activity, since on CPUs it waits for the slowest worker.
        total = self.world.sum_of(weight.clone())
        loss = self._accumulate(micro_batches, total.clamp(min=1.0))
        if self._unfinished is not None:
            self._finish()
            if not self._should_continue():
                self.optimizer.zero_grad()
                return
        self.checkpointer.wait_for_copy()
        self._update(batch, loss, total)
        if not self._ahead or self._is_last_or_saved(self.state.step + 1):
            self._finish()

    def _accumulate(self, micro_batches: Sequence[Batch], total_weight: Tensor) -> Tensor:
        """Add up the gradients of the micro-batches; return this worker's part of the step's loss.

        `total_weight` is the sum over all workers.
        """
        # Strategies average gradients over workers, and the step needs the mean over samples that count.
        share = self.world.size / total_weight
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
        return summed / total_weight

    def _learn(self, micro_batch: Batch, share: Tensor, *, last: bool) -> Tensor:
        """Add the gradients of a micro-batch, times `share`, to those of the step; return the sum of its losses."""
        epochs = micro_batch.epochs
        if epochs is None:  # a tensor, too, since a compiled function is compiled again for another number
            epochs = torch.full_like(micro_batch.rows, self.state.epoch)
        random = RowRandom(seed_of_phase(self.config.seed, self.state.start.phase), epochs, micro_batch.rows)
        with self.strategy.backward(last=last):
            with self.stopwatch.measure("forward"), self.strategy.forward():
                losses = weighted_losses(self.strategy.model, self.objective, self.conditioning, micro_batch, random)
            with self.stopwatch.measure("backward"):
                (losses.sum() * share).backward()  # type: ignore[no-untyped-call]
        return losses.detach().sum()

    def _update(self, batch: Batch, loss: Tensor, total: Tensor) -> None:
        """Take an optimizer step, unless it must be skipped, and exchange the workers' figures."""
        with self.stopwatch.measure("optimizer"):
            norm = self.strategy.norm(self.optimizer.gradients())
            flags = (self.stop.reason is not None, self.checkpointer.is_written())
            stopping, written = (torch.full_like(loss, float(flag)) for flag in flags)
            # All workers judge by the same numbers, to the last bit.
            figures = self.world.sum_of(torch.stack([loss, norm / self.world.size, stopping, written]))
            loss, norm = figures[:2]
            skip = skips(loss, norm, total)
            self._figures.copy_(torch.cat([figures, torch.stack([total, skip])]), non_blocking=True)
            copied = Mark(self.world.device)
            rate = learning_rate(self.state.step + 1, self.config.optimizer, self.config.max_steps)
            limit = self.config.optimizer.clip_norm
            divisor = None if limit is None else ((norm + 1e-6) / limit).clamp(min=1.0)
            self.optimizer.step(rate, skip=skip, divisor=divisor)
            self.optimizer.zero_grad()
        self._unfinished = _Unfinished(batch, rate, copied)

    def _is_last_or_saved(self, step: int) -> bool:
        """Return whether a step is the last of its epoch or run, or saved: it is copied while the next one computes."""
        state, config = self.state, self.config
        ends = state.position + self.batch_size >= self.reader.plan.positions(state.start) or step == config.max_steps
        return ends or not step % config.checkpoint.every_steps

    def _finish(self) -> None:
        """Account for the step whose figures the host has not read, if any, and run the callbacks."""
        if self._unfinished is None:
            return
        batch, rate, copied = self._unfinished
        self._unfinished = None
        state, epoch, position = self.state, self.state.epoch, self.state.position
        copied.wait()
        loss, norm, stoppers, writers, samples, skipped = self._figures.tolist()
        verdict: Verdict = "good"
        if skipped:
            verdict = "not_finite" if samples else "empty"
        if verdict == "good":
            self._bad_in_a_row = 0
            state.taken += 1
            if self.ema is not None:
                state.averaged += 1
                with self.stopwatch.measure("optimizer"):
                    self.ema.update(state.averaged)
        self._stop_requested = stoppers > 0
        self.checkpointer.advance(all_written=writers == self.world.size)
        done = self._account(batch, loss, round(samples), verdict)
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        state.seconds += seconds
        report = StepReport(
            step=state.step, epoch=epoch, epoch_done=done, loss=loss, norm=norm, samples=round(samples),
            bad=len(batch.bad), learning_rate=rate, verdict=verdict, seconds=seconds, parts=self.stopwatch.lap(),
        )  # fmt: skip
        if verdict not in ("good", "empty"):
            self._record_bad_step(report, position)
        for callback in self.callbacks:
            callback.on_step(self, report)
        if self.save_wanted:
            self.save()

    def _account(self, batch: Batch, loss: float, samples: int, verdict: Verdict) -> float:
        """Record the rows of a step as consumed and move on; return the epoch's consumed share."""
        state, epoch = self.state, self.state.epoch
        for number, rows in batch.counted_by_epoch(epoch):
            self.consumed.add(number, rows.numpy())
        self.bad += batch.bad
        state.step += 1
        state.position += self.batch_size
        state.count(samples, taken=verdict == "good")
        if verdict == "good":
            state.smooth(loss)
        done = min(1.0, state.position / self.reader.plan.positions(state.start))
        if done == 1.0:
            if not state.counted_in_epoch:
                raise self._nothing_counts(f"epoch {epoch} had")
            state.start = self.reader.plan.after(epoch, state.start)
            state.epoch, state.position, state.counted_in_epoch = epoch + 1, 0, 0
        return done

    def _record_bad_step(self, report: StepReport, position: int) -> None:
        """Record a skipped step with its place in the epoch; end the run if there have been too many in a row."""
        self._bad_in_a_row += 1
        run = self.checkpointer.run
        if self.world.is_main:
            run.record(
                "bad_step", step=report.step, verdict=report.verdict, epoch=report.epoch, position=position,
                loss=repr(report.loss), gradient_norm=repr(report.norm),
            )  # fmt: skip
        if self._bad_in_a_row >= MOST_BAD_STEPS:
            raise UserError(
                f"step {report.step}: {self._bad_in_a_row} bad steps in a row (loss or gradient not finite), which "
                f"{run.storage.uri_of(EVENTS)} lists; lower optimizer.learning_rate, set optimizer.clip_norm, or check "
                "the rows, and run the job again"
            )

    def save(self) -> None:
        """Begin a checkpoint, unless there is one of this step."""
        self.save_wanted = False
        if self.checkpointer.last_step == self.state.step:
            return
        self.checkpointer.begin(self.tensors(), self.state, self.consumed, self.bad)
        self.consumed, self.bad = Ledger(), []

    def _report_saved(self, saved: SavedCheckpoint) -> None:
        for callback in self.callbacks:
            callback.on_checkpoint(self, saved)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name; they are those in use, to save from and load into."""
        tensors = {f"{MODEL}{name}": weights.detach() for name, weights in self.trained.items()}
        if self.ema is not None:
            tensors |= {f"{EMA}{name}": average for name, average in self.ema.state_dict().items()}
        return tensors | self.optimizer.state_dict()

    def _nothing_counts(self, subject: str) -> DatasetError:
        return DatasetError(
            f"{self.config.source.uri}: {subject} no row that counts: all are held out, taken down, beyond limit or "
            "bad; lower data.holdout, raise limit, or use another dataset"
        )

    def _too_large(self, batch: Batch, cause: str) -> OutOfMemory:
        """Return the error for a micro-batch that exceeds the memory."""
        if half := len(batch) // 2:
            advice = f"try {half} (and keep data.global_batch_size: {self.batch_size}, or the training changes)"
        else:
            advice = "train on a larger GPU (scaling.accelerator)"
            if not self.config.strategy.activation_checkpointing:
                advice += ", or set strategy.activation_checkpointing: true"
        return OutOfMemory(
            f"data.batch_size: {counted(len(batch), 'sample')} do not fit into the memory of {self.world.device} "
            f"({cause}); {advice}"
        )
