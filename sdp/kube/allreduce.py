"""`python -m sdp.kube.allreduce`: measures an all-reduce between the GPUs of several nodes, as in a training step.

`sdp doctor --all-reduce` runs it on the cluster. It takes whole nodes, with a process for each GPU, and reports the
network that NCCL used: without EFA a cluster trains at a third of its speed, and nothing else shows it.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from sdp import cluster
from sdp.errors import SdpError, UserError, one_line
from sdp.ray_loss import unwrapped

WARM_UP, ROUNDS = 3, 10
UNLIMITED = "unlimited"
MEASURE_S = 600.0
_NETWORK = re.compile(r"Using network (.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """A measured all-reduce."""

    nodes: int
    gpus: int
    """GPUs of all nodes; 0 for a measurement on CPUs."""
    megabytes: int
    seconds: float
    """Time of one all-reduce."""
    gb_per_s: float
    """Rate over the slowest link: size / time × 2 (n - 1) / n for n ranks."""
    network: str
    """The network that NCCL reported; empty without NCCL."""
    memlock: str
    """The lowest `ulimit -l` of all processes: KiB, or unlimited. EFA locks a lot of memory."""

    def __str__(self) -> str:
        where = f"{self.nodes} nodes, {f'{self.gpus} GPUs' if self.gpus else 'CPUs only'}"
        took = f"{self.seconds * 1e3:.3g} ms{f', through {self.network}' if self.network else ''}"
        rate = f"all-reduce of {self.megabytes} MB: {self.gb_per_s:.3g} GB/s"
        return f"{rate} ({where}, {took}; ulimit -l: {self.memlock})"


def bus_rate(size: int, seconds: float, ranks: int) -> float:
    """Return GB/s over the slowest link; each rank sends and receives all but its own share, twice."""
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def network_of(log: str) -> str:
    """Return the network that NCCL's log names."""
    return str((_NETWORK.findall(log) or [""])[-1])


def memory_lock() -> str:
    """Return this process's limit on locked memory, as `ulimit -l` prints it."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if soft == resource.RLIM_INFINITY else str(soft // 1024)


def lowest_lock(limits: Sequence[str]) -> str:
    """Return the lowest of several limits."""
    return min(limits, key=lambda limit: float("inf") if limit == UNLIMITED else float(limit))


def measure(nodes: int, gpus: int, accelerator: str | None, megabytes: int, wait_s: float) -> AllReduce:
    """Take whole nodes of the connected cluster and measure; `gpus` is the number per node, 0 uses CPUs."""
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    per_node = max(1, gpus)
    remote: Any = ray.remote(_Rank)  # Ray's types do not cover an actor's methods
    bundle = {"GPU": float(gpus), "CPU": 1.0} if gpus else {"CPU": 1.0}
    labels = {"bundle_label_selector": [{cluster.ACCELERATOR_LABEL: accelerator}] * nodes} if accelerator else {}
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD", **labels)
    try:
        if not group.wait(wait_s):
            kind = f" with {gpus} {accelerator or 'GPUs'}" if gpus else ""
            raise SdpError(
                f"all-reduce: {nodes} nodes{kind} did not start within {wait_s:.0f} s; check sdp status "
                "and the worker groups"
            )
        ranks = [
            remote.options(
                num_gpus=1 if gpus else 0,
                num_cpus=1 / per_node,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number // per_node
                ),
            ).remote(number, nodes * per_node)
            for number in range(nodes * per_node)
        ]
        address = ray.get(ranks[0].address.remote(), timeout=wait_s)
        results = ray.get([rank.run.remote(address, megabytes) for rank in ranks], timeout=MEASURE_S)
    except RayError as error:
        raise failure(error) from error
    finally:
        remove_placement_group(group)
    seconds = max(result[0] for result in results)
    return AllReduce(
        nodes=nodes,
        gpus=nodes * gpus,
        megabytes=megabytes,
        seconds=seconds,
        gb_per_s=bus_rate(megabytes * 1_000_000, seconds, nodes * per_node),
        network=results[0][1],
        memlock=lowest_lock([result[2] for result in results]),
    )


def failure(error: Exception) -> SdpError:
    """Return the error of failed processes: their own SdpError, or the last line of any other exception."""
    from ray.exceptions import GetTimeoutError, RayTaskError

    if (own := unwrapped(error)) is not None:
        return own
    if isinstance(error, GetTimeoutError):
        return SdpError(f"all-reduce: not finished within {MEASURE_S:.0f} s; check the nodes' network and GPUs")
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = [line for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    return SdpError(f"all-reduce: a process failed: {one_line(lines[-1], 400)}; the nodes' logs may say more")


class _Rank:
    """One process of the group."""

    def __init__(self, number: int, count: int) -> None:
        self._number, self._count = number, count

    def address(self) -> str:
        """Return a free address on this node for the process group."""
        import socket

        import ray.util

        util: Any = ray.util  # untyped
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, address: str, megabytes: int) -> tuple[float, str, str]:
        """Return the seconds of one all-reduce, NCCL's network, and this process's limit on locked memory."""
        from sdp.train.network import network_error

        try:
            return *self._run(address, megabytes), memory_lock()
        except RuntimeError as error:
            # Explained on the worker, whose environment names the network that NCCL must use.
            known = network_error(error)
            if known is None:
                raise
            raise known from error

    def _run(self, address: str, megabytes: int) -> tuple[float, str]:
        import os

        import torch
        import torch.distributed as dist

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
            try:
                device = torch.device("cuda" if on_gpu else "cpu")
                synchronize: Any = torch.cuda.synchronize if on_gpu else lambda: None
                tensor = torch.zeros(megabytes * 1_000_000 // 2, dtype=torch.bfloat16, device=device)
                for _ in range(WARM_UP):
                    dist.all_reduce(tensor)
                synchronize()
                began = time.perf_counter()
                for _ in range(ROUNDS):
                    dist.all_reduce(tensor)
                synchronize()
                seconds = (time.perf_counter() - began) / ROUNDS
                dist.barrier()
            finally:
                dist.destroy_process_group()
            return seconds, network_of(log.read_text(errors="replace")) if log.is_file() else ""


def main(arguments: Sequence[str]) -> int:
    """Run the measurement and print the result."""
    parser = argparse.ArgumentParser(prog="python -m sdp.kube.allreduce", description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="per node; 0 uses CPUs")
    parser.add_argument("--accelerator", help="Ray accelerator type of the nodes")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--wait", type=float, default=1800.0, help="seconds to wait for the nodes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    try:
        if args.nodes < 2 or args.gpus < 0 or args.megabytes < 1:
            got = f"{args.nodes}, {args.gpus} and {args.megabytes}"
            raise UserError(f"all-reduce: expected --nodes >= 2, --gpus >= 0 and --megabytes >= 1, got {got}")
        cluster.connect()
        result = measure(args.nodes, args.gpus, args.accelerator, args.megabytes, args.wait)
    except SdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{json.dumps(asdict(result)) if args.json else result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
