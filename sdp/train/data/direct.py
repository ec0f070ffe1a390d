"""The direct reader: each worker reads its own share of the epoch's order, windows ahead of need, in threads."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdp.train.data.batch import PAD, Batch
from sdp.train.data.latents import MOMENTS, TOKEN_IDS, Column, GroupReader, LatentsDataset, scatter
from sdp.train.data.order import EpochOrder, Lane, OrderShape, Take, Window
from sdp.train.data.prefetch import prefetched
from sdp.train.data.weights import RowWeights, Weigh


@dataclass(frozen=True)
class DirectReader:
    """Batches of one worker. The position in the order is all there is to remember."""

    dataset: LatentsDataset
    seed: int
    shape: OrderShape
    rank: int
    world: int
    weighing: Callable[[], Weigh] = RowWeights
    """Gives the rows' weights, asked for at the beginning of each epoch."""
    threads: int = 4
    ahead: int = 2
    """Batches made before they are asked for."""
    verify: bool = True
    """Check what is read against its checksums."""
    pin: bool = False
    """Batches in page-locked memory, from which a GPU copies without waiting."""

    @property
    def rows(self) -> int:
        """Positions in an epoch."""
        return self.dataset.rows

    def batches(self, epoch: int, position: int, batch_size: int) -> Iterator[Batch]:
        """This worker's share of every batch from a position to the epoch's end, padded to equal size."""
        return prefetched(self._batches(epoch, position, batch_size), self.ahead, "sdp-batches")

    def _batches(self, epoch: int, position: int, batch_size: int) -> Iterator[Batch]:
        order = EpochOrder(self.seed, epoch, self.dataset.blocks, self.shape)
        share = -(-batch_size // self.world)
        with ThreadPoolExecutor(self.threads, thread_name_prefix="sdp-read") as pool:
            lanes = _Lanes(order, GroupReader(self.dataset, self.verify), self.weighing(), pool)
            try:
                for start in range(position, order.rows, batch_size):
                    takes = list(order.share(start, start + batch_size, self.rank, self.world))
                    lanes.want(takes)
                    yield batch_of(
                        self.dataset.columns, share, [rows for take in takes for rows in lanes.take(take)], pin=self.pin
                    )
                    lanes.forget(min(order.rows, start + batch_size) // order.lanes)
            finally:
                lanes.close()


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in the order in which they are taken, columns as raw bytes."""

    rows: NDArray[np.int64]
    weights: NDArray[np.float32]
    latents: NDArray[np.void]
    text: NDArray[np.void]

    def slice(self, start: int, stop: int) -> "Rows":
        return Rows(self.rows[start:stop], self.weights[start:stop], self.latents[start:stop], self.text[start:stop])


def batch_of(columns: tuple[Column, Column], size: int, filled: Sequence[Rows], *, pin: bool = False) -> Batch:
    """Rows put together and padded; the only place where a batch's bytes are copied."""
    latents, text = columns
    kind = "token_ids" if text.name == TOKEN_IDS else "text"
    tensors: dict[str, Any] = {
        "rows": torch.empty(size, dtype=torch.int64),
        "weights": torch.empty(size),
        "latents": torch.empty((size, *latents.shape), dtype=latents.torch_dtype, pin_memory=pin),
        kind: torch.empty((size, *text.shape), dtype=text.torch_dtype, pin_memory=pin),
    }
    into = (tensors["rows"].numpy(), tensors["weights"].numpy(), _raw(tensors["latents"]), _raw(tensors[kind]))
    at = 0
    for some in filled:
        stop = at + len(some.rows)
        for target, values in zip(into, (some.rows, some.weights, some.latents, some.text), strict=True):
            target[at:stop] = values
        at = stop
    for tensor in tensors.values():
        tensor[at:] = 0
    tensors["rows"][at:] = PAD
    return Batch(**tensors, moments=latents.name.startswith(MOMENTS))


class _Lanes:
    """The windows of an epoch that are being read or used, lane by lane in their order."""

    def __init__(self, order: EpochOrder, reader: GroupReader, weigh: Weigh, pool: ThreadPoolExecutor) -> None:
        self._order, self._reader, self._weigh, self._pool = order, reader, weigh, pool
        self._lanes: dict[int, Lane] = {}
        self._windows: dict[int, deque[tuple[Window, Future[Rows]]]] = {}
        self._buffers = Buffers()

    def want(self, takes: list[Take]) -> None:
        """Begin to read what these takes need, then what comes soon after them."""
        for take in takes:
            self._read(take.lane, take.start, take.stop)
        for take in takes:
            window, _ = self._windows[take.lane][-1]
            # Half a window ahead (and at least two takes), so that a lane rarely holds two whole ones.
            ahead = max(len(window) // 2, 2 * (take.stop - take.start))
            if window.stop < take.stop + ahead:
                self._read(take.lane, window.stop, min(take.stop + ahead, len(self._lane(take.lane))))

    def take(self, take: Take) -> Iterator[Rows]:
        """The rows of a take, window by window."""
        for window, loading in self._windows[take.lane]:
            start, stop = max(take.start, window.start), min(take.stop, window.stop)
            if start < stop:
                yield loading.result().slice(start - window.start, stop - window.start)

    def forget(self, row: int) -> None:
        """Let go of windows before a row: all lanes are read at one pace."""
        for windows in self._windows.values():
            while windows and windows[0][0].stop <= row:
                _, loading = windows.popleft()
                if loading.done() and loading.exception() is None:
                    self._buffers.give_back(loading.result())

    def close(self) -> None:
        for windows in self._windows.values():
            for _, loading in windows:
                loading.cancel()
        self._windows.clear()

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            self._lanes[number] = self._order.lane(number)
        return self._lanes[number]

    def _read(self, lane: int, start: int, stop: int) -> None:
        windows = self._windows.setdefault(lane, deque())
        start = max(start, windows[-1][0].stop) if windows else start
        while start < stop:
            window = self._lane(lane).window_at(start)
            windows.append((window, self._pool.submit(self._load, window)))
            start = window.stop

    def _load(self, window: Window) -> Rows:
        latents, text = self._reader.dataset.columns
        into = self._buffers.take(len(window), latents.width, text.width)
        places, at = window.places(), 0
        for piece in window.pieces:
            here = places[at : at + len(piece)]
            addresses, (latent_chunks, text_chunks) = self._reader.read(piece)
            into.rows[here] = addresses
            scatter(latent_chunks, here, into.latents)
            scatter(text_chunks, here, into.text)
            at += len(piece)
        into.weights[:] = self._weigh(into.rows)
        return into


class Buffers:
    """Memory of windows that are done with: fresh pages cost about as much as copying into them."""

    def __init__(self, keep: int = 64) -> None:
        self._free: deque[Rows] = deque(maxlen=keep)

    def take(self, count: int, latents: int, text: int) -> Rows:
        for _ in range(len(self._free)):
            try:
                found = self._free.popleft()
            except IndexError:
                break  # another thread was quicker
            if len(found.rows) >= count:
                return found.slice(0, count)
        return Rows(
            np.empty(count, np.int64),
            np.empty(count, np.float32),
            np.empty(count, np.dtype((np.void, latents))),
            np.empty(count, np.dtype((np.void, text))),
        )

    def give_back(self, rows: Rows) -> None:
        self._free.append(rows)


def _raw(tensor: Tensor) -> NDArray[np.void]:
    """A tensor's memory, one item a row."""
    flat = tensor.flatten(1).numpy()
    return flat.view(np.dtype((np.void, flat.shape[1] * flat.itemsize)))[:, 0]
