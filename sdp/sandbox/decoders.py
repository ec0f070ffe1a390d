"""The processes that decode for one worker, and the recovery when an image kills one.

An image whose decoder dies or does not reply in time is tried once more, alone. If that kills the decoder too, the
image is recorded as crashed. No other image is lost or decoded twice.
"""

import contextlib
import fcntl
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import sdp
from sdp.datasets.outcomes import FAILED, FAILURE_REASONS
from sdp.errors import SdpError, named
from sdp.imaging import MAX_PIXELS, RowError
from sdp.sandbox.child import HEAD, DecoderSettings, Handler, Reply, read, send
from sdp.sandbox.confine import hide

Argument = TypeVar("Argument")
Kept = TypeVar("Kept")
ImageData = bytes | bytearray | memoryview
Deliver = Callable[[Reply, memoryview], None]
"""Called with a handler's result, in another thread."""

_BATCH, _BATCH_BYTES = 8, 4 << 20
_PIPE_BYTES = 1 << 20
_LARGEST_REPLY, _LARGEST_RESULT = 1 << 20, 4 * MAX_PIXELS
"""Bytes of the two messages of an answer."""
_START_S = 120.0
_ANSWER_S, _SLOW_S = 60.0, 15.0
"""Time in which a decoder must read a batch, and in which it must answer; and the time of an answer after which it is
replaced: an image may have taken it over, to hold up all others until just before the deadline."""
_STOP_S = 5.0
_TRIES = 2
_CHECK_S = 1.0
"""Time between checks whether the decoders still work."""
_MEMORY_BYTES, _BYTES_A_PIXEL = 512 << 20, 16
"""Memory limit of a sandbox's decoder for an image; more than any codec uses."""
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME")
"""Variables that a decoder inherits: those that Python needs to start, and no secret."""


class _Died(Exception):
    """The decoder ended or was killed."""


class _TookTooLong(_Died):
    """The decoder used up its CPU time, as it would in another try."""


class _Slow(Exception):
    """The decoder has answered, but late."""


@dataclass(slots=True)
class _Task:
    data: Sequence[ImageData]
    deliver: Deliver
    tries: int = 0


class Decoders:
    """A queue of images and the `count` processes that decode them."""

    def __init__(self, settings: DecoderSettings, count: int) -> None:
        self._settings = settings
        hide()
        self._tasks: deque[_Task] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.error: BaseException | None = None
        """The error that has stopped decoding for good, if any."""
        self._threads = [threading.Thread(target=self._run, name=f"sdp-decode-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def put(self, data: Sequence[ImageData], deliver: Deliver) -> None:
        """Queue an image, given in pieces."""
        with self._changed:
            self._tasks.append(_Task(data, deliver))
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, which they do by themselves only after an error."""
        for thread in self._threads:
            thread.join(timeout_s)

    def close(self) -> None:
        """End the processes, and drop the queue."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.join(_STOP_S + _ANSWER_S)

    def _run(self) -> None:
        child: _Child | None = None
        try:
            while batch := self._next():
                if child is None:
                    child = _Child(self._settings)
                try:
                    child.send([task.data for task in batch], _ANSWER_S)
                    self._deliver(child, batch)
                except _Slow:
                    child.end()
                    child = None
                    self._put_back(batch)
                except _Died as death:
                    child.end()
                    child = None
                    self._blame(batch, death)
        except BaseException as error:  # noqa: BLE001 (kept for the thread that waits for results)
            self.error = error
        finally:
            if child is not None:
                child.end()

    def _deliver(self, child: "_Child", batch: deque[_Task]) -> None:
        """Deliver the results of a batch, each of which leaves it."""
        while batch:
            began = time.monotonic()
            reply, data = child.receive(_ANSWER_S)
            batch.popleft().deliver(reply, data)
            if time.monotonic() - began > _SLOW_S:
                raise _Slow

    def _next(self) -> deque[_Task]:
        """Return the next few images; one that has killed a decoder comes alone. Empty when closing."""
        with self._changed:
            while not self._tasks and not self._closing:
                self._changed.wait()
            batch: deque[_Task] = deque()
            size = 0
            while self._tasks and not self._closing and len(batch) < _BATCH:
                task = self._tasks[0]
                size += sum(map(len, task.data))
                if batch and (size > _BATCH_BYTES or task.tries):
                    break
                batch.append(self._tasks.popleft())
                if task.tries:
                    break
            return batch

    def _blame(self, batch: deque[_Task], death: _Died) -> None:
        """Blame the first image without a result; put the others back into the queue."""
        culprit = batch.popleft()
        culprit.tries += 1
        hopeless = culprit.tries >= _TRIES or isinstance(death, _TookTooLong)
        self._put_back(batch if hopeless else deque([culprit, *batch]))
        reason, detail = "crashed", f"the decoder {death}, twice"
        if isinstance(death, _TookTooLong):
            reason, detail = "undecodable", f"decoding it {death}"
        if hopeless:
            reply = {"outcome": FAILED, "reason": reason, "detail": detail}
            culprit.deliver(reply, memoryview(b""))

    def _put_back(self, batch: deque[_Task]) -> None:
        with self._changed:
            self._tasks.extendleft(reversed(batch))
            self._changed.notify_all()


class Sandbox:
    """Decoders whose caller waits for the result; their processes end with this object."""

    def __init__(self, handle: Handler, count: int = 1) -> None:
        settings = DecoderSettings(handle, _MEMORY_BYTES + MAX_PIXELS * _BYTES_A_PIXEL)
        self._decoders = Decoders(settings, count)
        weakref.finalize(self, self._decoders.close).atexit = False  # they end with their pipe

    def __call__(self, *data: ImageData) -> tuple[Reply, memoryview]:
        """Return the handler's result for an image, given in pieces; raise RowError for an image that it refuses."""
        future: Future[tuple[Reply, memoryview]] = Future()
        self._decoders.put(data, lambda *reply: future.set_result(reply))
        while not wait([future], _CHECK_S).done:
            if (error := self._decoders.error) is not None:
                raise error if isinstance(error, SdpError) else SdpError(f"decoding has stopped ({named(error)})")
        reply, result = future.result()
        if (reason := reply.get("reason")) is not None:
            raise RowError(reason if reason in list(FAILURE_REASONS) else "crashed", str(reply.get("detail")))
        return reply, result


def once_a_thread(make: Callable[[Argument], Kept]) -> Callable[[Argument], Kept]:
    """Return a function that keeps its last result in each thread: a sandbox takes longer to start than a piece.

    The result ends with its thread, or when another is asked for.
    """
    kept = threading.local()

    def get(argument: Argument) -> Kept:
        if not hasattr(kept, "get"):
            kept.get = lru_cache(maxsize=1)(make)
        result: Kept = kept.get(argument)
        return result

    return get


class _Child:
    """One decoding process."""

    def __init__(self, settings: DecoderSettings) -> None:
        root = str(Path(sdp.__file__).resolve().parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        inherited = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        env = {**inherited, **one_thread, "PYTHONPATH": path}
        command = [sys.executable, "-P", "-m", "sdp.sandbox.child"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._sink, self._source = self._process.stdin.fileno(), self._process.stdout.fileno()
        for fd in (self._sink, self._source):
            with contextlib.suppress(OSError):  # the system's limit for pipes is lower: slower, not wrong
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._sink, False)
        try:
            send(self._sink, [pickle.dumps(settings, protocol=5)], self._ready(self._sink, select.POLLOUT, _START_S))
            # Its first message, so that no image is blamed for a decoder that cannot start.
            self._message(self._ready(self._source, select.POLLIN, _START_S), _LARGEST_REPLY)
        except (BrokenPipeError, _Died) as error:
            self.end()
            raise SdpError(
                f"a decoder process does not start ({error}); see the worker's log for its messages"
            ) from error

    def send(self, images: Sequence[Sequence[ImageData]], within_s: float) -> None:
        ready = self._ready(self._sink, select.POLLOUT, within_s)
        try:
            ready()
            os.write(self._sink, HEAD.pack(len(images)))
            for pieces in images:
                send(self._sink, pieces, ready)
        except BrokenPipeError:
            raise self._death() from None

    def receive(self, within_s: float) -> tuple[Reply, memoryview]:
        ready = self._ready(self._source, select.POLLIN, within_s)
        text, data = self._message(ready, _LARGEST_REPLY), self._message(ready, _LARGEST_RESULT)
        try:
            reply = json.loads(bytes(text))
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):  # an image that has taken the decoder over may write anything
            raise _Died("sent a malformed reply")
        return reply, data

    def _message(self, ready: Callable[[], None], largest: int) -> memoryview:
        length = HEAD.unpack(self._read(HEAD.size, ready))[0]
        if length > largest:
            raise _Died("sent a malformed message")
        return self._read(length, ready)

    def _ready(self, fd: int, event: int, within_s: float) -> Callable[[], None]:
        """Return a function that waits for a pipe, in all its calls together until `within_s` from now."""
        poll, deadline = select.poll(), time.monotonic() + within_s
        poll.register(fd, event)

        def ready() -> None:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _Died(f"gave no answer in {within_s:g} s")

        return ready

    def end(self) -> None:
        """End the process, which has nothing to lose."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait(_STOP_S)

    def _read(self, length: int, ready: Callable[[], None]) -> memoryview:
        try:
            return read(self._source, length, ready)
        except EOFError:
            raise self._death() from None

    def _death(self) -> _Died:
        """Return the reason why the process ended."""
        try:
            code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return _Died("closed its end")
        if code == -signal.SIGXCPU:
            return _TookTooLong("takes more CPU time than an image of its size may")
        return _Died(f"died of signal {-code}" if code < 0 else f"ended with exit code {code}")
