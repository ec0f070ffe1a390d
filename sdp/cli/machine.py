"""This machine, described for bug reports: versions, processors, memory, GPUs, disks. Imports nothing heavy."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from sdp import __version__
from sdp.console import size

_DEPENDENCIES = ("torch", "ray", "diffusers", "transformers", "pyarrow")


def versions() -> list[str]:
    """Return the versions of sdp and of its main dependencies."""
    lines = [f"sdp {__version__}", f"python {platform.python_version()} ({platform.system()} {platform.release()})"]
    for name in _DEPENDENCIES:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} not installed")
    return lines


def describe() -> Iterator[tuple[str, str]]:
    """Yield the name and the description of each part of this machine."""
    for line in versions():
        name, _, version = line.partition(" ")
        yield name, version
    yield "CPUs", f"{len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count()} to use"
    yield "memory", _memory()
    yield from _gpus()
    for name, folder in (("disk", "."), ("temporary files", "/tmp"), ("home", str(Path("~").expanduser()))):
        try:
            usage = shutil.disk_usage(folder)
        except OSError as error:
            yield name, f"{folder}: {error.strerror}"
            continue
        writable = "" if os.access(folder, os.W_OK) else ", not writable"
        yield name, f"{Path(folder).absolute()}: {size(usage.free)} free of {size(usage.total)}{writable}"


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    bound = f", of which this container may use {size(int(limit))}" if limit.isdecimal() else ""
    shared = f", {size(shutil.disk_usage('/dev/shm').total)} in /dev/shm" if Path("/dev/shm").is_dir() else ""
    return f"{size(total)}{bound}{shared}"


def _gpus() -> Iterator[tuple[str, str]]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        yield "GPU", "none with NVIDIA's driver: nvidia-smi is not installed"
        return
    except subprocess.TimeoutExpired:
        yield "GPU", "nvidia-smi does not answer"
        return
    lines = (result.stdout if result.returncode == 0 else result.stdout or result.stderr).strip().splitlines()
    for line in lines or ["none"]:
        yield "GPU", line.strip()
