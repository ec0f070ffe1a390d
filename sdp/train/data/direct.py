"""The direct reader: each worker reads its own share of the epoch's order, windows ahead of need, in threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdp.train.data.batch import PAD, Batch
from sdp.train.data.latents import MOMENTS, TOKEN_IDS, GroupReader, LatentsDataset, scatter
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
            lanes = _Lanes(order, GroupReader(self.dataset), self.weighing(), pool)
            try:
                for start in range(position, order.rows, batch_size):
                    lanes.forget(start // order.lanes)
                    takes = list(order.share(start, start + batch_size, self.rank, self.world))
                    lanes.want(takes)
                    yield self._batch(share, [rows for take in takes for rows in lanes.take(take)])
            finally:
                lanes.close()

    def _batch(self, size: int, filled: "list[Rows]") -> Batch:
        latents, text = self.dataset.columns
        rows = torch.full((size,), PAD, dtype=torch.int64)
        batch = {"rows": rows, "weights": torch.zeros(size)}
        kind = "token_ids" if text.name == TOKEN_IDS else "text"
        for name, column in (("latents", latents), (kind, text)):
            dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
            batch[name] = torch.zeros((size, *column.shape), dtype=dtype, pin_memory=self.pin)
        into = (rows.numpy(), batch["weights"].numpy(), _raw(batch["latents"]), _raw(batch[kind]))
        at = 0
        for some in filled:
            for target, values in zip(into, (some.rows, some.weights, some.latents, some.text), strict=True):
                target[at : at + len(some.rows)] = values
            at += len(some.rows)
        return Batch(**batch, moments=latents.name.startswith(MOMENTS))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in the order in which they are taken, columns as raw bytes."""

    rows: NDArray[np.int64]
    weights: NDArray[np.float32]
    latents: NDArray[np.void]
    text: NDArray[np.void]

    def slice(self, start: int, stop: int) -> "Rows":
        return Rows(self.rows[start:stop], self.weights[start:stop], self.latents[start:stop], self.text[start:stop])


class _Lanes:
    """The windows of an epoch that are being read or used."""

    def __init__(self, order: EpochOrder, reader: GroupReader, weigh: Weigh, pool: ThreadPoolExecutor) -> None:
        self._order, self._reader, self._weigh, self._pool = order, reader, weigh, pool
        self._columns = reader.dataset.columns
        self._lanes: dict[int, Lane] = {}
        self._windows: dict[tuple[int, int], tuple[Window, Future[Rows]]] = {}

    def want(self, takes: list[Take]) -> None:
        """Begin to read what these takes need, then what comes soon after them."""
        for take in takes:
            self._read(take.lane, take.start, take.stop)
        for take in takes:
            lane = self._lane(take.lane)
            window = lane.window_at(take.stop - 1)
            # Half a window ahead (and at least two takes), so that a lane rarely holds two whole ones.
            ahead = max(len(window) // 2, 2 * (take.stop - take.start))
            self._read(take.lane, take.stop, min(take.stop + ahead, len(lane)))

    def take(self, take: Take) -> Iterator[Rows]:
        """The rows of a take, window by window."""
        at = take.start
        while at < take.stop:
            window = self._lane(take.lane).window_at(at)
            _, loading = self._windows[take.lane, window.start]
            stop = min(take.stop, window.stop)
            yield loading.result().slice(at - window.start, stop - window.start)
            at = stop

    def forget(self, row: int) -> None:
        """Let go of windows before a row: all lanes are read at one pace."""
        for key, (window, _) in list(self._windows.items()):
            if window.stop <= row:
                del self._windows[key]

    def close(self) -> None:
        for _, loading in self._windows.values():
            loading.cancel()
        self._windows.clear()

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            self._lanes[number] = self._order.lane(number)
        return self._lanes[number]

    def _read(self, lane: int, start: int, stop: int) -> None:
        while start < stop:
            window = self._lane(lane).window_at(start)
            if (lane, window.start) not in self._windows:
                self._windows[lane, window.start] = window, self._pool.submit(self._load, window)
            start = window.stop

    def _load(self, window: Window) -> Rows:
        rows = np.empty(len(window), np.int64)
        latents, text = (np.empty(len(window), np.dtype((np.void, column.width))) for column in self._columns)
        places, at = window.places(), 0
        for piece in window.pieces:
            here = places[at : at + len(piece)]
            addresses, (latent_chunks, text_chunks) = self._reader.read(piece)
            rows[here] = addresses
            scatter(latent_chunks, here, latents)
            scatter(text_chunks, here, text)
            at += len(piece)
        return Rows(rows, self._weigh(rows), latents, text)


def _raw(tensor: Tensor) -> NDArray[np.void]:
    """A tensor's memory, one item a row."""
    flat = tensor.flatten(1).numpy()
    return flat.view(np.dtype((np.void, flat.shape[1] * flat.itemsize)))[:, 0]
