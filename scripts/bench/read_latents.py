"""Reading latents into tensors: sdp's reader against the reference's read path, and against plain pyarrow.

    python -m scripts.bench.read_latents           (ROWS=300000 for a larger set; 60000 by default)

The reference is that of scripts/bench/_reference_process.py. All read the same latents, 4 × 32 × 32, in batches of 128. The reference's are as it writes them: a float32 tensor
column by Ray, read by read_parquet and iter_torch_batches and cast to half. sdp's are as `sdp process` writes them:
fp16 bytes and token ids, read in the shuffled order of an epoch. Each set is read once before, so that it is in the page
cache if there is room. Each case is a separate process (and Ray, if it uses one); CPU seconds are those of all its
processes. The cases alternate ROUNDS times (3), and the best round of each counts.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench import _cases
from scripts.bench._cases import run_case, sized
from scripts.bench._processes import cpu_of_tree
from sdp.console import table

ROWS = int(os.environ.get("ROWS", sized("60000", "2000")))
ROUNDS = int(os.environ.get("ROUNDS", sized("3", "1")))
BATCH = 128
PART_ROWS = sized(10_000, 1000)
CASES = ("reference", "direct", "pyarrow", "copy")


def main() -> int:
    """Make the sets, run the cases in turns, and print the ratios."""
    folder = Path(tempfile.mkdtemp(prefix="sdp-bench-read-"))
    try:
        for case in ("write-reference", "write-sdp"):
            _case(case, folder)
        rounds = [{case: _case(case, folder) for case in CASES} for _ in range(ROUNDS)]
        print_figures({case: _best([round[case] for round in rounds]) for case in CASES})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def print_figures(figures: dict[str, dict[str, float]]) -> None:
    reference, plain = figures["reference"], figures["pyarrow"]
    rows = [
        (
            {"direct": "sdp", "copy": "pyarrow, mapped"}.get(case, case),
            f"{f['rows_per_s']:,.0f}",
            f"{f['rows_per_cpu_s']:,.0f}",
            f"{f['first_s']:.2f}",
            f"{f['rows_per_s'] / reference['rows_per_s']:.1f}",
            f"{f['rows_per_cpu_s'] / reference['rows_per_cpu_s']:.1f}",
            f"{f['rows_per_cpu_s'] / plain['rows_per_cpu_s']:.2f}",
        )
        for case, f in figures.items()
    ]
    header = ("reader", "rows/s", "rows/CPU s", "first batch s", "× reference", "× per CPU s", "of pyarrow per CPU s")
    print(f"latents of {ROWS:,} rows into batches of {BATCH}, best of {ROUNDS} (goals: 5 ×, 5 ×, a third)")
    print(table(rows, header), flush=True)


def _best(rounds: list[dict[str, float]]) -> dict[str, float]:
    best = {name: max(figures[name] for figures in rounds) for name in ("rows_per_s", "rows_per_cpu_s")}
    return {**best, "first_s": min(figures["first_s"] for figures in rounds)}


def _case(case: str, folder: Path) -> dict[str, float]:
    own_process = partial(run_case, "scripts.bench.read_latents", case, folder)
    figures: dict[str, float] = sized(own_process, partial(RUNS[case], folder))()  # the smallest size measures nothing
    return figures


# --- cases -----------------------------------------------------------------------------------------------------------


def reference(folder: Path) -> dict[str, float]:
    """Read float32 tensors with Ray: read_parquet, iter_torch_batches, half."""
    import torch

    ray = _start_ray()
    where = str(folder / "reference")

    def batches() -> Iterator[Any]:
        for batch in ray.data.read_parquet(where).iter_torch_batches(batch_size=BATCH, dtypes=torch.float32):
            yield batch["image_latents_256"].half()

    return _measured(batches, where)


def direct(folder: Path) -> dict[str, float]:
    """Read fp16 bytes with threads of this process, as sdp does."""
    from sdp.train.assemble import latents_reader
    from sdp.train.data.sources import open_sources
    from sdp.train.world import World

    def batches() -> Iterator[Any]:
        config = _config(folder)
        yield from _of_reader(latents_reader(config, open_sources(config), World()))

    return _measured(batches, str(folder / "sdp"))


def pyarrow(folder: Path) -> dict[str, float]:
    """Read the same files and columns with pyarrow in the consumer, with checksums as sdp does, in stored order."""
    return _by_pyarrow(folder, ["row", "latents_256", "token_ids"], page_checksum_verification=True)


def copy(folder: Path) -> dict[str, float]:
    """Read only latents, memory-mapped and without checksums: little more than a copy of the bytes."""
    return _by_pyarrow(folder, ["latents_256"], memory_map=True)


def _by_pyarrow(folder: Path, columns: list[str], **how: bool) -> dict[str, float]:
    import pyarrow.parquet as pq
    import torch

    where = str(folder / "sdp")

    def batches() -> Iterator[Any]:
        for part in sorted(Path(where, "parts").iterdir()):
            for record_batch in pq.ParquetFile(part, **how).iter_batches(BATCH, columns=columns):
                column = record_batch["latents_256"]
                flat = np.frombuffer(column.buffers()[1], np.float16)[column.offset * 4096 :][: len(column) * 4096]
                yield torch.from_numpy(flat.copy()).view(-1, 4, 32, 32)

    return _measured(batches, where)


def _of_reader(reader: Any) -> Iterator[Any]:
    for batch in reader.batches(0, 0, BATCH):
        yield batch.latents if bool(batch.weights.all()) else batch.latents[batch.weights > 0]


def _config(folder: Path) -> Any:
    from sdp.config import parse

    settings = {"source": {"uri": str(folder / "sdp")}, "output": {"uri": str(folder / "run")}}
    return parse("train", {**settings, "model": {"source": "builtin:tiny"}})


def _start_ray() -> Any:
    import logging

    import ray

    _cases.start_ray(num_cpus=2, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray


def _measured(batches: Callable[[], Iterator[Any]], where: str) -> dict[str, float]:
    for file in Path(where).rglob("*.parquet"):
        file.read_bytes()  # into the page cache
    cpu, start, first, rows = cpu_of_tree(), time.perf_counter(), 0.0, 0
    for batch in batches():
        first = first or time.perf_counter() - start
        rows += len(batch)
    seconds, cpu = time.perf_counter() - start, cpu_of_tree() - cpu
    assert rows == ROWS, rows
    return {"rows_per_s": rows / seconds, "rows_per_cpu_s": rows / max(cpu, 1e-6), "first_s": first}


# --- the data --------------------------------------------------------------------------------------------------------


def write_reference(folder: Path) -> dict[str, float]:
    """Write the latents as the reference does."""
    ray = _start_ray()

    def latents(batch: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(int(batch["id"][0]))
        return {"image_latents_256": rng.standard_normal((len(batch["id"]), 4, 32, 32), dtype=np.float32)}

    made = ray.data.range(ROWS, override_num_blocks=max(1, ROWS // PART_ROWS)).map_batches(latents, batch_size=1000)
    made.write_parquet(str(folder / "reference"), min_rows_per_file=PART_ROWS)
    return {}


def write_sdp(folder: Path) -> dict[str, float]:
    """Write the latents as `sdp process` does."""
    from sdp.encode.table import LAYOUT
    from tests.latents import make_latents

    groups = LAYOUT.row_group_rows
    make_latents(folder, ROWS, unit_rows=PART_ROWS, group_rows=groups, resolution=256, uri=str(folder / "sdp"))
    return {}


RUNS = {"write-reference": write_reference, "write-sdp": write_sdp, "reference": reference}
RUNS |= {"direct": direct, "pyarrow": pyarrow, "copy": copy}
if __name__ == "__main__":
    sys.exit(_cases.main(main, RUNS))
