"""Download: images per second and CPU time against img2dataset 1.47, with the same nginx, JPEGs and work.

3000 JPEGs of about 180 KB that are like photographs to a codec are made once and served by nginx on this machine. Both
programs fetch them, resize the shorter side to 256, cut the centre square and encode at quality 95. They fetch each
image several times, under URLs with different queries, so that start-up does not dominate. All also run on a few
images: the difference is the cost of an image. sdp runs in one process, and on a local Ray. Figures are medians of three
rounds, in turns. At the end the pixels are compared. `--stages` measures only sdp's steps on a fetched image, in one
process and without a server. At the smallest size sdp runs alone, and Python's own server has the images.

    python -m scripts.bench.download [--images 3000] [--passes 3] [--stages]
"""

import argparse
import hashlib
import io
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from scripts.bench._cases import sized
from scripts.bench._photos import make_photos
from scripts.bench._processes import Cost, run_and_measure

ROOT = Path(__file__).resolve().parents[2]
PEER = "img2dataset==1.47.0"
HOME = ROOT / ".tools" / "bench-img2dataset"
SIZE, QUALITY, FEW = 256, 95, sized(20, 0)
ROUNDS = sized(3, 1)
TIMEOUT_S = 1200


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=sized(3000, 12), help="different JPEGs")
    parser.add_argument("--passes", type=int, default=sized(3, 1), help="number of times to fetch each")
    parser.add_argument("--connections", type=int, default=128, help="concurrent requests, for both")
    parser.add_argument("--stages", action="store_true", help="only sdp's steps on an image, in one process")
    options = parser.parse_args(arguments)
    alone = sized(False, True)
    if options.stages:
        return _print_stages(options.images)
    nginx = None if alone else shutil.which("nginx")
    if nginx is None and not alone:
        print("bench download: needs nginx; apt-get install nginx", file=sys.stderr)
        return 2
    peer = None if alone else _peer()
    with tempfile.TemporaryDirectory(prefix="sdp-bench-") as name:
        folder = Path(name)
        began = time.monotonic()
        total = make_photos(folder / "www", options.images)
        print(
            f"{options.images} JPEGs, {total / options.images / 1000:.0f} KB on average, "
            f"made in {time.monotonic() - began:.0f} s"
        )
        with _nginx(nginx, folder) if nginx else _python(folder) as base:
            return _compare(peer, base, folder, options.images, options.passes, options.connections)


def _compare(peer: Path | None, base: str, folder: Path, images: int, passes: int, connections: int) -> int:
    urls = [f"{base}/{number:05d}.jpg?pass={turn}" for turn in range(passes) for number in range(images)]
    programs = {
        **({"img2dataset": partial(_run_peer, peer)} if peer else {}),
        "sdp": _run_sdp,
        "sdp on Ray": _run_on_ray,
    }
    costs: dict[tuple[str, str], list[Cost]] = {}
    for number in range(ROUNDS):
        for name, run in programs.items():
            for count, rows in sized({"few": urls[:FEW], "all": urls}, {"all": urls}).items():
                work = folder / f"{name}-{count}"
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                _write_list(work / "urls.parquet", rows)
                cost = run(work, connections)
                if cost.code:
                    print(f"bench download: {name} ended with exit code {cost.code}", file=sys.stderr)
                    return 1
                costs.setdefault((name, count), []).append(cost)
            costs.setdefault((name, "few"), [Cost()])  # the smallest size measures nothing
        print(f"round {number + 1} of {ROUNDS}: " + _seconds(costs), flush=True)
    for name in programs:
        _print(name, _median(costs[name, "few"]), _median(costs[name, "all"]), len(urls))
    stored = {name: _images(name, folder / f"{name}-all" / "out") for name in programs}
    if wrong := [f"{len(stored[name]):,} from {name}" for name in programs if len(stored[name]) != len(urls)]:
        print(f"bench download: expected {len(urls):,} images, got {' and '.join(wrong)}", file=sys.stderr)
        return 1
    if peer is None:
        return 0
    for name in list(programs)[1:]:
        _print_ratios(
            name, *(_median(costs[program, count]) for program in ("img2dataset", name) for count in ("few", "all"))
        )
    ratios = [_psnr(stored["sdp"][url], stored["img2dataset"][url]) for url in urls[: min(images, 1000)]]
    print(f"PSNR of the pixels: mean {np.mean(ratios):.1f} dB, worst {min(ratios):.1f} dB")
    return 0


def _seconds(costs: Mapping[tuple[str, str], Sequence[Cost]]) -> str:
    return ", ".join(f"{name} {runs[-1].seconds:.1f} s" for (name, count), runs in costs.items() if count == "all")


def _median(costs: Sequence[Cost]) -> Cost:
    """Return the median of each figure, and the CPU time by program of the last run."""
    seconds, cpu_s, peak = (
        statistics.median(getattr(cost, name) for cost in costs) for name in ("seconds", "cpu_s", "peak_bytes")
    )
    return Cost(seconds, cpu_s, round(peak), by_name=costs[-1].by_name)


def _print(name: str, few: Cost, run: Cost, rows: int) -> None:
    cpu_ms = (run.cpu_s - few.cpu_s) / (rows - FEW) * 1000
    print(
        f"{name:12} {rows / run.seconds:7.1f} images/s over all, {(rows - FEW) / (run.seconds - few.seconds):7.1f} "
        f"once started; CPU s per 1000 images {run.cpu_s / rows * 1000:6.2f} over all, {cpu_ms:6.2f} once started; "
        f"peak memory {run.peak_bytes / 1e6:,.0f} MB; starting: {few.seconds:.1f} s, {few.cpu_s:.1f} CPU s"
    )
    top = sorted(run.by_name.items(), key=lambda item: -item[1])[:6]
    print(" " * 12, "CPU s:", ", ".join(f"{program} {seconds:.1f}" for program, seconds in top), flush=True)


def _print_ratios(name: str, peer_few: Cost, peer: Cost, sdp_few: Cost, sdp: Cost) -> None:
    print(
        f"{name} against img2dataset: images/s {peer.seconds / sdp.seconds:.2f} over all, "
        f"{(peer.seconds - peer_few.seconds) / (sdp.seconds - sdp_few.seconds):.2f} once started; "
        f"CPU time {sdp.cpu_s / peer.cpu_s:.2f} over all, "
        f"{(sdp.cpu_s - sdp_few.cpu_s) / (peer.cpu_s - peer_few.cpu_s):.2f} once started; "
        f"memory {sdp.peak_bytes / peer.peak_bytes:.2f}"
    )


def _print_stages(images: int) -> int:
    """Print the CPU time of each step on an image, separately for baseline and progressive JPEGs."""
    from sdp.download.image import ROOM, encode, resized
    from sdp.imaging import decode

    with tempfile.TemporaryDirectory(prefix="sdp-bench-") as name:
        make_photos(Path(name, "www"), images)
        photos = [path.read_bytes() for path in sorted(Path(name, "www").iterdir())]
    spent: dict[bool, list[NDArray[np.float64]]] = {False: [], True: []}
    for data in photos:
        marks = [time.process_time()]
        hashlib.sha256(data).hexdigest()
        marks.append(time.process_time())
        image = decode(data, min_side=math.ceil(SIZE * ROOM))
        marks.append(time.process_time())
        pixels = resized(image, SIZE, crop=True, enlarge=False)
        marks.append(time.process_time())
        encode(pixels, QUALITY)
        marks.append(time.process_time())
        spent[b"\xff\xc2" in data[:1000]].append(np.diff(marks) * 1000)
    for progressive, step_times in spent.items():
        steps = zip(("hashing", "decoding", "resizing", "encoding"), np.median(step_times, axis=0), strict=True)
        kind = "progressive" if progressive else "baseline"
        print(f"{len(step_times)} {kind} JPEGs, CPU ms (median):", ", ".join(f"{step} {ms:.2f}" for step, ms in steps))
    return 0


# The two programs.


def _peer() -> Path:
    """Return the path of img2dataset, in its own environment that is created on demand."""
    python = HOME / "bin" / "python"
    marker = HOME / "made-from"
    if not (marker.exists() and marker.read_text() == PEER):
        uv = subprocess.run(["sh", str(ROOT / "scripts" / "uv.sh")], capture_output=True, text=True, check=True).stdout
        shutil.rmtree(HOME, ignore_errors=True)
        subprocess.run([uv.strip(), "venv", "--quiet", "--python", sys.executable, str(HOME)], check=True)
        subprocess.run([uv.strip(), "pip", "install", "--quiet", "--python", str(python), PEER], check=True)
        marker.write_text(PEER)
    return HOME / "bin" / "img2dataset"


def _run_peer(peer: Path, work: Path, connections: int) -> Cost:
    options: dict[str, Any] = {
        "url_list": work / "urls.parquet",
        "input_format": "parquet",
        "url_col": "url",
        "caption_col": "caption",
        "output_folder": work / "out",
        "output_format": "parquet",
        "image_size": SIZE,
        "resize_mode": "center_crop",
        "encode_quality": QUALITY,
        "processes_count": 2,
        "thread_count": connections // 2,
        "number_sample_per_shard": 1000,
        "enable_wandb": False,
        "retries": 2,
        "compute_hash": "sha256",
    }
    command = [str(peer), *(f"--{key}={value}" for key, value in options.items())]
    return run_and_measure(command, timeout_s=TIMEOUT_S, cwd=work, env={**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1"})


def _run_sdp(work: Path, connections: int, **more: str) -> Cost:
    rows = pq.read_metadata(work / "urls.parquet").num_rows
    rows_per_file = min(1000, -(-rows // 4))  # several parts even in the short run, so that as many processes start
    config = {
        "source": {"uri": str(work / "urls.parquet")},
        "output": {"uri": str(work / "out"), "rows_per_file": rows_per_file},
        "fetch": {"allow_networks": ["127.0.0.0/8"], "connections": connections},
        "hosts": {"at_once": connections, "per_second": None},
        "image": {"size": SIZE, "crop": "center", "quality": QUALITY},
    }
    (work / "download.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "sdp", "download", "--config", str(work / "download.json")]
    return run_and_measure(command, timeout_s=TIMEOUT_S, cwd=ROOT, env={**os.environ, **more})


def _run_on_ray(work: Path, connections: int) -> Cost:
    return _run_sdp(work, connections, RAY_ADDRESS="local")


# The server, the lists and the pixels.


@contextmanager
def _python(folder: Path) -> Iterator[str]:
    """Serve a folder from a thread; yield the base URL."""
    handler = partial(_Quiet, directory=str(folder / "www"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextmanager
def _nginx(nginx: str, folder: Path) -> Iterator[str]:
    """Serve a folder with nginx, one process whose CPU time does not count; yield the base URL."""
    with socket.socket() as plug:
        plug.bind(("127.0.0.1", 0))
        port = plug.getsockname()[1]
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    folder.chmod(0o755)  # started as root, nginx serves as another user
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr crit;"
        "events { worker_connections 4096; }"
        f"http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000; {paths}"
        f"types {{ image/jpeg jpg; }} server {{ listen 127.0.0.1:{port} backlog=4096; root {folder}/www; }} }}"
    )
    process = subprocess.Popen([nginx, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        deadline = time.monotonic() + 20
        while True:
            with socket.socket() as plug:
                plug.settimeout(1)
                if plug.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"nginx does not answer on port {port}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _write_list(path: Path, urls: list[str]) -> None:
    pq.write_table(pa.table({"url": urls, "caption": [f"photograph {number}" for number in range(len(urls))]}), path)


def _images(program: str, out: Path) -> dict[str, bytes]:
    """Return what a program has stored, by URL."""
    images: dict[str, bytes] = {}
    folder, column = (out, "jpg") if program == "img2dataset" else (out / "parts", "image")
    for part in sorted(folder.glob("*.parquet")):
        table = pq.read_table(part, columns=["url", column])
        pairs = zip(table["url"].to_pylist(), table[column].to_pylist(), strict=True)
        images.update((url, data) for url, data in pairs if data is not None)
    return images


def _psnr(one: bytes, other: bytes) -> float:
    from PIL import Image

    pixels = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=np.float64) for data in (one, other)]
    return float(10 * np.log10(255**2 / max(1e-9, np.mean((pixels[0] - pixels[1]) ** 2))))


if __name__ == "__main__":
    sys.exit(main())
