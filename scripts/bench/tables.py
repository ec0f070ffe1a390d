"""On a cluster: the tables of the Ray team's article on Stable Diffusion v2 (1, 3.a, 3.b, online from 2), ours beside theirs.

    python -m scripts.bench.tables --images s3://b/images --latents s3://b/latents --model s3://b/sd2 --work s3://b/bench \
        --workers 32 --accelerator A100 --encoders 40 --encoder-accelerator A10G --efa
    python -m scripts.bench.tables --tiny --images .demo/images --latents .demo/latents        the same code on two cores

Each case is `sdp train` itself for a few steps, a Ray job of its own, and its rate is what its metrics tell of the
steps after the first. The cluster is the one of RAY_ADDRESS. Theirs ran on 32 A100-80G (1 and 3.b) and 16 A100-40G (3.a),
so what compares is the rate of one GPU and what each step brings. --efa says that the cluster has EFA: it is left out of
the baseline then (NCCL_NET=Socket), as theirs was, and makes a step of its own.
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

from sdp.console import table

TIMEOUT_S = 3600
THEIRS: dict[str, dict[int, float]] = {
    "collocated": {256: 2805 / 32, 512: 812 / 32},
    "offline": {256: 4068 / 32, 512: 1029 / 32},
    "online": {256: 4075 / 32},
}
"""Images per second of a GPU, DDP over EFA."""
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
"""Of a GPU, as theirs."""


@dataclass(frozen=True)
class Case:
    """One run."""

    mode: str
    resolution: int
    strategy: str = "ddp"
    compile: bool = False
    efa: bool = True
    """Over EFA, if there is any."""


def cases_of(mode_names: Sequence[str], resolution: int, *, efa: bool) -> dict[str, Case]:
    """The lines of both tables -> what is run for them; two lines may be one run."""
    steps = {
        "ddp": Case("offline", resolution, efa=not efa),
        "+ efa": Case("offline", resolution),
        "+ fsdp": Case("offline", resolution, "fsdp"),
        "+ compile": Case("offline", resolution, "fsdp", compile=True),
    }
    if not efa:
        del steps["+ efa"]
    lines = {mode: Case(mode, resolution) for mode in THEIRS} | steps
    return {name: case for name, case in lines.items() if not mode_names or name.removeprefix("+ ") in mode_names}


def main(arguments: Sequence[str]) -> int:
    """Run the cases one after the other, and print the tables."""
    given = _arguments(arguments)
    if not given.images or not given.latents:
        print("tables: no --images and --latents (what sdp download and sdp process wrote), nothing measured")
        return 0
    found: dict[Case, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="sdp-bench-tables-") as folder:
        work = given.work or folder
        for resolution in given.resolutions:
            for name, case in cases_of(given.only, resolution, efa=given.efa).items():
                if case not in found:
                    found[case] = _measure(given, case, work)
                    told = "failed" if (rate := found[case]) is None else f"{rate:,.1f} img/s"
                    print(f"  {resolution} px, {name}: {told}", flush=True)
    for resolution in given.resolutions:
        rates = {name: found[case] for name, case in cases_of(given.only, resolution, efa=given.efa).items()}
        print(f"\n{resolution} px, {given.workers} workers\n{report(rates, resolution, given.workers)}")
    return 1 if None in found.values() else 0


def report(rates: Mapping[str, float | None], resolution: int, workers: int) -> str:
    """Both tables at one resolution: images per second of all, of one GPU, and against the first line."""

    def cells(name: str, first: str, theirs: Sequence[Mapping[str, Mapping[int, float]]]) -> list[str]:
        rate, base = rates.get(name), rates.get(first)
        ours = ["-"] * 3
        if rate:
            ours = [f"{rate:,.1f}", f"{rate / workers:,.1f}", f"{rate / base:.2f}×" if base else "-"]
        for article in theirs:
            a_gpu = article[name].get(resolution)
            ours += [f"{a_gpu:,.1f}", f"{a_gpu / article[first][resolution]:.2f}×"] if a_gpu else ["-", "-"]
        return [name, *ours]

    modes = [cells(name, "collocated", [THEIRS]) for name in THEIRS if name in rates]
    steps = [cells(name, "ddp", [STEPS_3A, STEPS_3B]) for name in STEPS_3B if name in rates]
    ours = ("ours img/s", "a GPU", "")
    told = []
    if modes:
        told.append(table(modes, ("where it encodes", *ours, "theirs a GPU", " ")))
    if steps:
        told.append(table(steps, ("strategy", *ours, "theirs 3.a a GPU", " ", "theirs 3.b a GPU", "  ")))
    return "\n\n".join(told)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="tables")
    parser.add_argument("--images", help="an images dataset, for collocated and online")
    parser.add_argument("--latents", help="a latents dataset with all resolutions, for the others")
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--work", help="a URI that the workers can write to; else a folder of this machine")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--accelerator", help="the Ray accelerator type of the trainers")
    parser.add_argument("--encoders", type=int, default=1)
    parser.add_argument("--encoder-accelerator")
    parser.add_argument("--resolutions", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--batch", type=int, help="of a GPU; else 128 at 256 px and 32 at 512, as theirs")
    parser.add_argument("--warm", type=int, default=30, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--efa", action="store_true", help="the cluster has EFA")
    parser.add_argument(
        "--only", type=words, default=[], help="of collocated, offline, online, ddp, efa, fsdp, compile"
    )
    parser.add_argument("--tiny", action="store_true", help="the tiny model at 64 px in fp32")
    given = parser.parse_args(arguments)
    given.resolutions = given.resolutions or ([64] if given.tiny else [256, 512])
    return given


def _measure(given: argparse.Namespace, case: Case, work: str) -> float | None:
    """A case, in a process of its own; None, and why, where it failed."""
    run = f"{work.rstrip('/')}/{case.mode}-{case.resolution}-{uuid4().hex[:8]}"
    told = {"settings": settings_of(given, case, run), "warm": given.warm, "socket": given.efa and not case.efa}
    command = [sys.executable, "-m", "scripts.bench.tables", "case", json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        print(f"  {asdict(case)}: exit code {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return None
    return float(done.stdout.splitlines()[-1])


def settings_of(given: argparse.Namespace, case: Case, run: str) -> list[str]:
    """What `sdp train` is told."""
    last = given.warm + given.steps
    settings = {
        "source.uri": given.latents if case.mode == "offline" else given.images,
        "output.uri": run,
        "model.source": given.model,
        "data.mode": case.mode,
        "data.resolution": case.resolution,
        "data.batch_size": given.batch or BATCH.get(case.resolution, 8),
        "scaling.num_workers": given.workers,
        "scaling.accelerator": given.accelerator or "null",
        "strategy.kind": case.strategy,
        "strategy.compile": str(case.compile).lower(),
        "encode.num_workers": given.encoders,
        "encode.accelerator": given.encoder_accelerator or "null",
        "precision": "fp32" if given.tiny else "bf16",
        "max_steps": last,
        "checkpoint.every_steps": last,
        "log.every_steps": 1,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def rate_of(lines: Sequence[Mapping[str, Any]], warm: int) -> float:
    """Images per second of the steps after the first ones."""
    steps = [line for line in lines if line["step"] > warm]
    seconds = sum(line["step_seconds"] for line in steps)
    return sum(line["samples_per_s"] * line["step_seconds"] for line in steps) / seconds


def _case(told: dict[str, Any]) -> None:
    import ray

    from sdp.config import load
    from sdp.storage import open_storage
    from sdp.train import job
    from sdp.train.run_folder import RunFolder

    if told["socket"]:  # for the workers that this job has, whatever the pods' own environment says
        ray.init(
            address=os.environ.get("RAY_ADDRESS", "local"),
            runtime_env={"env_vars": {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}},
            log_to_driver=False,
        )
    config = load("train", None, told["settings"])
    job.run(config)
    print(rate_of(RunFolder(open_storage(config.output.uri, config.storage.options())).metrics(), told["warm"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        _case(json.loads(sys.argv[2]))
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
