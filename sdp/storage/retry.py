"""Retries with a deadline.

Every call to a store is a coroutine in one background thread, where it can be cancelled: at its deadline the connection
is closed, whatever the server does. obstore's own retries are off, since it would repeat a conditional write whose
response was lost, and then report a conflict with itself; only parts of a multipart upload, which have no condition, it
repeats itself.

obstore's threads do not survive a fork, and they abort a process whose interpreter ends while they need it. So a forked
child is refused, and a process cancels its requests before its interpreter ends.
"""

import asyncio
import atexit
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

import obstore

from sdp.backoff import backoff
from sdp.console import say
from sdp.errors import StorageError
from sdp.storage.base import StorageOptions
from sdp.storage.explain import REPORTED, Explain, StorageFailure, classify

T = TypeVar("T")

FIRST_RETRIES = 5
"""Retries while a store has never answered this process: its address may be wrong, and a user waits for that error."""
_SILENT_S = 15.0
"""Time after which a wait for a store is announced, and between two announcements."""
_ATTEMPT_S = 20.0
"""Time for one attempt, beyond that for its bytes."""
SLOWEST = 4 * 1024 * 1024
"""Bytes a second: an attempt slower than this is abandoned for another."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_CLOSE_S = 10.0
"""Time for obstore to end cancelled requests before the process ends."""

_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None
_closed = False
_ENDING = "the process ends: storage cannot be used any more"
_FORKED = (
    "storage: this process was forked from one that had used a store, whose connections do not survive a fork; start "
    'processes by spawn or forkserver (DataLoader: multiprocessing_context="spawn")'
)
_held: list["weakref.ref[Any]"] = []
"""Futures and buffers that obstore's threads may still use."""
_announced = -math.inf
_answered = set[str]()
"""The addresses of stores that have answered."""
_in_worker = "RAY_RAYLET_PID" in os.environ
"""True in Ray's workers, which start after stores have answered the driver."""


class Attempt:
    """One attempt at an operation. Its requests get a share of the deadline, so that a stall leaves time for more."""

    def __init__(self, options: StorageOptions, deadline: float, before: StorageFailure | None) -> None:
        self._share_s, self._deadline = min(_ATTEMPT_S, options.timeout_s / 3), deadline
        self.before = before
        """The failure of the previous attempt; None in the first."""

    async def __call__(self, request: Awaitable[T], nbytes: int = 0) -> T:
        """Wait for a request that moves this many bytes."""
        left_s = self._deadline - time.monotonic()
        try:
            async with asyncio.timeout(max(0.001, min(left_s, self._share_s + nbytes / SLOWEST))):
                return await watch(request)
        finally:
            del request  # the traceback of its own exception would keep it alive


def watch(item: T) -> T:
    """Return a future or buffer of obstore's; a process does not end before the last reference to it has gone.

    obstore drops that reference once its thread no longer needs the interpreter. The weak references have no
    callback, which would run in that thread.
    """
    _held[:] = [*(ref for ref in _held if ref() is not None), weakref.ref(item)]
    return item


async def persist(call: Callable[[Attempt], Awaitable[T]], options: StorageOptions, explain: Explain, at: str) -> T:
    """Attempt a call to the store at an address until it succeeds, fails for good, or the deadline passes."""
    global _announced
    start = time.monotonic()
    deadline = start + options.timeout_s
    failure: StorageFailure | None = None
    for retry in itertools.count():
        try:
            result = await call(Attempt(options, deadline, failure))
            _answered.add(at)
            return result
        except REPORTED as error:
            failure = classify(error)
        if failure.kind != "transient":
            _answered.add(at)
        usual = math.inf if _in_worker or at in _answered else FIRST_RETRIES
        most = usual if options.retries is None else options.retries
        pause_s = backoff(retry, _FIRST_PAUSE_S, _LONGEST_PAUSE_S, spread=True)
        tried = f"{retry + 1} attempt{'s' if retry else ''} in {time.monotonic() - start:.1f} s"
        # Instance metadata may throttle, so it gets one retry; more would take long if there is none.
        may_help = failure.kind == "transient" or (failure.kind == "credentials" and retry == 0)
        if not may_help or retry >= most or time.monotonic() + pause_s >= deadline:
            # `from None`, since the dump in obstore's message may hold signatures.
            raise explain(failure, tried) from None
        if time.monotonic() - max(start, _announced) > _SILENT_S:
            _announced = time.monotonic()
            say(f"retrying: {str(explain(failure, tried)).partition(';')[0]}")
        await asyncio.sleep(pause_s)
    raise AssertionError("unreachable: the last attempt returns or raises")


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the background thread and return its result; it is cancelled if this thread is interrupted.

    Once the process ends, raise SystemExit, which ends a thread without a traceback.
    """
    future = _submit(work)
    try:
        return future.result()
    except CancelledError:
        raise SystemExit(_ENDING) from None
    except BaseException:  # an interrupt above all
        future.cancel()
        raise


def _submit(work: Coroutine[Any, Any, T]) -> "Future[T]":
    """Start a coroutine in this process's event loop, which runs in a daemon thread."""
    global _running
    # Compared before the lock is taken, which another thread may have held during the fork.
    if _running is not None and _running[0] != os.getpid():
        work.close()
        raise StorageError(_FORKED)
    with _lock:
        if _closed:
            work.close()
            raise SystemExit(_ENDING)
        if _running is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="sdp-storage", daemon=True).start()
            _running = (os.getpid(), loop)
        return asyncio.run_coroutine_threadsafe(work, _running[1])


@atexit.register
def _close() -> None:
    """Refuse new calls, cancel those under way, and wait until no thread of obstore needs the interpreter."""
    global _closed
    if _running is None or _running[0] != os.getpid():
        return
    with _lock:
        _closed = True
    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(_cancel(), _running[1]).result(_CLOSE_S)


async def _cancel() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while any(ref() is not None for ref in _held):
        await asyncio.sleep(0.001)
        obstore.Bytes()  # any call into obstore drops the references that its threads have given up
