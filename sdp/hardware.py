"""The catalogue of GPUs and of cloud instances that have them.

Nothing is computed for a GPU that is not in it: a share of a guessed peak is worse than none. Peaks are dense bf16;
datasheets often print twice as much, with structured sparsity.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

GIB = 1 << 30
TERA = 1e12

CUDA_MAJOR = 13
"""The CUDA release family of the locked torch; kept here because a laptop that checks a cluster has no torch."""
DRIVERS: Mapping[int, int] = MappingProxyType({12: 525, 13: 580})
"""The oldest branch of NVIDIA's driver that runs a release family of CUDA (docs.nvidia.com, CUDA compatibility)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    products: tuple[str, ...]
    """Product names as NVML prints them."""
    accelerators: tuple[str, ...]
    """Ray accelerator types of a node that has it, narrowest first; Ray itself detects the last."""
    memory_bytes: int
    """As in the datasheet; NVML reports a few per cent less."""
    peak_flops: float
    """Dense bf16 tensor FLOP/s."""
    bytes_per_s: float = 0.0
    """The memory's bandwidth, of GPUs in the catalogue."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One kind of cloud instance."""

    name: str
    gpu: str | None
    """Name of its GPU in GPUS."""
    gpus: int
    vcpus: int


# --- GPUs ------------------------------------------------------------------------------------------------------------
# Figures are NVIDIA's, by documents that quote its datasheets; the datasheets themselves were not available:
# - peaks of A100, H100 (all three), H200, B200 and L40S: pytorch/torchtitan, torchtitan/tools/utils.py (2025);
# - L4 (121 dense, 242 with sparsity) and A10G (70 dense, 140 with sparsity): quotations of the datasheets. 125, which
#   some print for the A10G, is the peak of the A10, another GPU.
# For the Ada cards, L4 and L40S, some sources say that bf16 with fp32 accumulation runs at half the datasheet's rate
# (such as allenai/OLMo-core's speed_monitor.py). cuBLAS has exceeded that half on an L4, so the datasheet is used.

_A100_40G = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")
_A100_80G = ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")
_GPUS = (
    Gpu("A10G", ("NVIDIA A10G",), ("A10G",), 24 * GIB, 70 * TERA, 0.6 * TERA),
    Gpu("L4", ("NVIDIA L4",), ("L4",), 24 * GIB, 121 * TERA, 0.3 * TERA),
    Gpu("L40S", ("NVIDIA L40S",), ("L40S",), 48 * GIB, 362.05 * TERA, 0.864 * TERA),
    Gpu("A100-40G", _A100_40G, ("A100-40G", "A100"), 40 * GIB, 312 * TERA, 1.555 * TERA),
    Gpu("A100-80G", _A100_80G, ("A100-80G", "A100"), 80 * GIB, 312 * TERA, 2.039 * TERA),
    Gpu("H100-SXM", ("NVIDIA H100 80GB HBM3",), ("H100",), 80 * GIB, 989 * TERA, 3.35 * TERA),
    Gpu("H100-PCIe", ("NVIDIA H100 PCIe",), ("H100",), 80 * GIB, 756 * TERA, 2 * TERA),
    Gpu("H100-NVL", ("NVIDIA H100 NVL",), ("H100",), 94 * GIB, 835 * TERA, 3.9 * TERA),
    Gpu("H200", ("NVIDIA H200",), ("H200",), 141 * GIB, 989 * TERA, 4.8 * TERA),
    Gpu("B200", ("NVIDIA B200",), ("B200",), 180 * GIB, 2250 * TERA, 8 * TERA),
)

GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _GPUS})


def gpu_by_product(product: str) -> Gpu | None:
    """Return the GPU of an NVML product name; None for an unknown one, or for a MIG slice.

    Drivers before 470 omit the maker's name.
    """
    return _BY_PRODUCT.get(_plain(product))


def gpus_by_accelerator(accelerator: str) -> tuple[Gpu, ...]:
    """Return every GPU that a Ray accelerator type may stand for."""
    return tuple(gpu for gpu in _GPUS if accelerator in gpu.accelerators)


def mfu(flops: float, seconds: float, gpu: Gpu | None, count: int = 1) -> float | None:
    """Return the share of `count` GPUs' peak that `flops` in `seconds` reach; None for an unknown GPU or no time."""
    if gpu is None or seconds <= 0 or count < 1:
        return None
    return flops / seconds / (gpu.peak_flops * count)


def _plain(product: str) -> str:
    return " ".join(product.split()).casefold().removeprefix("nvidia ")


_BY_PRODUCT = {_plain(product): gpu for gpu in _GPUS for product in gpu.products}


# --- Instances -------------------------------------------------------------------------------------------------------
# GPUs and vCPUs: EC2's own description of its instance types on 2026-08-21, by
# aws/karpenter-provider-aws, website/content/en/docs/reference/instance-types.md. Prices are in sdp/plan/prices.yaml.

_INSTANCES: dict[str, list[Any]] = json.loads(Path(__file__).with_name("instances.json").read_bytes())
INSTANCES: Mapping[str, Instance] = MappingProxyType({name: Instance(name, *row) for name, row in _INSTANCES.items()})


def local_gpus() -> int:
    """Count the NVIDIA GPUs of this machine that this process may use, without loading a library."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(number.strip() not in ("", "-1") for number in visible.split(","))
    return len([*Path("/proc/driver/nvidia/gpus").glob("*")])


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use, by its affinity and by its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or one without a quota: "max 100000"
        return cores
