"""The usual setup, all on the training node: DataLoader workers transform, and the trainer's GPU encodes."""

import multiprocessing
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from sdp.encode.chunk import ShapeGroup
from sdp.encode.encoder import Encoder
from sdp.errors import SdpError
from sdp.train.data.images import ImagesDataset, Slice, Transformed
from sdp.train.data.rows import Rows
from sdp.train.stopwatch import Stopwatch

_AHEAD = 2
"""Slices that each DataLoader worker prepares ahead."""


@dataclass(frozen=True)
class Collocated:
    """An engine that encodes in this process what DataLoader workers have transformed."""

    images: ImagesDataset
    encoder: Encoder
    workers: int
    stopwatch: Stopwatch

    def __call__(self, slices: Iterator[Slice]) -> Generator[Rows]:
        """Yield the rows of each slice, in order."""
        multiprocessing.set_forkserver_preload(["sdp.train.data.collocated", "tokenizers"])
        with warnings.catch_warnings():
            # torch warns if there are more workers than cores, but data.readers is the user's choice.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader: Any = DataLoader(
                _Slices(self.images),
                batch_size=None,
                sampler=slices,  # which it takes as they are
                num_workers=self.workers,
                prefetch_factor=_AHEAD,
                # A fork would be unsafe: this process has threads, and perhaps CUDA.
                multiprocessing_context="forkserver",
            )
        for result in loader:
            if isinstance(result, SdpError):
                raise result
            with self.stopwatch.measure("encode"):
                encoded = self.images.work(self.encoder, _with_values(result, lambda tensor: tensor.numpy()))
            yield encoded


class _Slices(Dataset[Any]):
    """Transforms slices. Errors are returned, since a DataLoader would wrap a raised one in its own traceback."""

    def __init__(self, images: ImagesDataset) -> None:
        self._images = images

    def __getitem__(self, data_slice: Slice) -> Transformed | SdpError:
        try:
            # Tensors cross to the trainer in shared memory, arrays through a pipe.
            return _with_values(self._images.prepare(data_slice)[0], torch.from_numpy)
        except SdpError as error:
            return error


def _with_values(transformed: Transformed, change: Callable[[Any], Any]) -> Transformed:
    """Return a transformed slice whose pixels are converted by `change`."""
    crops = {
        side: [ShapeGroup(group.positions, change(group.values)) for group in groups]
        for side, groups in transformed.chunk.crops.items()
    }
    return replace(transformed, chunk=replace(transformed.chunk, crops=crops))
