"""The accelerator's half of encoding: crops to latents, token ids to embeddings. Plain torch, one encoder per process.

The noise of the VAE's sample is drawn on the host from the row's address, so a row's result depends on the row alone,
up to rounding: kernels for another batch size or device add in another order. Latents are shifted and scaled here,
once.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sdp.datasets.draws import noise
from sdp.datasets.outcomes import FAILED, Outcome
from sdp.device import (
    DTYPES,
    BatchLimit,
    Mark,
    choose_device,
    configure_compiler,
    configure_torch,
    enter,
    new_stream,
    record,
    share_cores,
)
from sdp.encode.chunk import Chunk, Encoded, ShapeGroup
from sdp.encode.recipe import TEXT, TEXT_BATCH, EncoderSettings
from sdp.families import Family, latent_space
from sdp.families.sd import SD
from sdp.model.latents import scale_of, to_pixels

Positions = NDArray[np.int64]
"""Places of items among a chunk's."""
Values = tuple[Tensor, Tensor]
"""Encoded items, and whether each is finite."""
EncodeBatch = Callable[[Tensor, Positions], Values]
"""Encodes a batch of items, given their positions."""
_LOG_VARIANCE = (-30.0, 20.0)
"""The range to which diffusers clamps the VAE's log-variance."""


class BatchEncoder:
    """Frozen networks on one device, fed batch by batch."""

    def __init__(self, settings: EncoderSettings, device: str | None = None) -> None:
        configure_torch()
        self.device = torch.device(device) if device else choose_device()
        self._settings = settings
        sizes = {TEXT: TEXT_BATCH, **settings.batch_sizes}
        self._limits = {key: BatchLimit(size) for key, size in sizes.items()}
        self._feeder = _Feeder(self.device)
        self._launching = threading.Lock()

    @property
    def batch_limits(self) -> dict[int, int]:
        """The batch sizes in use: those of the settings, or smaller where memory was short."""
        return {key: limit.size for key, limit in self._limits.items()}

    @contextmanager
    def _launched(self) -> Iterator[None]:
        """Queue the block's work on the device, right behind a concurrent call's, and wait until it is done."""
        enter(self.device)  # Ray calls from threads of its own
        with self._launching, torch.inference_mode():
            yield
            launched = Mark(self.device)
        launched.wait()

    def _prepared(self, module: nn.Module) -> Callable[..., Any]:
        module = module.to(self.device, DTYPES[self._settings.dtype]).eval().requires_grad_(False)
        share_cores(self.device, module)
        module = module.to(memory_format=torch.channels_last)  # as the pixels arrive; convolutions are faster
        if not self._settings.compile:
            return module
        configure_compiler()
        return torch.compile(module, dynamic=False)

    def _in_batches(self, limit: int, items: NDArray[Any], where: Positions, encode: EncodeBatch) -> Values:
        """Encode items batch by batch, at most as many at once as the batch limit of this key allows."""
        results = [
            result
            for batch, numbers in self._feeder(self._batches(limit, items, where))
            for result in self._within_memory(limit, batch, numbers, encode)
        ]
        if not results:
            return torch.zeros((0,), dtype=torch.float16), torch.ones((0,), dtype=torch.bool)
        values, good = (torch.cat(parts) for parts in zip(*results, strict=True))
        return self._feeder.to_host(values), self._feeder.to_host(good)

    def _batches(self, limit: int, items: NDArray[Any], where: Positions) -> Iterator[tuple[NDArray[Any], Positions]]:
        at = 0
        while at < len(items):
            size = self._limits[limit].size
            yield items[at : at + size], where[at : at + size]
            at += size

    def _within_memory(self, limit: int, batch: Tensor, numbers: Positions, encode: EncodeBatch) -> Iterator[Values]:
        """Encode a batch, in parts if memory is too short for all of it."""

        def encode_part(part: slice) -> Values:
            items, where = batch[part], numbers[part]
            count, padded = len(items), self._limits[limit].size
            costly = self._settings.compile or torch.backends.cudnn.benchmark  # to compile or search for another shape
            if costly and count < padded:
                items = torch.cat([items, items[-1:].expand(padded - count, *items.shape[1:])])
                where = np.concatenate([where, np.repeat(where[-1:], padded - count)])
            values, good = encode(items, where)
            return values[:count], good[:count]

        name = "a caption" if limit == TEXT else f"an image of {limit} px"
        too_large = (
            f"encode.accelerator: {self.device} has no memory for {name} in {self._settings.dtype}; choose a larger "
            "one, or another encode.dtype"
        )
        return self._limits[limit].run(encode_part, len(batch), too_large)


class Encoder(BatchEncoder):
    """The VAE's encoder and, for embeddings, the text encoder, loaded on one device."""

    def __init__(
        self,
        vae: Any,
        settings: EncoderSettings,
        *,
        family: Family = SD,
        text_encoder: nn.Module | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(settings, device)
        self._family, self._space = family, latent_space(vae.config)
        self._scale = scale_of(vae, self.device)
        last = getattr(vae, "quant_conv", None) or nn.Identity()
        self._moments = self._prepared(nn.Sequential(vae.encoder, last))
        self._text = None if text_encoder is None else self._prepared(text_encoder)

    def __call__(self, chunk: Chunk) -> Encoded:
        """Encode a chunk."""
        with self._launched():
            latents = {
                side: [(group.positions, *self._crops(side, chunk, group)) for group in groups]
                for side, groups in chunk.crops.items()
            }
            text = None if self._text is None else self._captions(chunk.tokens)
        finite = np.ones(len(chunk), np.bool_)
        for groups in latents.values():
            for where, _, good in groups:
                finite[where] &= good.numpy()
        if text is not None:
            finite &= text[1].numpy()
        values = {side: [ShapeGroup(w, v.numpy()) for w, v, _ in groups] for side, groups in latents.items()}
        failed = [Outcome(row, FAILED, "not_finite", "NaN or infinite latents") for row in chunk.rows[~finite].tolist()]
        embeddings = None if text is None else text[0].numpy()
        return Encoded(chunk, values, embeddings, finite, [*chunk.outcomes, *failed])

    def embed(self, tokens: NDArray[np.uint32]) -> NDArray[np.float16]:
        """Return the embeddings of captions."""
        with self._launched():
            values, _ = self._captions(tokens)
        embedded: NDArray[np.float16] = values.numpy()
        return embedded

    def _crops(self, side: int, chunk: Chunk, group: ShapeGroup) -> Values:
        """Return latents of crops of one shape, and which are finite: valid on the host once the device is done."""

        def encode(pixels: Tensor, where: Positions) -> Values:
            return self._encode(pixels, self._noise(side, chunk, where, pixels))

        return self._in_batches(side, group.values, group.positions, encode)

    def _captions(self, tokens: NDArray[np.uint32]) -> Values:
        """Return embeddings of captions, and which are finite: valid on the host once the device is done."""

        def encode(ids: Tensor, _: Positions) -> Values:
            assert self._text is not None
            return _finite(self._family.encode_text(self._text, ids))

        return self._in_batches(TEXT, tokens.astype(np.int64), np.arange(len(tokens)), encode)

    def _noise(self, side: int, chunk: Chunk, where: Positions, pixels: Tensor) -> Tensor | None:
        if self._settings.content == "moments" or not self._space.drawn:
            return None
        shape = self._space.shape(pixels.shape[2], pixels.shape[1])
        drawn = noise(self._settings.seed, chunk.rows[where], shape, resolution=side)
        return self._feeder.to_device(torch.from_numpy(drawn))

    def _encode(self, pixels: Tensor, noise: Tensor | None) -> Values:
        """Return scaled fp16 latents of uint8 pixels (n, rows, columns, 3), and which of them are finite."""
        planes, scale = to_pixels(pixels).to(DTYPES[self._settings.dtype]), self._scale
        encoded = self._moments(planes).float()
        if not self._space.drawn:
            return _finite((encoded - scale.shift) * scale.factor)
        mean, log_variance = map(scale.packed, encoded.chunk(2, dim=1))
        log_variance = log_variance.clamp(*_LOG_VARIANCE)
        if noise is not None:
            return _finite((mean + (log_variance * 0.5).exp() * noise - scale.shift) * scale.factor)
        # The moments of the scaled latent, so that readers need not scale.
        return _finite(torch.cat([(mean - scale.shift) * scale.factor, log_variance + 2 * scale.factor.log()], dim=1))


class _Feeder:
    """Copies each batch to the device ahead of the work, through pinned memory and on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._copies = new_stream(device) if self._pinned else None

    def __call__(self, batches: Iterable[tuple[NDArray[Any], Positions]]) -> Iterator[tuple[Tensor, Positions]]:
        """Yield the batches on the device, in order; copy the next one meanwhile."""
        sent: Iterator[Any] = ((*self._send(batch), numbers) for batch, numbers in batches)
        for (batch, copy_end, numbers), _ in pairwise(chain(sent, [None])):
            yield self._received(batch, copy_end), numbers
            del batch, copy_end  # before another one is sent

    def to_device(self, values: Tensor) -> Tensor:
        """Copy a small tensor to the device, for work queued later."""
        return values.pin_memory().to(self._device, non_blocking=True) if self._pinned else values

    def to_host(self, values: Tensor) -> Tensor:
        """Copy a tensor to the host; valid after a mark that is set later."""
        if not self._pinned:
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    def _send(self, batch: NDArray[Any]) -> tuple[Tensor, Any]:
        """Begin to copy a batch; return it and the event that ends the copy."""
        # torch reuses pinned memory, but not before the copy has ended.
        host = torch.empty(batch.shape, dtype=torch.from_numpy(batch[:0].copy()).dtype, pin_memory=self._pinned)
        host.numpy()[:] = batch  # by numpy, since torch has no read-only tensors and the batch is in shared memory
        if self._copies is None:
            return host, None
        with torch.cuda.stream(self._copies):
            batch_on_device = host.to(self._device, non_blocking=True)
        return batch_on_device, record(self._copies)

    def _received(self, batch: Tensor, copy_end: Any) -> Tensor:
        """Make the current stream wait for the end of a batch's copy; return the batch."""
        if copy_end is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copy_end)
            batch.record_stream(stream)
        return batch


def _finite(values: Tensor) -> Values:
    """Return values as fp16, and whether each item is finite after that conversion."""
    halves = values.half()
    return halves, halves.isfinite().flatten(1).all(1)
