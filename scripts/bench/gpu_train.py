"""On GPUs: the 866 M U-Net of Stable Diffusion 2 with random weights: img/s, MFU, memory, and a step's phases and kernels.

    python -m scripts.bench.gpu_train                                     every GPU of this machine, all cases
    python -m scripts.bench.gpu_train --resolutions 512 --strategies fsdp --compile on --batch 32 --steps 50
    python -m scripts.bench.gpu_train --compile on --without ,search      all in use, then without cuDNN's search
    python -m scripts.bench.gpu_train --checkpoint --batch 64             how long a checkpoint stalls, and a resume
    python -m scripts.bench.gpu_train --tiny                              the same code with the tiny model, on a CPU

The loop is that of `sdp train`, with the text encoder beside the U-Net as for a dataset with token ids; batches are
already in pinned memory. Each case runs in separate processes, one per GPU, and one that fails stops no other. Without
--batch, halving finds the largest power of two that fits, from what `sdp plan` expects. MFU counts only the U-Net's
arithmetic, against the dense bf16 peak of sdp/hardware.py.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from scripts.bench._cases import hand_over, sized, take_stdout
from scripts.bench._training import (
    MODELS,
    SWITCHES,
    environment,
    make_config,
    make_model,
    make_trainer,
    operations,
    predicted,
)
from sdp.console import size, table
from sdp.errors import OutOfMemory, SdpError, one_line

LARGEST = {256: 256, 512: 64}
"""The first batch per GPU to try on a GPU that the catalogue does not know, by resolution."""
OUT_OF_MEMORY = 3
CASE_TIMEOUT_S = 1800
RESUMED_STEPS = 5
"""Steps after a resume whose losses are compared with those of the run that went on."""


def main(arguments: Sequence[str]) -> int:
    """Run the cases one after the other, and print a line after each; return 1 if none could be measured."""
    options = _arguments(arguments)
    gpus = _gpus()
    if not gpus and not options.tiny:
        print("gpu_train: no GPU here, nothing measured; it needs one, --tiny tries the same code on a CPU")
        return 0
    workers = options.workers or (len(gpus) if not options.tiny else 1)
    print(
        f"gpu_train: {workers} x {gpus[0] if gpus else 'CPU'}, {options.steps} steps after {options.warm}", flush=True
    )
    rows, measured = [], False
    for case in cases(options, workers):
        resolution, kind, without = case["resolution"], case["kind"], case["without"]
        parts = [f"{resolution} px", kind]
        if options.model != "sd2":
            parts.insert(0, options.model)
        if case["compile"]:
            parts.append("compiled")
        if options.lora:
            parts.append(f"LoRA of rank {options.lora}")
        if without:
            parts.append(f"without {without}")
        if options.micro_batches > 1:
            parts.append(f"{options.micro_batches} micro-batches")
        name = ", ".join(parts)
        try:
            figures = _measure(case, options.batch, options.largest, gpus)
            hand_over(name, **figures)
            cells, measured = _cells(figures), True
        except SdpError as error:
            hand_over(name, reason=one_line(error, 300))
            cells = ("out of memory" if isinstance(error, OutOfMemory) else "failed", *("-",) * 6)
        rows.append((str(resolution), kind, "on" if case["compile"] else "off", without or "-", *cells))
        print(f"  {' '.join(rows[-1])}", flush=True)
    header = (
        "px", "strategy", "compile", "without", "batch a GPU", "img/s", "img/s a GPU", "MFU", "peak memory",
        "step ms", "first s",
    )  # fmt: skip
    print(table(rows, header))
    return 0 if measured else 1


def cases(options: argparse.Namespace, workers: int) -> Iterator[dict[str, Any]]:
    """Yield the cases that the command line asks for."""
    for resolution, kind, compiled, without in product(
        options.resolutions, options.strategies, options.compile, options.without
    ):
        yield {
            "resolution": resolution, "kind": kind, "compile": compiled == "on", "workers": workers,
            "warm": options.warm, "steps": options.steps, "shard": options.shard, "tiny": options.tiny,
            "without": without, "lora": options.lora, "model": options.model,
            "activation_checkpointing": options.activation_checkpointing, "micro_batches": options.micro_batches,
            "checkpoint": options.checkpoint, "room": options.room,
        }  # fmt: skip


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="gpu_train")
    parser.add_argument("--model", choices=MODELS, default="sd2")
    parser.add_argument("--resolutions", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--strategies", type=words, default=["ddp", "fsdp"])
    parser.add_argument("--compile", type=words, default=["off", "on"])
    parser.add_argument("--without", type=words, default=[""], help=f"nothing, or one of {', '.join(SWITCHES)}")
    parser.add_argument("--batch", type=int, help="per GPU (default: the largest power of two that fits)")
    parser.add_argument("--largest", type=int, default=1 << 30, help="without --batch, the largest to begin with")
    parser.add_argument("--micro-batches", type=int, default=1, help="equal parts that a GPU cuts its batch into")
    parser.add_argument("--lora", type=int, help="train matrices of this rank instead of the U-Net")
    parser.add_argument("--workers", type=int, help="default: one per GPU")
    parser.add_argument("--warm", type=int, default=sized(10, 1))
    parser.add_argument("--steps", type=int, default=sized(30, 2))
    parser.add_argument("--shard", default="shard_grad_op")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="write a checkpoint, and resume from it")
    parser.add_argument("--tiny", action="store_true", default=sized(False, True), help="the tiny model, without a GPU")
    parser.add_argument("--room", type=int, default=int(os.environ.get("SDP_BENCH_ROOM", "0")), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.without) - {"", *SWITCHES}:
        parser.error(f"--without: expected nothing or one of {', '.join(SWITCHES)}, got {', '.join(sorted(unknown))}")
    if options.tiny:
        options.model = "sd2"
        options.resolutions, options.batch = [64], options.batch and min(options.batch, 4)
    options.resolutions = options.resolutions or [256, 512]
    return options


def _gpus() -> list[str]:
    """Return the names of the GPUs, from another process, so that this one takes no GPU memory."""
    code = "import torch; print(*(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())), sep='\\n')"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
    return [line for line in names.splitlines() if line]


def _measure(case: dict[str, Any], batch: int | None, largest: int, gpus: Sequence[str]) -> dict[str, Any]:
    """Run a case at the largest batch that fits and is wanted, or at the given one; return its figures."""
    size = batch or min(largest, 4 if case["tiny"] else _first_batch(case, gpus))
    while True:
        try:
            return run({**case, "batch": size})
        except OutOfMemory:
            if batch or size <= case["micro_batches"]:
                raise
            size //= 2


def _first_batch(case: dict[str, Any], gpus: Sequence[str]) -> int:
    """Return the batch whose micro-batches are the largest power of two that fits into all of the memory, as `sdp plan` expects."""
    from sdp.hardware import gpu_by_product

    gpu = gpu_by_product(gpus[0])
    if gpu is None:
        return LARGEST.get(case["resolution"], 32)
    parts = case["micro_batches"]
    config = make_config({**case, "batch": parts, "folder": "unused"}, case["workers"])
    return parts << max(1, predicted(config, case["workers"], gpu, case["model"]).largest(1.0)).bit_length() - 1


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case's processes; return its figures. Raise OutOfMemory, or an SdpError for another failure."""
    command = [sys.executable, "-m", "scripts.bench.gpu_train", "worker"]
    with tempfile.TemporaryDirectory(prefix="sdp-bench-gpu-") as folder, ExitStack() as stack:
        errors = [stack.enter_context(Path(folder, f"{n}.err").open("w+b")) for n in range(case["workers"])]
        processes = [
            subprocess.Popen(
                [*command, json.dumps({**case, "rank": rank, "folder": folder})],
                stdout=subprocess.PIPE,
                stderr=error,
                env=environment(case),
            )
            for rank, error in enumerate(errors)
        ]
        deadline = time.monotonic() + CASE_TIMEOUT_S
        try:
            # If one fails, the others wait for it for ever.
            while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
                if time.monotonic() > deadline:
                    raise SdpError(f"not done after {CASE_TIMEOUT_S} s")
                time.sleep(0.1)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        output = processes[0].stdout.read().decode() if processes[0].stdout else ""
        if any(codes):
            full = OUT_OF_MEMORY in codes
            failed = codes.index(OUT_OF_MEMORY if full else next(filter(None, codes)))
            text = Path(folder, f"{failed}.err").read_text(encoding="utf-8", errors="replace").strip()
            print("\n".join(text.splitlines()[-40:]), file=sys.stderr, flush=True)
            line = text.splitlines()[-1] if text else f"exit code {codes[failed]}"
            raise OutOfMemory(line) if full else SdpError(line)
    figures: dict[str, Any] = json.loads(output)
    return figures


def _cells(figures: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(figures["batch"]),
        f"{figures['per_s']:,.1f}",
        f"{figures['per_s'] / figures['workers']:,.1f}",
        f"{figures['mfu']:.1%}" if figures["mfu"] is not None else "-",
        size(figures["peak"]) if figures["peak"] else "-",
        f"{1000 * figures['step_s']:,.0f}",
        f"{figures['first_s']:.1f}",
    )


# --- one worker ------------------------------------------------------------------------------------------------------


class Done(Exception):
    """Ends a run without its last checkpoint."""


def worker(case: dict[str, Any]) -> int:
    """Train; print the figures on rank 0."""
    output = take_stdout()
    import torch.distributed as dist

    from sdp.device import choose_device, out_of_memory
    from sdp.train.world import World

    device = choose_device(case["rank"])
    cuda = device.type == "cuda"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.FileStore(str(Path(case["folder"]) / "store"), case["workers"]),
        rank=case["rank"],
        world_size=case["workers"],
        device_id=device if cuda else None,
    )
    world = World(case["rank"], case["workers"], device)
    try:
        figures = _train(case, world)
        if case.get("checkpoint"):
            gc.collect()
            figures |= _checkpoint(case, world)
    except Exception as error:
        if not out_of_memory(error):
            raise
        print(one_line(error, 300), file=sys.stderr, flush=True)
        os._exit(OUT_OF_MEMORY)  # the others hang in a collective
    if world.is_main:
        print(json.dumps(figures), file=output, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _trainer(case: dict[str, Any], world: Any, callback: Any) -> Any:
    import torch

    from sdp.train.callbacks.garbage import CollectGarbage
    from sdp.train.callbacks.metrics import RecordMetrics

    folder = Path(case["folder"]) / f"model-{world.rank}"
    model = make_model(folder, tiny=case["tiny"], name=case["model"])
    trainer = make_trainer(case, model, world, [RecordMetrics(10), CollectGarbage(), callback])

    def stand_in(_: Any, inputs: tuple[Any, ...]) -> None:
        """Wait as for a GPU that is at work, or lack its memory."""
        time.sleep(case.get("wait_s", 0.0))
        if (room := case.get("room")) and len(inputs[0]) > room:
            raise torch.OutOfMemoryError(f"no room for {len(inputs[0])}")

    if case["tiny"]:
        trainer.networks.denoiser.register_forward_pre_hook(stand_in)
    return trainer


def _train(case: dict[str, Any], world: Any) -> dict[str, Any]:
    """Measure the steps after the warm-up, and count the kernels of one more."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from sdp import hardware
    from sdp.train.trainer import Callback

    cuda = world.device.type == "cuda"
    last = case["warm"] + case["steps"]
    times: list[float] = []
    phases: Counter[str] = Counter()
    profiler = profile(activities=[ProfilerActivity.CUDA]) if cuda else None

    class Watch(Callback):
        """Records times after the warm-up, and profiles the step after the last of them."""

        began = time.perf_counter()
        first = 0.0
        peak = 0

        def on_step(self, _trainer: Any, report: Any) -> None:
            self.first = self.first or time.perf_counter() - self.began
            if case["warm"] < report.step <= last:
                phases.update(report.parts)
            if report.step in (case["warm"], last, last + 1) and cuda:
                torch.cuda.synchronize()
            if report.step in (case["warm"], last):
                times.append(time.perf_counter())
            if report.step == case["warm"] and cuda:
                self.peak = torch.cuda.max_memory_reserved()
                torch.cuda.reset_peak_memory_stats()
            if report.step == last and profiler is not None:
                profiler.start()
            elif report.step >= last:
                raise Done

    watch = Watch()
    trainer = _trainer(case, world, watch)
    try:
        trainer.train()
    except Done:
        pass
    seconds = times[1] - times[0]
    per_s = case["steps"] * trainer.batch_size / seconds
    gpu = hardware.gpu_by_product(torch.cuda.get_device_name()) if cuda and not case["tiny"] else None
    counted = gpu is not None and world.is_main and not case.get("lora")  # LoRA leaves out a third
    per_sample = operations(case["model"], case["resolution"]) if counted else 0.0
    kernels = 0
    if profiler is not None:
        profiler.stop()
        work = [event.name for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
        kernels = sum(not name.startswith(("Memcpy", "Memset")) for name in work)
    return {
        "batch": case["batch"],
        "workers": world.size,
        "per_s": per_s,
        "mfu": hardware.mfu(per_sample * per_s, 1.0, gpu, world.size) if counted else None,
        "peak": torch.cuda.max_memory_allocated() if cuda else 0,
        "held": max(watch.peak, torch.cuda.max_memory_reserved()) if cuda else 0,
        "plan": predicted(trainer.config, world.size, gpu, case["model"]).total if gpu else 0,
        "phases": {name: 1000 * spent / case["steps"] for name, spent in phases.items()},
        "kernels": kernels,
        "step_s": seconds / case["steps"],
        "first_s": watch.first,
    }


def _checkpoint(case: dict[str, Any], world: Any) -> dict[str, Any]:
    """Measure how a checkpoint slows training down, and whether a resumed run repeats the steps after it."""
    import torch

    from sdp.train.trainer import Callback

    losses: dict[int, float] = {}

    class Save(Callback):
        """Saves after the warm-up; ends the run some steps after the checkpoint is complete."""

        saved: Any = None

        def __init__(self) -> None:
            self.steps: dict[bool, list[float]] = {False: [], True: []}

        def on_step(self, trainer: Any, report: Any) -> None:
            losses[report.step] = report.loss
            if report.step > case["warm"] // 2:
                self.steps[trainer.checkpointer.in_progress].append(report.seconds)
            trainer.save_wanted = report.step == case["warm"]
            if self.saved and report.step >= case["warm"] + max(case["steps"], RESUMED_STEPS):
                raise Done

        def on_checkpoint(self, _trainer: Any, saved: Any) -> None:
            self.saved = saved

    class Resume(Callback):
        """Compares the steps after a resume."""

        began = time.perf_counter()
        load_s = off = 0.0

        def on_start(self, trainer: Any) -> None:
            assert trainer.state.step == case["warm"], f"resumed from step {trainer.state.step}"
            self.load_s = time.perf_counter() - self.began

        def on_step(self, _trainer: Any, report: Any) -> None:
            self.off = max(self.off, abs(report.loss / losses[report.step] - 1))
            if report.step == case["warm"] + RESUMED_STEPS:
                raise Done

    case = {**case, "folder": str(Path(case["folder"]) / "checkpoint")}
    save = Save()
    for callback in (save, resume := Resume()):
        trainer = _trainer(case, world, callback)
        resume.began = time.perf_counter()
        try:
            trainer.train()
        except Done:
            pass
        state = sum(tensor.numel() * tensor.itemsize for tensor in trainer.tensors().values())
        del trainer
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    free, writing = (sum(seconds) / max(1, len(seconds)) for seconds in (save.steps[False], save.steps[True]))
    return {
        "checkpoint": f"{size(state)} a worker stall {save.saved.seconds:.2f} s and are written in "
        f"{save.saved.whole_s:.1f} s, in which a step takes {writing / free:.2f} times as long; resumed in "
        f"{resume.load_s:.1f} s, {RESUMED_STEPS} losses at most {resume.off:.1e} off"
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        sys.exit(worker(json.loads(sys.argv[2])))
    sys.exit(main(sys.argv[1:]))
