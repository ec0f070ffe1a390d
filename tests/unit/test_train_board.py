"""The board's report on workers that could not report themselves."""

import signal

import pytest

from sdp.errors import UserError
from sdp.train.board import RESIZE, Board
from sdp.train.driver import on_signals


def test_ray_says_why_workers_ended_that_could_not() -> None:
    board = Board()
    board.begin(0)
    board.train(["a pid 1", "b pid 2"])
    killed = "a pid 1, b pid 2: none reported why (killed)"
    assert board.report("killed").failures == [killed]
    unseen = "the workers ended before training began: none reported why (lost)"
    assert board.report("lost").failures == [killed, unseen], "an attempt without a worker"
    assert board.begin(0).attempts == 2


def test_a_worker_that_said_why_is_taken_at_its_word() -> None:
    board, fatal = Board(), UserError("mend it")
    board.begin(0)
    board.train(["a pid 1"])
    board.failed(0, "struck", None)
    assert board.report("RayTaskError").failures == ["worker 0: struck"]
    board.failed(1, "mend it", fatal)
    assert (board.report().failures, board.report().fatal) == (["worker 0: struck", "worker 1: mend it"], fatal)
    assert board.begin(0).failures == ["worker 0: struck", "worker 1: mend it"]


def test_a_stop_tells_whether_there_is_something_to_save() -> None:
    board = Board()
    assert not board.stop("SIGINT")
    board.begin(0)
    assert not board.stop("SIGINT")
    board.train(["a pid 1"])
    assert board.stop("SIGINT")
    board.report()
    assert not board.stop("SIGINT"), "the next attempt waits for its workers"


def test_a_signal_with_nothing_to_save_interrupts(capsys: pytest.CaptureFixture[str]) -> None:
    def nothing_to_save(name: str) -> None:
        raise KeyboardInterrupt(name)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt, match=r"^SIGTERM$"), on_signals(nothing_to_save):
            signal.raise_signal(signal.SIGTERM)
        assert capsys.readouterr().err == "", "a checkpoint is promised"
        signal.raise_signal(signal.SIGTERM)  # the second one of `ray job stop`
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stop_for_more_workers_is_no_failure_and_its_figures_are_void() -> None:
    board = Board()
    board.begin(0)
    board.train(["a pid 1"])
    board.push({"step": 7})
    board.stop(RESIZE)
    assert board.request() == RESIZE
    board.ended(f"asked to stop: {RESIZE}")
    report = board.report()
    assert (report.resizing, report.attempts) == (True, 1)
    assert board.progress() == (None, [], False)
    report = board.begin(0)
    assert (report.resizing, report.attempts, report.failures) == (False, 1, [])
    assert board.request() is None
    board.stop("SIGTERM")
    assert board.begin(0).attempts == 2
    assert board.request() == "SIGTERM"
