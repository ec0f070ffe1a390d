"""The device that a process computes on, and what each of its threads needs before it touches a GPU.

CUDA's current device belongs to the thread: a new thread works on GPU 0 until it selects another, which makes a
context of half a gigabyte there, and an event recorded without naming a stream is recorded there too. So a thread that
may touch a GPU is started here, and events are recorded on named streams, here.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from sdp.errors import OutOfMemory, UserError, one_line
from sdp.hardware import CUDA_MAJOR, DRIVERS, usable_cores

Result = TypeVar("Result")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by their names in configurations."""
_DRIVER = Path("/proc/driver/nvidia/version")
_SMALL = 10_000_000
"""Parameters of a network that one thread runs fastest: several would wait for each other longer than they work."""
_NO_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "was unable to find an engine",  # cuDNN tries its algorithms one after the other, and none gets its workspace
    "Unable to find a valid cuDNN algorithm",
)
"""Messages of torch's libraries that mean the GPU's memory is used up."""


def configure_torch(*, fixed_shapes: bool = False) -> None:
    """Set torch's global settings, the same for jobs and benchmarks.

    With fixed shapes, cuDNN searches for the fastest convolutions, among all that it has; torch's default is the first
    ten. A search takes longer than many batches, so it does not suit batches of ever new sizes, such as an encoder's.
    """
    torch.set_float32_matmul_precision("high")
    if fixed_shapes:
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.benchmark_limit = 0


def configure_compiler() -> None:
    """Prepare torch's compiler for many fixed shapes in one process (`dynamic=False`).

    Inductor gives up channels-last convolutions for dynamic shapes, and by a rule of thumb also in graphs with a
    convolution to half its channels or fewer.
    """
    torch._inductor.config.force_layout_optimization = True
    torch._dynamo.config.recompile_limit = 1024  # blocks of many shapes share a code object, in training and sampling
    torch._dynamo.config.accumulated_recompile_limit = 4096


def choose_device(
    local_rank: int = 0, *, environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER
) -> torch.device:
    """Return this process's GPU, made the thread's current one, or the CPU where torch sees no GPU.

    Raise a UserError if Ray has granted a GPU that torch cannot use: the CPU would be fifty times slower while the GPU
    is paid for. Tests have clusters that claim GPUs; those have no driver.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        enter(device)
        return device
    granted = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if granted and granted != "-1" and driver.exists():
        oldest = DRIVERS[int((torch.version.cuda or str(CUDA_MAJOR)).partition(".")[0])]
        raise UserError(
            f"GPU {granted}: granted to this process, but torch cannot use it ({_reason()}); driver: "
            f"{one_line(driver.read_text().partition(chr(10))[0])}; torch {torch.__version__}, built for CUDA "
            f"{torch.version.cuda}, which needs driver {oldest} or later; update the driver"
        )
    return torch.device("cpu")


def _reason() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return one_line(error, 200)
    return "it found no device"


def share_cores(
    device: torch.device, network: torch.nn.Module, processes: int = 1, *, environ: Mapping[str, str] = os.environ
) -> None:
    """Set the number of torch's threads for a network, which `processes` of the job run on this machine's CPUs.

    OMP_NUM_THREADS, which Ray sets, has precedence. The number can change the last bits of a result, so it is the same
    on all machines for a small network.
    """
    if device.type == "cpu" and "OMP_NUM_THREADS" not in environ:
        small = sum(weights.numel() for weights in network.parameters()) < _SMALL
        torch.set_num_threads(1 if small else max(1, usable_cores() // processes))


def enter(device: torch.device) -> None:
    """Make a device the calling thread's current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def start_thread(device: torch.device, work: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that works on this device."""

    def run() -> None:
        enter(device)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def thread_pool(device: torch.device, count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of threads that work on this device."""
    return ThreadPoolExecutor(count, name, initializer=enter, initargs=(device,))


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of this GPU. Keep it: each stream has its own cache of the GPU's memory."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def record(stream: torch.cuda.Stream, *, timing: bool = False) -> torch.cuda.Event:
    """Record an event at the end of the work queued on a stream so far."""
    event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class Mark:
    """The end of the work that the calling thread has queued on a device so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = record(torch.cuda.current_stream(device)) if device.type == "cuda" else None

    def wait(self) -> None:
        """Block until the device has done that work."""
        if self._event is not None:
            self._event.synchronize()


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device's memory is used up."""
    is_reported = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return is_reported or isinstance(error, OutOfMemory | torch.OutOfMemoryError)


@dataclass(slots=True)
class BatchLimit:
    """The most items of a batch; halved for good when memory is too short."""

    size: int

    def run(self, work: Callable[[slice], Result], count: int, too_large: str) -> Iterator[Result]:
        """Yield the results of `work` for slices of `count` items; `too_large` is the error if not even one fits."""
        at = 0
        while at < count:
            size = min(self.size, count - at)
            try:
                yield work(slice(at, at + size))
                at += size
                continue
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if size == 1:
                    raise OutOfMemory(too_large) from error
            # The handler has ended, since it would keep the failed attempt's tensors alive.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.size = min(self.size, -(-size // 2))
