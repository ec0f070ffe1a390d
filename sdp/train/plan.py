"""What a run is going to do, known before any resource is taken; and what it says of itself afterwards."""

from dataclasses import dataclass
from typing import Any

from sdp.config import Range, TrainConfig
from sdp.console import duration, size
from sdp.datasets.manifest import open_dataset
from sdp.errors import DatasetError
from sdp.model import sources
from sdp.model.checkpoints import find_checkpoint
from sdp.storage import open_storage
from sdp.train.callbacks.stragglers import behind
from sdp.train.checkpoint import read_state
from sdp.train.data.direct import DirectReader
from sdp.train.data.latents import open_latents, refuse_another_encoder
from sdp.train.data.order import OrderShape
from sdp.train.data.sources import open_sources
from sdp.train.run_folder import RunFolder
from sdp.train.state import TrainState

DATASET_KINDS = {"offline": "latents", "online": "images", "collocated": "images"}
"""What is read in each data.mode."""
PARTS = ("unet", "text_encoder", "tokenizer", "scheduler")
"""Of the model, what training needs."""
NOTABLE = 0.1
"""A worker that is behind the others by more than this share is named in the progress."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it goes on."""

    run: str
    rows: int
    """Of the dataset, an epoch."""
    batch: int
    """Samples of a step, over all workers (at most, where they are elastic)."""
    state: TrainState
    checkpoint: str | None
    last_step: int | None
    """None where an epoch's end will end it, and elastic workers make its step unknown."""
    finished: str | None

    @property
    def epoch_steps(self) -> int:
        return -(-self.rows // self.batch)

    def lines(self) -> list[str]:
        """For the person at the terminal."""
        at = f"from step {self.state.step:,}" if self.checkpoint else "from the beginning"
        to = f"to step {self.last_step:,}" if self.last_step is not None else "to the end of the last epoch"
        return [
            f"train: {self.rows:,} rows, {self.batch:,} a step, {self.epoch_steps:,} steps an epoch",
            f"train: {self.run}, {at} {to}",
        ]


def make_plan(config: TrainConfig, *, begun: bool = True) -> Plan:
    """Look at everything that can be wrong, in the order of what is cheapest.

    Of a phase that is still to come (not `begun`) its beginning is not there yet.
    """
    options = config.storage.options()
    offline = config.data.mode == "offline"
    model = sources.check(config.model.source, _needed(config), storage=options)
    if config.model.start_from is not None and begun:
        find_checkpoint(config.model.start_from, options)
    rows = _latents(config, model) if offline else _images(config)
    _check_validation(config, model)
    batch = config.data.global_batch_size or config.data.batch_size * most_workers(config)
    if rows < batch:
        raise DatasetError(
            f"{config.source.uri}: {rows} rows are fewer than one step's {batch}; lower data.batch_size or "
            "data.global_batch_size, or process more images"
        )
    run = RunFolder(open_storage(config.output.uri, options))
    step = run.latest()
    state = read_state(run.checkpoint(step)) if step is not None else TrainState()
    return Plan(
        run.storage.uri,
        rows,
        batch,
        state,
        run.checkpoint(step).uri if step is not None else None,
        _last_step(config, state, rows, batch),
        finished(config, state),
    )


def _latents(config: TrainConfig, model: sources.ModelSource) -> int:
    """Positions in an epoch; what is not latents, or another model's, is refused."""
    found = open_sources(config)
    if model.kind in ("builtin", "local"):  # of others the workers know the digest once they have them
        for source in found.all:
            if source.dataset is not None:
                refuse_another_encoder(config, source.dataset, sources.resolve(model, storage=config.storage.options()))
    if config.data.reader == "direct":
        DirectReader(found.ingredients, config.seed, OrderShape(), 0, 1)  # looks whether they can be mixed
    return found.rows


def _images(config: TrainConfig) -> int:
    """The same of images."""
    dataset = open_dataset(open_storage(config.source.uri, config.storage.options()), "images")
    return sum(
        part["written"]
        for part in dataset.parts.select(["written", "start"]).to_pylist()
        if config.limit is None or part["start"] < config.limit
    )


def _needed(config: TrainConfig) -> tuple[str, ...]:
    """Of the model: pictures that are encoded or drawn meanwhile go through the VAE."""
    through_vae = config.data.mode != "offline" or config.samples.every_steps is not None
    return (*PARTS, "vae") if through_vae else PARTS


def _check_validation(config: TrainConfig, model: sources.ModelSource) -> None:
    """What is to be measured on is there, and was made by the same model."""
    source, options = config.evaluate.source, config.storage.options()
    if config.evaluate.every_steps is None or source is None:
        return
    dataset = open_dataset(open_storage(source, options), "latents")
    open_latents(dataset, config.data.resolution)
    if model.kind in ("builtin", "local"):
        refuse_another_encoder(config, dataset, sources.resolve(model, storage=options))


def most_workers(config: TrainConfig) -> int:
    """The most workers that the run may have."""
    workers = config.scaling.num_workers
    return workers.max if isinstance(workers, Range) else workers


def finished(config: TrainConfig, state: TrainState) -> str | None:
    """The limit that a run has reached, if it has."""
    limits = (("max_steps", state.step), ("max_epochs", state.epoch), ("max_samples", state.samples))
    for name, reached in limits:
        limit = getattr(config, name)
        if limit is not None and reached >= limit:
            return f"{name} is {limit} and {reached} are done"
    return None


def _last_step(config: TrainConfig, state: TrainState, rows: int, batch: int) -> int | None:
    """The step at which the run ends, as far as can be told."""
    ends = []
    if config.max_steps is not None:
        ends.append(config.max_steps)
    if config.max_epochs is not None and state.epoch < config.max_epochs:
        whole = config.max_epochs - state.epoch - 1
        ends.append(state.step + -(-(rows - state.position) // batch) + whole * -(-rows // batch))
    return min(ends) if ends else None


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
    if line.get("cost"):
        parts.append(f"cost {line['cost']:,.2f}")
    if plan.last_step is not None and line["samples_per_s"]:
        left = (plan.last_step - line["step"]) * plan.batch / line["samples_per_s"]
        parts.append(f"ETA {duration(max(0.0, left))}")
    return " · ".join(parts)


def summary_lines(state: TrainState, checkpoint: str | None, reason: str) -> list[str]:
    """What happened, and what can be done next."""
    loss = f", loss {state.loss:.4f}" if state.loss is not None else ""
    lines = [
        f"train: ended at step {state.step:,} ({reason}): {state.samples:,} samples in {duration(state.seconds)}{loss}",
    ]
    if state.skipped:
        lines.append(f"train: {state.skipped} bad steps were skipped; their rows are in the run's bad_steps/")
    if checkpoint:
        lines += [f"train: checkpoint {checkpoint}", f"next: sdp export {checkpoint} OUT, or sdp generate with it"]
    return lines
