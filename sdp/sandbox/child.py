"""The process that decodes: image bytes in on one pipe, checked pictures out on the other.

Decoders are large bodies of C that read strangers' bytes. If one crashes, hangs or uses all memory, only this process
dies, and its parent knows which image it was. An image that takes over the process gains nothing: it has no secrets in
its environment, no files and no network (see `confine`).
"""

import json
import math
import os
import pickle
import resource
import struct
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sdp.datasets.outcomes import FAILED
from sdp.imaging import OnHeader, Pixels, RowError, decode, lacks_memory, read_header
from sdp.sandbox.confine import confine

CPU_S_A_PIXEL = 0.25e-6
"""Twice what random pixels take in the slowest format (AVIF, 0.11 s a megapixel)."""
HEAD = struct.Struct("<Q")
_WRITE_PIECES = 512
"""Pieces of a message that are written at once."""

Reply = dict[str, Any]
"""A JSON object, since a hostile image could reach beyond its decoder by a pickle."""
Handler = Callable[[memoryview, OnHeader], tuple[Reply, bytes | memoryview]]
"""A picklable function of an image's bytes, which may raise any exception."""


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """The settings of a decoder, sent once."""

    handle: Handler
    memory_bytes: int
    """Memory for one image, beyond its own bytes and the process's base."""
    cpu_s: float = 5.0
    """CPU seconds for one image, beyond those for its pixels."""


def main() -> None:
    """Serve until the parent closes its end."""
    source, sink, log, nowhere = os.dup(0), os.dup(1), os.dup(2), os.open(os.devnull, os.O_WRONLY)
    warnings.simplefilter("ignore")  # there would be some about every damaged TIFF, in the worker's log
    settings: DecoderSettings = pickle.loads(_read(source, _number(source)))
    _load_codecs()
    base = _address_space() + settings.memory_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    for output in (1, 2):  # else an image could fill the worker's log, or get between the replies
        os.dup2(nowhere, output)
    if missing := confine():
        os.write(log, f"sdp: this kernel confines decoders without {', '.join(missing)}\n".encode())
    os.close(log)
    send(sink, [b"ready"])
    while True:
        # All images are read before the first reply is written, so that the two ends never wait for each other.
        images = [_read(source, _number(source)) for _ in range(_number(source))]
        most = base + sum(map(len, images))
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        for image in images:
            reply, data = _handle(image, settings)
            send(sink, [json.dumps(reply).encode()])
            send(sink, [data])
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def pixels(data: memoryview, on_header: OnHeader, min_side: int | None = None) -> tuple[Reply, memoryview]:
    """Decode an image; the handler for callers that need all its pixels, or a reduction to a shorter side."""
    header = read_header(data)
    on_header(header)
    decoded = decode(data, min_side=min_side, header=header).pixels
    return {"shape": decoded.shape}, decoded.data.cast("B")


def unpacked(reply: Reply, data: memoryview) -> Pixels:
    """Return the pixels that a reply of `pixels` holds."""
    with suppress(KeyError, TypeError, ValueError):
        result = np.frombuffer(data, np.uint8).reshape(reply["shape"])
        if result.size and result.shape[2:] == (3,):
            return result
    raise RowError("crashed", "its decoder sent a malformed reply")


def _load_codecs() -> None:
    """Load all libraries now: later no file can be opened and no thread started."""
    import cv2
    import simplejpeg  # noqa: F401
    from PIL import AvifImagePlugin, Image

    Image.init()
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    cv2.setNumThreads(1)


def _handle(image: memoryview, settings: DecoderSettings) -> tuple[Reply, bytes | memoryview]:
    _limit_cpu(settings.cpu_s)
    try:
        return settings.handle(
            image, lambda header: _limit_cpu(settings.cpu_s + header.width * header.height * CPU_S_A_PIXEL)
        )
    except Exception as error:  # noqa: BLE001 (corrupt bytes make codecs raise any exception)
        reason, detail = "internal", f"{type(error).__name__}: {error}"
        if lacks_memory(error):
            reason, detail = "no_memory", f"decoding takes more than {settings.memory_bytes / 1e6:.0f} MB"
        elif isinstance(error, RowError):
            reason, detail = error.reason, error.detail
        return {"outcome": FAILED, "reason": reason, "detail": detail}, b""


def _limit_cpu(seconds: float) -> None:
    """Have the kernel kill this process after this many more CPU seconds."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


def _address_space() -> int:
    """Return the bytes of address space that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _number(fd: int) -> int:
    return int(HEAD.unpack(_read(fd, HEAD.size))[0])


def _read(fd: int, length: int) -> memoryview:
    """Read a message, or end this process if the parent has closed its end."""
    try:
        return read(fd, length)
    except EOFError:
        sys.exit(0)


def read(fd: int, length: int, wait: Callable[[], None] = lambda: None) -> memoryview:
    """Read bytes; call `wait` before each read. Raise EOFError if the other end is closed."""
    data, at = memoryview(bytearray(length)), 0
    while at < length:
        wait()
        count = os.readv(fd, [data[at:]])
        if not count:
            raise EOFError
        at += count
    return data


def send(fd: int, pieces: Sequence[bytes | bytearray | memoryview], wait: Callable[[], None] = lambda: None) -> None:
    """Write one message, its length and its bytes; call `wait` before each write."""
    queue, at = [HEAD.pack(sum(map(len, pieces))), *pieces], 0
    while at < len(queue):
        wait()
        written = os.writev(fd, queue[at : at + _WRITE_PIECES])
        while at < len(queue) and written >= len(queue[at]):
            written -= len(queue[at])
            at += 1
        if written:
            queue[at] = memoryview(queue[at])[written:]


if __name__ == "__main__":
    main()
