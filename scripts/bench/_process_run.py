"""One run for scripts.bench.process, in a separate process: the reference's, sdp's, or an encoder in it and alone."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from scripts.bench._cases import sized, start_ray
from sdp.config import load
from sdp.encode.chunk import Chunk, Encoded, ShapeGroup
from sdp.encode.work import EncodeSpec
from sdp.process import job
from sdp.process.prepare import prepare
from sdp.ray.cluster import worker_environment

MODEL = Path(__file__).resolve().parents[2] / "sdp" / "model" / "tiny"
STORE = 2_000_000_000


def start(**more: Any) -> None:
    """Start a private Ray with four logical CPUs (three at the smallest size), for either side, even if another Ray runs on this machine."""
    more["runtime_env"] = {**worker_environment(), **more.get("runtime_env", {})}
    start_ray(num_cpus=sized(4, 3), object_store_memory=STORE, **more)
    ray.data.DataContext.get_current().enable_progress_bars = False


def config_of(case: dict[str, Any], *more: str) -> Any:
    """Return the configuration of `sdp process` for a case."""
    settings = [f"source.uri={case['source']}", f"output.uri={case['output']}/sdp", "model.source=builtin:tiny"]
    settings += [f"resolutions=[{case['side']}]", *more]
    return load("process", None, settings)


def run_reference(case: dict[str, Any]) -> None:
    """Run the reference's processing."""
    from scripts.bench import _reference_process

    start()
    _reference_process.run(Path(case["source"]), Path(case["output"]) / "reference", MODEL, case["side"])


def size(case: dict[str, Any]) -> None:
    """Write the stored bytes per image to OUTPUT/result, in this process: they are the same from Ray."""
    dataset = job.run(config_of(case, f"encode.dtype={case['dtype']}", f"encode.text={case['text']}")).dataset
    assert dataset is not None
    Path(case["output"], "result").write_text(json.dumps(dataset.manifest.size / dataset.manifest.counts.written))


class Sleeper:
    """A stand-in for an encoder on an accelerator, which sleeps for each chunk in turn and uses no CPU."""

    def __init__(self, rate: float, side: int) -> None:
        self.rate, self.side = rate, side
        self.batch_limits = {side: 64}
        self._queue = threading.Lock()  # a second call may come during the first, as for a real one

    def __call__(self, chunk: Chunk) -> Encoded:
        with self._queue:
            time.sleep(len(chunk) / self.rate)
        where = np.arange(len(chunk))
        latents = np.zeros((len(chunk), 4, self.side // 8, self.side // 8), np.float16)
        return Encoded(chunk, {self.side: [ShapeGroup(where, latents)]}, None, np.ones(len(chunk), np.bool_), [])


def put_to_sleep(rate: float, side: int) -> None:
    """Replace the encoder of a worker process that starts by one that sleeps."""
    if rate:
        EncodeSpec.load_encoder = lambda *_: Sleeper(rate, side)  # type: ignore[assignment,method-assign]


def encoder(case: dict[str, Any]) -> None:
    """Write the rates of the pipeline's encoders and of as many bare ones to OUTPUT/result."""
    rate, side = case["rate"], case["side"]
    start(runtime_env={"worker_process_setup_hook": lambda: put_to_sleep(rate, side)})
    more = [f"encode.num_workers={case['encoders']}", "encode.dtype=fp32"]
    config = config_of(case, *more, *([f"limit={case['limit']}"] if "limit" in case else []))
    figures = job.run(config).figures
    pipeline = figures.images_encoded / (figures.busy_s + figures.idle_s) * case["encoders"]
    ray.shutdown()
    result = {"pipeline": pipeline, "bare": bare(config, rate, side) * case["encoders"], "wait": figures.wait}
    Path(case["output"], "result").write_text(json.dumps(result))


def bare(config: Any, rate: float, side: int, chunks: int = sized(2, 1), count: int = sized(64, 4)) -> float:
    """Return the images per second of the encoder's own code on prepared chunks."""
    import torch

    torch.set_num_threads(1)
    spec = prepare(config).spec
    one: Any = Sleeper(rate, side) if rate else spec.load_encoder()
    pixels: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)
    zeros = np.zeros(count, np.int16)
    tokens = np.zeros((count, 77), np.uint16)
    chunk = Chunk(np.arange(count), [""] * count, tokens, {side: [ShapeGroup(np.arange(count), pixels)]}, zeros)
    spec.work(one, chunk)
    began = time.monotonic()
    for _ in range(chunks):
        spec.work(one, chunk)
    return chunks * count / (time.monotonic() - began)


if __name__ == "__main__":
    runs = {"reference": run_reference, "size": size, "encoder": encoder}
    runs[sys.argv[1]](json.loads(sys.argv[2]))
