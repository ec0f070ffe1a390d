"""Signals, events and the summary, for drivers that train in their own process or on Ray."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from sdp.console import say
from sdp.errors import SdpError, one_line
from sdp.leaving import note_signal
from sdp.model.checkpoints import TrainState


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """The result of a job."""

    run: str
    checkpoint: str | None
    state: TrainState
    reason: str
    """The reason why training ended."""
    recoveries: int = 0
    """Restarts of the workers after failures."""


@contextmanager
def on_signals(action: Callable[[str], Any]) -> Iterator[None]:
    """Call `action` with the name of a SIGINT or SIGTERM; a second Ctrl-C interrupts. Works in the main thread only.

    The action raises KeyboardInterrupt if there is nothing to save.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        name = note_signal(number)
        if asked and number == signal.SIGINT:
            if callable(before := handlers[signal.SIGINT]):
                before(number, frame)
            raise KeyboardInterrupt(name)
        if not asked:
            asked = True
            action(name)
            say(f"train: {name}: ending after this step, with a checkpoint; Ctrl-C again ends without one")

    handlers = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if not (asked and number == signal.SIGTERM):  # `ray job stop` sends it twice: no second interrupt
                signal.signal(number, handler)


def failure_line(error: Exception) -> str:
    """Return an error as one line, for the run's events."""
    text = one_line(error, 300)
    return text if isinstance(error, SdpError) else f"{type(error).__name__}: {text}"
