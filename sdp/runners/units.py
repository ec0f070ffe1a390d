"""Units through a runner: each is cut into pieces, which come back in any order, and becomes one part.

When all of a unit's pieces are back, a task writes the part: rows never pass through the driver. A piece that kills its
worker is cut until the row at fault is alone; that row's outcome is `crashed`, and the rest of the unit is written.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from sdp.datasets.outcomes import FAILED, Outcome
from sdp.datasets.parts import PartInfo
from sdp.datasets.units import Work
from sdp.errors import SdpError, named
from sdp.runners.blocks import Note
from sdp.runners.desk import State
from sdp.runners.runner import TASKS, Feed, RowsLost, Runner
from sdp.runners.stages import TRIES
from sdp.sources.pieces import Piece

_WAIT_S = 0.5


class Job(Protocol):
    """A job's own ways with its pieces and parts."""

    write: Callable[..., PartInfo]
    """Writes a part: (stages, rows of the pieces, work, earlier failures by reason)."""

    def item(self, piece: Piece) -> Any:
        """Return what the stages get for a piece."""

    def crashed(self, piece: Piece, detail: str) -> Any:
        """Return the result of a piece whose only row kills its workers."""

    def retried(self, work: Work) -> Mapping[str, int]:
        """Return the earlier failures that a part supersedes, by reason."""

    def receive(self, piece: Piece, note: Note) -> None:
        """Count a piece that is done."""

    def finish(self, work: Work, info: PartInfo) -> None:
        """Count a part that is written."""

    def show(self, state: State) -> None:
        """Show the progress."""


def run_units(
    runner: Runner, planned: Iterator[tuple[Work, Sequence[Piece]]], job: Job, check: Callable[[], None]
) -> list[PartInfo]:
    """Write the parts of all units; `check` raises where the run has lost its output."""
    units, infos = OpenUnits(planned), list[PartInfo]()
    writing: dict[Future[PartInfo], Work] = {}

    def next_item() -> tuple[Piece, Any] | None:
        return None if (piece := units.next_piece()) is None else (piece, job.item(piece))

    with runner:
        feed = Feed(runner, next_item)
        while not units.finished:
            check()
            for piece, note, rows in feed.results(_WAIT_S):
                if note.died is None:
                    units.gather(piece, rows)
                    job.receive(piece, note)
                elif piece.take > 1:
                    units.cut(piece)
                else:
                    units.gather(piece, job.crashed(piece, note.died))
            while len(writing) < TASKS and (complete := units.next_complete()) is not None:
                check()
                work, pieces = complete
                writing[runner.task(job.write, pieces, work, job.retried(work))] = work
            done, _ = wait([*writing], 0 if feed.under_way else _WAIT_S, FIRST_COMPLETED)
            for part in done:
                work = writing.pop(part)
                if (info := _written(part, work)) is None:
                    units.restart(work)
                    continue
                del units.open[work]
                infos.append(info)
                job.finish(work, info)
            job.show(runner.state())
    return infos


def crashed(rows: Iterable[int], detail: str) -> list[Outcome]:
    """Return the outcomes of rows that kill their workers."""
    return [Outcome(row, FAILED, "crashed", detail, attempts=TRIES) for row in rows]


def _written(part: Future[PartInfo], work: Work) -> PartInfo | None:
    """Return the part that has been written; None if its rows were lost with their node."""
    try:
        return part.result()
    except RowsLost:
        return None
    except SdpError:
        raise
    except Exception as error:
        raise SdpError(f"write: {work.name}: {named(error)}") from error


@dataclass(slots=True)
class _Unit:
    """A unit under way."""

    missing: set[Piece]
    gathered: dict[Piece, Any] = field(default_factory=dict)
    """Rows as `results` yields them, by piece."""
    writing: bool = False


class OpenUnits:
    """The order of pieces, and the units whose pieces are all back."""

    def __init__(self, planned: Iterator[tuple[Work, Sequence[Piece]]]) -> None:
        self._planned = planned
        self._exhausted = False
        self._queue: deque[Piece] = deque()
        self.open: dict[Work, _Unit] = {}

    @property
    def finished(self) -> bool:
        """True once everything is written."""
        return self._exhausted and not self.open

    def next_piece(self) -> Piece | None:
        """Return the next piece; None at the end, and while too many units wait to be written."""
        while not self._queue:
            if self._exhausted or sum(not unit.missing for unit in self.open.values()) > TASKS:
                return None
            planned = next(self._planned, None)
            if planned is None:
                self._exhausted = True
            else:
                work, pieces = planned
                self.open[work] = _Unit(set(pieces))
                self._queue.extend(pieces)
        return self._queue.popleft()

    def gather(self, piece: Piece, rows: Any) -> None:
        """Store a piece's rows."""
        unit = self.open[piece.work]
        unit.missing.remove(piece)
        unit.gathered[piece] = rows

    def cut(self, piece: Piece) -> None:
        """Replace a piece with smaller ones."""
        unit = self.open[piece.work]
        smaller = piece.narrow()
        unit.missing = (unit.missing - {piece}) | set(smaller)
        self._queue.extendleft(reversed(smaller))

    def next_complete(self) -> tuple[Work, list[Any]] | None:
        """Return a complete unit and its rows in the source's order; None if there is none."""
        for work, unit in self.open.items():
            if not unit.missing and not unit.writing:
                unit.writing = True
                return work, [unit.gathered[piece] for piece in sorted(unit.gathered)]
        return None

    def restart(self, work: Work) -> None:
        """Queue all pieces of a unit again: rows were lost with a node before they were written."""
        unit = self.open[work]
        self._queue.extendleft(unit.gathered)
        unit.missing |= set(unit.gathered)
        unit.gathered.clear()
        unit.writing = False
