"""On a cluster: the tables of the Ray team's article on Stable Diffusion v2 (1, 3.a, 3.b, online from 2), with sdp's figures.

    python -m scripts.bench.tables --images s3://b/images --latents s3://b/latents --model s3://b/sd2 --work s3://b/bench \
        --workers 32 --accelerator A100 --encoders 40 --encoder-accelerator A10G --efa
    python -m scripts.bench.tables --tiny --images .demo/images --latents .demo/latents        the same code on two cores

Each case runs `sdp train` for a few steps as a separate Ray job; its rate comes from the metrics of the steps after the
warm-up. The cluster is that of RAY_ADDRESS. The article used 32 A100-80G (1 and 3.b) and 16 A100-40G (3.a), so compare
the rate of one GPU and the gain of each step. --efa says that the cluster has EFA: as in the article, the baseline then
does not use it (NCCL_NET=Socket), and a step adds it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

from scripts.bench._cases import take_stdout
from sdp.console import table

TIMEOUT_S = 3600
ARTICLE: dict[str, dict[int, float]] = {
    "collocated": {256: 2805 / 32, 512: 812 / 32},
    "offline": {256: 4068 / 32, 512: 1029 / 32},
    "online": {256: 4075 / 32},
}
"""The article's images per second of a GPU, with DDP over EFA."""
STEPS_3A: dict[str, dict[int, float]] = {
    "ddp": {256: 1075 / 16, 512: 264 / 16},
    "+ efa": {256: 1269 / 16, 512: 474 / 16},
    "+ fsdp": {256: 1925 / 16, 512: 667 / 16},
    "+ compile": {256: 2910 / 16, 512: 805 / 16},
}
STEPS_3B: dict[str, dict[int, float]] = {
    "ddp": {256: 1573 / 32, 512: 389 / 32},
    "+ efa": {256: 4068 / 32, 512: 1029 / 32},
    "+ fsdp": {256: 5014 / 32, 512: 1168 / 32},
    "+ compile": {256: 5908 / 32, 512: 1349 / 32},
}
BATCH = {256: 128, 512: 32}
"""The batch of a GPU, as in the article."""


@dataclass(frozen=True)
class Case:
    """A run of `sdp train`."""

    mode: str
    resolution: int
    strategy: str = "ddp"
    compile: bool = False
    efa: bool = True
    """Use EFA if the cluster has it."""


def cases_of(mode_names: Sequence[str], resolution: int, *, efa: bool) -> dict[str, Case]:
    """Return the case for each line of both tables; two lines may share a case."""
    steps = {
        "ddp": Case("offline", resolution, efa=not efa),
        "+ efa": Case("offline", resolution),
        "+ fsdp": Case("offline", resolution, "fsdp"),
        "+ compile": Case("offline", resolution, "fsdp", compile=True),
    }
    if not efa:
        del steps["+ efa"]
    lines = {mode: Case(mode, resolution) for mode in ARTICLE} | steps
    return {name: case for name, case in lines.items() if not mode_names or name.removeprefix("+ ") in mode_names}


def main(arguments: Sequence[str]) -> int:
    """Run the cases one after the other, and print the tables."""
    options = _arguments(arguments)
    if not options.images or not options.latents:
        print("tables: no --images and --latents (what sdp download and sdp process wrote), nothing measured")
        return 0
    measured: dict[Case, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="sdp-bench-tables-") as folder:
        work = options.work or folder
        for resolution in options.resolutions:
            for name, case in cases_of(options.only, resolution, efa=options.efa).items():
                if case not in measured:
                    rate = measured[case] = _measure(options, case, work)
                    print(
                        f"  {resolution} px, {name}: {'failed' if rate is None else f'{rate:,.1f} img/s'}", flush=True
                    )
    for resolution in options.resolutions:
        rates = {name: measured[case] for name, case in cases_of(options.only, resolution, efa=options.efa).items()}
        print(f"\n{resolution} px, {options.workers} workers\n{report(rates, resolution, options.workers)}")
    return 1 if None in measured.values() else 0


def report(rates: Mapping[str, float | None], resolution: int, workers: int) -> str:
    """Return both tables at one resolution: images per second in total, per GPU, and relative to the first line."""

    def cells(name: str, first: str, articles: Sequence[Mapping[str, Mapping[int, float]]]) -> list[str]:
        rate, base = rates.get(name), rates.get(first)
        row = [name, *["-"] * 3]
        if rate:
            row = [name, f"{rate:,.1f}", f"{rate / workers:,.1f}", f"{rate / base:.2f}×" if base else "-"]
        for article in articles:
            a_gpu = article[name].get(resolution)
            row += [f"{a_gpu:,.1f}", f"{a_gpu / article[first][resolution]:.2f}×"] if a_gpu else ["-", "-"]
        return row

    modes = [cells(name, "collocated", [ARTICLE]) for name in ARTICLE if name in rates]
    steps = [cells(name, "ddp", [STEPS_3A, STEPS_3B]) for name in STEPS_3B if name in rates]
    header = ("sdp img/s", "per GPU", "")
    tables = []
    if modes:
        tables.append(table(modes, ("encoding", *header, "article per GPU", " ")))
    if steps:
        tables.append(table(steps, ("strategy", *header, "article 3.a per GPU", " ", "article 3.b per GPU", "  ")))
    return "\n\n".join(tables)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="tables")
    parser.add_argument("--images", help="an images dataset, for collocated and online")
    parser.add_argument("--latents", help="a latents dataset with all resolutions, for the others")
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--work", help="a URI that the workers can write to (default: a folder on this machine)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--accelerator", help="the Ray accelerator type of the trainers")
    parser.add_argument("--encoders", type=int, default=1)
    parser.add_argument("--encoder-accelerator")
    parser.add_argument("--resolutions", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--batch", type=int, help="per GPU (default: 128 at 256 px and 32 at 512, as in the article)")
    parser.add_argument("--warm", type=int, default=30, help="steps before those that are measured")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--efa", action="store_true", help="the cluster has EFA")
    parser.add_argument(
        "--only", type=words, default=[], help="any of collocated, offline, online, ddp, efa, fsdp, compile"
    )
    parser.add_argument("--tiny", action="store_true", help="the tiny model at 64 px in fp32")
    options = parser.parse_args(arguments)
    options.resolutions = options.resolutions or ([64] if options.tiny else [256, 512])
    return options


def _measure(options: argparse.Namespace, case: Case, work: str) -> float | None:
    """Run a case in a separate process; return its rate, or print why it failed and return None."""
    run = f"{work.rstrip('/')}/{case.mode}-{case.resolution}-{uuid4().hex[:8]}"
    argument = {
        "settings": settings_of(options, case, run),
        "warm": options.warm,
        "socket": options.efa and not case.efa,
    }
    command = [sys.executable, "-m", "scripts.bench.tables", "case", json.dumps(argument)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        print(f"  {asdict(case)}: exit code {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return None
    return float(done.stdout)


def settings_of(options: argparse.Namespace, case: Case, run: str) -> list[str]:
    """Return the settings of `sdp train` for a case."""
    last = options.warm + options.steps
    settings = {
        "source.uri": options.latents if case.mode == "offline" else options.images,
        "output.uri": run,
        "model.source": options.model,
        "data.mode": case.mode,
        "data.resolution": case.resolution,
        "data.batch_size": options.batch or BATCH.get(case.resolution, 8),
        "data.global_batch_size": "null",
        "scaling.num_workers": options.workers,
        "scaling.accelerator": options.accelerator or "null",
        "strategy.kind": case.strategy,
        "strategy.compile": str(case.compile).lower(),
        "encode.num_workers": options.encoders,
        "encode.accelerator": options.encoder_accelerator or "null",
        "precision": "fp32" if options.tiny else "bf16",
        "max_steps": last,
        "checkpoint.every_steps": last,
        "log.every_steps": 1,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def rate_of(lines: Sequence[Mapping[str, Any]], warm: int) -> float:
    """Return the images per second of the steps after the warm-up."""
    steps = [line for line in lines if line["step"] > warm]
    seconds = sum(line["step_seconds"] for line in steps)
    return sum(line["samples_per_s"] * line["step_seconds"] for line in steps) / seconds


def _case(argument: dict[str, Any]) -> None:
    import ray

    from sdp.config import load
    from sdp.storage import open_storage
    from sdp.train import job
    from sdp.train.run_folder import RunFolder

    if argument["socket"]:  # for this job's workers, whatever the pods' own environment sets
        ray.init(
            address=os.environ.get("RAY_ADDRESS", "local"),
            runtime_env={"env_vars": {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}},
            log_to_driver=False,
        )
    config, output = load("train", None, argument["settings"]), take_stdout()
    job.run(config)
    metrics = RunFolder(open_storage(config.output.uri, config.storage.options())).metrics()
    print(rate_of(metrics, argument["warm"]), file=output, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        _case(json.loads(sys.argv[2]))
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
