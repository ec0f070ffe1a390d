"""Measure an all-reduce between the GPUs of several nodes, as in a training step, and name the network that NCCL used.

    ray job submit --working-dir scripts -- python allreduce.py --nodes 2 --gpus 8 --accelerator A100

It takes whole nodes, with a process for each GPU. Without EFA a cluster trains at a third of its speed, and nothing
else shows it. `--gpus 0` measures CPUs.
"""

import argparse
import os
import re
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

WARM_UP, ROUNDS = 3, 10
MEASURE_S = 600.0


def bus_rate(size: int, seconds: float, ranks: int) -> float:
    """Return GB/s over the slowest link; each rank sends and receives all but its own share, twice."""
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def network_of(log: str) -> str:
    """Return the network that NCCL's log names; empty without NCCL."""
    return str((re.findall(r"Using network (.+?)\s*$", log, re.MULTILINE) or [""])[-1])


def memory_lock() -> str:
    """Return this process's limit on locked memory, as `ulimit -l` prints it; EFA locks a lot."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft // 1024)


def measure(nodes: int, gpus: int, accelerator: str | None, megabytes: int, wait_s: float) -> str:
    """Take whole nodes of the connected cluster, measure, and return the result in a line."""
    per_node = max(1, gpus)
    bundle = {"GPU": float(gpus), "CPU": 1.0} if gpus else {"CPU": 1.0}
    labels = {"bundle_label_selector": [{"ray.io/accelerator-type": accelerator}] * nodes} if accelerator else {}
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD", **labels)
    if not group.wait(wait_s):
        raise SystemExit(f"all-reduce: {nodes} nodes with {gpus} {accelerator or 'GPUs'} did not start in {wait_s:g} s")
    ranks: list[Any] = [
        ray.remote(Rank)
        .options(
            num_gpus=1 if gpus else 0,
            num_cpus=1 / per_node,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number // per_node
            ),
        )
        .remote(number, nodes * per_node)
        for number in range(nodes * per_node)
    ]
    address = ray.get(ranks[0].address.remote(), timeout=wait_s)
    results = ray.get([rank.run.remote(address, megabytes) for rank in ranks], timeout=MEASURE_S)
    seconds = max(seconds for seconds, _, _ in results)
    network = f", through {results[0][1]}" if results[0][1] else ""
    locks = ", ".join(sorted({lock for _, _, lock in results}))
    return (
        f"all-reduce of {megabytes} MB: {bus_rate(megabytes * 1_000_000, seconds, len(ranks)):.3g} GB/s "
        f"({nodes} nodes, {f'{nodes * gpus} GPUs' if gpus else 'CPUs only'}, {seconds * 1e3:.3g} ms{network}; "
        f"ulimit -l: {locks})"
    )


class Rank:
    """One process of the group."""

    def __init__(self, number: int, count: int) -> None:
        self._number, self._count = number, count

    def address(self) -> str:
        """Return a free address on this node for the process group."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"  # type: ignore[no-untyped-call]

    def run(self, address: str, megabytes: int) -> tuple[float, str, str]:
        """Return the seconds of one all-reduce, NCCL's network, and this process's limit on locked memory."""
        on_gpu = torch.cuda.is_available()
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "nccl.log"
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                init_method=f"tcp://{address}",
                rank=self._number,
                world_size=self._count,
                timeout=timedelta(seconds=300),
            )
            tensor = torch.zeros(megabytes * 500_000, dtype=torch.bfloat16, device="cuda" if on_gpu else "cpu")
            for number in range(WARM_UP + ROUNDS):
                if number == WARM_UP:
                    tensor[0].item()  # waits for the GPU
                    began = time.perf_counter()
                dist.all_reduce(tensor)
            tensor[0].item()
            seconds = (time.perf_counter() - began) / ROUNDS
            dist.destroy_process_group()
            return seconds, network_of(log.read_text(errors="replace")) if log.is_file() else "", memory_lock()


def main(arguments: Sequence[str]) -> None:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="per node; 0 uses CPUs")
    parser.add_argument("--accelerator", help="Ray accelerator type of the nodes")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--wait", type=float, default=1800.0, help="seconds to wait for the nodes")
    args = parser.parse_args(arguments)
    ray.init(ignore_reinit_error=True)
    print(measure(args.nodes, args.gpus, args.accelerator, args.megabytes, args.wait))


if __name__ == "__main__":
    main(sys.argv[1:])
