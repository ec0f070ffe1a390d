"""Training's own speed: latents into tensors against the reference's read path, and what our loop adds to a step.

    ROWS=300000 python -m scripts.bench.train        (default 60000; the set is cached, by being read once before)

Both readers read the same latents, 4 × 32 × 32: the reference's as it writes them (a float32 tensor column by Ray), ours
as `sdp process` does (fp16 bytes, and token ids beside them). CPU seconds are those of all processes that take part.
The loop is compared on one thread with a bare PyTorch loop of the same step, turn and turn about.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sdp.console import table

ROWS = int(os.environ.get("ROWS", "60000"))
BATCH = 128
PART_ROWS = 10_000
_TICK = os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Run the cases, each in a process of its own, and print the ratios."""
    folder = Path(tempfile.mkdtemp(prefix="sdp-bench-train-"))
    try:
        figures = {case: _case(case, folder) for case in ("reference", "sdp", "pyarrow")}
        _print_ingest(figures)
        _print_loop(_case("loop", folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _print_ingest(figures: dict[str, dict[str, float]]) -> None:
    reference, plain = figures["reference"], figures["pyarrow"]
    rows = [
        (
            case,
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
    print(f"latents of {ROWS:,} rows into batches of {BATCH} (goals: 5 ×, 5 ×, a third)")
    print(table(rows, header), flush=True)


def _print_loop(figures: dict[str, float]) -> None:
    print(
        f"a step of the tiny model: bare {figures['bare_ms']:.1f} ms, ours {figures['ours_ms']:.1f} ms of CPU: "
        f"{figures['overhead']:+.1%} (goal: at most +3 %)",
        flush=True,
    )


def _case(case: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "scripts.bench.train", case, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


# --- readers ---------------------------------------------------------------------------------------------------------


def reference(folder: Path) -> dict[str, float]:
    """float32 tensors by Ray, read_parquet, iter_torch_batches, half."""
    import logging

    import ray
    import torch

    ray.init("local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    where = str(folder / "reference")

    def latents(batch: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(int(batch["id"][0]))
        return {"image_latents_256": rng.standard_normal((len(batch["id"]), 4, 32, 32), dtype=np.float32)}

    made = ray.data.range(ROWS, override_num_blocks=max(1, ROWS // PART_ROWS)).map_batches(latents, batch_size=1000)
    made.write_parquet(where, min_rows_per_file=PART_ROWS)

    def batches() -> Iterator[Any]:
        for batch in ray.data.read_parquet(where).iter_torch_batches(batch_size=BATCH, dtypes=torch.float32):
            yield batch["image_latents_256"].half()

    return _measured(batches, where)


def sdp(folder: Path) -> dict[str, float]:
    """fp16 bytes, by the direct reader."""
    from sdp.datasets.manifest import open_dataset
    from sdp.storage import open_storage
    from sdp.train.data.direct import DirectReader
    from sdp.train.data.latents import open_latents
    from sdp.train.data.order import OrderShape

    where = str(folder / "latents")
    _write_latents(folder, where)
    dataset = open_latents(open_dataset(open_storage(where)), 256)

    def batches() -> Iterator[Any]:
        reader = DirectReader(dataset, 0, OrderShape(), 0, 1)
        for batch in reader.batches(0, 0, BATCH):
            yield batch.latents[batch.weights > 0] if batch.weights[-1] == 0 else batch.latents

    return _measured(batches, where)


def pyarrow(folder: Path) -> dict[str, float]:
    """The same files, read by pyarrow in the consumer, in their own order: as little as can be done."""
    import pyarrow.parquet as pq
    import torch

    where = str(folder / "latents")

    def batches() -> Iterator[Any]:
        for part in sorted(Path(where, "parts").iterdir()):
            for some in pq.ParquetFile(part, memory_map=True).iter_batches(BATCH, columns=["latents_256"]):
                column = some["latents_256"]
                flat = np.frombuffer(column.buffers()[1], np.float16)[column.offset * 4096 :][: len(column) * 4096]
                yield torch.from_numpy(flat.copy()).view(-1, 4, 32, 32)

    return _measured(batches, where)


def _measured(batches: Callable[[], Iterator[Any]], where: str) -> dict[str, float]:
    for file in Path(where).rglob("*.parquet"):
        file.read_bytes()  # into the page cache
    cpu, start, first, rows = _cpu_of_tree(), time.perf_counter(), 0.0, 0
    for batch in batches():
        first = first or time.perf_counter() - start
        rows += len(batch)
    seconds, cpu = time.perf_counter() - start, _cpu_of_tree() - cpu
    assert rows == ROWS, rows
    return {"rows_per_s": rows / seconds, "rows_per_cpu_s": rows / cpu, "first_s": first}


def _cpu_of_tree() -> float:
    """CPU seconds of this process and all below it, the ended ones included."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile: its parent has its time
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    total, ahead = 0, [os.getpid()]
    while ahead:
        pid = ahead.pop()
        total += ticks.get(pid, 0)
        ahead += [child for child, parent in parents.items() if parent == pid]
    return total / _TICK


def _write_latents(folder: Path, where: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sdp.datasets.manifest import finish
    from sdp.datasets.outcomes import WRITTEN, Outcome, account_table
    from sdp.datasets.output import Head, open_output
    from sdp.datasets.parts import Layout, write_part
    from sdp.datasets.source import freeze_source
    from sdp.storage import list_source, open_storage

    pq.write_table(pa.table({"url": pa.nulls(ROWS, pa.string())}), folder / "source.parquet")
    output = open_output(open_storage(where), Head("latents", PART_ROWS, False, {}))
    output = freeze_source(output, list_source(str(folder / "source.parquet")), ["url"])
    for work in output.pending():
        rows = np.arange(work.unit.start, work.unit.stop)
        rng = np.random.default_rng(work.unit.number)
        latents = rng.standard_normal((len(rows), 4096), dtype=np.float32).astype(np.float16)
        tokens = rng.integers(0, 49408, (len(rows), 77)).astype(np.uint16)
        columns = [pa.array(rows), *(_fixed(values) for values in (latents, tokens))]
        fields = [
            pa.field("row", pa.int64(), nullable=False),
            pa.field(
                "latents_256", pa.binary(8192), nullable=False, metadata={"shape": "[4,32,32]", "dtype": "float16"}
            ),
            pa.field("token_ids", pa.binary(154), nullable=False, metadata={"shape": "[77]", "dtype": "uint16"}),
        ]
        account = account_table([Outcome(row, WRITTEN) for row in rows.tolist()])
        part = pa.table(columns, schema=pa.schema(fields))
        write_part(output.storage, "latents", work, part, account, layout=Layout(row_group_rows=1024))
    finish(output)


def _fixed(values: Any) -> Any:
    import pyarrow as pa

    width = values.shape[1] * values.itemsize
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(values), [None, pa.py_buffer(values)])


# --- the loop --------------------------------------------------------------------------------------------------------


def loop(folder: Path, steps: int = 40) -> dict[str, float]:
    """CPU milliseconds of a step of the tiny model at batch 32, in our loop and in a bare one."""
    import torch

    from sdp.config import parse
    from sdp.model.sources import resolve
    from sdp.storage import open_storage
    from sdp.train.assemble import make_conditioning, make_objective, make_unet
    from sdp.train.checkpoint import Checkpointer
    from sdp.train.run_folder import RunFolder
    from sdp.train.trainer import Ingredients, Trainer
    from sdp.train.world import World

    torch.set_num_threads(1)
    config = parse(
        "train",
        {
            "source": {"uri": "unused"},
            "output": {"uri": str(folder / "run")},
            "model": {"source": "builtin:tiny"},
            "data": {"resolution": 64, "batch_size": 32},
            "precision": "fp32",
            "max_steps": steps,
            "optimizer": {"clip_norm": 1.0},
        },
    )
    model, world = resolve(config.model.source), World()
    batch = _batch(32)

    class Same:
        """The same batch again and again."""

        rows = 10**9

        def batches(self, *_: int) -> Iterator[Any]:
            while True:
                yield batch

    trainer = Trainer(
        Ingredients(
            config=config,
            world=world,
            unet=make_unet(config, model, world),
            objective=make_objective(config, model, world),
            conditioning=make_conditioning(config, model, world),
            reader=Same(),
            checkpointer=Checkpointer(RunFolder(open_storage(config.output.uri)), world, {}),
        )
    )
    bare = _bare_step(config, model, batch)
    ours_s, bare_s = [], []
    for number in range(steps):
        for step, seconds in (
            (bare, bare_s),
            (lambda: trainer._step(batch, time.perf_counter()), ours_s),
        ):
            start = time.process_time()
            step()
            if number >= 5:
                seconds.append(time.process_time() - start)
    # The middle half: a busy machine's outliers tell nothing of the code.
    ours_ms, bare_ms = (1000 * statistics.median(seconds) for seconds in (ours_s, bare_s))
    return {"ours_ms": ours_ms, "bare_ms": bare_ms, "overhead": ours_ms / bare_ms - 1}


def _batch(size: int) -> Any:
    import torch

    from sdp.train.data.batch import Batch

    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(size, 4, 8, 8, generator=generator).half()
    tokens = torch.randint(0, 500, (size, 77), generator=generator).to(torch.int32)
    return Batch(torch.arange(size), torch.ones(size), latents, tokens)


def _bare_step(config: Any, model: Any, batch: Any) -> Callable[[], None]:
    """What everybody writes: diffusers' own training step, with clipping and a moving average."""
    import torch
    import torch.nn.functional as F
    from diffusers import DDPMScheduler

    from sdp.model import load
    from sdp.train.assemble import make_unet
    from sdp.train.world import World

    unet = make_unet(config, model, World())
    encoder = load.load_text_encoder(model.path)
    empty = encoder(torch.zeros(1, 77, dtype=torch.int64)).last_hidden_state
    scheduler = DDPMScheduler.from_pretrained(model.path / "scheduler")
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, fused=True)
    average = [parameter.detach().clone() for parameter in unet.parameters()]
    weights = list(unet.parameters())

    def step() -> None:
        latents = batch.latents.float()
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 1000, (len(latents),))
        with torch.no_grad():
            text = encoder(batch.token_ids.long()).last_hidden_state
            text = torch.where(torch.rand(len(latents), 1, 1) < 0.1, empty, text)
        predicted = unet(scheduler.add_noise(latents, noise, timesteps), timesteps, text).sample
        loss = F.mse_loss(predicted, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(average, weights, 1e-4)
        loss.item()

    return step


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    cases = {"reference": reference, "sdp": sdp, "pyarrow": pyarrow, "loop": loop}
    print(json.dumps(cases[sys.argv[1]](Path(sys.argv[2]))))
