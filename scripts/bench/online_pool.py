"""Throughput of online mode's pool of encoders, on a local Ray of several nodes, with real payloads.

    python -m scripts.bench.online_pool [--encoders 1,2,3,4,5,6,7,8] [--seconds 30]
    python -m scripts.bench.online_pool --encoders 4 --pace 0.5    everything at half the speed: half the bytes a second

The pool, the trainers' readers, Ray's five raylets and all bytes are real: for each image 196,608 bytes of pixels go
from a transform to an encoder, and from there 16,384 bytes of moments and 157,696 of embedded captions to a trainer
(with --text token_ids 154 bytes of token ids). Work that this machine is too small for is replaced by a sleep:
transforms as on a core (250 img/s), encoders as on an A10G (102 img/s, the figure of the reference that _reference_process.py names), two trainers as on an
A100 (184 img/s, its best). Throughput is counted at the trainers, over whole slices.
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
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from scripts.bench._cases import sized, spare_ray
from sdp.config import parse
from sdp.console import table
from sdp.encode.chunk import Chunk, ShapeGroup
from sdp.model.sources import resolve
from sdp.ray import cluster
from sdp.ray.cluster import worker_environment
from sdp.runners.blocks import Note
from sdp.runners.placement import Placement
from sdp.runners.stages import PrepareStats
from sdp.sources.reading import Columns
from sdp.storage import open_storage
from sdp.train import online
from sdp.train.data import encoded
from sdp.train.data.images import ImagesDataset, Transformed, _encode_spec, slices_ahead
from sdp.train.data.mixture import MixturePlan
from sdp.train.data.order import RowGroups, Shuffle
from sdp.train.data.reader import Reader
from sdp.train.data.rows import Rows, items_of
from sdp.train.data.weights import RowWeights

SIDE = 256
TRANSFORM_RATE, ENCODER_RATE, TRAINER_RATE = 250.0, 102.0, 184.0
_pace = 1.0
"""This process's share of these rates."""
TEXT_WIDTH = 1024
TRAINERS = 2
GROUP_ROWS = sized(254, 26)
"""Rows of one slice, which travel together."""
BATCH = sized(127, 13)
READ_AHEAD = 4
"""Batches that a trainer reads ahead."""
MOST_WARM_S = 300.0


def main(arguments: Sequence[str]) -> int:
    """Measure each number of encoders, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--encoders", default=sized("1,2,3,4,5,6,7,8", "1"))
    parser.add_argument("--seconds", type=float, default=sized(30.0, 2.0), help="length of the measured window")
    parser.add_argument("--text", choices=("text_embedding", "token_ids"), default="text_embedding")
    parser.add_argument("--pace", type=float, default=1.0, help="factor on the rates of all workers")
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.encoders.split(",")]
    results: list[dict[str, float]] = []
    put_sleepers(options.pace)
    with tempfile.TemporaryDirectory(prefix="sdp-bench-online-") as folder:
        cluster = start_cluster(options.pace)
        try:
            images = make_images(folder, options.text)
            header = ("encoders", "min(encoders, trainers)", "at the trainers", "share", "encoders busy")
            for count in counts:
                results.append(measure(images, count, options.seconds))
                print(json.dumps(results[-1]), flush=True)
        finally:
            ray.shutdown()
            cluster.shutdown()
    rows = [
        (f"{r['encoders']:.0f}", f"{r['possible']:.0f} img/s", f"{r['reached']:.1f} img/s",
         f"{r['reached'] / r['possible']:.1%}", f"{r['busy']:.1%}")
        for r in results
    ]  # fmt: skip
    print(
        f"windows of {options.seconds:g} s (goals: 97 % of the minimum; encoders 99 % busy while they are the bottleneck)"
    )
    print(table(rows, header))
    return 0


def start_cluster(pace: float) -> Any:
    """Start a head without work, a CPU node, two nodes of four simulated A10G and one of two A100."""
    from ray.cluster_utils import Cluster

    def begin_worker() -> None:  # Ray refuses functools.partial
        put_sleepers(pace)

    spare_ray()
    store = 700_000_000
    head = {"num_cpus": 0, "object_store_memory": 200_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=sized(8, 2), labels={"ray.io/node-group": "cpu"}, object_store_memory=1_500_000_000)
    for kind, gpus in (*sized((("A10G", 4), ("A10G", 4)), (("A10G", 1),)), ("A100", TRAINERS)):
        labels = {"ray.io/accelerator-type": kind}
        cluster.add_node(num_cpus=gpus, num_gpus=gpus, labels=labels, object_store_memory=store)
    environment = {**worker_environment(), "worker_process_setup_hook": begin_worker}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
    cluster.wait_for_nodes()
    return cluster


def put_sleepers(pace: float) -> None:
    """Replace the work of a worker process by functions that sleep and return bytes of the right size."""
    global _pace
    _pace = pace
    stages: Any = ImagesDataset
    stages.prepare, stages.load, stages.work = transform, gpu, encode


def transform(images: ImagesDataset, part: Any) -> tuple[Transformed, PrepareStats]:
    """Return crops of a slice, after the time that a core would take."""
    began, count = time.monotonic(), len(part)
    rows = np.arange(part.piece.skip, part.piece.skip + count) + part.piece.groups[0].number * GROUP_ROWS
    pixels = np.zeros((count, SIDE, SIDE, 3), np.uint8)
    chunk = Chunk(
        rows, [""] * count, np.ones((count, 77), np.uint16),
        {SIDE: [ShapeGroup(np.arange(count), pixels)]}, np.zeros(count, np.int16),
    )  # fmt: skip
    _sleep_until(began + count / (_pace * TRANSFORM_RATE))
    return Transformed(rows, chunk), PrepareStats(count, count / TRANSFORM_RATE)


def gpu(*_: Any) -> threading.Lock:
    """Return a lock that stands for an encoder's GPU: one slice at a time, although its actor holds two."""
    return threading.Lock()


def encode(images: ImagesDataset, busy: threading.Lock, made: Transformed) -> Rows:
    """Return moments and text of a slice, after the time that an A10G would take."""
    count = len(made.rows)
    latents, text = images.columns
    moments = np.zeros((count, latents.width), np.uint8)
    with busy:
        began = time.monotonic()
        assert made.chunk.crops[SIDE][0].values[-1, -1, -1, -1] == 0  # the bytes have arrived
        _sleep_until(began + count / (_pace * ENCODER_RATE))
    captions = np.ones((count, text.width), np.uint8)
    return Rows(made.rows, np.ones(count, np.float32), items_of(moments), items_of(captions))


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))


def make_images(folder: str, text: str) -> ImagesDataset:
    """Return an images dataset whose row groups are never read."""
    settings = {"source": {"uri": folder}, "output": {"uri": f"{folder}-run"}, "model": {"source": "builtin:tiny"}}
    config = parse("train", {**settings, "data": {"mode": "online", "resolution": SIDE}})
    storage: Any = SimpleNamespace(storage=open_storage(folder))
    spec = _encode_spec(config, storage, resolve("builtin:tiny"), Columns())
    width = TEXT_WIDTH if text == "text_embedding" else None
    from sdp.families import TextSpace

    spec = replace(spec, shape=replace(spec.shape, text=TextSpace(width=width)))
    row_groups = RowGroups.of([[GROUP_ROWS] * 4000])
    return ImagesDataset(open_storage(folder), ("parts/000000000.parquet",), row_groups, spec, RowWeights())


class MeasuredPool(online.EncoderPool):
    """A pool that also reports its sums."""

    _busy_s = _idle_s = 0.0

    def _count(self, note: Note) -> None:
        super()._count(note)
        self._busy_s += note.busy_s
        self._idle_s += note.idle_s

    async def sums(self) -> tuple[float, float, int]:
        return self._busy_s, self._idle_s, self._encoders


class SleepingTrainers:
    """Trainers that take batches from the real readers at an A100's pace, and synchronise at each step."""

    def __init__(self, images: ImagesDataset, pool: Any, ahead: int) -> None:
        shuffle = Shuffle(lanes=TRAINERS, units=1, row_groups=1)
        plan = MixturePlan((images.row_groups,), 0, shuffle)
        sources = [encoded.EncodedRows(images, encoded.online(online.submitter(pool), ahead)) for _ in range(TRAINERS)]
        readers = [Reader(plan, source, rank, TRAINERS, READ_AHEAD) for rank, source in enumerate(sources)]
        self._ended: list[float] = []
        self._together = threading.Barrier(TRAINERS, timeout=MOST_WARM_S)
        executor = ThreadPoolExecutor(TRAINERS)
        self._training = [executor.submit(self._train, reader.batches(0, 0, BATCH * TRAINERS)) for reader in readers]

    def _train(self, batches: Iterator[Any]) -> None:
        last = 0.0
        for batch in batches:
            assert float(batch.weights.sum()) == BATCH
            self._together.wait()
            # If its data came in time, a step begins when the previous one ended.
            now = time.monotonic()
            last = (last if now - last < 0.05 else now) + BATCH / (_pace * TRAINER_RATE)
            _sleep_until(last)
            self._ended.append(last)

    def ended(self) -> list[float]:
        """Return the end time of each trainer's steps, by the machine's monotonic clock."""
        for future in self._training:
            if future.done():
                future.result()  # raises the error that ended it
        return list(self._ended)


def measure(images: ImagesDataset, encoders: int, seconds: float) -> dict[str, float]:
    """Return the throughput at the trainers with a number of encoders, and how busy these were."""
    placement = Placement(
        least=encoders, most=encoders, labels={"ray.io/accelerator-type": "A10G"}, gpus=1.0, wait_s=300.0,
        prepare_labels={"ray.io/node-group": "cpu"}, prepare_concurrency=8, output="bench",
    )  # fmt: skip
    remote_pool: Any = ray.remote(MeasuredPool)
    board = SimpleNamespace(announce=SimpleNamespace(remote=print))
    pool = remote_pool.options(num_cpus=0, scheduling_strategy=cluster.this_node()).remote(images, placement, board)
    config = parse(
        "train",
        {
            "source": {"uri": "x"}, "output": {"uri": "y"}, "model": {"source": "builtin:tiny"},
            "data": {"mode": "online"},
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
        # Wait until the slices of the start are used up; from then on steps determine when slices are requested.
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
        "possible": possible(encoders),
        "reached": reached,
        "busy": busy / (busy + idle),
    }


def possible(encoders: int) -> float:
    """Return the images per second of the slower side."""
    return _pace * min(encoders * ENCODER_RATE, TRAINERS * TRAINER_RATE)


def _rate(trainers: Any, seconds: float) -> float:
    """Wait for the window, and return the samples a second at all trainers in it.

    It is the slope of a line through the samples taken over time, so that a slice more or less at an end of the window,
    which is 4 % of one encoder's minute, hardly matters.
    """
    began = time.monotonic()
    _sleep_until(began + seconds)
    ended = np.sort(ray.get(trainers.ended.remote()))
    at = np.linspace(began, began + seconds, 1000)
    return float(np.polyfit(at - began, np.searchsorted(ended, at) * float(BATCH), 1)[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
