"""The images that the server serves: each is made once, on demand or ahead of time."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.misbehaving.wire import response_head

Source = Callable[[int], tuple[bytes, str, str]]
"""Index → (bytes, content type, file extension)."""


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image and its plain answer, ready to be written in one piece."""

    content_type: str
    answer: bytes
    head_length: int

    @property
    def data(self) -> bytes:
        return self.answer[self.head_length :]


def shapes_source(seed: int) -> Source:
    """The synthetic shapes, drawn from (seed, index)."""
    from scripts.demo import shapes

    return lambda index: shapes.encode(shapes.sample(index, seed))


class Gallery:
    """Makes images in threads and keeps the latest used; belongs to the event loop's thread."""

    def __init__(self, source: Source, count: int, kept_bytes: int = 1 << 30, makers: int = 2):
        self.count = count
        self._source = source
        self._room = kept_bytes
        self._kept: OrderedDict[int, Image] = OrderedDict()
        self._making: dict[int, asyncio.Future[Image]] = {}
        self._makers = ThreadPoolExecutor(makers, thread_name_prefix="image-makers")

    def ready(self, index: int) -> Image | None:
        """The image if it is there already."""
        image = self._kept.get(index)
        if image is not None:
            self._kept.move_to_end(index)
        return image

    async def image(self, index: int) -> Image:
        """Return the image, making it if needed. Concurrent requests wait for the same one."""
        image = self.ready(index)
        if image is not None:
            return image
        making = self._making.get(index)
        if making is None:
            making = asyncio.get_running_loop().run_in_executor(self._makers, _make, self._source, index)
            self._making[index] = making
            making.add_done_callback(lambda done: self._keep(index, done))
        # A visitor that leaves must not cancel what the others wait for.
        return await asyncio.shield(making)

    async def warm(self) -> None:
        """Make all images."""
        await asyncio.gather(*map(self.image, range(self.count)))

    def close(self) -> None:
        self._makers.shutdown(wait=True, cancel_futures=True)

    def _keep(self, index: int, done: "asyncio.Future[Image]") -> None:
        del self._making[index]
        if done.cancelled() or done.exception() is not None:
            return
        image = done.result()
        self._kept[index] = image
        self._room -= len(image.answer)
        while self._room < 0 and len(self._kept) > 1:
            self._room += len(self._kept.popitem(last=False)[1].answer)


def _make(source: Source, index: int) -> Image:
    data, content_type, _ = source(index)
    head = response_head(200, f"Content-Type: {content_type}", f"Content-Length: {len(data)}")
    return Image(content_type, head + data, len(head))
