"""The messages between a worker's gate and the budgets that all workers share."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator

from sdp.download.politeness import Answer, Ask

_JOIN_S = 30.0


class Courier:
    """A thread that carries a gate's messages to the budgets and back, one at a time."""

    def __init__(self, exchange: Callable[[Ask], Answer], every_s: float) -> None:
        self._exchange, self._every_s = exchange, every_s
        self.on_answer: Callable[[], None] = lambda: None
        self._asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._answers: deque[tuple[Ask, Answer]] = deque()
        self._under_way = False
        self._sent_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="sdp-courier", daemon=True)
        self._thread.start()

    def ready(self, now: float) -> bool:
        return not self._under_way and now - self._sent_at >= self._every_s

    def silent_s(self, now: float) -> float:
        """Return the seconds since the last message."""
        return now - self._sent_at

    def send(self, ask: Ask, now: float) -> None:
        self._under_way, self._sent_at = True, now
        self._asks.put(ask)

    def answers(self) -> Iterator[tuple[Ask, Answer]]:
        while self._answers:
            yield self._answers.popleft()

    def close(self) -> None:
        self._asks.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (ask := self._asks.get()) is not None:
            self._answers.append((ask, self._exchange(ask)))
            self._under_way = False
            self.on_answer()
