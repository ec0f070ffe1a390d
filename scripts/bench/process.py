"""Process: transform, pipeline and bytes against the reference's design (scripts/bench/_reference_process.py).

    python -m scripts.bench.process [--images 600] [--only transform,sandbox,pipeline,bytes] [--px 64,256]

Everything is measured on this machine in one run, so only the ratios matter.
"""

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from scripts.bench._cases import sized
from scripts.bench._photos import make_photos
from scripts.bench._processes import Cost, run_and_measure

if TYPE_CHECKING:
    from sdp.encode.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900
PARTS = ("transform", "sandbox", "pipeline", "bytes")
RUNS = {
    64: (("fp32", "token_ids"), ("fp32", "text_embedding")),
    256: (("fp32", "token_ids"), ("bf16", "token_ids")),
}
"""sdp's (precision, text) of each run, by side in pixels; the reference always uses fp32 and embeddings."""
IMAGES = {64: (800, 4000), 256: (200, 800)}
"""The images of a short run, enough for all workers to start, and of a long one, by side in pixels."""
ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=sized(600, 4), help="different JPEGs")
    usual = sized(PARTS, ("transform", "sandbox", "bytes"))
    parser.add_argument("--only", default=",".join(usual), help="any of " + ", ".join(PARTS))
    parser.add_argument("--px", default=",".join(map(str, RUNS)), help="sides of the pipeline's pictures")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    with tempfile.TemporaryDirectory(prefix="sdp-bench-") as name:
        folder = Path(name)
        total = make_photos(folder / "jpeg", options.images)
        photos = [path.read_bytes() for path in sorted((folder / "jpeg").iterdir())]
        print(f"{len(photos)} JPEGs of {total / len(photos) / 1000:.0f} KB on average\n")
        if "transform" in wanted:
            transform(photos[:120])
        if "sandbox" in wanted:
            sandbox(photos[:40])
        if "pipeline" in wanted:
            pipeline(folder, photos, [int(side) for side in options.px.split(",")])
        if "bytes" in wanted:
            stored_bytes(folder, photos[:200])
    return 0


# --- transform -------------------------------------------------------------------------------------------------------


def transform(photos: list[bytes]) -> None:
    """Print the images per second that one core transforms, and how close the results are to Lanczos."""
    import torch

    from scripts.bench._reference_process import image_transform
    from sdp.encode.recipe import Recipe
    from sdp.encode.transform import crop_image
    from sdp.imaging import centre_box, read_header

    torch.set_num_threads(1)
    print("transform, one core: the reference's (PIL, torchvision) against sdp's")
    print("  px     reference       sdp    ratio  PSNR: reference  sdp  worst")
    for side in (64, 256, 512):
        reference = image_transform(side)
        recipe = Recipe((side,), max_upscale=4)
        seconds = _alternate([reference, _crop_with(recipe)], photos)
        scores: list[list[float]] = [[], []]
        for data in photos:
            header = read_header(data)
            box = centre_box(header.width, header.height)
            exact = _lanczos(data, (box.left, box.top, box.width, box.height), side)
            pixels = ((reference(data).permute(1, 2, 0) * 0.5 + 0.5) * 255).round().byte().numpy()
            scores[0].append(_psnr(pixels, exact))
            scores[1].append(_psnr(crop_image(data, recipe, 0)[1][side], exact))
        rates = [len(photos) / duration for duration in seconds]
        means = [float(np.mean(score)) for score in scores]
        print(
            f"  {side:<4} {rates[0]:7.0f}/s {rates[1]:7.0f}/s    {rates[1] / rates[0]:.2f}×"
            f" {means[0]:11.1f} {means[1]:6.1f} {min(scores[1]):8.1f}"
        )
    both, small, large = (Recipe(sides, max_upscale=4) for sides in ((256, 512), (256,), (512,)))
    together, first, second = _alternate([_crop_with(both), _crop_with(small), _crop_with(large)], photos)
    print(f"  256 and 512 from one decode: {(first + second) / together:.2f}× as fast as one after the other\n")


def _crop_with(recipe: "Recipe") -> Callable[[bytes], object]:
    from sdp.encode.transform import crop_image

    return lambda data: crop_image(data, recipe, 0)


def sandbox(photos: list[bytes]) -> None:
    """Print the images per second that sandboxed decoders crop, against this process."""
    import cv2

    from sdp.encode.recipe import Recipe
    from sdp.encode.transform import SandboxedCrops
    from sdp.imaging import decode
    from sdp.sandbox import child
    from sdp.sandbox.decoders import Sandbox

    cv2.setNumThreads(1)
    whole_picture = Sandbox(child.pixels)
    print(
        "sandbox, images per CPU second: this process against a sandboxed decoder, with the CPU time of both its ends"
    )
    for side in sized((64, 256, 512, None), (64, None)):
        ways: list[Callable[[bytes], object]] = [decode, whole_picture]
        if side is not None:
            recipe = Recipe((side,), max_upscale=4)
            crops = SandboxedCrops(recipe)
            ways = [_crop_with(recipe), lambda data, crops=crops: crops(data, 0)]  # type: ignore[misc]
        ways[1](photos[0])  # starts the decoder
        plain, sandboxed = (len(photos) / duration for duration in _alternate(ways, photos, sized(15, 1), _cpu_s))
        print(f"  {side or 'whole':<5} {plain:7.0f}/s {sandboxed:7.0f}/s    {sandboxed / plain:.2f}×")
    print()


def _cpu_s() -> float:
    """Return the CPU seconds of this process and its children so far."""
    children = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    spent = [int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in children]
    return time.process_time() + sum(spent) / 1e9


def _alternate(
    ways: list[Callable[[bytes], object]],
    photos: list[bytes],
    rounds: int = sized(5, 1),
    clock: Callable[[], float] = time.process_time,
) -> list[float]:
    """Return the CPU seconds of each way over all photos, the best of alternating rounds."""
    best = [float("inf")] * len(ways)
    for _ in range(rounds):
        for number, way in enumerate(ways):
            began = clock()
            for data in photos:
                way(data)
            best[number] = min(best[number], clock() - began)
    return best


def _lanczos(data: bytes, box: tuple[float, float, float, float], side: int) -> NDArray[np.uint8]:
    from PIL import Image

    left, top, width, height = box
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    edges = (left, top, left + width, top + height)
    return np.asarray(picture.resize((side, side), Image.Resampling.LANCZOS, box=edges))


def _psnr(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    error = float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))
    return 10 * float(np.log10(255**2 / max(error, 1e-9)))


# --- pipeline --------------------------------------------------------------------------------------------------------


def pipeline(folder: Path, photos: list[bytes], sides: Sequence[int]) -> None:
    """Print the cost of whole commands, in one process and on a local Ray, from a Parquet file of images to latents.

    The cost of an image is the difference between a long run and a short one, which take equally long to start. Each
    figure is the median of alternating rounds.
    """
    print(f"pipeline, tiny models, median of {ROUNDS}: an image without the start, and whole runs")
    print(
        "  px   program                          img/s   CPU ms an image   whole run, s    CPU s   peak MB   a short one, s"
    )
    for side in sides:
        few, count = IMAGES[side]
        many = (photos * -(-count // len(photos)))[:count]
        sources = write_source(folder / f"short-{side}", many[:few]), write_source(folder / f"long-{side}", many)
        usual, *others = RUNS[side]
        programs: dict[str, dict[str, Any]] = {
            "the reference": {"run": "reference"},
            "sdp": {"dtype": usual[0], "text": usual[1]},
            "sdp on Ray": {"dtype": usual[0], "text": usual[1], "on_ray": True},
            **{f"sdp, {dtype}, {text}": {"dtype": dtype, "text": text} for dtype, text in others},
        }
        rounds: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in programs}
        for _ in range(ROUNDS):
            for name, case in programs.items():
                short, long = (_cost(folder, {**case, "side": side, "source": str(source)}) for source in sources)
                rounds[name].append((short, long))
        for name, costs in rounds.items():
            more = count - few
            rate = statistics.median(more / (long.seconds - short.seconds) for short, long in costs)
            cpu_ms = statistics.median(1e3 * (long.cpu_s - short.cpu_s) / more for short, long in costs)
            whole, cpu, peak, start = (
                statistics.median(figures)
                for figures in zip(
                    *((b.seconds, b.cpu_s, b.peak_bytes / 1e6, a.seconds) for a, b in costs), strict=True
                )
            )
            print(
                f"  {side:<4} {name:<28} {rate:9.1f} {cpu_ms:17.1f} {whole:14.1f} {cpu:8.1f} {peak:9.0f} {start:16.1f}",
                flush=True,
            )
    print()


def _cost(folder: Path, case: dict[str, Any]) -> Cost:
    """Return the time and CPU time of a run, all its processes together."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        log = Path(output) / "log"
        if case.get("run"):
            command = [
                "-m",
                "scripts.bench._reference_process",
                case["source"],
                f"{output}/reference",
                str(case["side"]),
            ]
        else:
            settings = (word for setting in _settings(case, output) for word in ("--set", setting))
            command = ["-m", "sdp", "process", *settings]
        quiet = ["sh", "-c", 'log=$1; shift; exec "$@" >"$log" 2>&1', "sh", str(log)]
        environment = {**os.environ, **({"RAY_ADDRESS": "local"} if case.get("on_ray") else {})}
        cost = run_and_measure([*quiet, sys.executable, *command], timeout_s=TIMEOUT_S, cwd=ROOT, env=environment)
        if cost.code:
            raise SystemExit(f"bench process: {case}: exit code {cost.code}\n{log.read_text()[-4000:]}")
    return cost


def _settings(case: dict[str, Any], output: str) -> list[str]:
    """Return the settings of `sdp process` for a case."""
    settings = [f"source.uri={case['source']}", f"output.uri={output}/sdp", "model.source=builtin:tiny"]
    return [*settings, f"resolutions=[{case['side']}]", f"encode.dtype={case['dtype']}", f"encode.text={case['text']}"]


def write_source(folder: Path, photos: list[bytes], group: int = 32) -> Path:
    """Write a Parquet folder of images and captions with small row groups, as `sdp download` does; return its path."""
    if not folder.exists():
        folder.mkdir()
        captions = [f"photograph number {number}, of something or other" for number in range(len(photos))]
        table = pa.table({"image": pa.array(photos, pa.binary()), "caption": captions})
        step = -(-len(photos) // 4)
        for number in range(4):
            pq.write_table(table.slice(number * step, step), folder / f"{number}.parquet", row_group_size=group)
    return folder


# --- bytes -----------------------------------------------------------------------------------------------------------


def stored_bytes(folder: Path, photos: list[bytes]) -> None:
    """Print the bytes of an image on disk at 256 px: sdp's as written, the reference's in Stable Diffusion 2's shapes."""
    from sdp.config import load
    from sdp.process import job

    case = {"source": write_source(folder / "source-bytes", photos), "side": 256, "dtype": "bf16", "text": "token_ids"}
    dataset = job.run(load("process", None, _settings(case, str(folder)))).dataset
    assert dataset is not None
    sdp = dataset.manifest.size / dataset.manifest.counts.written
    draw = np.random.default_rng(0)
    columns = {}
    for name, count in (("image_latents_256", 4 * 32 * 32), ("caption_embeddings", 77 * 1024)):
        values = draw.standard_normal(len(photos) * count, dtype=np.float32)
        offsets = np.arange(len(photos) + 1, dtype=np.int64) * count
        columns[name] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
    pq.write_table(pa.table(columns), folder / "reference.parquet")
    reference = (folder / "reference.parquet").stat().st_size / len(photos)
    print("bytes of an image at 256 px: reference with fp32 latents and text, sdp with fp16 latents and token ids")
    print(f"  reference {reference:,.0f}, sdp {sdp:,.0f}: 1/{reference / sdp:.1f}\n")


if __name__ == "__main__":
    sys.exit(main())
