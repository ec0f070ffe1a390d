"""The control plane with up to 64 trainers and 512 encoders, without their work: CPU time, memory and requests.

    python -m scripts.bench.control [--only online,checkpoint]

Each size runs the code of the jobs in a process of its own; a case's docstring says what is stood in for. Figures are
CPU time, because the machine may do other work.
"""

import argparse
import gc
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.bench import _cases, _s3
from scripts.bench._cases import run_case, sized
from scripts.bench._processes import cpu_by_name
from sdp.console import table

Figures = dict[str, float]
LINE = {
    "loss": 1.0, "loss_smoothed": 1.0, "gradient_norm": 1.0, "learning_rate": 1e-4, "samples_per_s": 100.0,
    "workers": 8, "skipped": 0, "mfu": 0.3, "encoders": 8, "encoders_busy": 0.9, "encoded": 1000,
    "validation": {"all": 1.0, "0-99": 1.0},
}  # fmt: skip
"""A line of a run's metrics."""


def online(folder: Path, trainers: int, encoders: int) -> Figures:
    """Send slices through the pool, the desk and Ray Data.

    Transforms and encoders return at once; trainers are threads of one actor, and take slices as fast as they come.
    """
    import ray

    from scripts.bench import _players
    from scripts.bench.online_pool import make_images
    from sdp.ray import cluster
    from sdp.runners.placement import Placement
    from sdp.train import online

    environment = cluster.worker_environment()
    _cases.start_ray(num_cpus=sized(4, 2), object_store_memory=400_000_000, runtime_env=environment)
    online.EncoderPool = _players.Pool  # type: ignore[misc]
    ahead = 16 + math.ceil(4 * encoders / trainers)  # slices_ahead, of row groups of a thousand rows
    placement = Placement(
        least=encoders, most=encoders, cpus=0.001, wait_s=600.0, prepare_concurrency=4, output="bench"
    )
    pool = online.start_pool(make_images(str(folder), "token_ids"), placement, _players.BOARD, trainers * (ahead + 1))
    players: Any = ray.remote(num_cpus=0)(_players.Trainers)
    playing = players.options(scheduling_strategy=cluster.this_node()).remote(pool, trainers, ahead)

    def now() -> dict[str, float]:
        figures = {"slices": ray.get(playing.taken.remote()), "Ray Data's": ray.get(pool.scheduling_s.remote())}
        return figures | cpu_by_name() | {"time": time.monotonic()}

    while ray.get(pool.status.remote())[0]["encoders"] < encoders or now()["slices"] < WARM_SLICES:
        time.sleep(0.5)
    before = now()
    time.sleep(WINDOW_S)
    after, asked = now(), time.monotonic()
    ray.get(pool.status.remote())
    result = {"open": trainers * (ahead + 1), "status s": time.monotonic() - asked}
    slices = after["slices"] - before["slices"]
    result["slices/s here"] = slices / (after["time"] - before["time"])
    for name in ("Ray Data's", "ray::Pool", "ray::Desk", "ray::Trainers", "raylet", "gcs_server"):
        result[f"{name} ms"] = 1e3 * (after.get(name, 0.0) - before.get(name, 0.0)) / slices
    return result


def board(_: Path, trainers: int) -> Figures:
    """Begin an attempt with all trainers at once; then rank 0 and the driver call the board as while training.

    Trainers are threads of the driver.
    """
    import ray

    from sdp.ray import cluster
    from sdp.train.board import Board

    _cases.start_ray(num_cpus=2, object_store_memory=100_000_000)
    board = cluster.start_beside_driver(Board)
    ray.get(board.request.remote())

    def timed(call: Callable[..., Any], *arguments: Any) -> float:
        began = time.perf_counter()
        ray.get(call(*arguments))
        return time.perf_counter() - began

    with ThreadPoolExecutor(trainers) as pool:
        began = list(pool.map(partial(timed, board.begin.remote), range(trainers)))
    before, until, answers = cpu_by_name().get("ray::Board", 0.0), time.monotonic() + WINDOW_S, list[float]()
    while time.monotonic() < until:
        board.push.remote(LINE)
        answers += [timed(board.request.remote), timed(board.progress.remote)]
        time.sleep(0.25)
    used = cpu_by_name().get("ray::Board", 0.0) - before
    return {"last begins ms": 1e3 * max(began), "answer ms": 1e3 * max(answers), "CPU ms a s": 1e3 * used / WINDOW_S}


def checkpoint(folder: Path, ranks: int, loaders: int, tensors: int) -> Figures:
    """Save sharded tensors twice, complete the checkpoints, and load the newest on another number of ranks.

    Ranks are threads with torch's process group for threads, shards are tiny; requests are those in versitygw's log.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed import multi_threaded_pg

    from scripts.tools import find
    from sdp.datasets.ledger import Ledger
    from sdp.model.checkpoints import TrainState
    from sdp.storage import open_storage
    from sdp.train.checkpoint import CheckpointManager
    from sdp.train.run_folder import RunFolder
    from sdp.train.world import World

    gc.disable()  # as the trainer does
    cpu: dict[str, dict[int, float]] = {what: {} for what in ("first save", "next save", "load")}

    def shards(rank: int, world: int, fill: Callable[..., Any]) -> dict[str, Any]:
        mesh, rows = DeviceMesh("cpu", list(range(world))), ROWS // world
        own = torch.arange(ROWS * 4.0).view(ROWS, 4)[rank * rows : (rank + 1) * rows]
        return {f"model.{n}": DTensor.from_local(fill(own), mesh, [Shard(0)], run_check=False) for n in range(tensors)}

    def save(checkpointer: CheckpointManager, rank: int, world: int) -> None:
        own = shards(rank, world, torch.clone)
        for step, what in ((1, "first save"), (2, "next save")):
            began = time.thread_time()
            saving = checkpointer.stage(own, TrainState(step=step), Ledger())
            cpu[what][rank] = time.thread_time() - began
            saving.written.result()
            dist.barrier()
            if rank == 0:
                checkpointer.commit(saving)

    def load(checkpointer: CheckpointManager, rank: int, world: int) -> None:
        own, began = shards(rank, world, torch.zeros_like), time.thread_time()
        assert checkpointer.restore(own) == TrainState(step=2)
        cpu["load"][rank] = time.thread_time() - began
        for tensor, expected in zip(own.values(), shards(rank, world, torch.clone).values(), strict=True):
            assert torch.equal(tensor.to_local(), expected.to_local())

    def run(work: Callable[..., None], world: int, store: Any, rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            work(CheckpointManager(RunFolder(open_storage(uri)), World(rank, world), {}), rank, world)
            dist.barrier()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)  # the other threads would wait for this one

    program, log = find("versitygw"), folder / "requests.log"
    log.touch()
    with _s3.serve(str(program), folder, f"--access-log={log}") if program else nullcontext(str(folder / "run")) as uri:
        requests = []
        for work, world in ((save, ranks), (load, loaders)):
            multi_threaded_pg._install_threaded_pg()
            torch._C._distributed_c10d._set_thread_isolation_mode(True)
            with ThreadPoolExecutor(world) as pool:
                list(pool.map(partial(run, work, world, dist.HashStore()), range(world)))
            requests.append(log.read_bytes().count(b"\n"))
        files = [*open_storage(uri).list("checkpoints/step-000000002/")]
    result = {"files": len(files), "KB of .json": sum(file.size for file in files if ".json" in file.path) / 1e3}
    result |= {"requests to save": requests[0] / 2, "requests to load": requests[1] - requests[0]}
    for what, seconds in cpu.items():
        result |= {f"{what}: rank 0 s": seconds[0], f"{what}: others s": sum(seconds.values()) / len(seconds)}
    return result


def metrics(_: Path, trainers: int, encoders: int) -> Figures:
    """Emit every metric of an online run, each process to a registry of its own, and render them all.

    Registries stand in for Ray's agents; the GPU exporter's series, which do not depend on the job, are not among them.
    """
    import torch
    from prometheus_client import CollectorRegistry, generate_latest

    from sdp.config.train import PricesConfig
    from sdp.model.checkpoints import TrainState
    from sdp.telemetry import Telemetry
    from sdp.train.callbacks.telemetry import EmitMetrics
    from tests.registry import RegistryBackend

    registries = [CollectorRegistry() for _ in range(trainers + encoders)]
    parts = dict.fromkeys(("data", "copy", "forward", "backward", "optimizer"), 0.1)
    report: Any = SimpleNamespace(parts=parts, samples=1, bad=1, verdict="good", epoch=0, epoch_done=0.5)
    for number, registry in enumerate(registries):
        telemetry = Telemetry(RegistryBackend(registry), "run", "job")
        if number >= trainers:
            telemetry.process("encoder")
            continue
        world = SimpleNamespace(rank=number, is_main=number == 0, device=torch.device("cuda"))
        config = SimpleNamespace(data=SimpleNamespace(mode="online"), prices=PricesConfig(trainer_hour=1.0))
        trainer: Any = SimpleNamespace(
            world=world, state=TrainState(0, trainer_hours=1.0), config=config,
            checkpointer=SimpleNamespace(run=SimpleNamespace(latest=lambda: None)), reader=SimpleNamespace(rows=1),
        )  # fmt: skip
        emit = EmitMetrics(telemetry)
        emit.on_start(trainer)
        emit.on_checkpoint(trainer, SimpleNamespace(state=TrainState(1), seconds=1.0, ledger_rows=1))
        if number == 0:
            emit.on_metrics(trainer, {**LINE, "gpu_hours": 1.0, "finish_time": 1.0})
        emit._reported_at = -math.inf
        emit.on_step(trainer, report)
    began = time.process_time()
    pages = [generate_latest(registry) for registry in registries]
    rendering = time.process_time() - began
    lines = [[line for line in page.splitlines() if line[:1] != b"#" and b"_created{" not in line] for page in pages]
    series = [len(page) for page in lines]
    result = {"series": sum(series), "of rank 0": series[0], "of a trainer": series[trainers - 1]}
    return result | {"of an encoder": series[-1], "render ms": 1e3 * rendering, "KB": sum(map(len, pages)) / 1e3}


def readers(_: Path, ranks: int, rows: int) -> Figures:
    """Plan an epoch as a rank does; merge what all ranks have consumed between two checkpoints, a two-hundredth."""
    import numpy as np

    from sdp.datasets.ledger import Ledger
    from sdp.train.data.order import EpochOrder, RowGroups, Shuffle

    size, numbers = 1000, np.arange(rows // 1000)
    groups = RowGroups(numbers // 10, numbers % 10, np.full(len(numbers), size))
    began = time.process_time()
    order = EpochOrder(0, 0, groups, Shuffle(lanes=ranks))
    lanes = [order.lane(number) for number in range(ranks)]
    result, main, sent = {"plan s": time.process_time() - began}, Ledger(), list[bytes]()
    for lane in lanes:
        ledger, at, half, stop = Ledger(), 0, len(lane) // 2, len(lane) * 101 // 200
        while at < stop:
            window = lane.window_at(at)
            for part in window.ranges:
                first = part.row_group * size
                (main if at < half else ledger).add(0, np.arange(first + part.start, first + part.stop))
            at = window.stop
        sent.append(ledger.to_bytes())
    began = time.process_time()
    main.merge(map(Ledger.from_bytes, sent))
    data = main.to_bytes()
    result["merge ms"] = 1e3 * (time.process_time() - began)
    return result | {"ledger KB": len(data) / 1e3, "a rank's KB": len(sent[0]) / 1e3}


ROWS = 192
"""Rows of a tensor, which 64 and 48 ranks share evenly."""
WARM_SLICES, WINDOW_S = sized(300, 20), sized(20.0, 1.0)
CASES: dict[str, tuple[Callable[..., Figures], str, Sequence[tuple[int, ...]]]] = {
    "online": (online, "trainers × encoders", sized([(8, 1), (8, 4), (8, 16), (64, 16)], [(2, 1)])),
    "board": (board, "trainers", sized([(8,), (64,), (512,)], [(2,)])),
    "checkpoint": (checkpoint, "ranks × loaders × tensors", sized([(8, 6, 100), (32, 24, 100), (64, 48, 100)], [(4, 3, 2)])),
    "metrics": (metrics, "trainers × encoders", sized([(1, 8), (8, 64), (64, 512)], [(2, 2)])),
    "readers": (readers, "ranks × rows", sized([(8, 2_000_000_000), (64, 2_000_000_000)], [(4, 1_000_000)])),
}  # fmt: skip


def report(arguments: Sequence[str] = ()) -> int:
    """Measure and print the cases."""
    parser = argparse.ArgumentParser(prog="control")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES))
    for name in parser.parse_args(arguments).only:
        _, of, sizes = CASES[name]
        rows, header = list[tuple[str, ...]](), [of]
        for size in sizes:
            with tempfile.TemporaryDirectory() as scratch:
                figures: Figures = run_case("scripts.bench.control", f"{name}:{size}", Path(scratch))
            header[1:] = figures
            rows.append((" × ".join(map(str, size)), *(f"{figure:,.4g}" for figure in figures.values())))
        print(f"{name}\n{table(rows, header)}\n", flush=True)
    return 0


if __name__ == "__main__":
    runs = {f"{name}:{size}": (measure, size) for name, (measure, _, sizes) in CASES.items() for size in sizes}
    cases = {key: partial(lambda run, folder: run[0](folder, *run[1]), run) for key, run in runs.items()}
    sys.exit(_cases.main(partial(report, sys.argv[1:]), cases))
