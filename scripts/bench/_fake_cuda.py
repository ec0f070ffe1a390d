"""A fake CUDA runtime: fake_cuda.c replaces CUDA's, so that torch on a machine without a GPU sees A100s.

Under FakeTensorMode no kernel runs, so nothing else is needed: devices, dtypes, streams, autocast, the choice of attention kernels and
autograd's threads are torch's own for an A100.
"""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cuda.c")


def environment(folder: Path) -> dict[str, str]:
    """Compile the library into a folder; return an environment in which a process uses it."""
    library = folder / "libcuda.so.1"
    triton = find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    command = [
        shutil.which("cc") or "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        "-I",
        str(headers),
        "-Wl,-soname,libcuda.so.1",
    ]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True, timeout=120)
    return {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(folder)}
