"""One run for scripts.bench.process, in a process of its own: theirs, ours, or an encoder beside its bare self."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from sdp.config import load
from sdp.encode import work
from sdp.encode.chunk import Chunk, Encoded, Group
from sdp.process import job
from sdp.process.prepare import prepare

MODEL = Path(__file__).resolve().parents[2] / "sdp" / "model" / "tiny"
STORE = 2_000_000_000


def start(**more: Any) -> None:
    """Four logical CPUs on whatever there is, for both sides. A cluster of its own, though another may be running here."""
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=STORE, **more)
    ray.data.DataContext.get_current().enable_progress_bars = False


def config_of(told: dict[str, Any], *more: str) -> Any:
    settings = [f"source.uri={told['source']}", f"output.uri={told['output']}/ours", "model.source=builtin:tiny"]
    settings += [f"resolutions=[{told['side']}]", "transform.max_upscale=4", *more]
    return load("process", None, settings)


def theirs(told: dict[str, Any]) -> None:
    from scripts.bench import _reference_process

    start()
    _reference_process.run(Path(told["source"]), Path(told["output"]) / "theirs", MODEL, told["side"])


def ours(told: dict[str, Any]) -> None:
    start()
    job.run(config_of(told, f"encode.dtype={told['dtype']}", f"encode.text={told['text']}"))


def size(told: dict[str, Any]) -> None:
    """Bytes of an image as they lie in the parts."""
    start()
    dataset = job.run(config_of(told, f"encode.dtype={told['dtype']}", f"encode.text={told['text']}")).dataset
    assert dataset is not None
    Path(told["output"], "found").write_text(json.dumps(dataset.manifest.size / dataset.manifest.counts.written))


class Sleeper:
    """Stands for an encoder on an accelerator: takes its time, one chunk after another, and no CPU."""

    def __init__(self, rate: float, side: int) -> None:
        self.rate, self.side = rate, side
        self.batch_limits = {side: 64}
        self._queue = threading.Lock()  # a second call may come meanwhile, as to a real one

    def __call__(self, chunk: Chunk) -> Encoded:
        with self._queue:
            time.sleep(len(chunk) / self.rate)
        where = np.arange(len(chunk))
        latents = np.zeros((len(chunk), 4, self.side // 8, self.side // 8), np.float16)
        return Encoded(chunk, {self.side: [Group(where, latents)]}, None, np.ones(len(chunk), np.bool_), [])


def put_to_sleep(rate: float, side: int) -> None:
    """Runs in each worker process as it starts."""
    if rate:
        work.load_encoder = lambda *_: Sleeper(rate, side)  # type: ignore[assignment] # stands in


def encoder(told: dict[str, Any]) -> None:
    """What the pipeline's encoders reach, and what one reaches alone."""
    rate, side = told["rate"], told["side"]
    start(runtime_env={"worker_process_setup_hook": lambda: put_to_sleep(rate, side)})
    more = [f"encode.num_workers={told['encoders']}", "encode.dtype=fp32"]
    config = config_of(told, *more, *([f"limit={told['limit']}"] if "limit" in told else []))
    figures = job.run(config).figures
    pipeline = figures.images_encoded / (figures.busy_s + figures.idle_s) * told["encoders"]
    ray.shutdown()
    found = {"pipeline": pipeline, "bare": bare(config, rate, side) * told["encoders"], "wait": figures.wait}
    Path(told["output"], "found").write_text(json.dumps(found))


def bare(config: Any, rate: float, side: int, chunks: int = 2, count: int = 64) -> float:
    """Images per second of the encoder's own code on chunks that are there."""
    import torch

    torch.set_num_threads(1)
    spec = prepare(config).spec
    one: Any = Sleeper(rate, side) if rate else work.load_encoder(spec)
    pixels: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)
    zeros = np.zeros(count, np.int16)
    tokens = np.zeros((count, 77), np.uint16)
    chunk = Chunk(np.arange(count), [""] * count, tokens, {side: [Group(np.arange(count), pixels)]}, zeros)
    work.encode_chunk(spec, one, chunk)
    began = time.monotonic()
    for _ in range(chunks):
        work.encode_chunk(spec, one, chunk)
    return chunks * count / (time.monotonic() - began)


if __name__ == "__main__":
    {"theirs": theirs, "ours": ours, "size": size, "encoder": encoder}[sys.argv[1]](json.loads(sys.argv[2]))
