"""A run's folder: its identity, checkpoints, events and metrics.

    _run.json                        the run's identity, written once
    checkpoints/step-000001000/      tensors, ledger.roaring, config.json, and last complete.json
    bad_rows/step-000001000.jsonl    bad rows since the previous checkpoint, with reasons
    events.jsonl                     starts, failures, checkpoints, skipped steps
    metrics/000003-000055000.jsonl   a line every few steps: the third file, for the steps after 55,000
    samples/step-000001000/          pictures drawn at that step, and last prompts.json

A checkpoint without complete.json does not count. One process writes at a time: the driver before and after training,
and the main worker in between. Reading needs neither torch nor Ray; `sdp inspect` and `sdp report` use this module.

Object stores cannot append, so the newest file of metrics is rewritten until it is full and older files never change.
A job that resumes from a checkpoint starts a new file after that step. Lines of older files about later steps are then
void, since those steps are done again.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from sdp.config import keys
from sdp.config.train import TrainConfig
from sdp.datasets.audit import RUN
from sdp.datasets.concurrently import ordered_map
from sdp.datasets.outcomes import Outcome
from sdp.datasets.output import read_json
from sdp.datasets.records import BadRecord, parse
from sdp.errors import AlreadyExists, Conflict, DatasetError, NotFound
from sdp.model.checkpoints import COMPLETE, Steps, TrainState, checkpoint_name, read_state, steps_in
from sdp.storage import Storage, open_storage

EVENTS = "events.jsonl"
PROFILE = "profile/summary.txt"
FORMAT = 1
SAMPLES, PROMPTS = "samples/", "prompts.json"
"""The pictures drawn during training; PROMPTS is written last and maps each picture to its prompt."""

EVALUATIONS = "evaluations.jsonl"
"""A line for each evaluation of pictures that a checkpoint of this run drew."""

METRICS = "metrics/"
FILE_LINES = 1000
"""Lines of a full file of metrics, which has about 800 kB."""

_METRICS_FILE = re.compile(rf"{METRICS}(\d{{6,}})-(\d{{9,}})\.jsonl", re.ASCII)

_APPENDS = 5
"""Attempts to append a line."""

LogLine = dict[str, Any]

_NUMBERS = ("step", "samples", "epoch", "workers", "epoch_done", "samples_per_s", "seconds")
"""Numbers that each line of metrics has."""
_FIGURES = (
    *("loss", "loss_smoothed", "gradient_norm", "learning_rate", "skipped", "mfu", "memory_peak", "left_s"),
    *("gpu_hours", "finish_time", "step_seconds", "samples_per_s_per_worker", "encoders", "encoded", "samples_step"),
)
"""Numbers that a line may have."""
_GROUPS = ("time", "validation")
"""Numbers by name that a line may have."""
_PROMPTS = re.compile(rf"{SAMPLES}step-(\d{{9,18}})/{re.escape(PROMPTS)}", re.ASCII)
_PICTURE = re.compile(r"\d{3,9}\.png", re.ASCII)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    storage: Storage
    check: Callable[[], None] = lambda: None
    """Raises if the job has lost the run's lease."""

    @staticmethod
    def of(config: TrainConfig, check: Callable[[], None] = lambda: None) -> "RunFolder":
        """Return the folder of a configuration's run."""
        return RunFolder(open_storage(config.output.uri, config.storage.options()), check)

    def claim(self, head: Mapping[str, Any]) -> None:
        """Write the run's identity; if it exists, refuse a different one. Moved datasets are updated."""
        try:
            self.storage.create(RUN, json_line(_head(head), indent=1))
        except AlreadyExists:
            self.refuse_another(head)
            stored = read_json(self.storage, RUN)
            if stored.get("datasets") != head.get("datasets"):
                moved = json_line({**stored, "datasets": head.get("datasets")}, indent=1)
                self.storage.publish_held(RUN, moved, self.check)

    def refuse_another(self, head: Mapping[str, Any]) -> None:
        """Raise a DatasetError if the folder holds a run of another identity; write nothing."""
        try:
            stored = read_json(self.storage, RUN)
        except NotFound:
            return
        now = json.loads(json_line(_head(head)))
        was_identity, identity = stored.pop("identity", {}), now.pop("identity", {})
        for record in (stored, now):  # datasets may have moved; `open_pinned` compares their content
            record.pop("datasets", None)
        if not isinstance(was_identity, dict):
            raise DatasetError(
                f"{self.storage.uri_of(RUN)}: identity: expected a mapping, got {was_identity!r:.60}; restore it from "
                "a backup, or choose another output.uri"
            )
        # Keys that may change by now may differ; a key that is newer than the run had its default.
        defaults = json.loads(json_line({key.path: key.default for key in keys(TrainConfig)}))
        differing = [(k, was_identity.get(k, defaults.get(k)), identity.get(k)) for k in sorted(identity)]
        differing += [(k, stored.get(k), now.get(k)) for k in sorted(stored.keys() | now.keys())]
        changed = "; ".join(
            f"{k} was {json.dumps(was)} and is {json.dumps(is_)} now" for k, was, is_ in differing if was != is_
        )
        if changed:
            raise DatasetError(
                f"output.uri: {self.storage.uri} holds a run with another configuration ({changed}); set it back, or "
                "choose another output.uri (model.start_from begins with this run's weights)"
            )

    def checkpoint(self, step: int) -> Storage:
        """Return the folder of a step's checkpoint."""
        return self.storage.child(checkpoint_name(step))

    def steps(self) -> Steps:
        """Return the steps that have a checkpoint folder."""
        return steps_in(self.storage)

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint."""
        return next(reversed(self.steps().complete), None)

    def newest(self) -> Storage | None:
        """Return the folder of the newest complete checkpoint."""
        step = self.latest()
        return None if step is None else self.checkpoint(step)

    def state(self) -> TrainState:
        """Return the run's state at its newest checkpoint; without one, that of a new run."""
        checkpoint = self.newest()
        return TrainState(0) if checkpoint is None else read_state(checkpoint)

    def delete_checkpoint(self, step: int) -> None:
        """Delete a checkpoint, its marker first, so that it is never taken for complete."""
        self.check()
        folder = self.checkpoint(step)
        folder.delete(COMPLETE)
        for name in folder.names():
            folder.delete(name)
        if folder.uri.startswith("/"):  # object stores have no empty folders, disks do
            with suppress(OSError):
                Path(folder.uri).rmdir()

    def record(self, event: str, **details: Any) -> None:
        """Add an event to the run's history."""
        line = json_line({"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **details})
        self._append(EVENTS, line + b"\n")

    def record_evaluation(self, checkpoint: str, weights: str, uri: str) -> None:
        """Add an evaluation of pictures that a checkpoint drew; `weights` is the setting of that name."""
        self._append(EVALUATIONS, json_line({"checkpoint": checkpoint, "weights": weights, "uri": uri}) + b"\n")

    def evaluations(self, checkpoint: str) -> list[tuple[str, str]]:
        """Return the evaluations of a checkpoint's pictures: their URI, and the setting `weights` of the pictures."""
        lines = self._lines(EVALUATIONS, lambda line: isinstance(line.get("uri"), str))
        own = [line for line in lines if line.get("checkpoint") == checkpoint]
        return list(dict.fromkeys((line["uri"], str(line.get("weights", "auto"))) for line in own))

    def record_bad_rows(self, step: int, bad: Sequence[Outcome]) -> None:
        """Write the reasons of bad rows."""
        if bad:
            lines = [json_line(asdict(outcome)) + b"\n" for outcome in sorted(bad, key=lambda outcome: outcome.row)]
            self.storage.publish_held(f"bad_rows/step-{step:09d}.jsonl", b"".join(lines), self.check)

    def bad_rows(self, problems: list[str] | None = None) -> list[LogLine]:
        """Return a line with the reason for each bad row."""
        return [line for name in self.storage.names("bad_rows/") for line in self._lines(name, _is_bad_row, problems)]

    def events(self, problems: list[str] | None = None) -> list[LogLine]:
        """Return the events; a file that does not exist yet has none."""
        return self._lines(EVENTS, _is_event, problems)

    def metrics(self, problems: list[str] | None = None, *, newest: int = 0) -> list[LogLine]:
        """Return the metrics, of the newest files or of all; a repeated step appears once."""
        files = metrics_files(self.storage)[-newest:]
        read = ordered_map(lambda file: self._lines(file[2], _is_metric, problems), files, workers=8)
        return joined((after, lines) for (_, after, _), lines in zip(files, read, strict=True))

    def sample_steps(self) -> list[int]:
        """Return the steps whose set of pictures is complete."""
        return sorted(int(match[1]) for name in self.storage.names(SAMPLES) if (match := _PROMPTS.fullmatch(name)))

    def sample_prompts(self, step: int) -> dict[str, str]:
        """Return the prompt of each picture of a step, by the picture's file name."""
        name = f"{samples_folder(step)}/{PROMPTS}"
        try:
            prompts = parse(dict[str, str], read_json(self.storage, name))
        except BadRecord as error:
            raise DatasetError(f"{self.storage.uri_of(name)}: {error}; delete it") from error
        return {picture: prompt for picture, prompt in prompts.items() if _PICTURE.fullmatch(picture)}

    def samples(self, step: int) -> Iterator[tuple[str, str, bytes]]:
        """Yield the file name, the prompt and the content of each picture of a step."""
        for name, prompt in sorted(self.sample_prompts(step).items()):
            yield name, prompt, self.storage.read(f"{samples_folder(step)}/{name}")

    def _append(self, path: str, line: bytes) -> None:
        """Append a line, and keep those that others add meanwhile."""
        for left in reversed(range(_APPENDS)):
            etag, content = self.storage.etag(path), self._content(path)
            self.check()
            newline = b"\n" if content and not content.endswith(b"\n") else b""  # or a torn line would damage this one
            try:
                self.storage.swap(path, content + newline + line, etag)
                return
            except Conflict:
                if not left:
                    raise

    def _content(self, path: str) -> bytes:
        try:
            return self.storage.read(path)
        except NotFound:
            return b""

    def _lines(self, path: str, is_good: Callable[[LogLine], bool], problems: list[str] | None = None) -> list[LogLine]:
        """Return the valid lines of a file. One problem counts the others; without a list for it, it is logged."""
        good, damaged = list[LogLine](), list[int]()
        for number, text in enumerate(self._content(path).split(b"\n"), 1):
            if not text.strip():
                continue
            if isinstance(line := _parsed(text), dict) and is_good(line):
                good.append(line)
            else:
                damaged.append(number)
        if damaged:
            lines_are = "line is" if len(damaged) == 1 else "lines are"
            what = f"{len(damaged):,} {lines_are} damaged and left out, the first at line {damaged[0]:,}"
            problem = f"{self.storage.uri_of(path)}: {what}"
            if problems is None:
                log.warning("%s", problem)
            else:
                problems.append(problem)
        return good


def samples_folder(step: int) -> str:
    """Return the folder of a step's pictures within a run."""
    return f"{SAMPLES}step-{step:09d}"


def metrics_file(number: int, after: int) -> str:
    """Return the name of a run's file of metrics by its number and the step that it begins after."""
    return f"{METRICS}{number:06d}-{after:09d}.jsonl"


def metrics_files(run: Storage) -> list[tuple[int, int, str]]:
    """Return (number, step that it begins after, name) of each file of a run's metrics, from the oldest."""
    matches = (_METRICS_FILE.fullmatch(name) for name in run.names(METRICS))
    return sorted((int(match[1]), int(match[2]), match[0]) for match in matches if match)


def joined(files: Iterable[tuple[int, Sequence[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return the valid lines of files, each given as the step that it begins after and its lines, from the oldest."""
    lines: list[dict[str, Any]] = []
    for after, new in files:
        while lines and lines[-1]["step"] > after:
            lines.pop()
        lines += new
    return lines


def _head(head: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "kind": "run", **head}


def json_line(data: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return strict JSON, in which a number that is not finite becomes null."""
    return json.dumps(to_jsonable_python(data, inf_nan_mode="null", fallback=str), indent=indent).encode()


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_metric(line: LogLine) -> bool:
    """Return whether a line has the numbers that are read, under names that no older version gave to a group."""
    needed = [*_NUMBERS]
    if line.get("validation") is not None:
        needed.append("validation_step")
    groups = [line[name] for name in _GROUPS if line.get(name) is not None]
    if not all(isinstance(group, dict) for group in groups) or not all(_is_number(line.get(name)) for name in needed):
        return False
    return all(
        value is None or _is_number(value) or (isinstance(value, dict) and name not in _FIGURES)
        for name, value in line.items()
    ) and all(map(_is_number, chain.from_iterable(group.values() for group in groups)))


def _is_event(line: LogLine) -> bool:
    needed = {"end": "reason", "bad_step": "verdict"}.get(str(line.get("event")), "event")
    texts = all(isinstance(line.get(name), str) for name in ("time", "event", needed))
    return texts and isinstance(line.get("failures", []), list)


def _is_bad_row(line: LogLine) -> bool:
    return isinstance(line.get("row"), int) and isinstance(line.get("reason"), str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
