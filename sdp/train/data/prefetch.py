"""An iterator that works ahead in a thread, a bounded number of items."""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

import torch

from sdp.device import start_thread

Item = TypeVar("Item")

_POLL_S = 0.5
"""How long a thread that waits takes to notice that nobody wants its items any more."""


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(items: Iterator[Item], ahead: int, name: str, device: torch.device) -> Iterator[Item]:
    """Yield the same items, made up to `ahead` before they are asked for by a thread that works on `device`.

    Errors come where they would have come. Closing this iterator closes `items`, in the thread that runs it.
    """
    ready: queue.Queue[Item | _End] = queue.Queue(ahead)
    unwanted = threading.Event()

    def put(item: Item | _End) -> None:
        while not unwanted.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue  # the consumer is busy; look again whether it still wants items

    def work() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                put(item)
                if unwanted.is_set():
                    break
        except BaseException as caught:  # noqa: BLE001 — handed over, to be raised where the items are used
            error = caught
        finally:
            if hasattr(items, "close"):
                items.close()
        put(_End(error))

    thread = start_thread(device, work, name)
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        unwanted.set()
        thread.join(timeout=60)
