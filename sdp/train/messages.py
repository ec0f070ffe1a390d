"""A run's progress line, and its summary when training ends."""

import os
import shlex
from typing import Any

from sdp.config.train import PricesConfig, TrainConfig
from sdp.console import SUBMITTED_ENV, clock, counted, duration, rate, size, spent
from sdp.hardware import gpus_by_accelerator
from sdp.model.checkpoints import TrainState, run_of
from sdp.model.sources import BUILTIN
from sdp.plan.speeds import Speeds
from sdp.train.plan import TrainPlan


def progress_line(line: dict[str, Any], last: int | None) -> str:
    """Return the progress as one line, from a line of metrics and the run's last step, if known.

    step 1,230 of 5,000 · epoch 0 41% · loss 0.1234 · 812 img/s (203 each) · lr 1.0e-04 · data 3% · ETA 1:02:03
    """
    of_last = f" of {last:,}" if last is not None else ""
    per_worker = f" ({line['samples_per_s_per_worker']:,.0f} each)" if line["workers"] > 1 else ""
    parts = [
        f"step {line['step']:,}{of_last}",
        f"epoch {line['epoch']} {line['epoch_done']:.0%}",
        f"loss {line['loss_smoothed']:.4f}" if line["loss_smoothed"] is not None else "no loss yet",
        f"{rate(line['samples_per_s'])} img/s{per_worker}",
        f"lr {line['learning_rate']:.1e}",
    ]
    if line.get("mfu") is not None:
        parts.append(f"MFU {line['mfu']:.1%}")
    if line["step_seconds"]:
        parts.append(f"data {line['time'].get('data', 0.0) / line['step_seconds']:.0%}")
    if line.get("memory_peak"):
        parts.append(f"{size(line['memory_peak'])} GPU memory")
    if line["skipped"]:
        parts.append(f"{line['skipped']} skipped")
    if line.get("gpu_hours"):
        parts.append(f"{line['gpu_hours']:,.2f} GPU-hours")
    if "left_s" in line:
        parts.append(f"ETA {duration(line['left_s'])}, at {clock(line['finish_time'])}")
    return " · ".join(parts)


def forecast_line(config: TrainConfig, plan: TrainPlan) -> str:
    """Return the hours and the cost that are left, by the run's own speed or by a published one."""
    state, workers, kinds = plan.state, config.scaling.most, gpus_by_accelerator(config.scaling.gpu_type or "")
    if state.samples and state.seconds:
        speed, source = state.samples / state.seconds, "its speed so far"
    elif kinds and not config.model.source.startswith(BUILTIN):
        figure = Speeds().train(kinds[-1].name, config.data.resolution)
        speed, source = figure.value * workers, figure.source
    else:
        return "train: how long it takes is not known before it runs: its first line of progress says it"
    if plan.last_step is None:
        return f"train: {rate(speed)} img/s, by {source}"
    hours = (plan.last_step - state.step) * plan.batch / speed / 3600
    prices = config.prices.hourly
    per_hour = workers * prices.get("trainer_hour", 0.0)
    if config.data.mode == "online":
        per_hour += config.encode.most * prices.get("encoder_hour", 0.0)
    return f"train: about {spent(hours * 3600, 0.0, hours * per_hour)} more, at {rate(speed)} img/s ({source})"


def summary_lines(
    state: TrainState, checkpoint: str | None, reason: str, prices: PricesConfig | None = None, *, lora: bool = False
) -> list[str]:
    """Return a summary of the training that has ended, and the next commands."""
    cost = state.cost(prices.model_dump()) if prices is not None else 0.0
    loss = f", loss {state.loss:.4f}" if state.loss is not None else ""
    took = spent(state.seconds, state.gpu_hours, cost)
    lines = [f"train: ended at step {state.step:,} ({reason}): {state.samples:,} samples in {took}{loss}"]
    if state.skipped:
        lines.append(f"train: skipped {counted(state.skipped, 'bad step')}; the run's events.jsonl lists them")
    if state.empty:
        lines.append(
            f"train: {counted(state.empty, 'step')} had no row that counts (held out, filtered, taken down, beyond "
            "limit or bad)"
        )
    if checkpoint:
        lines.append(f"train: checkpoint {checkpoint}")
    if checkpoint and state.step:
        run = shlex.quote(run_of(checkpoint))
        export = f"for ComfyUI, sdp export {run} FILE.safetensors --lora" if lora else f"sdp export {run} FOLDER"
        draw = f"sdp generate {run} 'a prompt'"
        if os.environ.get(SUBMITTED_ENV):
            draw = f"sdp submit generate --set checkpoint={run}"
        lines.append(f"next: {draw}, or {export}")
    return lines
