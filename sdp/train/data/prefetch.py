"""An iterator that works ahead in a thread, a bounded number of items."""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")

_POLL_S = 0.5
"""How long a thread that waits takes to notice that nobody wants its items any more."""


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetched(items: Iterator[Item], ahead: int, name: str = "sdp-prefetch") -> Iterator[Item]:
    """The same items, up to `ahead` of them made before they are asked for; errors come where they would have come.

    Closing this iterator closes `items`, in the thread that runs it.
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

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
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
