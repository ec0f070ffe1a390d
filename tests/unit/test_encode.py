"""Crops to latents: scaled once, drawn by the row, whatever the batch; bad numbers and small memories are survived."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sdp.datasets.draws import noise
from sdp.encode.chunk import Chunk, Encoded, ShapeGroup
from sdp.encode.encoder import Encoder, _Feeder
from sdp.encode.recipe import TEXT, EncoderSettings
from sdp.errors import OutOfMemory
from sdp.runners.stages import Occupancy
from tests.process_kit import make_text_encoder, make_vae


@pytest.fixture(autouse=True)
def _no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode as in a process that does not train, which training in this one would have changed."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


SCALE = 0.18215

torch.set_num_threads(1)  # these networks are too small to be shared out


def chunk_of(rows: list[int], side: int = 32, pixels: NDArray[np.uint8] | None = None) -> Chunk:
    """Pixels that depend on the row alone; read-only, as what comes out of the object store is."""
    if pixels is None:
        pixels = np.stack([np.random.default_rng(row).integers(0, 256, (side, side, 3), np.uint8) for row in rows])
    pixels.flags.writeable = False
    tokens = np.stack([np.random.default_rng(row).integers(0, 900, 77, np.uint16) for row in rows])
    return Chunk(
        rows=np.array(rows),
        keys=[str(row) for row in rows],
        tokens=tokens,
        crops={side: [ShapeGroup(np.arange(len(rows)), pixels)]},
        buckets=np.zeros(len(rows), np.int16),
    )


def encoder_of(vae: Any = None, text: Any = None, batch: int = 4, **settings: Any) -> Encoder:
    encoder_settings = EncoderSettings(batch_sizes={16: batch, 32: batch, 64: batch, TEXT: batch}, **settings)
    return Encoder(vae or make_vae(), encoder_settings, text_encoder=text, device="cpu")


def latents(encoded: Encoded, side: int = 32) -> NDArray[np.float16]:
    (group,) = encoded.latents[side]
    return group.values


class Flat(nn.Module):
    """A fake VAE that returns given moments and records its inputs."""

    def __init__(self, mean: float = 1.0, poison: int | None = None) -> None:
        super().__init__()
        self.config = {"scaling_factor": SCALE, "latent_channels": 4}
        self.mean, self.poison = mean, poison
        self.seen: list[Tensor] = []

    @property
    def encoder(self) -> nn.Module:
        return self

    @property
    def quant_conv(self) -> None:
        return None

    def forward(self, pixels: Tensor) -> Tensor:
        self.seen.append(pixels)
        count, _, height, width = pixels.shape
        moments = torch.full((count, 8, height // 8, width // 8), self.mean)
        moments[:, 4:] = -100.0
        if self.poison is not None:
            moments[(pixels[:, 0, 0, 0] * 127.5 + 127.5).round() == self.poison] = float("nan")
        return moments


class Narrow(nn.Module):
    """A VAE's encoder that has room for few images."""

    def __init__(self, inside: nn.Module, room: int, error: RuntimeError | None = None) -> None:
        super().__init__()
        self.inside, self.room, self.sizes = inside, room, list[int]()
        self.error = error or torch.OutOfMemoryError("no room")

    def forward(self, pixels: Tensor) -> Tensor:
        self.sizes.append(len(pixels))
        if len(pixels) > self.room:
            raise self.error
        encoded: Tensor = self.inside(pixels)
        return encoded


# --- what the numbers are --------------------------------------------------------------------------------------------


def test_latents_are_scaled_exactly_once() -> None:
    assert np.allclose(latents(encoder_of(Flat(mean=2.0))(chunk_of([1]))), 2.0 * SCALE, atol=1e-3)


def test_the_vae_sees_pixels_from_minus_one_to_one_channels_first() -> None:
    pixels = np.zeros((1, 32, 32, 3), np.uint8)
    pixels[..., 0], pixels[..., 1], pixels[..., 2] = 0, 255, 51
    vae = Flat()
    encoder_of(vae)(chunk_of([1], pixels=pixels))
    (seen,) = vae.seen
    assert seen.shape == (1, 3, 32, 32)
    assert [seen[0, c].unique().item() for c in range(3)] == pytest.approx([-1.0, 1.0, -0.6])


def test_the_sample_is_diffusers_own_with_our_noise() -> None:
    vae = make_vae()
    chunk = chunk_of([11, 12, 13])
    encoded = latents(encoder_of(vae, seed=3)(chunk))
    pixels = torch.from_numpy(chunk.crops[32][0].values.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
    drawn = noise(3, chunk.rows, (4, 4, 4), resolution=32)
    expected = (posterior.mean + posterior.std * torch.from_numpy(drawn)) * SCALE
    assert posterior.std.mean() > 0.1, "else the noise would not show"
    assert encoded.dtype == np.float16
    assert np.allclose(encoded, expected.numpy(), atol=2e-3)


def test_moments_are_those_of_the_scaled_latent() -> None:
    vae = make_vae()
    chunk = chunk_of([11, 12])
    moments = latents(encoder_of(vae, content="moments")(chunk)).astype(np.float32)
    assert moments.shape == (2, 8, 4, 4)
    drawn = noise(0, chunk.rows, (4, 4, 4), resolution=32)
    sampled = moments[:, :4] + np.exp(0.5 * moments[:, 4:]) * drawn
    assert np.allclose(sampled, latents(encoder_of(make_vae())(chunk)), atol=4e-3)


# --- what they do not depend on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_a_rows_latents_do_not_depend_on_batch_size_or_company(batch: int) -> None:
    alone = {row: latents(encoder_of(batch=1)(chunk_of([row])))[0] for row in (5, 6, 7)}
    together = latents(encoder_of(batch=batch)(chunk_of([7, 9, 5, 4, 6])))
    for row, place in ((7, 0), (5, 2), (6, 4)):
        assert np.allclose(together[place], alone[row], atol=1e-3)


# --- what may go wrong -----------------------------------------------------------------------------------------------


def test_nan_is_a_failed_row_and_leaves_its_neighbours_alone() -> None:
    pixels = np.full((6, 32, 32, 3), 10, np.uint8)
    pixels[3] = 200
    encoded = encoder_of(Flat(poison=200))(chunk_of([20, 21, 22, 23, 24, 25], pixels=pixels))
    assert encoded.good.tolist() == [True, True, True, False, True, True]
    assert [(o.row, o.outcome, o.reason) for o in encoded.outcomes] == [(23, "failed", "not_finite")]


def test_a_latent_too_large_for_fp16_is_not_finite() -> None:
    encoded = encoder_of(Flat(mean=1e6))(chunk_of([1]))
    assert not encoded.good.any()


def test_a_batch_that_memory_has_no_room_for_is_split_and_the_size_remembered() -> None:
    vae = make_vae()
    vae.encoder = Narrow(vae.encoder, room=3)
    encoder = encoder_of(vae, batch=8)
    chunk = chunk_of(list(range(11)))
    encoded = encoder(chunk)
    assert np.allclose(latents(encoded), latents(encoder_of(batch=2)(chunk)), atol=1e-3)
    assert encoder.batch_limits[32] == 2
    sizes = vae.encoder.sizes
    assert sizes[:2] == [8, 4]
    sizes.clear()
    encoder(chunk_of(list(range(8))))
    assert max(sizes) <= 3, "it did not try the larger size again"


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate",
        "FIND was unable to find an engine to execute this computation",
        "GET was unable to find an engine to execute this computation",
        "Unable to find a valid cuDNN algorithm to run convolution",
    ],
)
def test_other_words_for_too_little_memory_are_understood(message: str) -> None:
    vae = make_vae()
    vae.encoder = Narrow(vae.encoder, room=2, error=RuntimeError(message))
    encoder = encoder_of(vae, batch=4)
    assert encoder(chunk_of([1, 2, 3, 4])).good.all()
    assert encoder.batch_limits[32] == 2


def test_another_error_is_no_reason_to_try_smaller_batches() -> None:
    vae = make_vae()
    vae.encoder = Narrow(vae.encoder, room=2, error=RuntimeError("a kernel was not found"))
    with pytest.raises(RuntimeError, match="a kernel was not found"):
        encoder_of(vae, batch=4)(chunk_of([1, 2, 3, 4]))
    assert vae.encoder.sizes == [4]


def test_not_even_one_image_is_one_clear_line() -> None:
    vae = make_vae()
    vae.encoder = Narrow(vae.encoder, room=0)
    with pytest.raises(OutOfMemory, match=r"encode\.accelerator: .*an image of 32 px"):
        encoder_of(vae)(chunk_of([1, 2]))


def test_a_chunk_of_nothing_is_encoded_to_nothing() -> None:
    chunk = chunk_of([1])
    empty = Chunk(chunk.rows[:0], [], chunk.tokens[:0], {32: []}, chunk.buckets[:0], list(chunk.outcomes))
    encoded = encoder_of(text=make_text_encoder())(empty)
    assert len(encoded.good) == 0


# --- text ------------------------------------------------------------------------------------------------------------


def test_captions_become_the_text_encoders_last_hidden_state() -> None:
    text = make_text_encoder()
    chunk = chunk_of([1, 2, 3, 4, 5])
    encoded = encoder_of(text=text, batch=2)(chunk)
    with torch.no_grad():
        expected = text(torch.from_numpy(chunk.tokens.astype(np.int64))).last_hidden_state
    assert encoded.text is not None
    assert encoded.text.dtype == np.float16
    assert np.allclose(encoded.text, expected.numpy(), atol=5e-3)


# --- the way it is used ----------------------------------------------------------------------------------------------


def test_the_next_batch_is_on_its_way_while_one_is_worked_on() -> None:
    pulled: list[int] = []

    def batches() -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        for number in range(5):
            pulled.append(number)
            yield np.full((2, 3), number, np.uint8), np.array([number])

    for number, (batch, where) in enumerate(_Feeder(torch.device("cpu"))(batches())):
        assert pulled == list(range(min(number + 2, 5)))
        assert batch.tolist() == [[number] * 3] * 2, "its buffer is not taken from it meanwhile"
        assert where.tolist() == [number]


def test_two_calls_at_once_do_not_mix() -> None:
    encoder = encoder_of()
    chunks = [chunk_of(list(range(start, start + 6))) for start in (0, 100, 200)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(encoder, chunks))
    for chunk, encoded in zip(chunks, results, strict=True):
        assert np.array_equal(latents(encoded), latents(encoder_of()(chunk)))


def test_time_in_use_and_between_uses_adds_up_where_they_overlap() -> None:
    used = Occupancy()
    assert used.add(10.0, 14.0) == (4.0, 0.0), "what came before the first use is nobody's wait"
    assert used.add(12.0, 16.0) == (2.0, 0.0)
    assert used.add(20.0, 21.0) == (1.0, 4.0)


@pytest.mark.parametrize("compiled", [True, False])
def test_batches_have_one_shape_where_another_is_compiled_or_searched_for(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """The compiler itself is left out: what is asked is that it sees one shape, and that fillers do not come back."""
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not compiled)  # as beside a trainer
    vae = make_vae()
    vae.encoder = Narrow(vae.encoder, room=100)
    chunk = chunk_of(list(range(10)))
    encoded = encoder_of(vae, batch=4, compile=compiled)(chunk)
    assert set(vae.encoder.sizes) == {4}
    assert np.allclose(latents(encoded), latents(encoder_of(batch=4)(chunk)), atol=1e-3)
