"""Everything on the training node, as it is usually done: DataLoader workers transform, the trainer's GPU encodes."""

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from sdp.encode.chunk import Group
from sdp.encode.encoder import Encoder
from sdp.errors import SdpError
from sdp.train.data.images import EncodedSlice, ImagesDataset, Slice, Transformed, encode_slice, transform_slice

_AHEAD = 2
"""Slices that a worker has ready."""


@dataclass(frozen=True)
class Collocated:
    """Encodes on this worker what processes beside it have transformed."""

    images: ImagesDataset
    encoder: Encoder
    workers: int

    def encoded(self, slices: Iterator[Slice]) -> Iterator[EncodedSlice]:
        """See Engine."""
        # Not forked from here: this process has threads, and perhaps CUDA.
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["sdp.train.data.collocated", "sdp.model.load", "transformers"])
        with warnings.catch_warnings():
            # data.readers is the user's word; on a small machine torch would tell it to the terminal each time.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader: Any = DataLoader(
                _Slices(self.images),
                batch_size=None,
                sampler=_Once(slices),
                num_workers=self.workers,
                prefetch_factor=_AHEAD,
                worker_init_fn=_alone,
                multiprocessing_context=context,
                collate_fn=_as_it_is,
            )
        for made in loader:
            if isinstance(made, SdpError):
                raise made
            yield encode_slice(self.images, self.encoder, _with_values(made, lambda tensor: tensor.numpy()))


class _Slices(Dataset[Any]):
    """Asked for a slice, it gives the slice transformed; or the error, which a DataLoader would drown in its own."""

    def __init__(self, images: ImagesDataset) -> None:
        self._images = images

    def __getitem__(self, some: Slice) -> Transformed | SdpError:
        try:
            # Tensors cross to the trainer in shared memory, arrays through a pipe.
            return _with_values(transform_slice(self._images, some)[0], torch.from_numpy)
        except SdpError as error:
            return error


class _Once:
    """A sampler, for one epoch."""

    def __init__(self, slices: Iterator[Slice]) -> None:
        self._slices = slices

    def __iter__(self) -> Iterator[Slice]:
        return self._slices


def _with_values(made: Transformed, change: Callable[[Any], Any]) -> Transformed:
    """The same with the pixels in another form."""
    crops = {
        side: [Group(group.where, change(group.values)) for group in groups]
        for side, groups in made.chunk.crops.items()
    }
    return replace(made, chunk=replace(made.chunk, crops=crops))


def _alone(_: int) -> None:
    torch.set_num_threads(1)


def _as_it_is(item: Any) -> Any:
    return item
