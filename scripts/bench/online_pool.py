"""Online mode's pool of encoders between images and trainers, on a local Ray of several nodes, with real payloads.

    python -m scripts.bench.online_pool [--encoders 1,2,3,4,5,6,7,8] [--seconds 30] [--picture docs/pictures/online.svg]

The pool, the trainers' readers, Ray's five raylets and all bytes are real: 196,608 bytes of pixels an image go from a
transform to an encoder, and from there 16,384 bytes of moments and 157,696 of embedded captions to a trainer (with
--text token_ids 154 bytes of token ids). What has no CPU here
sleeps instead: transforms as a core would (250 img/s), encoders as an A10G would (102 img/s, what the reference saw),
two trainers as an A100 would (184 img/s, its best). Throughput is counted at the trainers, over whole slices.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from sdp import cluster
from sdp.charts import Line, lines
from sdp.config import parse
from sdp.console import table
from sdp.encode.blocks import Note
from sdp.encode.chunk import Chunk, Group, TransformStats
from sdp.encode.placement import Placement
from sdp.model.sources import resolve
from sdp.storage import open_storage
from sdp.train import online
from sdp.train.data.encoded import EncodedReader
from sdp.train.data.images import EncodedSlice, ImagesDataset, Transformed, _encode_spec
from sdp.train.data.online import Online, slices_ahead
from sdp.train.data.order import Blocks, OrderShape
from sdp.train.data.weights import RowWeights

SIDE = 256
TRANSFORM_RATE, ENCODER_RATE, TRAINER_RATE = 250.0, 102.0, 184.0
TEXT_WIDTH = 1024
TRAINERS = 2
GROUP_ROWS = 254
"""One slice: what travels at once."""
BATCH = 127
READ_AHEAD = 4
"""Batches."""
MOST_WARM_S = 300.0


def main(arguments: Sequence[str]) -> int:
    """Measure each number of encoders, print what came out, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--encoders", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the window that is measured")
    parser.add_argument("--text", choices=("text_embedding", "token_ids"), default="text_embedding")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args(arguments)
    counts = [int(count) for count in given.encoders.split(",")]
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="sdp-bench-online-") as folder:
        cluster = start_cluster()
        try:
            images = make_images(folder, given.text)
            header = ("encoders", "min(encoders, trainers)", "at the trainers", "of it", "encoders busy")
            for count in counts:
                found.append(measure(images, count, given.seconds))
                print(json.dumps(found[-1]), flush=True)
        finally:
            ray.shutdown()
            cluster.shutdown()
    rows = [
        (f"{f['encoders']:.0f}", f"{f['there']:.0f} img/s", f"{f['reached']:.1f} img/s",
         f"{f['reached'] / f['there']:.1%}", f"{f['busy']:.1%}")
        for f in found
    ]  # fmt: skip
    print(f"windows of {given.seconds:g} s (goals: 97 % of it; encoders 99 % busy while they are the bottleneck)")
    print(table(rows, header))
    if given.picture is not None:
        given.picture.parent.mkdir(parents=True, exist_ok=True)
        given.picture.write_text(picture(found))
    return 0


def picture(found: Sequence[dict[str, float]]) -> str:
    """Throughput over the number of encoders."""
    x = [f["encoders"] for f in found]
    curves = [Line("possible", x, [f["there"] for f in found]), Line("measured", x, [f["reached"] for f in found])]
    drawn = lines(curves, x_name="encoders (A10G at 102 img/s each); upwards img/s at two trainers of 184", zero=True)
    look = (
        "<style>svg{--a:#0969da;--b:#bc4c00;--line:#d0d7de;background:#fff}"
        "text{font:13px system-ui,sans-serif;fill:#57606a}</style>"
    )
    head, _, rest = drawn.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{look}{rest}\n'


def start_cluster() -> Any:
    """A head that does not work, a CPU node, two nodes of four A10G, one of two A100: as Ray sees them."""
    from ray.cluster_utils import Cluster

    store = 700_000_000
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 200_000_000})
    cluster.add_node(num_cpus=8, labels={"ray.io/node-group": "cpu"}, object_store_memory=1_500_000_000)
    for kind, gpus in (("A10G", 4), ("A10G", 4), ("A100", TRAINERS)):
        labels = {"ray.io/accelerator-type": kind}
        cluster.add_node(num_cpus=gpus, num_gpus=gpus, labels=labels, object_store_memory=store)
    hook = {"worker_process_setup_hook": put_sleepers}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=hook)
    cluster.wait_for_nodes()
    return cluster


def put_sleepers() -> None:
    """In each worker: what stands for work sleeps, and hands on bytes of the right size."""
    online.transform_slice, online.load_encoder, online.encode_slice = transform, gpu, encode  # type: ignore[assignment]


def transform(images: ImagesDataset, some: Any) -> tuple[Transformed, TransformStats]:
    """Crops of a slice, in a core's time."""
    began, count = time.monotonic(), len(some)
    rows = np.arange(some.piece.skip, some.piece.skip + count) + some.piece.groups[0].number * GROUP_ROWS
    pixels = np.zeros((count, SIDE, SIDE, 3), np.uint8)
    chunk = Chunk(
        rows, [""] * count, np.ones((count, 77), np.uint16),
        {SIDE: [Group(np.arange(count), pixels)]}, np.zeros(count, np.int16),
    )  # fmt: skip
    _sleep_until(began + count / TRANSFORM_RATE)
    return Transformed(rows, chunk), TransformStats(count, count / TRANSFORM_RATE)


def gpu(*_: Any) -> threading.Lock:
    """What stands for an encoder's GPU: one slice at a time, though two are in its actor's hands."""
    return threading.Lock()


def encode(images: ImagesDataset, busy: threading.Lock, made: Transformed) -> EncodedSlice:
    """Moments and tokens of a slice, in an A10G's time."""
    count = len(made.rows)
    latents, text = images.columns
    moments = np.zeros((count, latents.width), np.uint8)
    with busy:
        began = time.monotonic()
        assert made.chunk.crops[SIDE][0].values[-1, -1, -1, -1] == 0  # the bytes are here
        _sleep_until(began + count / ENCODER_RATE)
    return EncodedSlice(made.rows, np.ones(count, np.float32), moments, np.ones((count, text.width), np.uint8), ())


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))


def make_images(folder: str, text: str) -> ImagesDataset:
    """Row groups of an images dataset that nobody reads."""
    given = {"source": {"uri": folder}, "output": {"uri": f"{folder}-run"}, "model": {"source": "builtin:tiny"}}
    config = parse("train", {**given, "data": {"mode": "online", "resolution": SIDE}})
    storage: Any = SimpleNamespace(storage=open_storage(folder))
    spec = _encode_spec(config, storage, resolve("builtin:tiny"))
    width = TEXT_WIDTH if text == "text_embedding" else None
    spec = replace(spec, shape=replace(spec.shape, text_width=width))
    blocks = Blocks.of([[GROUP_ROWS] * 4000])
    return ImagesDataset(open_storage(folder), ("parts/000000000.parquet",), blocks, spec, RowWeights())


class MeasuredPool(online.Pool):
    """Tells its sums, too."""

    _busy_s = _idle_s = 0.0

    def _count(self, note: Note, encoders: int) -> None:
        super()._count(note, encoders)
        self._busy_s += note.busy_s
        self._idle_s += note.idle_s

    async def sums(self) -> tuple[float, float, int]:
        return self._busy_s, self._idle_s, self._encoders


class SleepingTrainers:
    """Take batches from the real readers at an A100's pace, each step together, as an all-reduce has it."""

    def __init__(self, images: ImagesDataset, pool: Any, ahead: int) -> None:
        shape = OrderShape(lanes=TRAINERS, units=1, row_groups=1)
        readers = [
            EncodedReader(images, Online(online.asker(pool), ahead), 0, shape, rank, TRAINERS, ahead=READ_AHEAD)
            for rank in range(TRAINERS)
        ]
        self._ended: list[float] = []
        self._together = threading.Barrier(TRAINERS, timeout=MOST_WARM_S)
        executor = ThreadPoolExecutor(TRAINERS)
        self._training = [executor.submit(self._train, reader.batches(0, 0, BATCH * TRAINERS)) for reader in readers]

    def _train(self, batches: Iterator[Any]) -> None:
        last = 0.0
        for batch in batches:
            assert float(batch.weights.sum()) == BATCH
            self._together.wait()
            # Where data was there in time, a step begins when the one before ended.
            now = time.monotonic()
            last = (last if now - last < 0.05 else now) + BATCH / TRAINER_RATE
            _sleep_until(last)
            self._ended.append(last)

    def ended(self) -> list[float]:
        """When each step of each ended: by a clock that all of the machine share."""
        for each in self._training:
            if each.done():
                each.result()  # which raises what ended it
        return list(self._ended)


def measure(images: ImagesDataset, encoders: int, seconds: float) -> dict[str, float]:
    """Throughput at the trainers with so many encoders, and how busy these were."""
    placement = Placement(
        least=encoders, most=encoders, accelerator="A10G", gpus=1.0, encoder_cpus=1.0, transform_cpus=1.0,
        start_timeout_s=300.0, labels={"ray.io/node-group": "cpu"}, concurrency=8, output="bench",
    )  # fmt: skip
    remote_pool: Any = ray.remote(MeasuredPool)
    pool = remote_pool.options(num_cpus=0, scheduling_strategy=cluster.this_node()).remote(images, placement)
    config = parse(
        "train",
        {
            "source": {"uri": "x"}, "output": {"uri": "y"}, "model": {"source": "builtin:tiny"},
            "data": {"mode": "online", "shuffle": {"lanes": TRAINERS, "units": 1, "row_groups": 1}},
            "encode": {"num_workers": encoders},
        },
    )  # fmt: skip
    ahead = slices_ahead(config, images, TRAINERS)
    remote_trainers: Any = ray.remote(SleepingTrainers)
    options = {"num_gpus": TRAINERS, "num_cpus": TRAINERS, "label_selector": {"ray.io/accelerator-type": "A100"}}
    trainers = remote_trainers.options(**options).remote(images, pool, ahead)
    try:
        while ray.get(pool.sums.remote())[2] < encoders or not ray.get(trainers.ended.remote()):
            time.sleep(1.0)
        # What was asked for at the start is used up: from then on slices are asked for as steps take them.
        warm, warm_until = TRAINERS * (ahead * GROUP_ROWS // BATCH + READ_AHEAD), time.monotonic() + MOST_WARM_S
        while (steps := len(ray.get(trainers.ended.remote()))) < warm:
            assert time.monotonic() < warm_until, f"{steps} of {warm} steps with {encoders} encoders"
            time.sleep(0.2)
        busy, idle, _ = ray.get(pool.sums.remote())
        reached = _rate(trainers, seconds)
        busy_then, idle_then, _ = ray.get(pool.sums.remote())
    finally:
        for actor in (trainers, pool):
            ray.kill(actor)
    busy, idle = busy_then - busy, idle_then - idle
    return {
        "encoders": float(encoders),
        "there": possible(encoders),
        "reached": reached,
        "busy": busy / (busy + idle),
    }


def possible(encoders: int) -> float:
    """What the slower side can do."""
    return min(encoders * ENCODER_RATE, TRAINERS * TRAINER_RATE)


def _rate(trainers: Any, seconds: float) -> float:
    """Samples a second at all trainers in the time that comes, in which this waits.

    The slope of the line through what they have taken, by time: a slice more or less at an end of the window, which is
    4 % of one encoder's minute, weighs next to nothing in it.
    """
    began = time.monotonic()
    _sleep_until(began + seconds)
    ended = np.sort(ray.get(trainers.ended.remote()))
    at = np.linspace(began, began + seconds, 1000)
    return float(np.polyfit(at - began, np.searchsorted(ended, at) * float(BATCH), 1)[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
