"""A test double for CUDA: two GPUs whose threads, streams and events are checked, over tensors in the host's memory.

Copies between a GPU and page-locked memory happen when somebody waits for them, not before, as on a GPU that is busy:
whoever waits for the wrong event reads what was in the memory before. A thread that touches CUDA before it has set its
device, a tensor used on a stream that has not waited for it, and page-locked memory changed while it is being copied
are failures, raised where they happen and again at the end.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

GPUS = 2


class Stream:
    """A queue of work, which is done when the stream is waited for."""

    def __init__(self, gpus: "Gpus", index: int) -> None:
        self.gpus, self.device = gpus, torch.device("cuda", index)
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self.waited: dict[Stream, int] = {}
        """The amount of other streams' work that precedes the next work on this stream."""

    def finish(self, upto: int) -> None:
        while self.done < upto:
            self.done += 1
            self.work[self.done - 1]()

    def synchronize(self) -> None:
        self.gpus.touch(self.device)
        self.finish(len(self.work))

    def wait_event(self, event: "Event") -> None:
        self.gpus.touch(self.device)
        if event.stream is not None:
            self.waited[event.stream] = max(self.waited.get(event.stream, 0), event.position)
            self.work.append(lambda stream=event.stream, upto=event.position: stream.finish(upto))


class Event:
    """A position in a stream."""

    def __init__(self, gpus: "Gpus") -> None:
        self.gpus, self.stream, self.position = gpus, None, 0
        self.stream: Stream | None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpus.current_stream()
        self.gpus.touch(stream.device)
        if self.stream is not None and self.stream.device != stream.device:
            self.gpus.fail(f"an event of {self.stream.device} is recorded on a stream of {stream.device}")
        self.stream, self.position = stream, len(stream.work)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.position

    def synchronize(self) -> None:
        if self.stream is not None:
            self.gpus.touch(self.stream.device)
            self.stream.finish(self.position)


class OnGpu(Tensor):
    """A tensor that claims to be on a GPU."""

    gpus: "Gpus"
    stream: Stream
    position: int

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.stream.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: Any) -> None:
        pass

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert a tensor on {self.device} to numpy")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        inputs: list[OnGpu] = []
        tree_map_only(OnGpu, inputs.append, (args, kwargs))
        gpus = inputs[0].gpus
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "__get__":
                return gpus.placed(func(*args, **kwargs), inputs[0].stream)
            stream = gpus.current_stream(inputs[0].device)
            gpus.touch(stream.device)
            for tensor in inputs:
                tensor.ready_for(stream)
            if func is Tensor.copy_ and not isinstance(args[0], OnGpu):
                return gpus.copy_back(args[0], args[1], stream, **kwargs)
            args = [argument for argument in args if not isinstance(argument, torch.device)]
            return gpus.placed(func(*args, **kwargs), stream)

    def ready_for(self, stream: Stream) -> None:
        if self.device != stream.device:
            self.gpus.fail(f"a tensor on {self.device} is used on a stream of {stream.device}")
        if self.stream is not stream and stream.waited.get(self.stream, 0) < self.position:
            self.gpus.fail("a tensor is used on a stream that has not waited for it")


class Gpus:
    """The record of all calls to the double."""

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        """GPUs on which a context was made."""
        self.streams: list[Stream] = []
        """Those that were made, without the GPUs' own."""
        self.failures: list[str] = []
        self._own = [Stream(self, index) for index in range(GPUS)]
        self._thread = threading.local()
        self._pinned: list[Any] = []

    def fail(self, what: str) -> None:
        self.failures.append(f"{threading.current_thread().name}: {what}")
        raise AssertionError(self.failures[-1])

    def touch(self, device: torch.device | None = None) -> None:
        """Record that the current thread uses a GPU."""
        if not hasattr(self._thread, "device"):
            self.fail("touches CUDA before torch.cuda.set_device")
        self.contexts.add(self.current_device() if device is None else device.index)

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, device: torch.device | int) -> None:
        self._thread.device = device if isinstance(device, int) else device.index
        self.contexts.add(self._thread.device)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        index = self.current_device() if device is None else device.index
        chosen: dict[int, Stream] = getattr(self._thread, "streams", {})
        return chosen.get(index, self._own[index])

    def new_stream(self, device: torch.device | None = None) -> Stream:
        self.touch(device)
        self.streams.append(Stream(self, self.current_device() if device is None else device.index))
        return self.streams[-1]

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Both the device and its stream are the thread's current ones inside; afterwards, those before are again."""
        before, index = self.current_device(), stream.device.index
        chosen: dict[int, Stream] = self._thread.__dict__.setdefault("streams", {})
        stream_before = self.current_stream(stream.device)
        self._thread.device, chosen[index] = index, stream
        try:
            yield
        finally:
            chosen[index] = stream_before
            self.set_device(before)

    def on_gpu(self, tensor: Tensor, device: torch.device) -> OnGpu:
        """Copy a tensor to a GPU; from page-locked memory the copy is under way when this returns."""
        self.touch(device)
        stream = self.current_stream(device)
        copy = tensor.detach().clone()
        if self.is_pinned(tensor):

            def check() -> None:
                if not torch.equal(tensor, copy):
                    self.fail("page-locked memory was changed before it was copied to the GPU")

            stream.work.append(check)
        return self.placed(copy, stream)  # type: ignore[no-any-return]

    def copy_back(self, host: Tensor, source: Tensor, stream: Stream, non_blocking: bool = False) -> Tensor:
        def copy() -> None:
            with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
                host.copy_(source)

        stream.work.append(copy)
        if not (non_blocking and self.is_pinned(host)):
            stream.finish(len(stream.work))
        return host

    def placed(self, results: Any, stream: Stream) -> Any:
        """Return the tensors as the GPU's."""

        def place(tensor: Tensor) -> Tensor:
            placed = tensor.as_subclass(OnGpu)
            placed.gpus, placed.stream, placed.position = self, stream, len(stream.work)
            return placed

        return tree_map_only(Tensor, place, results)

    def pinned(self, tensor: Tensor) -> Tensor:
        self.touch()
        self._pinned.append(tensor.untyped_storage())
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == storage.data_ptr() for storage in self._pinned)

    def close(self) -> None:
        """Do all work that is left, and fail if anything has failed."""
        for stream in [*self._own, *self.streams]:
            stream.finish(len(stream.work))
        assert not self.failures, self.failures


@contextmanager
def two_gpus(patch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    """Give torch two simulated GPUs while the context lasts."""
    gpus = Gpus()
    empty, to, module_to = torch.empty, Tensor.to, nn.Module.to

    def pinned_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return gpus.pinned(tensor.zero_()) if pin_memory else tensor

    def tensor_to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = next((argument for argument in args if isinstance(argument, torch.device)), None)
        if device is not None and device.type == "cuda" and not isinstance(tensor, OnGpu):
            return gpus.on_gpu(tensor, device)
        return to(tensor, *args, **kwargs)

    def weights_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Leave the weights on the host, because they do not change."""
        return module_to(module, *[argument for argument in args if not isinstance(argument, torch.device)], **kwargs)

    with patch.context() as patched:
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: GPUS,
            "current_device": gpus.current_device,
            "set_device": gpus.set_device,
            "current_stream": gpus.current_stream,
            "stream": gpus.on_stream,
            "Stream": gpus.new_stream,
            "Event": lambda enable_timing=False: Event(gpus),  # noqa: ARG005
            "empty_cache": gpus.touch,
            "get_device_name": lambda device: f"double {device}",
        }.items():
            patched.setattr(torch.cuda, name, value)
        patched.setattr(torch, "empty", pinned_empty)
        patched.setattr(Tensor, "to", tensor_to)
        patched.setattr(Tensor, "pin_memory", lambda tensor: gpus.pinned(tensor.clone()))
        patched.setattr(nn.Module, "to", weights_to)
        yield gpus
        gpus.close()
