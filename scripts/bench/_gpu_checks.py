"""Checks for gpu_first_hour.sh that need GPUs and are no benchmarks of their own.

python -m scripts.bench._gpu_checks latents --images URI       collocated encoding on the last GPU, against the CPU
python -m scripts.bench._gpu_checks checkpoint --latents URI --work FOLDER    processes on each GPU while checkpoints are written
python -m scripts.bench._gpu_checks exporter                   memory by the exporter, against nvidia-smi
python -m scripts.bench._gpu_checks generate                   pictures a second by the sampler, with random weights
"""

import argparse
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from scripts.bench._cases import hand_over, sized

CLOSE = 0.05
"""The largest difference of bf16 latents from fp32 ones, as a share of their mean."""


def main(arguments: Sequence[str]) -> int:
    """Run a check; return 1 if it failed."""
    parser = argparse.ArgumentParser(prog="_gpu_checks")
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--images")
    parser.add_argument("--latents")
    parser.add_argument("--work")
    parser.add_argument("--device", help="instead of the last GPU")
    options = parser.parse_args(arguments)
    figures = {"case": options.check} | CHECKS[options.check](options)
    hand_over(**figures)
    return 1 if "reason" in figures else 0


def _result(text: str, *, good: bool) -> dict[str, str]:
    return {"note" if good else "reason": text}


def latents(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the latents of collocated training with the CPU's: a wrong event or device gives those of other rows."""
    import torch

    from sdp.device import enter

    device = torch.device(options.device or f"cuda:{torch.cuda.device_count() - 1}")
    enter(device)
    on_device, on_cpu = (_batches(options.images, place) for place in (device, torch.device("cpu")))
    off, rows = 0.0, 0
    for one, other in zip(on_device, on_cpu, strict=True):
        if not torch.equal(one.rows, other.rows):
            return _result(f"{device}: rows {one.rows.tolist()} instead of {other.rows.tolist()}", good=False)
        count = one.latents.shape[1] // 2  # only means: bf16 is less exact for the log-variance
        one_mean, other_mean = (batch.latents[:, :count].cpu().float() for batch in (one, other))
        scale = other_mean.abs().mean().item()
        off = max(off, *((one_mean - other_mean).abs().mean(dim=(1, 2, 3)) / scale).tolist())
        rows += len(one.counted)
    return _result(f"{device}: {rows} rows, at most {off:.2%} from fp32 on the CPU", good=off < CLOSE)


def _batches(images: str, device: Any) -> list[Any]:
    from sdp.config import parse
    from sdp.model.checkpoints import FIRST
    from sdp.model.sources import resolve
    from sdp.train.assemble import make_reader
    from sdp.train.world import World

    with tempfile.TemporaryDirectory() as run:
        config = parse(
            "train",
            {
                "source": {"uri": images}, "output": {"uri": run}, "model": {"source": "builtin:tiny"},
                "data": {"mode": "collocated", "resolution": 64, "batch_size": 16},
                "encode": {"dtype": "bf16" if device.type == "cuda" else "fp32"},
            },
        )  # fmt: skip
        reader, *_ = make_reader(config, resolve("builtin:tiny"), World(device=device))
        batches = reader.batches(0, 0, 16, FIRST)
        first = list(islice(batches, 16))
        batches.close()  # type: ignore[attr-defined]  # all readers are generators
        return first


def checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    """Train on all GPUs with a checkpoint every few steps: no process may hold memory of another's GPU."""
    import torch

    settings = {
        "source.uri": options.latents, "output.uri": options.work, "model.source": "builtin:tiny", "data.resolution": 64,
        "data.batch_size": 16, "max_steps": 200, "checkpoint.every_steps": 20, "scaling.num_workers": torch.cuda.device_count(),
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    most: Counter[str] = Counter()
    with subprocess.Popen([sys.executable, "-m", "sdp", "train", *words]) as job:
        while job.poll() is None:
            most |= Counter(line.strip() for line in _nvidia_smi("compute-apps=gpu_uuid"))
            time.sleep(0.5)
    if not most:  # in a container of its own process namespace, or under a driver that does not say
        return _result(f"exit code {job.returncode}; nvidia-smi lists no processes here", good=job.returncode == 0)
    result = f"exit code {job.returncode}, at most {max(most.values())} process on a GPU, {len(most)} GPUs used"
    return _result(result, good=job.returncode == 0 and max(most.values()) == 1)


def exporter(_: argparse.Namespace) -> dict[str, Any]:
    """Compare the memory in use that the exporter and nvidia-smi report."""
    with subprocess.Popen(
        [sys.executable, "-m", "sdp.exporter", "--port", "0", "--address", "127.0.0.1"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            url = next(line.split()[-1] for line in process.stderr or () if "listening on" in line)
            text = (
                urllib.request.urlopen(url + ("" if url.endswith("/metrics") else "/metrics"), timeout=30)
                .read()
                .decode()
            )
        finally:
            process.terminate()
    exported = sorted(
        float(line.split()[-1]) / 2**20 for line in text.splitlines() if line.startswith("sdp_gpu_memory_used_bytes{")
    )
    expected = sorted(float(line) for line in _nvidia_smi("gpu=memory.used"))
    close = len(exported) == len(expected) and all(
        abs(a - b) <= 64 + 0.05 * b for a, b in zip(exported, expected, strict=True)
    )
    text = f"MiB by the exporter {[round(x) for x in exported]}, by nvidia-smi {[round(x) for x in expected]}"
    return _result(text, good=close)


def generate(_: argparse.Namespace) -> dict[str, Any]:
    """Measure the painter of `sdp generate`, at its default batch."""
    import torch
    from diffusers import AutoencoderKL

    from scripts.bench._training import make_model
    from scripts.published import VAE
    from sdp.config.generate import SamplerConfig
    from sdp.device import BatchLimit, choose_device, configure_torch
    from sdp.families.sd import SD
    from sdp.generate.painter import Painter
    from sdp.model import load
    from sdp.model.trained import load_networks

    device, tiny = choose_device(), sized(False, True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    configure_torch(fixed_shapes=True)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), tiny=tiny).path
        unet: Any = load_networks(path, text_encoder=False, pretrained=False).denoiser
        unet = unet.eval().requires_grad_(False).to(device, dtype)
        vae: Any = load.load_vae(path) if tiny else AutoencoderKL.from_config(dict(VAE)).eval()
        vae = torch.nn.Module.to(vae, device)
        schedule = load.load_scheduler_config(path)
    resolution, sampler = sized(512, 64), SamplerConfig(steps=sized(50, 2))

    def encode(prompts: Sequence[str]) -> torch.Tensor:
        return torch.randn(len(prompts), 77, unet.config.cross_attention_dim, device=device, dtype=dtype)

    painter = Painter(SD, unet, vae, encode, schedule, sampler, resolution, dtype, BatchLimit(8))
    painter.paint(["warm"] * painter.limit.size, range(painter.limit.size))
    prompts = ["a picture"] * 4 * painter.limit.size
    began = time.perf_counter()
    unfinished = sum(picture is None for picture in painter.paint(prompts, range(len(prompts))))
    per_s = len(prompts) / (time.perf_counter() - began)
    name = f"generate {resolution} px, {sampler.scheduler}, {sampler.steps} steps, guided, {dtype}"
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"case": name, "per_s": per_s, "peak": peak, "batch": painter.limit.size, "note": f"{unfinished} not finite"}


def _nvidia_smi(query: str) -> list[str]:
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


CHECKS = {"latents": latents, "checkpoint": checkpoint, "exporter": exporter, "generate": generate}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
