"""The accelerator's half: crops to latents, token ids to embeddings. Plain torch, one encoder a process.

What comes out for a row depends on the row, not on its neighbours, the batch size or the device: the noise of the VAE's
sample is drawn on the host from the row's address. Latents are multiplied by the VAE's scaling factor here, once.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sdp.datasets.outcomes import FAILED, Outcome
from sdp.device import Mark, choose_device, enter, new_stream, out_of_memory, record
from sdp.encode.chunk import Chunk, Encoded, Group
from sdp.encode.recipe import TEXT, Settings, noise
from sdp.errors import SdpError, one_line
from sdp.model.family import encode_text, latent_shape
from sdp.model.latents import to_pixels

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LOG_VARIANCE = (-30.0, 20.0)
"""Where diffusers clamps the VAE's log-variance."""


class EncoderTooSmall(SdpError):
    """Not even one row fits into the device's memory."""


class Encoder:
    """The VAE's encoder and, where embeddings are asked for, the text encoder, kept warm on one device."""

    def __init__(
        self, vae: Any, settings: Settings, *, text_encoder: nn.Module | None = None, device: str | None = None
    ) -> None:
        self.device = torch.device(device) if device else choose_device()
        self.scaling_factor = float(vae.config.scaling_factor)
        self._settings = settings
        self._limits = dict(settings.batch_sizes)
        self._moments = self._prepared(_Moments(vae.encoder, vae.quant_conv))  # the decoder is let go of
        self._text = None if text_encoder is None else self._prepared(text_encoder)
        self._feeder = _Feeder(self.device)
        self._launching = threading.Lock()

    @property
    def batch_limits(self) -> dict[int, int]:
        """The batch sizes in use: those of the settings, or what memory had room for."""
        return dict(self._limits)

    def __call__(self, chunk: Chunk) -> Encoded:
        """Encode a chunk. A second call may come meanwhile: its work is queued behind this one's without a gap."""
        enter(self.device)  # the caller's thread may be anybody's
        with self._launching, torch.inference_mode():
            latents = {
                side: [(group.where, *self._crops(side, chunk, group)) for group in groups]
                for side, groups in chunk.crops.items()
            }
            text = None if self._text is None else self._captions(chunk.tokens)
            launched = Mark(self.device)
        launched.wait()
        finite = np.ones(len(chunk), np.bool_)
        for groups in latents.values():
            for where, _, good in groups:
                finite[where] &= good.numpy()
        if text is not None:
            finite &= text[1].numpy()
        values = {side: [Group(w, v.numpy()) for w, v, _ in groups] for side, groups in latents.items()}
        return _settled(chunk, values, None if text is None else text[0].numpy(), finite)

    def embed(self, tokens: NDArray[np.uint16]) -> NDArray[np.float16]:
        """Captions' embeddings alone."""
        enter(self.device)  # the caller's thread may be anybody's
        with self._launching, torch.inference_mode():
            values, _ = self._captions(tokens)
            launched = Mark(self.device)
        launched.wait()
        embedded: NDArray[np.float16] = values.numpy()
        return embedded

    def _prepared(self, module: nn.Module) -> Callable[..., Any]:
        module = module.to(self.device, DTYPES[self._settings.dtype]).eval().requires_grad_(False)
        if self._settings.channels_last:
            module = module.to(memory_format=torch.channels_last)
        return torch.compile(module) if self._settings.compile else module

    def _crops(self, side: int, chunk: Chunk, group: Group) -> tuple[Tensor, Tensor]:
        """Latents of crops of one shape and which are finite: on the host, once the device is done with them."""

        def encode(pixels: Tensor, where: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
            return self._encode(pixels, self._noise(side, chunk, where, pixels))

        return self._all(side, group.values, group.where, encode)

    def _captions(self, tokens: NDArray[np.uint16]) -> tuple[Tensor, Tensor]:
        """Embeddings of captions and which are finite: on the host, once the device is done with them."""

        def encode(ids: Tensor, _: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
            assert self._text is not None
            return _finite(encode_text(self._text, ids))

        return self._all(TEXT, tokens.astype(np.int64), np.arange(len(tokens)), encode)

    def _all(
        self,
        what: int,
        items: NDArray[Any],
        where: NDArray[np.int64],
        encode: Callable[[Tensor, NDArray[np.int64]], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Feed items to the device batch by batch; what comes out, put together."""
        results = [
            self._within_memory(what, batch, numbers, encode)
            for batch, numbers in self._feeder(self._batches(what, items, where))
        ]
        if not results:
            return torch.zeros((0,), dtype=torch.float16), torch.ones((0,), dtype=torch.bool)
        values, good = (torch.cat(parts) for parts in zip(*results, strict=True))
        return self._feeder.back(values), self._feeder.back(good)

    def _batches(
        self, what: int, items: NDArray[Any], where: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        at = 0
        while at < len(items):
            size = self._limits[what]
            yield items[at : at + size], where[at : at + size]
            at += size

    def _within_memory(
        self,
        what: int,
        batch: Tensor,
        numbers: NDArray[np.int64],
        encode: Callable[[Tensor, NDArray[np.int64]], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Encode a batch; if memory has no room for it, in two halves, and from then on in batches of that size."""
        count = len(batch)
        if self._settings.compile and count < self._limits[what]:  # one shape, compiled once
            batch = torch.cat([batch, batch[-1:].expand(self._limits[what] - count, *batch.shape[1:])])
            numbers = np.concatenate([numbers, np.repeat(numbers[-1:], len(batch) - count)])
        try:
            values, good = encode(batch, numbers)
            return values[:count], good[:count]
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if count == 1:
                name = "a caption" if what == TEXT else f"an image of {what} px"
                raise EncoderTooSmall(
                    f"encode.accelerator: {self.device} has no memory for {name} in {self._settings.dtype} "
                    f"({one_line(error, 100)}); choose a larger one, or another encode.dtype"
                ) from error
        # Outside of the handler, which would keep the failed attempt's tensors alive.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        half = -(-count // 2)
        self._limits[what] = min(self._limits[what], half)
        halves = [
            self._within_memory(what, batch[start:stop], numbers[start:stop], encode)
            for start, stop in ((0, half), (half, count))
        ]
        values, good = (torch.cat(parts) for parts in zip(*halves, strict=True))
        return values, good

    def _noise(self, side: int, chunk: Chunk, where: NDArray[np.int64], pixels: Tensor) -> Tensor | None:
        if self._settings.content == "moments":
            return None
        shape = latent_shape(pixels.shape[2], pixels.shape[1])
        drawn = noise(self._settings.seed, chunk.rows[where], shape, resolution=side)
        return self._feeder.there(torch.from_numpy(drawn))

    def _encode(self, pixels: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """uint8 pixels (n, rows, columns, 3) to scaled fp16 latents, and which of them are finite."""
        planes = to_pixels(pixels).to(DTYPES[self._settings.dtype])
        if not self._settings.channels_last:  # as the pixels lie in memory, they are channels-last already
            planes = planes.contiguous()
        mean, log_variance = self._moments(planes).float().chunk(2, dim=1)
        if noise is None:
            # Of the scaled latent, so that nobody scales it again.
            log_scale = 2 * math.log(self.scaling_factor)
            return _finite(
                torch.cat([mean * self.scaling_factor, log_variance.clamp(*_LOG_VARIANCE) + log_scale], dim=1)
            )
        deviation = (log_variance.clamp(*_LOG_VARIANCE) * 0.5).exp()
        return _finite((mean + deviation * noise) * self.scaling_factor)


class _Moments(nn.Module):
    """The half of the VAE that is needed here."""

    def __init__(self, encoder: nn.Module, quant_conv: nn.Module | None) -> None:
        super().__init__()
        self.encoder, self.quant_conv = encoder, quant_conv or nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        moments: Tensor = self.quant_conv(self.encoder(pixels))
        return moments


class _Feeder:
    """Copies batches to the device one ahead of the work, through pinned memory and on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._copies = new_stream(device) if self._pinned else None
        self._slots = [_Slot(), _Slot()]

    def __call__(
        self, batches: Iterable[tuple[NDArray[Any], NDArray[np.int64]]]
    ) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """The batches on the device, in order; the next one's copy is under way while one is worked on."""
        ahead: tuple[Tensor, Any, NDArray[np.int64]] | None = None
        for batch, numbers in batches:
            coming = *self._send(batch), numbers
            if ahead is not None:
                yield self._arrived(*ahead[:2]), ahead[2]
            ahead = coming
        if ahead is not None:
            yield self._arrived(*ahead[:2]), ahead[2]

    def there(self, values: Tensor) -> Tensor:
        """A small tensor on the device, for work that is queued after this."""
        return values.pin_memory().to(self._device, non_blocking=True) if self._pinned else values

    def back(self, values: Tensor) -> Tensor:
        """A tensor on the host, good to read after a mark that is set later."""
        if not self._pinned:
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    def _send(self, batch: NDArray[Any]) -> tuple[Tensor, Any]:
        """Begin to copy a batch; return it with the event of its arrival."""
        slot = self._slots.pop(0)
        self._slots.append(slot)
        host = slot.take(batch, pinned=self._pinned)
        if self._copies is None:
            return host, None
        with torch.cuda.stream(self._copies):
            there = host.to(self._device, non_blocking=True)
        slot.copied = record(self._copies)
        return there, slot.copied

    def _arrived(self, batch: Tensor, copied: Any) -> Tensor:
        if copied is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(copied)
            batch.record_stream(now)
        return batch


@dataclass(slots=True)
class _Slot:
    """A host buffer that batches pass through."""

    room: Tensor | None = None
    copied: Any = None
    """When the device has taken what lies in it."""

    def take(self, batch: NDArray[Any], *, pinned: bool) -> Tensor:
        if self.copied is not None:
            self.copied.synchronize()
        # The batch lies in shared memory that may not be written, which torch cannot express: hence numpy's copy.
        if self.room is None or self.room.numel() * self.room.element_size() < batch.nbytes:
            self.room = torch.empty(batch.nbytes, dtype=torch.uint8, pin_memory=pinned)
        flat = self.room[: batch.nbytes]
        flat.numpy()[:] = np.ascontiguousarray(batch).reshape(-1).view(np.uint8)
        kind = torch.from_numpy(np.empty(0, batch.dtype)).dtype
        return flat.view(kind).view(batch.shape)


def _finite(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values as fp16, and of which items all are finite: then, in fp16, not only before."""
    halves = values.half()
    return halves, halves.isfinite().flatten(1).all(1)


def _settled(
    chunk: Chunk, latents: dict[int, list[Group]], text: NDArray[np.float16] | None, finite: NDArray[np.bool_]
) -> Encoded:
    """Record rows whose numbers are not all finite as failed."""
    failed = [Outcome(row, FAILED, "not_finite", "NaN or infinite latents") for row in chunk.rows[~finite].tolist()]
    return Encoded(chunk, latents, text, finite, [*chunk.outcomes, *failed])
