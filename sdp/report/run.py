"""The sections of a training run and of a checkpoint: loss, time, samples, history, and what it was made from."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from statistics import fmean, median
from typing import Any

from sdp import charts, lease
from sdp.charts import Line
from sdp.config import JOBS
from sdp.config.base import changed
from sdp.config.train import PHASES
from sdp.console import counted, duration, rate, size, spent
from sdp.datasets.records import reading
from sdp.errors import DatasetError, ModelError
from sdp.generate.layout import DRAWN
from sdp.model.checkpoints import COMPLETE, Steps, checkpoint_name, read_config, read_ledger, read_marker, state_in
from sdp.model.tensor_index import DamagedCheckpoint, read_tensor_index
from sdp.report.data import noted, small
from sdp.report.page import Bar, Block, Folded, Gallery, PageSection, Svg, Table, Tile
from sdp.storage import Storage
from sdp.train.run_folder import PROFILE, RunFolder, samples_folder

_TROUBLE = ("recovered", "gave_up", "bad_step", "stalled")
"""Events that report a failure."""
_EVENTS, _DETAILS = 30, 300
"""Limits on the rows of the history, and on the characters of each. Ordinary checkpoints go first."""
_SENTENCES = {
    "start": "from step {from_step}",
    "training": "from step {from_step} on {workers}",
    "samples": "of step {step}, drawn in {seconds} s",
    "checkpoint": "of step {step}, written in {whole_s} s",
    "bad_step": "step {step} is left out: {verdict}, loss {loss}, gradient norm {gradient_norm}",
    "recovered": "from step {from_step} on {workers}: {failures}",
    "gave_up": "{failures}",
    "changed": "from step {from_step}: {keys}",
    "preemption": "of a node is near, so step {step} is saved",
    "profile": "of the steps to {step}",
    "encoders": "{count} left: {reason}",
}
"""The details of each event."""
_UNDER_WAY = "not ended; under way"
_LIMITS = ("max_steps", "max_epochs")
_PARTS = {"data": "waiting for data", "copy": "copying to the device", "checkpoint": "writing checkpoints"}
_SAMPLE_STEPS = 6
"""Limit on the steps whose samples are shown."""
_LIVE_FILES = 4
"""Limit on the files of metrics that a live page reads."""
_HINT = "use another checkpoint"


def run_section(
    storage: Storage, pictures: int = 0, *, live_at: str | None = None, prices: Mapping[str, float] | None = None
) -> PageSection:
    """Describe a run of one phase, with its newest checkpoint in it.

    With `live_at` it is read from a few files, without checkpoints, and its pictures are links below this address.
    """
    run, live = RunFolder(storage), live_at is not None
    steps = Steps() if live else run.steps()
    problems: list[str] = []
    metrics, events = run.metrics(problems, newest=_LIVE_FILES if live else 0), run.events(problems)
    bad_rows = [] if live else run.bad_rows(problems)
    last = metrics[-1] if metrics else {}
    complete, newest = steps.complete, None
    if complete:
        try:
            newest = checkpoint_section(storage.child(checkpoint_name(complete[-1])), prices)
            problems += newest.problems
        except DatasetError as error:
            problems.append(str(error))
    reported = [event["step"] for event in events if isinstance(event.get("step"), int)]
    step = max([0, *complete[-1:], *(line["step"] for line in metrics[-1:]), *reported[-1:]])
    state, counts = _state(storage, events), Counter(event["event"] for event in events)
    reasons = Counter(line["reason"] for line in bad_rows)
    states = [(at, "complete" if steps[at] else "incomplete") for at in reversed(steps)]
    profile = [storage.read(PROFILE).decode(errors="replace")] if storage.exists(PROFILE) else []
    drawn = _samples(run, pictures, problems, live_at)
    last_drawn = Gallery("Newest pictures", [("", [tiles[-1] for _, tiles in drawn.rows])] if drawn.rows else [])
    blocks: list[Block] = [
        *([last_drawn] if live else [drawn, _drawn_by_request(storage, pictures, problems)]),
        *(_measures(metrics) if metrics else []),
        *([drawn] if live else []),
        _history(events),
        Table("Bad rows", ("reason", "rows"), reasons.most_common()),
    ]
    details: list[Block] = [
        Table("Checkpoints", ("step", "state"), states),
        *(Folded("Where a step's time and memory go", text) for text in profile),
        *(newest.details if newest else ()),
    ]
    figures = [("step", f"{step:,}")]
    if last:
        loss, held_out = last.get("loss_smoothed"), (last.get("validation") or {}).get("all")
        mfu, memory, left_s = last.get("mfu"), last.get("memory_peak"), last.get("left_s")
        cost = newest.facts["cost"] if newest else 0.0
        now = newest.facts if newest and newest.facts["step"] > last["step"] else last
        figures += [
            ("samples", f"{now['samples']:,}"),
            ("epochs", f"{last['epoch'] + last['epoch_done']:.2f}"),
            ("loss", f"{loss:.4f}" if loss is not None else ""),
            ("loss on held-out rows", f"{held_out:.4f}" if held_out is not None else ""),
            ("img/s", rate(median(line["samples_per_s"] for line in metrics))),
            ("workers", f"{last['workers']}"),
            ("trained for", spent(now["seconds"], now.get("gpu_hours") or 0.0, cost)),
            ("time left", duration(left_s) if left_s and state.startswith(_UNDER_WAY) else ""),
            ("of GPU peak", f"{mfu:.1%}" if mfu else ""),
            ("GPU memory", size(memory) if memory else ""),
            ("skipped steps", f"{last['skipped']:,}" if last.get("skipped") else ""),
        ]
    facts = {"kind": "run", "state": state, "step": step, "last": last, "checkpoints": complete}
    facts |= {"history": counts, "bad_rows": reasons, "newest": newest and newest.to_json()}
    name = storage.uri.rpartition("/")[2]
    title = f"Training, {name.replace('-', ' ')}" if name in PHASES else "Training"
    recovered = counts["recovered"]
    recoveries = f", after {counted(recovered, 'recovery', 'recoveries')}" if recovered else ""
    ended = state.startswith("ended")
    good = not problems and (ended or state.startswith(_UNDER_WAY))
    verdict = f"{_ending(events[-1])}{recoveries}." if ended else f"At step {step:,}{recoveries}; {state}."
    return PageSection(title, storage.uri, verdict, good, figures, blocks, details, problems, facts)


def checkpoint_section(folder: Storage, prices: Mapping[str, float] | None = None) -> PageSection:
    """Describe a complete checkpoint, with the cost by these prices, or by those that its run was given."""
    config = read_config(folder)
    with reading(folder.uri_of(COMPLETE), _HINT):
        marker = read_marker(folder)
        state, rows, model = state_in(marker), marker.get("epoch_rows"), marker.get("model", {})
        datasets = [*marker.get("datasets", []), *([marker["dataset"]] if "dataset" in marker else [])]
        started = (config.get("model") or {}).get("start_from")
        files, problems = {file.path: file.size for file in folder.list()}, list[str]()
        consumed = _check(folder, files, state.consumed, problems)
        cost = state.cost(prices or config.get("prices") or {})
        done = f", {min(1.0, state.position / rows):.1%} of {rows:,} rows consumed" if rows else ""
        gpu = f" on {marker['gpu']}" if marker.get("gpu") else ""
        verdict = f"Written {marker['created']} by {counted(marker['workers'], 'worker')}{gpu}, sdp {marker['sdp']}."
        sources = [
            ("sdp", str(marker["sdp"]), ""),
            ("model", model.get("source", "unknown"), model.get("digest") or ""),
            *([("started from the weights of", str(started), "")] if started else []),
            *(("trained on", str(one["uri"]), one.get("manifest_digest") or "") for one in datasets),
        ]
        figures = [
            ("step", f"{state.step:,}"),
            ("skipped steps", f"{state.skipped:,}" if state.skipped else ""),
            ("samples", f"{state.samples:,}"),
            ("epoch", f"{state.epoch}{done}"),
            ("in the ledger", f"{counted(sum(consumed.values()), 'row')} of {counted(len(consumed), 'epoch')}"),
            ("loss", f"{state.loss:.4f}" if state.loss is not None else ""),
            ("trained for", spent(state.seconds, state.gpu_hours, cost)),
            ("size", size(sum(files.values()))),
        ]
        differing = changed(JOBS["train"], config)
        details: list[Block] = [
            Table("Made from", ("", "source", "digest"), sources),
            Table("Settings", ("key", "not the default"), [(key, json.dumps(v)) for key, v in differing.items()]),
            Folded("Configuration", json.dumps(config, indent=1)),
        ]
        facts = {"kind": "checkpoint", **state.to_json(), "skipped": state.skipped}
        facts |= {"epoch_rows": rows, "consumed": consumed, "cost": cost}
        facts |= {name: marker[name] for name in ("created", "sdp", "workers")} | {"gpu": marker.get("gpu")}
        facts |= {"model": model, "datasets": datasets, "config": config, "changed": differing}
    if problems:
        verdict = f"Damaged: {counted(len(problems), 'problem')}, listed below."
    return PageSection("Checkpoint", folder.uri, verdict, not problems, figures, (), details, problems, facts)


def _check(folder: Storage, files: Mapping[str, int], samples: int, problems: list[str]) -> dict[int, int]:
    """Return the rows in the ledger by epoch; add a problem for each file or count that is wrong."""
    try:
        for file, count in sorted(read_tensor_index(folder).file_sizes().items()):
            if files.get(file, 0) < count:
                problems.append(f"{folder.uri_of(file)}: {files.get(file, 0):,} bytes, expected {count:,}; {_HINT}")
    except ModelError as error:
        problems.append(str(error))
    try:
        ledger = read_ledger(folder)
    except DamagedCheckpoint as error:
        problems.append(str(error))
        return {}
    consumed = {epoch: ledger.consumed(epoch) for epoch in ledger.epochs()}
    if (rows := sum(consumed.values())) != samples:
        problems.append(f"{folder.uri}: {samples:,} samples counted, but {rows:,} rows in its ledger; {_HINT}")
    return consumed


def _state(run: Storage, events: Sequence[Mapping[str, Any]]) -> str:
    """Return a run's state in one sentence."""
    last = events[-1] if events else {}
    if last.get("event") == "end":
        return f"ended: {last['reason']}"
    if last.get("event") == "gave_up":
        failures = last.get("failures") or [""]
        return f"given up: {str(failures[-1]) or 'unknown reason'}"
    return f"not ended; {lease.describe(run)}"


def _ending(event: Mapping[str, Any]) -> str:
    """Return the end of a run in words."""
    limit, _, words = event["reason"].partition(": ")
    step = _worded(event.get("step", "unknown"))
    if limit not in _LIMITS:
        return f"Ended at step {step}: {event['reason']}"
    return f"Finished: {step} of {words}" if limit == "max_steps" else f"Finished: {words}, at step {step}"


def _measures(metrics: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Return the loss of the batches and on held-out rows, and the mean time of a step by activity."""
    steps = [line["step"] for line in metrics]
    held_out = {line["validation_step"]: line["validation"].get("all") for line in metrics if line.get("validation")}
    curves = [
        Line("each step", steps, [line.get("loss") for line in metrics], faint=True),
        Line("smoothed", steps, [line.get("loss_smoothed") for line in metrics]),
        Line("held-out rows", [*held_out], [*held_out.values()]),
    ]
    times = [line["time"] for line in metrics if line.get("time")]
    means = {name: fmean(time.get(name, 0.0) for time in times) for name in dict.fromkeys(chain(*times))}
    return [
        Svg("Loss", charts.lines([curve for curve in curves if curve.x], x_name="step")),
        Bar("Time of a step", [(_PARTS.get(name, name), s, f"{1000 * s:,.1f} ms") for name, s in means.items()]),
    ]


def _samples(run: RunFolder, pictures: int, problems: list[str], live_at: str | None) -> Gallery:
    """Return the pictures drawn during training, by prompt, from the first step to the last."""
    available, rows = run.sample_steps(), dict[str, list[Tile]]()
    last = len(available) - 1
    steps = sorted({available[n * last // (_SAMPLE_STEPS - 1)] for n in range(_SAMPLE_STEPS) if available and pictures})
    for step in steps:
        prompts = dict[str, str]()
        with noted(problems):
            prompts = run.sample_prompts(step)
        for name, prompt in islice(sorted(prompts.items()), max(1, pictures // len(steps))):
            path = f"{samples_folder(step)}/{name}"
            with noted(problems):
                data, link = (_picture(run.storage, path), "") if live_at is None else (b"", f"{live_at}{path}")
                rows.setdefault(name, []).append(Tile(data, prompt, f"step {step:,}", link))
    return Gallery("Drawn during training", [(tiles[0].caption, tiles) for tiles in rows.values()])


def _picture(run: Storage, path: str) -> bytes:
    return small(run.read(path), run.uri_of(path))


def _drawn_by_request(run: Storage, pictures: int, problems: list[str]) -> Gallery:
    """Return the pictures that `sdp generate RUN PROMPT` has drawn, the last by name."""
    files = [file for file in run.names(f"{DRAWN}/") if file.endswith(".png")] if pictures else []
    tiles = list[Tile]()
    for file in files[-pictures:]:
        with noted(problems):
            tiles.append(Tile(_picture(run, file), file.rpartition("/")[2]))
    return Gallery("Drawn on request", [("", tiles)] if tiles else [])


def _history(events: Sequence[Mapping[str, Any]]) -> Block:
    notable = [event for event in events if event["event"] != "checkpoint"] if len(events) > _EVENTS else events
    rows = []
    for event in notable[-_EVENTS:]:
        words = {key: _worded(value) for key, value in event.items() if key not in ("time", "event")}
        try:
            details = _ending(event) if event["event"] == "end" else _SENTENCES[event["event"]].format_map(words)
        except KeyError:  # of another version
            details = " · ".join(f"{key.replace('_', ' ')} {value}" for key, value in words.items())
        mark = "⚠ " if event["event"] in _TROUBLE else ""
        time = event["time"].replace("T", " ").removesuffix("+00:00")
        rows.append((time, f"{mark}{event['event'].replace('_', ' ')}", details[:_DETAILS]))
    return Table("History", ("time (UTC)", "event", "details"), rows)


def _worded(value: Any) -> str:
    """Return a value of an event in words."""
    match value:
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(map(str, value))
        case dict():  # what a key was and is
            return ", ".join(f"{key} {_worded(both).replace(', ', ' → ')}" for key, both in value.items())
    return str(value)
