"""What the board says of workers that could not say it themselves."""

from sdp.errors import UserError
from sdp.train.board import Board


def test_workers_that_end_without_a_word_are_named_at_the_next_start() -> None:
    board = Board()
    board.begin(0)
    board.begin(1)
    board.work(["a pid 1", "b pid 2"])
    told = board.begin(0)
    assert told.attempts == 2
    assert told.failures == [
        "none of these said why it ended (killed, its node lost, or Ray changed their number): a pid 1, b pid 2"
    ]
    assert board.begin(0).failures[1:] == ["the workers ended before they had begun, and none said why"]


def test_a_worker_that_said_why_is_taken_at_its_word() -> None:
    board, fatal = Board(), UserError("mend it")
    board.begin(0)
    board.work(["a pid 1"])
    board.failed(0, "struck", None)
    assert board.begin(0).failures == ["worker 0: struck"]
    board.failed(1, "mend it", fatal)
    assert (board.told().failures, board.told().fatal) == (["worker 0: struck", "worker 1: mend it"], fatal)
    assert board.begin(0).failures == ["worker 0: struck", "worker 1: mend it"]
