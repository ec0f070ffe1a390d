"""Workers: a hanging reading is waited for until a deadline, and not afterwards."""

import threading
import time
from collections.abc import Iterator

import pytest

from sdp.exporter.nvml import Calls
from sdp.exporter.reader_thread import ReaderThread

LONG_S = 20.0


class Source:
    """Something to read that can be held up; each reading is a number."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Semaphore(0)
        self.count = 0
        self.name = f"test-{id(self)}"

    def read(self) -> int:
        self.count += 1
        number = self.count
        self.begun.release()
        assert self.go.wait(LONG_S)
        return number


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.go.set()


def make(source: Source, patience_s: float = LONG_S) -> ReaderThread[int]:
    return ReaderThread(source.name, source.read, patience_s=patience_s, calls=Calls(print))


def soon() -> float:
    return time.monotonic() + LONG_S


def test_each_one_who_asks_gets_a_reading_made_after_that(source: Source) -> None:
    worker = make(source)
    assert worker.answer(worker.ask(), soon())[0] == 1
    assert worker.answer(worker.ask(), soon())[0] == 2


def test_those_who_ask_while_a_reading_is_under_way_share_it(source: Source) -> None:
    source.go.clear()
    worker = make(source)
    tickets = [worker.ask()]
    assert source.begun.acquire(timeout=LONG_S)
    tickets += [worker.ask(), worker.ask()]
    source.go.set()
    assert [worker.answer(ticket, soon())[0] for ticket in tickets] == [1, 1, 1]


def test_a_reading_that_hangs_is_late_at_the_deadline_and_there_is_never_a_second_thread(source: Source) -> None:
    source.go.clear()
    worker = make(source, patience_s=0.2)
    began = time.monotonic()
    assert worker.answer(worker.ask(), began + 0.2) == (None, "timeout")
    assert 0.2 <= time.monotonic() - began < LONG_S / 2
    errors = [worker.answer(worker.ask(), soon())[1] for _ in range(50)]
    assert errors == ["timeout"] * 50  # each of them at once
    assert time.monotonic() - began < LONG_S / 2
    assert [thread.name for thread in threading.enumerate()].count(f"sdp-{source.name}") == 1
    source.go.set()
    end = soon()
    while worker.answer(worker.ask(), soon())[0] != 2:
        assert time.monotonic() < end


def test_an_exception_is_an_answer_without_a_value_and_the_next_reading_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    results = iter([ValueError("no"), "fine"])

    def read() -> str:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    worker = ReaderThread("test", read, patience_s=LONG_S, calls=Calls(print))
    assert worker.answer(worker.ask(), soon()) == (None, "exception")
    assert "ValueError: no" in caplog.text
    assert worker.answer(worker.ask(), soon())[0] == "fine"
