"""A unit under way. Several threads record the outcomes of its rows in any order; then it becomes a part."""

import threading
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from sdp.datasets.columns import readable
from sdp.datasets.outcomes import Outcome, account_table
from sdp.datasets.parts import Layout, PartInfo, write_part
from sdp.datasets.units import Addresses, Work
from sdp.download.image import Checked
from sdp.download.plan import Rules, as_text, plan
from sdp.storage import Storage
from sdp.urls import Url

KIND = "images"
ROW_GROUP_ROWS = 256
_SIDES = ("width", "height", "original_width", "original_height")
_PLAIN = ("row", "image", *_SIDES)
"""Columns that compression does not shrink: encoded images and small numbers."""

SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        *(pa.field(name, pa.string(), nullable=False) for name in ("key", "url", "caption")),
        pa.field("image", pa.binary(), nullable=False),
        *(pa.field(name, pa.int32(), nullable=False) for name in _SIDES),
        pa.field("sha256", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class UnitTask:
    """One part to write."""

    work: Work
    rows: Addresses
    """The addresses to account for: the whole unit, or in a retry the failed ones."""
    table: pa.Table
    """Their rows of the source, in the same order."""
    retried: dict[str, int] = field(default_factory=dict)
    """Failures that a retry supersedes, by reason."""


class UnitRun:
    """The state of a unit between its task and its part."""

    def __init__(self, task: UnitTask, rules: Rules) -> None:
        self._task, self._source = task, rules.source
        self.to_fetch, self.refused = plan(task.table, task.rows, rules)
        self._outcomes: dict[int, Outcome] = {outcome.row: outcome for outcome in self.refused}
        self._images: dict[int, Checked] = {}
        self._changed = threading.Condition()

    def settle(self, outcome: Outcome, image: Checked | None = None) -> None:
        """Record the outcome of a row, and its image if it is to be written."""
        with self._changed:
            if outcome.row in self._outcomes:
                raise ValueError(f"row {outcome.row} has an outcome already: {self._outcomes[outcome.row]}")
            self._outcomes[outcome.row] = outcome
            if image is not None:
                self._images[outcome.row] = image
            if self.complete:
                self._changed.notify_all()

    @property
    def complete(self) -> bool:
        return len(self._outcomes) == len(self._task.rows)

    def wait(self, timeout_s: float) -> bool:
        """Wait until every row has its outcome; return whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.complete, timeout_s)

    def write(self, output: Storage) -> PartInfo:
        """Publish the part."""
        names = [*SCHEMA.names, *self._source.columns]
        layout = Layout(ROW_GROUP_ROWS, {name: "none" if name in _PLAIN else "zstd" for name in names})
        account = account_table(list(self._outcomes.values()))
        task = self._task
        return write_part(output, KIND, task.work, self.rows(), account, layout=layout, retried=task.retried)

    def rows(self) -> pa.Table:
        """Return the rows to be written, by address."""
        fetched = sorted((row for row in self.to_fetch if row.row in self._images), key=lambda row: row.row)
        images = [self._images[row.row] for row in fetched]
        source = self._task.table.take(pa.array([row.at for row in fetched], pa.int64()))
        columns: dict[str, Any] = {
            "row": [row.row for row in fetched],
            "key": [f"{row.row:012d}" for row in fetched],
            "url": list(map(_shown, source[self._source.url_column].to_pylist(), [row.url for row in fetched])),
            "caption": [row.caption for row in fetched],
            "image": pa.array([image.data or b"" for image in images], pa.binary()),  # in chunks beyond 2 GB
        }
        for name in (*_SIDES, "sha256"):
            columns[name] = [getattr(image, name) for image in images]
        table = pa.table(columns, schema=SCHEMA)
        for name in dict.fromkeys(self._source.columns):
            table = table.append_column(source.schema.field(name), readable(source[name]))
        return table


def _shown(cell: object, url: Url) -> str:
    """Return the URL as the source has it, unless it has control characters."""
    text = as_text(cell)
    return text if isinstance(text, str) and text.isprintable() else url.text
