"""A run's folder: what it is, its checkpoints, its events and its metrics.

    _run.json                        what the run is, written once
    checkpoints/step-000001000/      tensors, ledger.roaring, config.json, and last of all complete.json
    bad_rows/step-000001000.jsonl    rows that turned out bad up to this checkpoint since the one before, and why
    events.jsonl                     starts, failures, checkpoints, resizes
    metrics.jsonl                    a line every few steps

A checkpoint without complete.json is none. One process writes at a time: the driver before and after training, the
main worker meanwhile.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from sdp.datasets.audit import RUN
from sdp.datasets.outcomes import Outcome
from sdp.datasets.output import read_json
from sdp.errors import AlreadyExists, DatasetError, NotFound
from sdp.model.checkpoints import COMPLETE, checkpoint_name, steps_in
from sdp.storage import Storage

EVENTS, METRICS = "events.jsonl", "metrics.jsonl"
FORMAT = 1


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    storage: Storage

    def claim(self, head: Mapping[str, Any]) -> None:
        """Say what the run is, or find that it has been begun with the same; another one is refused."""
        content = {"format": FORMAT, "kind": "run", **head}
        try:
            self.storage.create(RUN, _line(content, indent=1))
            return
        except AlreadyExists:
            there = read_json(self.storage, RUN)
        now = json.loads(_line(content))
        was_identity, identity = there.pop("identity", {}), now.pop("identity", {})
        differing = [(k, was_identity.get(k), identity.get(k)) for k in sorted(was_identity.keys() | identity.keys())]
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

    def delete_checkpoint(self, step: int) -> None:
        """Remove a checkpoint, its marker first: nobody shall take for whole what is half gone."""
        folder = self.checkpoint(step)
        folder.delete(COMPLETE)
        for name in folder.names():
            folder.delete(name)

    def record(self, event: str, **details: Any) -> None:
        """Add to the run's history."""
        line = _line({"time": datetime.now(UTC).isoformat(timespec="seconds"), "event": event, **details})
        self._append(EVENTS, line + b"\n")

    def record_bad_step(self, name: str, verdict: str, loss: float, norm: float, rows: Sequence[int]) -> None:
        """Keep the rows of a step that was not taken."""
        content = {"verdict": verdict, "loss": repr(loss), "gradient_norm": repr(norm), "rows": sorted(rows)}
        self.storage.publish(name, _line(content))
        self.record("bad_step", verdict=verdict, rows=self.storage.uri_of(name))

    def record_bad_rows(self, step: int, bad: Sequence[Outcome]) -> None:
        """Keep why rows were left out."""
        if bad:
            lines = [_line(asdict(outcome)) + b"\n" for outcome in sorted(bad, key=lambda outcome: outcome.row)]
            self.storage.publish(f"bad_rows/step-{step:09d}.jsonl", b"".join(lines))

    def bad_rows(self) -> dict[int, str]:
        """The reason of each row that has turned out bad."""
        found = {}
        for name in self.storage.names("bad_rows/"):
            for line in self._lines(name):
                found[int(line["row"])] = str(line["reason"])
        return found

    def events(self) -> list[dict[str, Any]]:
        return self._lines(EVENTS)

    def metrics(self) -> list[dict[str, Any]]:
        return self._lines(METRICS)

    def write_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Replace the metrics. They are few and small: object stores cannot append."""
        self.storage.publish(METRICS, b"".join(_line(line) + b"\n" for line in lines))

    def _append(self, path: str, line: bytes) -> None:
        self.storage.publish(path, self._content(path) + line)

    def _content(self, path: str) -> bytes:
        try:
            return self.storage.read(path)
        except NotFound:
            return b""

    def _lines(self, path: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._content(path).splitlines()]


def _line(data: Mapping[str, Any], indent: int | None = None) -> bytes:
    return json.dumps(data, indent=indent, default=str).encode()
