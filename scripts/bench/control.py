"""The control plane with up to 64 trainers and 512 encoders, without their work: CPU time, memory and messages.

    python -m scripts.bench.control [--only online,checkpoint]

Each size of a case runs the code of the jobs in a process of its own, with stand-ins only for the work; a case's
docstring names them. Figures are CPU time, because the machine may do other work.
"""

import argparse
import math
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.bench import _cases, _s3
from scripts.bench._cases import run_case, sized
from sdp.console import table

Figures = dict[str, float]
_TICK = os.sysconf("SC_CLK_TCK")
_ROLES = {"ray::Pool": "pool", "ray::Desk": "desk", "ray::Trainers": "trainers", "gcs_server": "gcs"}


@dataclass(frozen=True)
class Case:
    """A part of the control plane, at some sizes."""

    what: str
    measure: Callable[..., Figures]
    sizes: Sequence[tuple[int, ...]]
    """Arguments of `measure`."""
    of: str
    """The names of a size's numbers."""


# --- online -----------------------------------------------------------------------------------------------------------


def online(folder: Path, trainers: int, encoders: int) -> Figures:
    """Send slices through the real pool, desk, Ray Data and actors on one Ray, as fast as they pass.

    Stood in: transforms and encoders return at once, trainers are threads of one actor.
    """
    import ray

    from scripts.bench import _players
    from scripts.bench.online_pool import make_images
    from sdp import cluster
    from sdp.cluster import worker_environment
    from sdp.encode.placement import Placement
    from sdp.train import online

    ray.init(
        "local", num_cpus=4, object_store_memory=400_000_000, include_dashboard=False, log_to_driver=False,
        runtime_env=worker_environment(),
    )  # fmt: skip
    online.EncoderPool = _players.Pool  # type: ignore[misc]
    placement = Placement(encoders, encoders, None, 0.0, 0.001, 1.0, 600.0, {}, 4, "bench")
    pool = online.start_pool(make_images(str(folder), "token_ids"), placement)
    ahead = 16 + math.ceil(4 * encoders / trainers)
    players = ray.remote(num_cpus=0)(_players.Trainers).options(scheduling_strategy=cluster.this_node())
    playing = players.remote(pool, trainers, ahead)

    def taken() -> int:
        return int(ray.get(playing.taken.remote()))

    _players.wait_until(lambda: ray.get(pool.status.remote())[0]["encoders"], encoders)
    _players.wait_until(taken, WARM_PIECES)
    scheduling, _ = ray.get(pool.usage.remote())
    before, first, began = cpu_by_role(), taken(), time.monotonic()
    time.sleep(WINDOW_S)
    after, last, seconds = cpu_by_role(), taken(), time.monotonic() - began
    pieces = last - first
    asked = time.monotonic()
    scheduled, pool_mb = ray.get(pool.usage.remote())
    figures = {
        "open": trainers * (ahead + 1), "answer s": time.monotonic() - asked, "pool MB": pool_mb,
        "pieces/s here": pieces / seconds, "scheduling ms": 1e3 * (scheduled - scheduling) / pieces,
    }  # fmt: skip
    return figures | {f"{role} ms": 1e3 * (after[role] - before.get(role, 0.0)) / pieces for role in after}


def cpu_by_role() -> dict[str, float]:
    """Return the CPU seconds of this process's descendants, by what they are."""
    parents, seconds, roles = dict[int, int](), dict[int, float](), dict[int, str]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            title = (stat.parent / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended
        pid = int(stat.parent.name)
        parents[pid], seconds[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICK
        roles[pid] = next((role for name, role in _ROLES.items() if name in title[:200]), "")
        roles[pid] = roles[pid] or ("raylet" if "/raylet/raylet" in title[:300] else "others")
    own = {os.getpid()}
    for _ in range(8):
        own |= {pid for pid, parent in parents.items() if parent in own}
    totals = dict[str, float]()
    for pid in own - {os.getpid()}:
        totals[roles[pid]] = totals.get(roles[pid], 0.0) + seconds[pid]
    return totals


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, ranks: int, loaders: int, tensors: int) -> Figures:
    """Save tensors sharded over some ranks, complete the checkpoint, list it, and load it on other ranks.

    Stood in: ranks are threads with torch's process group for threads, and shards are tiny. The requests are those that
    versitygw logs.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    from scripts.tools import find
    from sdp.datasets.ledger import Ledger
    from sdp.storage import open_storage
    from sdp.train.checkpoint import Checkpointer
    from sdp.train.run_folder import RunFolder
    from sdp.train.state import TrainState
    from sdp.train.world import World

    figures = Figures()

    def shards(rank: int, world: int, fill: Callable[..., Any]) -> dict[str, Any]:
        mesh, rows = DeviceMesh("cpu", list(range(world))), ROWS // world
        whole = torch.arange(ROWS * 4.0).view(ROWS, 4)[rank * rows : (rank + 1) * rows]
        local = (fill(whole) for _ in range(tensors))
        return {
            f"model.{n}": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False) for n, shard in enumerate(local)
        }

    def save(rank: int, world: int) -> None:
        checkpointer = Checkpointer(RunFolder(open_storage(uri)), World(rank, world), {})
        for turn, step in (("first", 1), ("next", 2)):
            own, began = shards(rank, world, torch.clone), time.thread_time()
            saving = checkpointer.stage(own, TrainState(step=step), Ledger())
            cpu[rank, f"{turn} save"] = time.thread_time() - began
            saving.written.result()
            torch.distributed.barrier()
            began = time.thread_time()
            if rank == 0:
                checkpointer.commit(saving)
                cpu[0, "commit"] = time.thread_time() - began
            torch.distributed.barrier()
        checkpointer.close()

    def load(rank: int, world: int) -> None:
        own, began = shards(rank, world, torch.zeros_like), time.thread_time()
        state = Checkpointer(RunFolder(open_storage(uri)), World(rank, world), {}).restore(own)
        assert state is not None and state.step == 2
        cpu[rank, "load"] = time.thread_time() - began
        for tensor, expected in zip(own.values(), shards(rank, world, torch.clone).values(), strict=True):
            assert torch.equal(tensor.to_local(), expected.to_local())

    cpu: dict[tuple[int, str], float] = {}
    program, log = find("versitygw"), folder / "requests.log"
    with _s3.serve(str(program), folder, f"--access-log={log}") if program else nullcontext(str(folder / "run")) as uri:
        requests = [_lines(log)]
        for work, world in ((save, ranks), (load, loaders)):
            as_ranks(work, world)
            requests.append(_lines(log))
        names = [name for name in open_storage(uri).names("checkpoints/") if "step-000000002" in name]
        small = [name for name in names if not name.endswith(".bin")]
        index_mb = len(open_storage(uri).read(next(name for name in names if name.endswith("tensors.json")))) / 1e6
    for name in ("first save", "next save", "commit", "load"):
        times = [seconds for (rank, what), seconds in cpu.items() if what == name and rank]
        figures[f"{name}, rank 0 s"] = cpu[0, name]
        if any(times):
            figures[f"{name}, others s"] = sum(times) / len(times)
    puts, gets = (after - before for before, after in pairwise(requests))
    return figures | {
        "files": len(names), "small files": len(small), "index MB": index_mb,
        "requests to save": puts / 2, "requests to load": gets,
    }  # fmt: skip


def as_ranks(work: Callable[[int, int], None], world: int) -> None:
    """Run a function in a thread for each rank of a process group."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            work(rank, world)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the other threads would wait for this one

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(run, range(world)))
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    _uninstall_threaded_pg()


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# --- metrics ----------------------------------------------------------------------------------------------------------


def metrics(_: Path, trainers: int, encoders: int) -> Figures:
    """Emit every metric of an online run, of each process as its own, and render them all.

    Stood in: prometheus-client's registries for Ray's agents, a metrics line with all fields, one exporter's GPUs.
    """
    import torch
    from prometheus_client import CollectorRegistry, generate_latest

    from scripts.bench.telemetry import LINE
    from sdp.telemetry import Telemetry
    from sdp.telemetry.registry import RegistryBackend
    from sdp.train.callbacks.base import Saved
    from sdp.train.callbacks.telemetry import EmitMetrics

    registries, emitting = list[CollectorRegistry](), 0.0
    steps: Any = SimpleNamespace(parts=dict.fromkeys(PARTS, 0.1), samples=1, verdict="good", epoch=0, epoch_done=0.5)
    for rank in range(trainers):
        registries.append(CollectorRegistry())
        world = SimpleNamespace(rank=rank, size=trainers, is_main=rank == 0, device=torch.device("cuda"))
        state = SimpleNamespace(step=1, samples=1, epoch=0, position=0, cost=1.0)
        run = SimpleNamespace(latest=lambda: None)
        trainer: Any = SimpleNamespace(
            world=world, state=state, bad=[0], reader=SimpleNamespace(rows=1), checkpointer=SimpleNamespace(run=run),
            config=SimpleNamespace(data=SimpleNamespace(mode="online")),
        )  # fmt: skip
        emit = EmitMetrics(Telemetry(RegistryBackend(registries[-1]), "run", "job"))
        emit.on_start(trainer)
        emit.on_checkpoint(trainer, Saved("", 1, 1.0, 1.0, 1, 1))
        if rank == 0:
            emit.line({**LINE, "gpu_hours": 1.0, "finish_time": 1.0, "final_cost": 1.0})
        emit._reported_at, began = -math.inf, time.process_time()
        emit.on_step(trainer, steps)
        emitting += time.process_time() - began
    for _ in range(encoders):
        registries.append(CollectorRegistry())
        Telemetry(RegistryBackend(registries[-1]), "run", "job").process("encoder")
    began = time.process_time()
    pages = [generate_latest(registry) for registry in registries]
    rendering = time.process_time() - began
    series = [sum(not line.startswith(b"#") and b"_created" not in line for line in page.splitlines()) for page in pages]
    return {
        "series": sum(series), "of rank 0": series[0], "of a trainer": series[min(1, trainers - 1)],
        "of an encoder": series[-1], "render ms": 1e3 * rendering, "emit ms a second": 1e3 * emitting,
        "KB": sum(map(len, pages)) / 1e3,
    }  # fmt: skip


# --- data -------------------------------------------------------------------------------------------------------------


def readers(_: Path, ranks: int, rows: int) -> Figures:
    """Plan an epoch as one of the ranks does, and its steps; then merge what all have consumed at a checkpoint.

    Stood in: half of the epoch is consumed, and each checkpoint adds a two-hundredth of it, in the epoch's order.
    """
    import numpy as np

    from sdp.datasets.ledger import Ledger
    from sdp.train.data.encoded import Route
    from sdp.train.data.order import EpochOrder, OrderShape, RowGroups

    count = rows // GROUP_ROWS
    groups = RowGroups(np.arange(count) // 10, np.arange(count) % 10, np.full(count, GROUP_ROWS))
    before, began = _peak_mb(), time.process_time()
    order = EpochOrder(0, 0, groups, OrderShape(lanes=ranks))
    lane = order.lane(0)
    figures = {"plan s": time.process_time() - began, "plan MB": _peak_mb() - before}
    route, began = Route(order, 0, 2048, 0, ranks), time.process_time()
    windows = list(islice(route.windows(), 20))
    places = [(route.needed(lane, window).sum(), window.places()) for lane, window in windows]
    figures["window ms"] = 1e3 * (time.process_time() - began) / len(places)
    main, added = Ledger(), list[Ledger]()
    half, more = len(lane) // 2, len(lane) // 200
    for number in range(ranks):
        lane, ledger = order.lane(number), Ledger()
        for target, start, stop in ((main, 0, half), (ledger, half, half + more)):
            while start < stop:
                window = lane.window_at(start)
                for part in window.ranges:
                    first = part.row_group * GROUP_ROWS
                    if window.stop <= stop:
                        target.add_range(0, first + part.start, first + part.stop)
                    else:  # half of it, at random
                        target.add(0, first + np.random.default_rng(start).permutation(GROUP_ROWS)[: GROUP_ROWS // 2])
                start = window.stop
        added.append(ledger)
    sent, began = [ledger.to_bytes() for ledger in added], time.process_time()
    main.merge(map(Ledger.from_bytes, sent))
    figures["merge ms"], began = 1e3 * (time.process_time() - began), time.process_time()
    data = main.to_bytes()
    figures |= {"write ms": 1e3 * (time.process_time() - began), "ledger MB": len(data) / 1e6}
    return figures | {"KB of a rank": len(sent[0]) / 1e3}


WARM_PIECES, WINDOW_S = sized(300, 20), sized(20.0, 1.0)
GROUP_ROWS = 1000
ROWS = 192
"""Rows of a tensor, which 64 and 48 ranks share evenly."""
PARTS = ("data", "copy", "forward", "backward", "optimizer")
CASES = {
    "online": Case(
        "slices through the pool on Ray", online, sized([(1, 1), (8, 1), (8, 4), (8, 16), (64, 16)], [(2, 1)]),
        "trainers × encoders",
    ),
    "checkpoint": Case(
        "a checkpoint of sharded tensors", checkpoint, sized([(8, 8, 100), (32, 24, 100), (64, 48, 100)], [(4, 3, 2)]),
        "ranks × ranks that load × tensors",
    ),
    "metrics": Case(
        "all series of an online run", metrics, sized([(1, 8), (8, 64), (64, 512)], [(2, 2)]), "trainers × encoders"
    ),
    "readers": Case(
        "a rank's plan of an epoch, and the ledger of all ranks", readers,
        sized([(64, 20_000_000), (8, 2_000_000_000), (64, 2_000_000_000)], [(4, 1_000_000)]), "ranks × rows",
    ),
}  # fmt: skip


# --- running and printing ---------------------------------------------------------------------------------------------


def report(arguments: Sequence[str] = ()) -> int:
    """Measure and print the cases."""
    parser = argparse.ArgumentParser(prog="control")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES))
    for name in parser.parse_args(arguments).only:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as scratch:
            figures = [run_case("scripts.bench.control", key(name, size), Path(scratch)) for size in case.sizes]
        names = list(dict.fromkeys(figure for each in figures for figure in each))
        rows = [
            (" × ".join(map(str, size)), *(f"{each[figure]:,.4g}" if figure in each else "" for figure in names))
            for size, each in zip(case.sizes, figures, strict=True)
        ]
        print(f"{name}: {case.what}\n{table(rows, (case.of, *names))}\n", flush=True)
    return 0


def key(name: str, size: Sequence[int]) -> str:
    """Return the name of a size of a case on the command line."""
    return ":".join([name, *map(str, size)])


def run_size(name: str, size: Sequence[int], folder: Path) -> Figures:
    """Measure a size of a case."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    return CASES[name].measure(folder, *size)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sizes = {key(name, size): partial(run_size, name, size) for name, case in CASES.items() for size in case.sizes}
    sys.exit(_cases.main(partial(report, sys.argv[1:]), sizes))
