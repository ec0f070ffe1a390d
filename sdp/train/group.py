"""The process group of a run's workers, over NCCL if torch sees a GPU in all of them, else over gloo.

Ray's own goes by the GPUs that it has granted, which torch may be unable to use, and its controller loads torch before
the workers do. Here only the workers load torch.
"""

import socket
from datetime import timedelta

import ray
import ray.train

from sdp.train.interfaces import choose_interface

_AFTER_WATCHDOG_S = 120
"""Time that collectives wait longer than the watchdog, which saves the stacks: NCCL's timeout would only abort."""


def sees_gpu(granted: bool) -> bool:
    """Return whether a worker has a GPU that torch can use."""
    import torch.distributed

    return granted and torch.cuda.is_available()


def address() -> str:
    """Return an address of this worker's node that is free."""
    host = _host()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _host() -> str:
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return host


def join(rank: int, size: int, meet_at: str, cuda: bool) -> None:
    """Join the group, whose worker 0 is at the address."""
    import torch.distributed as dist

    from sdp.device import choose_device
    from sdp.train.callbacks.watchdog import WATCHDOG_S

    choose_interface(_host())
    # NCCL's own choice, the rank modulo this node's GPUs, is another worker's GPU where nodes have different numbers.
    device = choose_device(ray.train.get_context().get_local_rank()) if cuda else None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=meet_at,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=WATCHDOG_S + _AFTER_WATCHDOG_S),
        device_id=device,
    )


def leave() -> None:
    """Leave the group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
