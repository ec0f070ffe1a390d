"""What a run is going to do, known before any resource is taken; and what it says of itself afterwards."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp.config import TrainConfig
from sdp.console import clock, duration, size, spent
from sdp.datasets.manifest import Dataset, open_dataset
from sdp.datasets.output import read_json
from sdp.errors import ConfigError, DatasetError, Problem
from sdp.model import sources
from sdp.model.checkpoints import CONFIG, FIRST, find_checkpoint, read_marker
from sdp.plan.memory import fit
from sdp.plan.model import Group, Stage, stage
from sdp.storage import Storage, open_storage
from sdp.train.callbacks.stragglers import behind
from sdp.train.checkpoint import read_state
from sdp.train.data.buckets import BucketReader
from sdp.train.data.direct import DirectReader
from sdp.train.data.latents import TEXT, open_latents, refuse_another_encoder, refuse_embeddings
from sdp.train.data.order import Ints, OrderShape
from sdp.train.data.pinned import open_pinned, outgrown
from sdp.train.data.sources import open_sources, uris_of
from sdp.train.data.weights import RowWeights, held_out
from sdp.train.optimizer import learning_rate
from sdp.train.prediction import prediction_note
from sdp.train.run_folder import RunFolder
from sdp.train.state import TrainState

DATASET_KINDS = {"offline": "latents", "online": "images", "collocated": "images"}
"""What is read in each data.mode."""
PARTS = ("unet", "text_encoder", "tokenizer", "scheduler")
"""Of the model, what training needs."""
_PIECE = 65536
"""Addresses looked at together."""
NOTABLE = 0.1
"""A worker that is behind the others by more than this share is named in the progress."""
TUNABLE = ("optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.clip_norm", "guard.spike")
"""What changes a run's course, and may change from job to job: with an event in its history."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it goes on."""

    run: str
    rows: int
    """Of the dataset, an epoch."""
    positions: int
    """Of an epoch: its rows, and what fills up the last batches of each shape where crops have several."""
    batch: int
    """Samples of a step, over all workers (at most, where they are elastic)."""
    state: TrainState
    checkpoint: str | None
    last_step: int | None
    """None where an epoch's end will end it, and elastic workers make its step unknown."""
    finished: str | None
    notes: tuple[str, ...] = ()
    """What else a person should know."""
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Of TUNABLE, what is another value than in the checkpoint that is gone on from: its path, what it was and is."""

    @property
    def epoch_steps(self) -> int:
        return -(-self.positions // self.batch)

    def lines(self) -> list[str]:
        """For the person at the terminal."""
        return [
            f"train: {self.rows:,} rows, {self.batch:,} a step, {self.epoch_steps:,} steps an epoch",
            f"train: {self.run}, {self._way()}",
            *(f"train: {note}" for note in self.notes),
            *(f"train: {key} was {was} up to here, and is {now} now" for key, (was, now) in self.changed.items()),
        ]

    def _way(self) -> str:
        """From where to where."""
        if self.finished is not None:
            return f"done at step {self.state.step:,}: {self.finished}"
        at = f"from step {self.state.step:,}" if self.checkpoint else "from the beginning"
        return (
            f"{at} to step {self.last_step:,}" if self.last_step is not None else f"{at} to the end of the last epoch"
        )


def make_plan(config: TrainConfig, *, begun: bool = True) -> Plan:
    """Look at everything that can be wrong, in the order of what is cheapest.

    Of a phase that is still to come (not `begun`) its beginning is not there yet.
    """
    options = config.storage.options()
    offline = config.data.mode == "offline"
    model = sources.check(config.model.source, _needed(config), storage=options)
    if config.lora.rank is not None:
        from sdp.model.trained import refuse_lora  # brings torch

        refuse_lora(config.lora, model, options, text_encoder=config.model.train_text_encoder)
    if config.model.start_from is not None and begun:
        _refuse_other_networks(config, find_checkpoint(config.model.start_from, options))
    run = RunFolder(open_storage(config.output.uri, options))
    step = run.latest()
    state = read_state(run.checkpoint(step)) if step is not None else TrainState()
    newest = state.position == 0
    rows, positions, datasets, embedded = (_latents if offline else _images)(config, model, newest=newest)
    _check_validation(config, model)
    tight = fit(config, sources.family(model, storage=options), embedded=embedded)
    batch = config.data.global_batch_size or config.data.batch_size * config.scaling.most
    if rows < batch:
        raise DatasetError(
            f"{config.source.uri}: {rows} rows are fewer than one step's {batch}; lower data.batch_size or "
            "data.global_batch_size, or process more images"
        )
    if step is not None and state.position:
        _refuse_another_epoch(config, run.checkpoint(step), state, rows)
    before = read_json(run.checkpoint(step), CONFIG) if step is not None else {}
    notes = [
        *_batch_notes(before, batch),
        *_schedule_notes(config, before, state),
        *filter(None, [prediction_note(config) if begun else None, tight]),
        *(_mixture_notes(config, state) if newest else filter(None, map(outgrown, datasets))),
    ]
    return Plan(
        run.storage.uri,
        rows,
        positions,
        batch,
        state,
        run.checkpoint(step).uri if step is not None else None,
        last_step(config, state, positions, batch),
        finished(config, state) or used_up(config, state),
        tuple(notes),
        _changed(before, config),
    )


def _refuse_other_networks(config: TrainConfig, other: Storage) -> None:
    """Refuse to begin with a run that has trained other networks: a U-Net goes with the text that it has learned."""
    was = bool(read_json(other, CONFIG)["model"].get("train_text_encoder", False))
    if was != config.model.train_text_encoder:
        expected, got = (str(flag).lower() for flag in (was, config.model.train_text_encoder))
        hint = "or begin with the model that sdp export makes of it (model.source)"
        raise ConfigError([Problem("model.train_text_encoder", f"{expected}, as in {other.uri}", got, hint)])


def _changed(before: Mapping[str, Any], config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    now, found = config.model_dump(mode="json"), {}
    for path in TUNABLE:
        section, name = path.split(".")
        was = before.get(section)
        if isinstance(was, Mapping) and name in was and was[name] != now[section][name]:
            found[path] = (was[name], now[section][name])
    was_last = before.get("max_steps", config.max_steps)
    if config.optimizer.schedule != "constant" and was_last != config.max_steps:
        found["max_steps"] = (was_last, config.max_steps)
    return found


def _schedule_notes(config: TrainConfig, before: Mapping[str, Any], state: TrainState) -> Iterator[str]:
    """Say what max_steps makes of the learning rate, and what another max_steps than up to here has made of it."""
    optimizer, last = config.optimizer, config.max_steps
    if optimizer.schedule == "constant":
        return
    line = (
        f"optimizer.schedule: {optimizer.schedule} brings the learning rate from {optimizer.learning_rate:g} to 0 at "
        f"step {last:,}, which max_steps decides"
    )
    was = before.get("max_steps", last)
    if was != last:
        now, then = (learning_rate(state.step + 1, optimizer, end) for end in (last, was))
        line += f"; up to here that was step {was:,}: the next step's rate is {now:.3g}, in place of {then:.3g}"
    yield line


def _batch_notes(before: Mapping[str, Any], batch: int) -> Iterator[str]:
    """A step of another size is another course of learning: nobody shall come by it unawares."""
    data, workers = before.get("data"), (before.get("scaling") or {}).get("num_workers")
    most = workers.get("max") if isinstance(workers, Mapping) else workers
    if isinstance(data, Mapping) and isinstance(most, int) and isinstance(data.get("batch_size"), int):
        was = data.get("global_batch_size") or data["batch_size"] * most
        if was != batch:
            yield (
                f"a step had {was:,} samples up to here, and has {batch:,} now; data.batch_size and the number of "
                "workers decide that while data.global_batch_size is null"
            )


def _mixture_notes(config: TrainConfig, state: TrainState) -> Iterator[str]:
    """Say which of several datasets has changed in the middle of a pass over it."""
    if len(state.start.places) < 2:
        return
    for source, uri, (number, had, rows) in zip(
        open_sources(config, newest=True).all,
        uris_of(config),
        state.start.places,
        strict=False,  # another list of datasets is refused a little later
    ):
        size = source.weighted.dataset.rows
        if had and size != rows:
            yield (
                f"{uri}: has {size:,} rows by now, {rows:,} until here: pass {number} over it ends after {had:,} of "
                f"them, and pass {number + 1} begins"
            )


def _refuse_another_epoch(config: TrainConfig, checkpoint: Storage, state: TrainState, rows: int) -> None:
    """The order of an epoch follows from its rows: with others it would take some twice and some never."""
    limit = read_json(checkpoint, CONFIG).get("limit")
    if limit != config.limit:
        expected = f"{limit} until epoch {state.epoch} is over"
        hint = "set it back; it may change when max_epochs has ended the epoch"
        raise ConfigError([Problem("limit", expected, str(config.limit), hint)])
    marker = read_marker(checkpoint)
    granule = marker.get("granule", config.data.batch_size)
    if granule != config.data.batch_size:
        expected = f"{granule} until epoch {state.epoch} is over, whose crops have several shapes"
        hint = "set it back; it may change when max_epochs has ended the epoch"
        raise ConfigError([Problem("data.batch_size", expected, str(config.data.batch_size), hint)])
    begun = marker.get("epoch_rows", rows)
    if begun != rows:
        raise DatasetError(
            f"{config.source.uri}: {rows} rows, where epoch {state.epoch}, which is under way, was begun with {begun}; "
            "restore what was there, or choose another output.uri and begin from this run's weights by model.start_from"
        )


def _latents(config: TrainConfig, model: sources.ModelSource, *, newest: bool) -> tuple[int, int, list[Dataset], bool]:
    """Return rows and positions of an epoch, datasets of ours, and whether captions are embeddings.

    What is not latents, or another model's, is refused.
    """
    found = open_sources(config, newest=newest)
    if model.kind in ("builtin", "local"):  # of others the workers know the digest once they have them
        for source in found.all:
            if source.dataset is not None:
                refuse_another_encoder(config, source.dataset, sources.resolve(model, storage=config.storage.options()))
    first = found.all[0].weighted.dataset
    _refuse_nothing_to_train_on(config, list(zip(first.low.tolist(), first.high.tolist(), strict=True)))
    positions, shuffle = found.rows, config.data.shuffle
    if found.buckets is None:
        DirectReader(found.datasets, config.seed, OrderShape(), 0, 1)  # looks whether they can be mixed
    else:
        _refuse_split_granules(config)
        shape = OrderShape(max(shuffle.lanes, config.scaling.most), shuffle.units, shuffle.row_groups)
        reader = BucketReader(found.datasets, config.seed, shape, 0, 1, granule=config.data.batch_size)
        positions = reader.positions(FIRST)
    ours = [source.dataset for source in found.all if source.dataset is not None]
    return found.rows, positions, ours, first.text.name == TEXT


def _refuse_split_granules(config: TrainConfig) -> None:
    """Where crops have several shapes, what a worker takes at once is of one, and a step has whole ones."""
    whole, one = config.data.global_batch_size, config.data.batch_size
    if whole is not None and whole % one:
        hint = "the dataset's crops have several shapes, and each trainer takes batches of one"
        raise ConfigError(
            [Problem("data.global_batch_size", f"a multiple of data.batch_size ({one})", str(whole), hint)]
        )


def _images(config: TrainConfig, _: sources.ModelSource, *, newest: bool) -> tuple[int, int, list[Dataset], bool]:
    """The same of images."""
    dataset = open_pinned(config, 0, config.source.uri, DATASET_KINDS[config.data.mode], newest=newest)
    parts = dataset.parts.select(["written", "start", "stop"]).to_pylist()
    _refuse_nothing_to_train_on(config, [(part["start"], part["stop"]) for part in parts if part["written"]])
    rows = sum(part["written"] for part in parts if config.limit is None or part["start"] < config.limit)
    return rows, rows, [dataset], config.text_encoded


def _needed(config: TrainConfig) -> tuple[str, ...]:
    """Of the model: pictures that are encoded or drawn meanwhile go through the VAE."""
    through_vae = config.data.mode != "offline" or config.samples.every_steps is not None
    return (*PARTS, "vae") if through_vae else PARTS


def _check_validation(config: TrainConfig, model: sources.ModelSource) -> None:
    """What is to be measured on is there, and was made by the same model."""
    source, options = config.evaluate.source, config.storage.options()
    if config.evaluate.every_steps is None:
        return
    if source is None:
        _refuse_empty_holdout(config)
        return
    dataset = open_dataset(open_storage(source, options), "latents")
    refuse_embeddings(config, open_latents(dataset, config.data.resolution), source)
    if model.kind in ("builtin", "local"):
        refuse_another_encoder(config, dataset, sources.resolve(model, storage=options))


def _refuse_empty_holdout(config: TrainConfig) -> None:
    own = open_sources(config).all[0].weighted.dataset
    ranges = list(zip(own.low.tolist(), own.high.tolist(), strict=True))
    kept = RowWeights(0.0, config.limit)
    if not _any_row(ranges, lambda rows: (kept(rows) > 0) & held_out(rows, config.data.holdout)):
        raise ConfigError(
            [
                Problem(
                    "data.holdout",
                    f"one that keeps some of the {own.rows:,} rows from training, to measure on",
                    str(config.data.holdout),
                    "raise it, or name a dataset in evaluate.source",
                )
            ]
        )


def _refuse_nothing_to_train_on(config: TrainConfig, ranges: Sequence[tuple[int, int]]) -> None:
    """As far as addresses tell; what is taken down or turns out bad is found when an epoch has had no row."""
    counts = RowWeights(config.data.holdout, config.limit)
    if not _any_row(ranges, lambda rows: counts(rows) > 0):
        raise ConfigError(
            [
                Problem(
                    "data.holdout",
                    f"one that leaves some row of {config.source.uri} to train on",
                    str(config.data.holdout),
                    "lower it",
                )
            ]
        )


def _any_row(ranges: Sequence[tuple[int, int]], is_one: Callable[[Ints], NDArray[np.bool_]]) -> bool:
    """Whether there is one among these addresses: looked at in small pieces, of which the first mostly has some."""
    for low, high in ranges:
        for start in range(low, high, _PIECE):
            if is_one(np.arange(start, min(high, start + _PIECE), dtype=np.int64)).any():
                return True
    return False


def finished(config: TrainConfig, state: TrainState) -> str | None:
    """The limit that a run has reached, if it has."""
    limits = (("max_steps", state.step), ("max_epochs", state.epoch), ("max_samples", state.samples))
    for name, reached in limits:
        limit = getattr(config, name)
        if limit is not None and reached >= limit:
            return f"{name} is {limit} and {reached} are done"
    return None


def used_up(config: TrainConfig, state: TrainState) -> str | None:
    """The budget of which nothing is left, if so."""
    if config.max_hours is not None and state.seconds >= config.max_hours * 3600:
        return "max_hours is used up; raise it to go on"
    if config.max_cost is not None and state.cost >= config.max_cost:
        return "max_cost is used up; raise it to go on"
    return None


def last_step(config: TrainConfig, state: TrainState, rows: int, batch: int) -> int | None:
    """Return the step at which max_steps or max_epochs ends the run; None where neither does."""
    ends = []
    if config.max_steps is not None:
        ends.append(config.max_steps)
    if config.max_epochs is not None and state.epoch < config.max_epochs:
        whole = config.max_epochs - state.epoch - 1
        ends.append(state.step + -(-(rows - state.position) // batch) + whole * -(-rows // batch))
    return min(ends) if ends else None


def forecast(config: TrainConfig, state: TrainState, last: int | None, batch: int, rate: float, held: Group) -> Stage:
    """Return the rest of a run that has `last` as its last step: hours, GPU-hours and money by sdp plan's arithmetic.

    A run has no end that is known where no limit holds; the rest of it is then of infinite length.
    """
    left = [math.inf if last is None else float((last - state.step) * batch)]
    if config.max_samples is not None:
        left.append(config.max_samples - state.samples)
    if config.max_hours is not None:
        left.append((config.max_hours * 3600 - state.seconds) * rate)
    if config.max_cost is not None and held.per_hour:
        left.append((config.max_cost - state.cost) / held.per_hour * 3600 * rate)
    return stage("rest", max(0.0, min(left)), rate, [held])


def progress_line(line: dict[str, Any], plan: Plan) -> str:
    """step 1,230 of 5,000 · epoch 0 41% · loss 0.1234 · 812 img/s (203 each) · lr 1.0e-04 · data 3% · ETA 1:02:03"""
    whole = f" of {plan.last_step:,}" if plan.last_step is not None else ""
    each = f" ({line['samples_per_s_per_worker']:,.0f} each)" if line["workers"] > 1 else ""
    parts = [
        f"step {line['step']:,}{whole}",
        f"epoch {line['epoch']} {line['epoch_done']:.0%}",
        f"loss {line['loss_smoothed']:.4f}" if line["loss_smoothed"] is not None else "no loss yet",
        f"{line['samples_per_s']:,.0f} img/s{each}",
        f"lr {line['learning_rate']:.1e}",
    ]
    if line.get("mfu") is not None:
        parts.append(f"MFU {line['mfu']:.1%}")
    if line["step_seconds"]:
        parts.append(f"data {line['time'].get('data', 0.0) / line['step_seconds']:.0%}")
    if line.get("memory_peak"):
        parts.append(f"{size(line['memory_peak'])} GPU memory")
    if (slow := line.get("slowest")) and (extra := behind(slow)) > NOTABLE:
        parts.append(f"worker {slow['rank']} on {slow['host']} {extra:.0%} slower ({slow['part']})")
    if line["skipped"]:
        parts.append(f"{line['skipped']} skipped")
    for name, form in (("gpu_hours", "{} GPU-hours"), ("cost", "cost {}")):
        if line.get(name):
            whole = f" of {line[f'final_{name}']:,.2f}" if f"final_{name}" in line else ""
            parts.append(form.format(f"{line[name]:,.2f}{whole}"))
    if "left_s" in line:
        parts.append(f"ETA {duration(line['left_s'])}, at {clock(line['finish_time'])}")
    return " · ".join(parts)


def summary_lines(state: TrainState, checkpoint: str | None, reason: str) -> list[str]:
    """What happened, and what can be done next."""
    loss = f", loss {state.loss:.4f}" if state.loss is not None else ""
    lines = [
        f"train: ended at step {state.step:,} ({reason}): {state.samples:,} samples in "
        f"{spent(state.seconds, state.gpu_hours, state.cost)}{loss}",
    ]
    if state.skipped:
        lines.append(f"train: {state.skipped} bad steps were skipped; their rows are in the run's bad_steps/")
    if state.empty:
        lines.append(f"train: {state.empty} steps had no row that counts (held out, taken down, beyond limit or bad)")
    if checkpoint:
        lines.append(f"train: checkpoint {checkpoint}")
    if checkpoint and state.step:
        lines.append(f"next: sdp export {checkpoint} OUT, or sdp generate with it")
    return lines
