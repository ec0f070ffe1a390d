"""Trying again, by a deadline.

Every call to a store is a coroutine in one background thread, because that is where it can be given up: when its time
is over its connection is closed, whatever the server does. obstore's own retries are off (it would repeat a conditional
write whose answer was lost, and then report the conflict with itself); they are made here.
"""

import asyncio
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from sdp.errors import SdpError
from sdp.storage.base import StorageOptions
from sdp.storage.explain import REPORTED, Failure, classify

T = TypeVar("T")

SLOWEST = 4 * 1024 * 1024
"""Bytes a second: an attempt that moves its data slower than this is given up for a fresh one."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0

_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None


class Patience:
    """How long one attempt waits: a share of the deadline, so that a stalled one leaves time for another."""

    def __init__(self, options: StorageOptions, deadline: float) -> None:
        self._share = options.timeout_s / 3
        self._deadline = deadline

    async def __call__(self, work: Awaitable[T], nbytes: int = 0) -> T:
        left = self._deadline - time.monotonic()
        return await asyncio.wait_for(work, max(0.001, min(left, self._share + nbytes / SLOWEST)))


async def persist(
    call: Callable[[Patience, Failure | None], Awaitable[T]],
    options: StorageOptions,
    explain: Callable[[Failure, str], SdpError],
) -> T:
    """Call until it succeeds, fails for good, or the deadline is there.

    `call` is given the patience of its attempt and why the one before it failed; `explain` makes the error of a
    failure and how often and how long it was tried.
    """
    start = time.monotonic()
    deadline = start + options.timeout_s
    last: Failure | None = None
    for attempt in range(options.retries + 1):
        try:
            return await call(Patience(options, deadline), last)
        except REPORTED as error:
            last = classify(error)
        pause = backoff(attempt)
        tried = f"{attempt + 1} attempt{'s' if attempt else ''} in {time.monotonic() - start:.1f} s"
        # Instance metadata gets a second chance: it is throttled, but where there is none it must not take long.
        again = last.kind == "transient" or (last.kind == "credentials" and attempt == 0)
        if not again or attempt == options.retries or time.monotonic() + pause >= deadline:
            # Not chained: the dump in obstore's message may hold signatures.
            raise explain(last, tried) from None
        await asyncio.sleep(pause)
    raise AssertionError("unreachable: the last attempt returns or raises")


def backoff(attempt: int) -> float:
    """Seconds before the next attempt: doubling, at random between half and all of it, so that workers spread."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**attempt) * random.uniform(0.5, 1.0)


def wait(make: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine in the background thread and wait for it; it must end by itself, and is cancelled if we are."""

    async def begin() -> T:
        return await make()

    future: Future[T] = asyncio.run_coroutine_threadsafe(begin(), _loop())
    try:
        return future.result()
    except BaseException:  # an interrupt above all
        future.cancel()
        raise


def _loop() -> asyncio.AbstractEventLoop:
    """The process's loop, running in a daemon thread; a forked child starts its own."""
    global _running
    with _lock:
        if _running is None or _running[0] != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="sdp-storage", daemon=True).start()
            _running = (os.getpid(), loop)
        return _running[1]
