"""An iterator that a thread runs a bounded number of items ahead."""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

import torch

from sdp.device import start_thread

Item = TypeVar("Item")

_POLL_S = 0.5
"""Time until a waiting thread notices that the consumer has closed."""


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(items: Iterator[Item], ahead: int, device: torch.device) -> Iterator[Item]:
    """Yield the items of an iterator that a thread on `device` runs up to `ahead` items ahead.

    An error is raised in place of the item that it prevented. Closing this iterator closes `items`, in its thread.
    """
    ready: queue.Queue[Item | _End] = queue.Queue(ahead)
    closed = threading.Event()

    def put(item: Item | _End) -> None:
        while not closed.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue  # the consumer is busy, or has closed

    def work() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                put(item)
                if closed.is_set():
                    break
        except BaseException as caught:  # noqa: BLE001 (raised again by the consumer)
            error = caught
        finally:
            if hasattr(items, "close"):
                items.close()
        put(_End(error))

    thread = start_thread(device, work, "sdp-batches")
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        closed.set()
        thread.join(timeout=60)
