"""Everything on the training node: threads transform, and the trainer's GPU encodes."""

from collections.abc import Iterator
from dataclasses import dataclass

from sdp.datasets.concurrently import ordered_map
from sdp.encode.encoder import Encoder
from sdp.train.data.images import EncodedSlice, ImagesDataset, Slice
from sdp.train.stopwatch import Stopwatch


@dataclass(frozen=True)
class Collocated:
    """An engine that encodes in this process."""

    images: ImagesDataset
    encoder: Encoder
    threads: int
    stopwatch: Stopwatch

    def encoded(self, slices: Iterator[Slice]) -> Iterator[EncodedSlice]:
        """See Engine."""
        for transformed, _ in ordered_map(self.images.transform, slices, self.threads):
            with self.stopwatch.measure("encode"):
                encoded = self.images.encode(self.encoder, transformed)
            self.stopwatch.encoded += len(transformed.chunk)
            yield encoded
