"""A run's folder: what it is, its checkpoints, its events and its metrics.

    _run.json                        what the run is, written once
    checkpoints/step-000001000/      tensors, ledger.roaring, config.json, and last of all complete.json
    bad_rows/step-000001000.jsonl    rows that turned out bad up to this checkpoint since the one before, and why
    events.jsonl                     starts, failures, checkpoints, resizes
    metrics/000001-000000000.jsonl   a line every few steps, some hundred in a file

A checkpoint without complete.json is none. One process writes at a time: the driver before and after training, the
main worker meanwhile.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sdp.datasets.audit import RUN
from sdp.datasets.outcomes import Outcome
from sdp.datasets.output import read_json
from sdp.errors import AlreadyExists, DatasetError, NotFound
from sdp.model.checkpoints import COMPLETE, checkpoint_name, steps_in
from sdp.model.metric_files import files_in, joined
from sdp.storage import Storage

EVENTS = "events.jsonl"
FORMAT = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    storage: Storage

    def claim(self, head: Mapping[str, Any]) -> None:
        """Say what the run is, or find that it has been begun with the same; another one is refused."""
        try:
            self.storage.create(RUN, json_line(_head(head), indent=1))
        except AlreadyExists:
            self.refuse_another(head)

    def refuse_another(self, head: Mapping[str, Any]) -> None:
        """The same without saying anything: refuse a run that has been begun with something else."""
        try:
            there = read_json(self.storage, RUN)
        except NotFound:
            return
        now = json.loads(json_line(_head(head)))
        was_identity, identity = there.pop("identity", {}), now.pop("identity", {})
        if not isinstance(was_identity, dict):
            raise DatasetError(
                f"{self.storage.uri_of(RUN)}: identity: expected a mapping, got {was_identity!r:.60}; restore it from "
                "a backup, or choose another output.uri"
            )
        # What no longer belongs to it may have changed since.
        differing = [(k, was_identity.get(k), identity.get(k)) for k in sorted(identity)]
        differing += [(k, there.get(k), now.get(k)) for k in sorted(there.keys() | now.keys())]
        changed = "; ".join(f"{k} was {was!r} and is {is_!r} now" for k, was, is_ in differing if was != is_)
        if changed:
            raise DatasetError(
                f"output.uri: {self.storage.uri} holds a run with another configuration ({changed}); set it back, or "
                "choose another output.uri (model.start_from takes over this run's weights)"
            )

    def checkpoint(self, step: int) -> Storage:
        return self.storage.child(checkpoint_name(step))

    def steps(self) -> dict[int, bool]:
        """The steps that have a folder, and whether their checkpoint is complete."""
        return steps_in(self.storage)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        complete = [step for step, whole in self.steps().items() if whole]
        return complete[-1] if complete else None

    def newest(self) -> str | None:
        """The address of the newest complete checkpoint."""
        step = self.latest()
        return None if step is None else self.checkpoint(step).uri

    def delete_checkpoint(self, step: int) -> None:
        """Remove a checkpoint, its marker first: nobody shall take for whole what is half gone."""
        folder = self.checkpoint(step)
        folder.delete(COMPLETE)
        for name in folder.names():
            folder.delete(name)
        if folder.uri.startswith("/"):  # stores have no folders, disks keep them
            with suppress(OSError):
                Path(folder.uri).rmdir()

    def record(self, event: str, **details: Any) -> None:
        """Add to the run's history."""
        line = json_line({"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **details})
        self._append(EVENTS, line + b"\n")

    def record_bad_step(
        self, name: str, verdict: str, loss: float, norm: float, rows: Mapping[int, Sequence[int]]
    ) -> None:
        """Keep the rows of a step that was not taken, by epoch."""
        epochs = {str(epoch): sorted(some) for epoch, some in sorted(rows.items())}
        content = {"verdict": verdict, "loss": repr(loss), "gradient_norm": repr(norm), "epochs": epochs}
        self.storage.publish(name, json_line(content))
        self.record("bad_step", verdict=verdict, rows=self.storage.uri_of(name))

    def record_bad_rows(self, step: int, bad: Sequence[Outcome]) -> None:
        """Keep why rows were left out."""
        if bad:
            lines = [json_line(asdict(outcome)) + b"\n" for outcome in sorted(bad, key=lambda outcome: outcome.row)]
            self.storage.publish(f"bad_rows/step-{step:09d}.jsonl", b"".join(lines))

    def bad_rows(self) -> dict[int, str]:
        """The reason of each row that has turned out bad."""
        names = self.storage.names("bad_rows/")
        return {line["row"]: line["reason"] for name in names for line in self._lines(name, _is_bad_row)}

    def events(self) -> list[dict[str, Any]]:
        return self._lines(EVENTS, lambda line: isinstance(line.get("event"), str))

    def metrics(self) -> list[dict[str, Any]]:
        """What holds of them: what was done again is told once."""
        return joined((after, self._lines(name, _is_metric)) for _, after, name in files_in(self.storage))

    def _append(self, path: str, line: bytes) -> None:
        content = self._content(path)
        torn = b"\n" if content and not content.endswith(b"\n") else b""  # or the half line would spoil this one too
        self.storage.publish(path, content + torn + line)

    def _content(self, path: str) -> bytes:
        try:
            return self.storage.read(path)
        except NotFound:
            return b""

    def _lines(self, path: str, is_good: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """The good lines of a file; training does not end for the others."""
        texts = [text for text in self._content(path).split(b"\n") if text.strip()]
        found = [line for line in map(_parsed, texts) if isinstance(line, dict) and is_good(line)]
        if len(found) < len(texts):
            log.warning("%s: %d damaged lines are left out", self.storage.uri_of(path), len(texts) - len(found))
        return found


def _head(head: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "kind": "run", **head}


def json_line(data: Mapping[str, Any], indent: int | None = None) -> bytes:
    """As strict JSON: what is not finite, for which that has no word, is null."""
    return json.dumps(_finite(data), indent=indent, default=str, allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_metric(line: dict[str, Any]) -> bool:
    return isinstance(line.get("step"), int)


def _is_bad_row(line: dict[str, Any]) -> bool:
    return isinstance(line.get("row"), int) and isinstance(line.get("reason"), str)
