"""What a run makes of the ways in which workers end; without a cluster, whose answers are given here."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError

from sdp.datasets.units import Unit, Work
from sdp.encode.reading import Piece, RowGroup
from sdp.errors import ModelError, SdpError, Unavailable
from sdp.process import job
from sdp.process.figures import Figures
from sdp.process.flow import Flow, Room

WORK = Work(Unit(0, 0, 8))
PIECES = [Piece(WORK, order, (RowGroup("file", order, 4, 4 * order),), 0, 4) for order in range(2)]


def of_task(cause: Exception) -> Any:
    """An error as Ray hands it over: of the cause's class, too, with a stack for a text."""
    kind: Any = RayTaskError
    return kind("encode", "Traceback\n  File...\n", cause).as_instanceof_cause()


class Answers:
    """Stands for Ray: each reference is what comes of getting it."""

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def get(self, ref: Any) -> Any:
        if isinstance(ref, Exception):
            raise ref
        return ref

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def put(self, value: Any) -> Any:
        return value


class Bare(job._Run):
    """A run with one encoder that holds two pieces, on no cluster."""

    def __init__(self) -> None:
        self._figures = Figures()
        self._flow: Any = Flow(iter([(WORK, list(PIECES))]), Room(4, 4, 8))
        self._encoders, self._starting = [], {}
        self._encoding: dict[Any, Any] = {}
        self._deaths_in_a_row = self._transforms_lost = 0
        self._ever_transformed = self._ever_ready = False
        self._most = 1
        self._transforming: dict[Any, Any] = {}
        self._writing: dict[Any, Any] = {}
        self._impatience, self._retries = {}, {}
        self._add_encoder()

    def _add_encoder(self) -> None:
        encoder = job._Encoder(actor=f"encoder {self._figures.deaths}")
        self._encoders.append(encoder)

    def hold(self, ends: list[Any]) -> None:
        """Let the encoder hold the pieces; `ends` are what becomes of them."""
        (encoder,) = self._encoders
        for _ in ends:
            piece = self._flow.start_transform()
            self._flow.transformed(piece, "chunk")
        for end in ends:
            piece, chunk = self._flow.start_encode()
            encoder.holds.append((piece, chunk))
            self._encoding[end] = (piece, chunk, "rows", encoder)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers()
    monkeypatch.setattr(job, "ray", answers)
    return answers


@pytest.mark.parametrize(
    ("kind", "said"), [(ActorDiedError, ()), (OutOfMemoryError, ["much"]), (NodeDiedError, ["gone"])]
)
def test_an_encoder_is_replaced_whatever_it_died_of(ray: Answers, kind: Any, said: Sequence[str]) -> None:
    run, error = Bare(), kind(*said)
    run.hold([error, "never comes"])
    run._encode_ended(error)
    assert (run._figures.deaths, len(run._encoders)) == (1, 1)
    assert ray.killed == ["encoder 0"]
    assert run._flow.waiting == 1, "the piece that was behind goes on as it is"
    assert run._flow.start_transform() == PIECES[0], "the one at work begins again"


def test_after_an_error_that_is_none_of_ours_the_piece_at_fault_is_the_one_that_begins_again(ray: Answers) -> None:
    run = Bare()
    error = of_task(RuntimeError("CUDA error: an illegal memory access was encountered"))
    run.hold(["still at work", error])
    run._encode_ended(error)
    assert ray.killed == ["encoder 0"], "nothing works any more in a process whose device failed"
    assert run._flow.start_transform() == PIECES[1]
    assert run._flow.waiting == 1


def test_an_error_of_ours_ends_the_run_in_its_own_words(ray: Answers) -> None:
    run = Bare()
    error = of_task(ModelError("model source x: its content has changed"))
    run.hold([error])
    with pytest.raises(ModelError, match=r"^model source x: its content has changed$"):
        run._encode_ended(error)
    assert not ray.killed


@pytest.mark.parametrize(
    ("cause", "kind", "line"),
    [
        (
            RuntimeError("no kernel image"),
            SdpError,
            "encode: 10 encoders died one after another .* RuntimeError: no kernel",
        ),
        (Unavailable("s3://b/model: no answer"), Unavailable, "^s3://b/model: no answer$"),
    ],
)
def test_encoders_that_never_start_are_tried_so_often_and_then_told_in_a_line(
    ray: Answers, cause: Exception, kind: type[Exception], line: str
) -> None:
    run, error = Bare(), of_task(cause)

    def start() -> None:
        run._starting = {error: run._encoders[0]}
        run._start_ended(error)

    with pytest.raises(kind, match=line) as told:
        repeat(start, 20)
    assert len(ray.killed) == 10
    assert "\n" not in str(told.value)


def test_a_model_that_is_not_the_one_that_was_checked_is_told_at_once(ray: Answers) -> None:
    run, error = Bare(), of_task(ModelError("changed"))
    run._starting = {error: run._encoders[0]}
    with pytest.raises(ModelError, match=r"^changed$"):
        run._start_ended(error)
    assert not ray.killed


def test_transforms_of_which_none_succeeds_end_the_run_rather_than_fail_every_row(ray: Answers) -> None:
    rows = 4096
    piece = Piece(Work(Unit(0, 0, rows)), 0, (RowGroup("file", 0, rows, 0),), 0, rows)
    run = Bare()
    error: Any = WorkerCrashedError()
    run._flow = Flow(iter([(piece.work, [piece])]), Room(4, 4, 8))
    run._give_up = lambda *_: None  # type: ignore[method-assign]

    def die() -> None:
        run._transforming = {error: (run._flow.start_transform(), "chunk")}
        run._transform_ended(error)

    with pytest.raises(SdpError, match=r"^transform: 100 failed one after another, the last of WorkerCrashedError"):
        repeat(die, 200)
    assert ray.killed == []


def test_a_transform_that_raises_what_is_none_of_ours_is_tried_again(ray: Answers) -> None:
    run, error = Bare(), of_task(ValueError("a tokenizer's own"))
    piece = run._flow.start_transform()
    run._transforming = {error: (piece, "chunk")}
    run._transform_ended(error)
    assert run._figures.deaths == 1
    assert run._flow.start_transform() == piece
    assert ray.killed == []


def test_a_part_that_cannot_be_written_is_one_line(ray: Answers) -> None:
    run, error = Bare(), of_task(ValueError("what Arrow says\nin two lines"))
    run._writing = {error: WORK}
    with pytest.raises(SdpError, match=r"^write: ValueError: what Arrow says in two lines, after 1 attempts"):
        run._write_ended(error)
    assert ray.killed == []


def repeat(act: Callable[[], None], times: int) -> None:
    for _ in range(times):
        act()
