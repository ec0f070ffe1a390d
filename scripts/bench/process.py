"""Process: transform, pipeline, bytes and encoder against the reference's shape, written from its text.

    python -m scripts.bench.process [--images 600] [--only transform,sandbox,pipeline,bytes,encoder] [--px 64,256]

Everything is measured on this machine in one run; what counts are the ratios.
"""

import argparse
import io
import json
import subprocess
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

from scripts.bench._photos import make_photos
from scripts.bench._processes import Cost, run_and_measure

if TYPE_CHECKING:
    from sdp.encode.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900
PARTS = ("transform", "sandbox", "pipeline", "bytes", "encoder")
RUNS = {
    64: (("fp32", "token_ids"), ("fp32", "text_embedding")),
    256: (("fp32", "token_ids"), ("bf16", "token_ids")),
}
"""Pixels -> (precision, text) of ours; theirs is always fp32 with embeddings."""
IMAGES = {64: (800, 4000), 256: (200, 800)}
"""Pixels -> images of a short run (enough that all workers take part in it, and so have started) and of a long one."""
ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=600, help="different JPEGs")
    parser.add_argument("--only", default=",".join(PARTS), help="which of " + ", ".join(PARTS))
    parser.add_argument("--px", default=",".join(map(str, RUNS)), help="sides of the pipeline's pictures")
    given = parser.parse_args(arguments)
    wanted = given.only.split(",")
    with tempfile.TemporaryDirectory(prefix="sdp-bench-") as name:
        folder = Path(name)
        total = make_photos(folder / "jpeg", given.images)
        photos = [path.read_bytes() for path in sorted((folder / "jpeg").iterdir())]
        print(f"{len(photos)} JPEGs of {total / len(photos) / 1000:.0f} KB on average\n")
        if "transform" in wanted:
            transform(photos[:120])
        if "sandbox" in wanted:
            sandbox(photos[:40])
        if "pipeline" in wanted:
            pipeline(folder, photos, [int(side) for side in given.px.split(",")])
        if "bytes" in wanted:
            stored_bytes(folder, photos[:200])
        if "encoder" in wanted:
            encoder(folder, photos)
    return 0


# --- transform -------------------------------------------------------------------------------------------------------


def transform(photos: list[bytes]) -> None:
    """Images per second of one core, bytes to what the next step takes; and how near each is to Lanczos."""
    import torch

    from scripts.bench._reference_process import image_transform
    from sdp.encode.recipe import Recipe
    from sdp.encode.transform import crop_image
    from sdp.imaging import centre_box, read_header

    torch.set_num_threads(1)
    print("transform, one core: the text's (PIL, torchvision) against ours")
    print("  px        theirs      ours    ratio    ours with oversample 1.5    PSNR: theirs  ours  ours 1.5  worst")
    for side in (64, 256, 512):
        theirs = image_transform(side)
        recipes = [Recipe((side,), max_upscale=4), Recipe((side,), max_upscale=4, oversample=1.5)]
        ways = [theirs, *map(_ours, recipes)]
        seconds = _alternate(ways, photos)
        scores: list[list[float]] = [[], [], []]
        for data in photos:
            header = read_header(data)
            box = centre_box(header.width, header.height)
            exact = _lanczos(data, (box.left, box.top, box.width, box.height), side)
            pixels = ((theirs(data).permute(1, 2, 0) * 0.5 + 0.5) * 255).round().byte().numpy()
            scores[0].append(_psnr(pixels, exact))
            for number, recipe in enumerate(recipes, 1):
                scores[number].append(_psnr(crop_image(data, recipe, 0)[1][0][side], exact))
        rates = [len(photos) / each for each in seconds]
        means = [float(np.mean(score)) for score in scores]
        print(
            f"  {side:<4} {rates[0]:7.0f}/s {rates[1]:7.0f}/s    {rates[1] / rates[0]:.2f}×"
            f"            {rates[2] / rates[0]:.2f}×                   {means[0]:11.1f} {means[1]:6.1f} {means[2]:8.1f}"
            f" {min(scores[1]):8.1f}"
        )
    both, small, large = (Recipe(sides, max_upscale=4) for sides in ((256, 512), (256,), (512,)))
    together, first, second = _alternate([_ours(both), _ours(small), _ours(large)], photos)
    print(f"  256 and 512 out of one decode: {(first + second) / together:.2f}× as fast as one after the other\n")


def _ours(recipe: "Recipe") -> Callable[[bytes], object]:
    from sdp.encode.transform import crop_image

    return lambda data: crop_image(data, recipe, 0)


def sandbox(photos: list[bytes]) -> None:
    """Images per second when sandboxed decoders make the crops, against those of this process."""
    import cv2

    from sdp.encode.recipe import Recipe
    from sdp.encode.transform import SandboxedCrops
    from sdp.imaging import MAX_PIXELS, decode
    from sdp.sandbox import child
    from sdp.sandbox.decoders import Sandbox

    cv2.setNumThreads(1)
    whole = Sandbox(child.pixels, MAX_PIXELS)
    print("sandbox, images per CPU second: this process against a decoder without any rights, both its ends counted")
    for side in (64, 256, 512, None):
        ways: list[Callable[[bytes], object]] = [decode, whole]
        if side is not None:
            recipe = Recipe((side,), max_upscale=4)
            crops = SandboxedCrops(recipe)
            ways = [_ours(recipe), lambda data, crops=crops: crops(data, 0)]  # type: ignore[misc]
        ways[1](photos[0])  # starts the decoder
        here, there = (len(photos) / each for each in _alternate(ways, photos, 15, _cpu_s))
        print(f"  {side or 'whole':<5} {here:7.0f}/s {there:7.0f}/s    {there / here:.2f}×")
    print()


def _cpu_s() -> float:
    """CPU seconds of this process and its children so far."""
    children = [pid for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()]
    spent = [int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in children]
    return time.process_time() + sum(spent) / 1e9


def _alternate(
    ways: list[Callable[[bytes], object]],
    photos: list[bytes],
    rounds: int = 5,
    clock: Callable[[], float] = time.process_time,
) -> list[float]:
    """CPU seconds of each way over all photos: the best of rounds that take turns."""
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
    """Whole runs on a local Ray, from a Parquet of images to a Parquet of latents.

    What an image costs is the difference of a long run and a short one, which are alike in how long they take to start:
    of each the fastest of rounds that take turns, since what else this machine does only ever adds.
    """
    print(
        f"pipeline on a local Ray, tiny models, fastest of {ROUNDS}: beyond the start, and a whole run of so many images"
    )
    print(
        "  px   ours in                theirs        ours    ratio     CPU ms an image: theirs    ours  ratio"
        "    whole run of: theirs    ours  ratio"
    )
    for side in sides:
        ways = RUNS[side]
        few, count = IMAGES[side]
        many = (photos * -(-count // len(photos)))[:count]
        short, long = write_source(folder / f"short-{side}", many[:few]), write_source(folder / f"long-{side}", many)
        theirs: dict[str, object] = {"who": "theirs", "side": side}
        tellings = [theirs, *({"who": "ours", "side": side, "dtype": d, "text": t} for d, t in ways)]
        rounds = [
            [[_cost(folder, {**told, "source": str(source)}) for source in (short, long)] for told in tellings]
            for _ in range(ROUNDS)
        ]
        spent = [
            [[(run[way][n].seconds, run[way][n].cpu_s) for run in rounds] for n in (0, 1)]
            for way in range(len(tellings))
        ]
        least = [[tuple(map(min, zip(*runs, strict=True))) for runs in way] for way in spent]
        seconds = [(much[0] - little[0]) / (count - few) for little, much in least]
        cpu = [1e3 * (much[1] - little[1]) / (count - few) for little, much in least]
        for number, (dtype, text) in enumerate(ways, 1):
            what = f"{dtype}{', embeddings' if text != 'token_ids' else ''}"
            print(
                f"  {side:<4} {what:<16} {1 / seconds[0]:6.1f} img/s {1 / seconds[number]:6.1f} img/s"
                f"    {seconds[0] / seconds[number]:.2f}×   {cpu[0]:22.1f} {cpu[number]:9.1f}   {cpu[0] / cpu[number]:.2f}×"
                f"   {count:10} {least[0][1][0]:6.1f} s {least[number][1][0]:6.1f} s  {least[0][1][0] / least[number][1][0]:.2f}×",
                flush=True,
            )
    print()


def _cost(folder: Path, told: dict[str, object]) -> Cost:
    """Time and CPU time of a run, all its processes together."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        said = Path(output) / "said"
        command = [sys.executable, "-m", "scripts.bench._process_run", str(told["who"])]
        quiet = ["sh", "-c", 'said=$1; shift; exec "$@" >"$said" 2>&1', "sh", str(said)]
        telling = json.dumps({**told, "output": output})
        cost = run_and_measure([*quiet, *command, telling], timeout_s=TIMEOUT_S, cwd=ROOT)
        if cost.code:
            raise SystemExit(f"bench process: {told}: exit code {cost.code}\n{said.read_text()[-4000:]}")
    return cost


def write_source(folder: Path, photos: list[bytes], group: int = 32) -> Path:
    """A Parquet of images and captions; small row groups, as the download stage writes them."""
    if not folder.exists():
        folder.mkdir()
        captions = [f"photograph number {number}, of something or other" for number in range(len(photos))]
        table = pa.table({"image": pa.array(photos, pa.binary()), "caption": captions})
        step = -(-len(photos) // 4)
        for number in range(4):
            pq.write_table(table.slice(number * step, step), folder / f"{number}.parquet", row_group_size=group)
    return folder


def _run(folder: Path, who: str, told: dict[str, object]) -> Any:
    """What one run in a process of its own finds; what it says is shown if it fails."""
    with tempfile.TemporaryDirectory(dir=folder) as output, (folder / "said").open("w+b") as said:
        command = [sys.executable, "-m", "scripts.bench._process_run", who, json.dumps({**told, "output": output})]
        done = subprocess.run(command, timeout=TIMEOUT_S, cwd=ROOT, check=False, stdout=said, stderr=subprocess.STDOUT)
        if done.returncode:
            said.seek(0)
            raise SystemExit(f"bench process: {who}: exit code {done.returncode}\n{said.read().decode()[-4000:]}")
        return json.loads((Path(output) / "found").read_text())


# --- bytes -----------------------------------------------------------------------------------------------------------


def stored_bytes(folder: Path, photos: list[bytes]) -> None:
    """What an image takes on disk at 256 px: ours as written, theirs in the shapes of Stable Diffusion 2."""
    source = write_source(folder / "source-bytes", photos)
    ours = _run(folder, "size", {"source": str(source), "side": 256, "dtype": "bf16", "text": "token_ids"})
    draw = np.random.default_rng(0)
    columns = {}
    for name, count in (("image_latents_256", 4 * 32 * 32), ("caption_embeddings", 77 * 1024)):
        values = draw.standard_normal(len(photos) * count, dtype=np.float32)
        offsets = np.arange(len(photos) + 1, dtype=np.int64) * count
        columns[name] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
    pq.write_table(pa.table(columns), folder / "theirs.parquet")
    theirs = (folder / "theirs.parquet").stat().st_size / len(photos)
    print("bytes of an image at 256 px: theirs with fp32 latents and text, ours with fp16 latents and token ids")
    print(f"  theirs {theirs:,.0f}, ours {ours:,.0f}: 1/{theirs / ours:.1f}\n")


# --- encoder ---------------------------------------------------------------------------------------------------------


def encoder(folder: Path, photos: list[bytes]) -> None:
    """The bare encoder on prepared chunks against the pipeline's, where transforms have capacity to spare."""
    source = write_source(folder / "source-encoder", photos * 3)
    print("encoder: images per second in the pipeline against the bare encoder's, 256 px")
    for encoders, rate in ((1, 100.0), (2, 50.0), (4, 25.0), (1, 0.0)):
        told: dict[str, object] = {"source": str(source), "side": 256, "encoders": encoders, "rate": rate}
        found = _run(folder, "encoder", told if rate else {**told, "limit": 512})
        kind = f"{encoders} that sleep as one of {rate:.0f} img/s would" if rate else "1, the tiny VAE on one core"
        print(
            f"  {kind:<42} bare {found['bare']:6.1f}  pipeline {found['pipeline']:6.1f} "
            f" {found['pipeline'] / found['bare']:6.1%}   waited {found['wait']:.1%}",
            flush=True,
        )
    print()


if __name__ == "__main__":
    sys.exit(main())
