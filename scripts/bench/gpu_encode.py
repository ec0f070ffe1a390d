"""On a GPU: encoding with Stable Diffusion 2's VAE and text encoder in full size, random weights: img/s, share of peak, memory.

    python -m scripts.bench.gpu_encode [--sides 256,512] [--seconds 5] [--batches 16,32,64,128] [--no-compile]
    python -m scripts.bench.gpu_encode --latents     no times: latents against the CPU's, and of batches of 1 against 64
    python -m scripts.bench.gpu_encode --tiny        the same code on the tiny model, on a CPU if there is no GPU

sdp's encoder is called as its actor is: read-only chunks of uint8, two calls at a time. It alternates in the same run
with two others: the network alone on pixels that are already on the device, which shows the cost of copies, noise and
checks; and the encoder of the reference that scripts/bench/_reference_process.py names (fp16; each batch is copied, encoded and fetched in turn). Speed does not depend on
the weights.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from scripts.bench._cases import hand_over, sized
from scripts.published import VAE
from sdp import hardware
from sdp.config.process import EncodeConfig
from sdp.console import table
from sdp.device import DTYPES, choose_device, configure_torch
from sdp.encode.chunk import Chunk, ShapeGroup
from sdp.encode.encoder import Encoder
from sdp.encode.recipe import TEXT, EncoderSettings
from sdp.errors import one_line
from sdp.families.sd import SD2
from sdp.model import load, sources
from sdp.model.latents import to_pixels

SCALE = 0.18215
DEADLINE_S = 600
AGREES = 0.05
"""The largest difference of bf16 latents from fp32 ones, as a share of their mean."""


@dataclass(frozen=True)
class Case:
    """A combination of encoder settings."""

    side: int
    batch: int
    dtype: str = "bf16"
    compile: bool = False

    def __str__(self) -> str:
        words = [self.dtype]
        return ", ".join(words + (["compiled"] if self.compile else []))


@dataclass(frozen=True)
class Networks:
    """The networks to measure, and the device."""

    vae: Callable[[], Any]
    """Returns a new VAE, because an encoder keeps the one that it gets."""
    text: Callable[[], Any]
    device: torch.device
    seconds: float

    @property
    def gpu(self) -> hardware.Gpu | None:
        return hardware.gpu_by_product(torch.cuda.get_device_name()) if self.device.type == "cuda" else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sides", default=sized("256,512", "64"), help="resolutions")
    parser.add_argument(
        "--batches", default=sized("16,32,64,128", "1"), help="batch sizes at 256 px; a quarter of each at 512"
    )
    parser.add_argument("--seconds", type=float, default=sized(5.0, 0.2), help="time to measure each")
    parser.add_argument("--latents", action="store_true", help="only compare latents")
    parser.add_argument("--no-compile", action="store_true", default=sized(False, True), help="leave torch.compile out")
    parser.add_argument(
        "--tiny", action="store_true", default=sized(False, True), help="the tiny model, to try the script itself"
    )
    options = parser.parse_args(arguments)
    if options.tiny:
        options.sides, options.seconds = "64", 0.2
    if not options.tiny and not torch.cuda.is_available():
        print("no CUDA device here, nothing measured; run it on a machine with one, or with --tiny to try it on a CPU")
        return 0
    device = choose_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    networks = Networks(*(_tiny() if options.tiny else _real()), device, options.seconds)
    torch.manual_seed(0)
    configure_torch()  # as an encoder does; it is also for the network alone and the reference
    _print_device(networks)
    good = _check(networks)
    if options.latents:
        _batch_differences(networks)
        return 0 if good else 1
    sides = [int(side) for side in options.sides.split(",")]
    batches = [int(batch) for batch in options.batches.split(",")]
    best = [
        _images(networks, side, [max(1, batch * 256**2 // side**2) for batch in batches], not options.no_compile)
        for side in sides
    ]
    _captions(networks)
    print(f"\nbest: {'; '.join(best)}")
    return 0 if good else 1


def _real() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that make the networks with random weights, initialised on the CPU with a seed."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    def vae() -> Any:
        torch.manual_seed(1)
        return AutoencoderKL.from_config(dict(VAE)).eval()

    def text() -> Any:
        torch.manual_seed(2)
        return CLIPTextModel(CLIPTextConfig(**SD2.text_encoder)).eval()

    return vae, text


def _tiny() -> tuple[Callable[[], Any], Callable[[], Any]]:
    path = sources.resolve("builtin:tiny").path
    return lambda: load.load_vae(path), lambda: load.load_text_encoder(path)


def _print_device(networks: Networks) -> None:
    if networks.device.type == "cpu":
        print(f"on a CPU, {torch.get_num_threads()} threads; PyTorch {torch.__version__}\n")
        return
    name, gpu = torch.cuda.get_device_name(), networks.gpu
    memory = torch.cuda.get_device_properties(0).total_memory / hardware.GIB
    peak = (
        f"{gpu.peak_flops / hardware.TERA:g} TFLOP/s dense bf16" if gpu else "not in sdp.hardware, so no share of peak"
    )
    print(f"{name}: {memory:.0f} GiB, {peak}; PyTorch {torch.__version__}\n")


# --- correctness -----------------------------------------------------------------------------------------------------


def _check(networks: Networks) -> bool:
    """Compare the device's latents with fp32 on the CPU before any timing; many small batches, two calls at a time."""
    chunk = _chunk(64, 24)
    settings = {"seed": 5, "batch_sizes": {64: 5, TEXT: 5}}
    exact = Encoder(networks.vae(), EncoderSettings(dtype="fp32", **settings), device="cpu")(chunk)
    tested = Encoder(networks.vae(), EncoderSettings(dtype="bf16", **settings))
    wanted = exact.latents[64][0].values.astype(np.float32)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(tested, [chunk] * 6, timeout=DEADLINE_S))
    all_values = [encoded.latents[64][0].values.astype(np.float32) for encoded in results]
    # By row: another row's pixels, as after a copy that was not waited for, show in one row only.
    off = max(float((np.abs(v - wanted).mean((1, 2, 3)) / np.abs(wanted).mean()).max()) for v in all_values)
    good = all(encoded.good.all() for encoded in results) and off <= AGREES
    verdict = "agree" if good else "DO NOT AGREE"
    line = f"latents in bf16 {verdict} with fp32 on the CPU: a row's mean difference is at most {off:.2%} of the mean"
    hand_over("latents, against the CPU", note=f"{line}; six calls, two at a time")
    return good


def _batch_differences(networks: Networks) -> None:
    """Report the largest difference of a row's latents between batches of 1 and of 64, by dtype."""
    chunk = _chunk(sized(256, 64), sized(64, 4))
    (side,) = chunk.crops
    for dtype in DTYPES:
        one, many = (
            Encoder(
                networks.vae(), EncoderSettings(dtype=dtype, batch_sizes={side: size}), device=str(networks.device)
            )(chunk)
            .latents[side][0]
            .values.astype(np.float32)
            for size in (1, len(chunk))
        )
        differs = np.abs(one - many)
        note = f"at most {differs.max():.3g}, in {(differs > 0).mean():.1%} of the values, whose mean is {np.abs(many).mean():.3g}"
        hand_over(f"latents, batches of 1 against {len(chunk)}, {dtype}", note=note)


# --- images ----------------------------------------------------------------------------------------------------------


def _images(networks: Networks, side: int, batches: list[int], compiled: bool) -> str:
    """Print the table of a resolution; return a description of its best line."""
    usual = sized(EncodeConfig().batch_sizes([side])[side], 8)
    cases = [Case(side, usual), Case(side, usual, dtype="fp16")]
    cases += [Case(side, usual, compile=True)] if compiled else []
    cases += [Case(side, batch) for batch in batches if batch != usual]
    flops = _vae_flops(networks, side)
    print(f"images of {side} px: {flops / 1e9:,.4g} GFLOP each; img/s")
    rows = []
    for case in cases:
        try:
            rows.append(_images_row(networks, case, flops))
        except Exception as error:  # noqa: BLE001 (one case says nothing about the others)
            hand_over(f"encode {side} px, {case}", reason=f"{type(error).__name__}: {one_line(error, 200)}")
    rows.append(_reference_row(networks, side, usual, flops))
    print(table(rows, ("way", "batch", "img/s", "network alone", "share of it", "share of peak", "memory")), flush=True)
    print()
    if not rows[:-1]:
        return f"{side} px failed"
    way, batch, rate, _, _, share, _ = max(rows[:-1], key=lambda row: float(row[2].replace(",", "")))
    return f"{side} px {rate} img/s, {share} of the peak ({way}, batch {batch})"


def _images_row(networks: Networks, case: Case, flops: float) -> list[str]:
    settings = EncoderSettings(
        dtype=case.dtype,
        compile=case.compile,
        batch_sizes={case.side: case.batch, TEXT: 64},
    )
    torch.compiler.reset()  # otherwise it keeps the networks of earlier cases in memory
    encoder = Encoder(networks.vae(), settings)
    chunk = _chunk(case.side, 4 * case.batch)
    _begin_memory(networks)
    encoder(chunk)  # warm-up: choose and compile kernels, allocate memory
    rate = _two_at_once(lambda: encoder(chunk), len(chunk), networks.seconds)
    memory = _peak_memory(networks)
    bare = _network_alone(networks, encoder, case)
    fitting = encoder.batch_limits[case.side]
    batch = f"{case.batch}" if fitting == case.batch else f"{case.batch}, split to {fitting}"
    _hand_over(
        networks,
        f"encode {case.side} px, {case}, batch {batch}",
        flops,
        rate,
        f"{rate / bare:.0%} of the network alone",
    )
    return [
        str(case),
        batch,
        f"{rate:,.0f}",
        f"{bare:,.0f}",
        f"{rate / bare:.0%}",
        _share(networks, flops * rate),
        memory,
    ]


def _network_alone(networks: Networks, encoder: Encoder, case: Case) -> float:
    """Return the images per second of the VAE's encoder on pixels that are already on the device."""
    size = encoder.batch_limits[case.side]
    pixels = torch.randint(256, (size, case.side, case.side, 3), dtype=torch.uint8, device=networks.device)
    planes = to_pixels(pixels).to(DTYPES[case.dtype])
    with torch.inference_mode():
        return _one_by_one(lambda: encoder._moments(planes), size, networks)


def _reference_row(networks: Networks, side: int, batch: int, flops: float) -> list[str]:
    """Return the line of the reference's way: fp32 pixels, fp16 networks, each batch copied, encoded and fetched in turn."""
    cpu = networks.device.type == "cpu"
    dtype = torch.float32 if cpu else torch.float16
    vae: Any = torch.nn.Module.to(networks.vae(), networks.device, dtype)  # diffusers' own method warns
    images = np.zeros((batch, 3, side, side), np.float32)

    def encode() -> Any:
        with torch.no_grad():
            taken = torch.as_tensor(images, device=networks.device, dtype=dtype)
            latents = vae.encode(taken)["latent_dist"].sample() * SCALE
            return latents.detach().cpu().numpy().astype(np.float32)

    _begin_memory(networks)
    encode()
    rate = _one_by_one(encode, batch, networks)
    name = f"reference, {'fp32' if cpu else 'fp16'}"
    _hand_over(networks, f"encode {side} px, {name}, batch {batch}", flops, rate)
    return [name, f"{batch}", f"{rate:,.0f}", "", "", _share(networks, flops * rate), _peak_memory(networks)]


# --- captions --------------------------------------------------------------------------------------------------------


def _captions(networks: Networks) -> None:
    text = networks.text()
    width, batch = int(text.config.hidden_size), 64
    flops = _text_flops(networks)
    tokens = np.random.default_rng(0).integers(0, int(text.config.vocab_size), (8 * batch, 77), np.uint16)
    settings = EncoderSettings(dtype="bf16", batch_sizes={TEXT: batch})
    encoder = Encoder(networks.vae(), settings, text_encoder=text)
    _begin_memory(networks)
    encoder.embed(tokens)
    rate = _two_at_once(lambda: encoder.embed(tokens), len(tokens), networks.seconds)
    _hand_over(networks, f"captions to 77 × {width}, bf16, batch {batch}", flops, rate)
    print(
        f"captions to 77 × {width}: {flops / 1e9:,.4g} GFLOP each; the extra work of encode.text: text_embedding for an image"
    )
    print(
        table(
            [["bf16", f"{batch}", f"{rate:,.0f}", _share(networks, flops * rate), _peak_memory(networks)]],
            ("way", "batch", "captions/s", "share of peak", "memory"),
        )
    )


# --- measuring -------------------------------------------------------------------------------------------------------


def _chunk(side: int, count: int) -> Chunk:
    """Return a read-only chunk, as from Ray's object store."""
    pixels: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)
    pixels.flags.writeable = False
    zeros = np.zeros(count, np.int16)
    tokens = np.zeros((count, 77), np.uint16)
    crops = {side: [ShapeGroup(np.arange(count), pixels)]}
    return Chunk(np.arange(count), [""] * count, tokens, crops, zeros)


def _two_at_once(call: Callable[[], Any], items: int, seconds: float) -> float:
    """Return the items per second of two concurrent callers, as Ray calls an actor; over whole calls."""
    done, lock = [0], threading.Lock()
    began = time.perf_counter()

    def caller() -> None:
        while time.perf_counter() - began < seconds:
            call()
            with lock:
                done[0] += items

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(caller) for _ in range(2)]:
            future.result(timeout=DEADLINE_S)
    return done[0] / (time.perf_counter() - began)


def _one_by_one(call: Callable[[], Any], items: int, networks: Networks) -> float:
    call()
    _finish(networks)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < networks.seconds:
        for _ in range(4):  # keeps the device busy while the clock is read
            call()
            done += items
        _finish(networks)
    return done / (time.perf_counter() - began)


def _finish(networks: Networks) -> None:
    if networks.device.type == "cuda":
        torch.cuda.synchronize()


def _begin_memory(networks: Networks) -> None:
    if networks.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak_memory(networks: Networks) -> str:
    """Return the peak memory since _begin_memory, of tensors and as held by PyTorch."""
    if networks.device.type == "cpu":
        return "-"
    used, held = (f() / hardware.GIB for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
    return f"{used:.1f} GiB ({held:.1f} held)"


def _hand_over(networks: Networks, name: str, flops: float, rate: float, note: str = "") -> None:
    cuda = networks.device.type == "cuda"
    peak, held = (f() if cuda else 0 for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
    mfu = hardware.mfu(flops * rate, 1.0, networks.gpu)
    hand_over(name, per_s=rate, mfu=mfu, peak=peak, held=held, note=note)


def _share(networks: Networks, flops_a_second: float) -> str:
    reached = hardware.mfu(flops_a_second, 1.0, networks.gpu)
    return "-" if reached is None else f"{reached:.1%}"


def _vae_flops(networks: Networks, side: int) -> float:
    """Return the FLOPs of one image in the VAE's encoder, counted on the network; a multiply-add counts as two."""
    vae = networks.vae().to("meta")
    pixels = torch.empty(1, 3, side, side, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        vae.encode(pixels)
    return float(counter.get_total_flops())


def _text_flops(networks: Networks) -> float:
    text = networks.text().to("meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        text(torch.zeros(1, 77, dtype=torch.int64, device="meta"))
    return float(counter.get_total_flops())


if __name__ == "__main__":
    sys.exit(main())
