"""A fake libnvidia-ml.so.1 (fake_nvml.c), built with the system's C compiler, and the scenarios that it plays."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
GIB = 1 << 30

GPU_IS_LOST, UNKNOWN, DRIVER_NOT_LOADED, NOT_SUPPORTED = 15, 999, 9, 3
"""NVML's error codes, from nvml.h."""


def build(folder: Path) -> Path:
    """Compile the fake library into a folder for LD_LIBRARY_PATH; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("cc") or "gcc"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-pthread"]
    command += ["-Wl,-soname,libnvidia-ml.so.1", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(command, check=True, timeout=120)
    return folder


class Scenario:
    """The scenario file, whose lines a running program reads again after each `write`."""

    def __init__(self, path: Path, lines: Mapping[str, object]) -> None:
        self.path = path
        self.lines: dict[str, object] = {}
        self.write(lines)

    def write(self, changes: Mapping[str, object | None]) -> None:
        """Replace the file atomically, with these changes; None removes a line."""
        lines = {**self.lines, **changes}
        self.lines = {key: value for key, value in lines.items() if value is not None}
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{key} {value}\n" for key, value in self.lines.items()))
        new.replace(self.path)

    def environment(self, library: Path) -> dict[str, str]:
        """Return the environment of a process that is to see these GPUs."""
        return {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML_SCENARIO": str(self.path)}


def uuid(gpu: int) -> str:
    return f"GPU-{gpu:08d}-0000-0000-0000-000000000000"


def a100s(count: int) -> dict[str, object]:
    """Return busy A100-SXM4-80GB; the values of each GPU differ from the others'."""
    lines: dict[str, object] = {"driver": "570.86.15", "cuda": 12080, "gpus": count}
    lines |= {
        "gpu.*.name": "NVIDIA A100-SXM4-80GB",
        "gpu.*.utilization": 97,
        "gpu.*.memory_utilization": 41,
        "gpu.*.memory_total": 80 * GIB,
        "gpu.*.memory_reserved": GIB // 2,
        "gpu.*.memory_used": 60 * GIB,
        "gpu.*.power_mw": 391250,
        "gpu.*.power_limit_mw": 400000,
        "gpu.*.energy_mj": 123456789,
        "gpu.*.temperature": 61,
        "gpu.*.temperature_limit.1": 89,
        "gpu.*.clock_mhz.1": 1395,
        "gpu.*.clock_mhz.2": 1593,
        "gpu.*.clock_max_mhz.1": 1410,
        "gpu.*.throttle_reasons": 0,
        "gpu.*.pcie_transmit_kb": 12000,
        "gpu.*.pcie_receive_kb": 34000,
        "gpu.*.pcie_replays": 0,
        "gpu.*.pcie_width": 16,
        "gpu.*.pcie_width_max": 16,
        "gpu.*.field.82": 71,
        "gpu.*.field.91": 12,
        "gpu.*.field.138": 1000,
        "gpu.*.field.139": 2000,
        "gpu.*.field.38": 0,
        "gpu.*.field.45": 0,
        "gpu.*.field.52": 0,
        "gpu.*.field.59": 0,
        "gpu.*.ecc_driver_load.0": 0,
        "gpu.*.ecc_driver_load.1": 0,
        "gpu.*.remapped": "0 0 0 0",
    }
    lines |= {f"gpu.*.nvlink.{link}": 1 for link in range(12)}
    for gpu in range(count):
        lines |= {f"gpu.{gpu}.uuid": uuid(gpu)}
    return lines
