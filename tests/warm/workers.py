"""Forks processes from one that has already imported the large libraries: `python workers.py SOCKET`.

A process that imports torch and diffusers anew takes seconds of a core, and the tests start hundreds. Forked ones are
processes as real as others, which can be killed as others. Ends when its input does: with the pytest that started it.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# Not Ray: it reads its settings from the environment when it is imported, some of them those of one process.
PRELOADED = (
    "pandas", "pyarrow.dataset", "pyarrow.parquet", "pydantic", "aiohttp.web", "aiohttp_cors", "yaml", "requests",
    "google.protobuf.internal.builder", "google.protobuf.descriptor_pb2", "google.protobuf.struct_pb2",
    "google.protobuf.timestamp_pb2", "google.protobuf.json_format", "grpc.aio", "jsonschema", "msgpack",
    "opencensus.stats.stats", "opentelemetry.sdk.metrics", "opentelemetry.exporter.prometheus", "prometheus_client",
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "diffusers.models.unets.unet_2d_condition", "diffusers.models.autoencoders.autoencoder_kl",
    "transformers.models.clip.modeling_clip", "transformers.models.clip.tokenization_clip",
    "cv2", "simplejpeg", "PIL.Image", "obstore.store", "pycurl",
    "sdp.download.worker", "sdp.encode.work", "sdp.evaluate.job", "sdp.generate.job", "sdp.storage.retry",
    "sdp.train.assemble", "sdp.train.data.images", "sdp.train.driver", "sdp.train.job",
)  # fmt: skip


def main(at: Path) -> None:
    """Serve until the input ends; a fork ends with what it has become."""
    for name in PRELOADED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads after the imports: a fork would lack all but one"
    gc.freeze()
    if asked := _serve(at):
        _become(*asked)


def _serve(at: Path) -> tuple[dict[str, Any], list[int]] | None:
    """Serve requests; return a fork's request in that fork, and None at the end in the server."""
    forks: dict[int, socket.socket] = {}
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{at}.new")
    listener.listen(64)
    Path(f"{at}.new").rename(at)
    with selectors.DefaultSelector() as selector:
        for heard in (sys.stdin, woken, listener):
            selector.register(heard, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                source: Any = key.fileobj
                if source is sys.stdin:
                    for pid in forks:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if source is woken:
                    woken.recv(4096)
                    _reap(forks, selector)
                elif source is listener:
                    line, _ = listener.accept()
                    if (asked := _hear(line)) is None:
                        line.close()
                    elif pid := os.fork():
                        for descriptor in asked[1]:
                            os.close(descriptor)
                        forks[pid] = line
                        selector.register(line, selectors.EVENT_READ, pid)
                    else:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for other in (listener, line, woken, wake, *forks.values()):
                            other.close()
                        return asked
                elif key.data in forks:  # who asked has been killed
                    os.kill(key.data, signal.SIGKILL)
                    selector.unregister(source)


def _hear(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Read a request; None if the sender left before finishing it."""
    text, descriptors, _, _ = socket.recv_fds(line, 1 << 16, 3)
    while text and not text.endswith(b"\n"):
        if not (more := line.recv(1 << 16)):
            text = b""
        text += more
    if text:
        return json.loads(text), descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    return None


def _reap(forks: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Tell those who asked how their forks ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            line = forks.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            with suppress(KeyError):
                selector.unregister(line)
            with suppress(OSError):
                line.send(b"%d" % (code if code >= 0 else 128 - code))
            line.close()


def _become(asked: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Become the requested process, to its end."""
    os.setsid()
    for wanted, source in enumerate(descriptors):
        os.dup2(source, wanted)
        os.close(source)
    _open_streams()
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.modules["numpy"].random.seed()
    sys.argv = asked["argv"]
    sys.orig_argv = [sys.executable, *sys.argv]
    status: Any = None
    try:
        if sys.argv[0] == "-m":
            sys.modules["sdp.storage.retry"].__dict__["_in_worker"] = False  # this is none of Ray's workers
            sys.path[0], sys.argv = asked["folder"], sys.argv[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except Exception:  # noqa: BLE001 (told as the interpreter would)
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # The interpreter would also free all that was imported, which takes half a second of a core.
    os._exit(status if isinstance(status, int) else int(status is not None))


def _open_streams() -> None:
    """Open the standard streams anew: the server's know whether its own files are terminals and can be sought."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main(Path(sys.argv[1]))
