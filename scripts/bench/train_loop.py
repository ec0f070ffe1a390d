"""Overhead of the training loop over a bare PyTorch step, and of a checkpoint over a synchronous save.

    python -m scripts.bench.train_loop          (STEPS=60 PARAMETERS=20: steps, and millions of weights)

Both are ratios of one run, on CPU with one thread. The loop is complete, with the callbacks of a job (metrics,
telemetry, watchdog), and alternates with a bare loop of the same step: diffusers' own training step
with clipping and a moving average. A checkpoint is saved as in training, and synchronously; to a local folder, and to
an S3 server on this machine if versitygw is installed (`make test` installs it).
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.bench import _cases
from scripts.bench._cases import run_case, sized
from sdp.console import size, table

STEPS = int(os.environ.get("STEPS", sized("60", "8")))
PARAMETERS = float(os.environ.get("PARAMETERS", sized("20", "1")))
BATCH = 32
WARM = 5
SAVES = sized(5, 1)


def main() -> int:
    """Run the cases, each in a process of its own, and print the ratios."""
    folder = Path(tempfile.mkdtemp(prefix="sdp-bench-loop-"))
    try:
        _print_loop(run_case("scripts.bench.train_loop", "loop", folder))
        _print_stalls(run_case("scripts.bench.train_loop", "stall", folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _print_loop(figures: dict[str, float]) -> None:
    print(
        f"a step of the tiny model at batch {BATCH}, medians of {STEPS - WARM}: bare {figures['bare_ms']:.2f} ms of CPU, "
        f"sdp {figures['sdp_ms']:.2f}: {figures['overhead']:+.2%} (goal: at most +3 %)",
        flush=True,
    )


def _print_stalls(cases: list[dict[str, Any]]) -> None:
    rows = [
        (
            c["storage"],
            size(c["bytes"]),
            f"{c['synchronous_s']:.3f}",
            f"{c['stall_s']:.3f}",
            f"{c['stall_s'] / c['synchronous_s']:.1%}",
            f"{c['stall_s'] / c['torch_s']:.1%}" if c["torch_s"] else "-",
            f"{c['step_s']:.3f}",
            f"{c['step_saving_s'] / c['step_s']:.2f}",
        )
        for c in cases
    ]
    header = (
        *("storage", "state", "synchronous s", "stall s", "stall share", "share of torch's own save"),
        *("step s", "step while writing, ×"),
    )
    print(f"a checkpoint, medians of {SAVES} (goal: a stall of at most 5 % of a synchronous save)")
    print(table(rows, header), flush=True)


# --- the loop --------------------------------------------------------------------------------------------------------


def loop(folder: Path) -> dict[str, float]:
    """Return the CPU milliseconds of a step in sdp's loop and in a bare one, which alternate."""
    import torch

    from sdp import telemetry
    from sdp.model.sources import resolve
    from sdp.train.callbacks.checkpoints import SaveCheckpoints
    from sdp.train.callbacks.garbage import CollectGarbage
    from sdp.train.callbacks.metrics import RecordMetrics
    from sdp.train.callbacks.telemetry import EmitMetrics
    from sdp.train.callbacks.watchdog import Watchdog
    from sdp.train.trainer import Callback

    torch.set_num_threads(1)
    config = _config(folder / "run", max_steps=STEPS)
    model, batch = resolve(config.model.source), _batch(BATCH, 8)
    bare = _bare_step(config, model, batch)
    sdp_s: list[float] = []
    bare_s: list[float] = []

    class Turns(Callback):
        """Takes a bare step after each of sdp's; the last callback, so that sdp's step includes all others."""

        since = 0.0

        def on_start(self, _trainer: Any) -> None:
            self.since = time.process_time()

        def on_step(self, _trainer: Any, report: Any) -> None:
            now = time.process_time()
            bare()
            after = time.process_time()
            if report.step > WARM:
                sdp_s.append(now - self.since)
                bare_s.append(after - now)
            self.since = time.process_time()

    emit = EmitMetrics(telemetry.begin(config.output.uri))
    callbacks = [SaveCheckpoints(10**9), RecordMetrics(10), emit, Watchdog(1800.0), CollectGarbage()]
    _trainer(config, model, batch, [*callbacks, Turns()]).train()
    # Medians, because outliers come from a busy machine and not from the code.
    sdp_ms, bare_ms = (1000 * statistics.median(seconds) for seconds in (sdp_s, bare_s))
    return {"sdp_ms": sdp_ms, "bare_ms": bare_ms, "overhead": sdp_ms / bare_ms - 1}


def _bare_step(config: Any, model: Any, batch: Any) -> Callable[[], None]:
    """Return the usual training step, without sdp."""
    import torch
    import torch.nn.functional as F
    from diffusers import DDPMScheduler

    from sdp.model import load
    from sdp.train.assemble import make_networks
    from sdp.train.world import World

    unet = make_networks(config, model, World()).denoiser
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


# --- checkpoints -----------------------------------------------------------------------------------------------------


def stall(folder: Path) -> list[dict[str, Any]]:
    """Return how long training pauses for a checkpoint, and how long a synchronous one takes."""
    from scripts import tools
    from tests.integration.s3 import running_gateway

    cases = [_stall("a local folder", str(folder / "runs"), folder)]
    if program := tools.find("versitygw"):
        with running_gateway(program, folder / "s3") as gateway:
            os.environ |= gateway.env
            cases.append(_stall("S3 on this machine", gateway.uri, folder))
    return cases


def _stall(name: str, where: str, folder: Path) -> dict[str, Any]:
    import torch

    from sdp.train.trainer import Callback

    torch.set_num_threads(1)
    model = _larger_model(folder / "model")
    batch = _batch(1, 8)
    synchronous: list[float] = []
    stalls: list[float] = []
    free: list[float] = []
    saving: list[float] = []

    class Synchronous(Callback):
        """Saves and waits a few times; the first one also allocates its memory."""

        def on_step(self, trainer: Any, _report: Any) -> None:
            start = time.perf_counter()
            trainer.save()
            trainer.checkpointer.finish()
            synchronous.append(time.perf_counter() - start)

    class Apart(Callback):
        """Saves checkpoints as a job does, each three steps after the previous one is complete."""

        free_steps = 0

        def on_step(self, trainer: Any, report: Any) -> None:
            if trainer.checkpointer.in_progress:
                saving.append(report.seconds)
                self.free_steps = 0
                return
            self.free_steps += 1
            if self.free_steps > 1:
                free.append(report.seconds)
            if self.free_steps == 3:
                trainer.save_wanted = True
            if len(stalls) > SAVES:
                trainer.stop.reason = "enough"

        def on_checkpoint(self, _trainer: Any, saved: Any) -> None:
            stalls.append(saved.seconds)

    config = _config(f"{where}/synchronous", max_steps=SAVES + 1, model=str(model.path), batch_size=1)
    waited = _trainer(config, model, batch, [Synchronous()])
    waited.train()
    count = sum(tensor.numel() * tensor.itemsize for tensor in waited.tensors().values())
    torch_s = None if "://" in where else _by_torch(waited.tensors(), folder / "torch")
    del waited
    config = _config(f"{where}/run", max_steps=10_000, model=str(model.path), batch_size=1)
    _trainer(config, model, batch, [Apart()]).train()
    return {
        "storage": name,
        "bytes": count,
        "torch_s": torch_s,
        "synchronous_s": statistics.median(synchronous[1:]),
        "stall_s": statistics.median(stalls[1 : SAVES + 1]),
        "step_s": statistics.mean(free[2:]),
        "step_saving_s": statistics.mean(saving),
    }


def _by_torch(tensors: dict[str, Any], folder: Path) -> float:
    """Return the seconds of torch.distributed.checkpoint's own synchronous save of the same tensors to a local folder."""
    from torch.distributed import checkpoint

    seconds = []
    for number in range(SAVES + 1):
        start = time.perf_counter()
        checkpoint.save(tensors, checkpoint_id=folder / str(number), no_dist=True)
        seconds.append(time.perf_counter() - start)
    shutil.rmtree(folder)
    return statistics.median(seconds[1:])


def _larger_model(folder: Path) -> Any:
    """Return the tiny model with a U-Net of about PARAMETERS million weights, so that saving takes measurable time."""
    import math

    from sdp.model.sources import resolve

    if not folder.exists():
        tiny = resolve("builtin:tiny").path
        shutil.copytree(tiny, folder)
        config = json.loads((tiny / "unet/config.json").read_text())
        groups = config["norm_num_groups"]
        wide = max(1, round(math.sqrt(PARAMETERS / 60) * 640 / 64)) * 64
        config["block_out_channels"] = [max(groups, wide // 2), *([wide] * (len(config["block_out_channels"]) - 1))]
        (folder / "unet/config.json").write_text(json.dumps(config))
        (folder / "unet/diffusion_pytorch_model.safetensors").unlink()
    return resolve(str(folder))


# --- both ------------------------------------------------------------------------------------------------------------


def _config(output: Any, *, max_steps: int, model: str = "builtin:tiny", batch_size: int = BATCH) -> Any:
    from sdp.config import parse

    return parse(
        "train",
        {
            "source": {"uri": "unused"},
            "output": {"uri": str(output)},
            "model": {"source": model},
            "data": {"resolution": 64, "batch_size": batch_size},
            "precision": "fp32",
            "max_steps": max_steps,
            "objective": {"prediction": "epsilon"},
            "optimizer": {"clip_norm": 1.0},
        },
    )


def _trainer(config: Any, model: Any, batch: Any, callbacks: Any) -> Any:
    from sdp.config.train import CheckpointConfig
    from sdp.storage import open_storage
    from sdp.train.assemble import make_conditioning, make_networks, make_objective
    from sdp.train.checkpoint import CheckpointManager
    from sdp.train.run_folder import RunFolder
    from sdp.train.stopwatch import Stopwatch
    from sdp.train.trainer import Trainer
    from sdp.train.world import World

    class Same:
        """A reader that repeats one batch."""

        plan = SimpleNamespace(rows=10**9, positions=lambda _: 10**9)

        def batches(self, *_: Any) -> Iterator[Any]:
            while True:
                yield batch

    world = World()
    return Trainer(
        config=config,
        world=world,
        networks=make_networks(config, model, world),
        objective=make_objective(config, model, world),
        conditioning=make_conditioning(config, model, world),
        reader=Same(),
        checkpointer=CheckpointManager(
            RunFolder(open_storage(config.output.uri, config.storage.options())),
            world,
            {},
            CheckpointConfig(keep_last=1),
        ),
        stopwatch=Stopwatch(world.device),
        callbacks=callbacks,
    )


def _batch(count: int, side: int) -> Any:
    import torch

    from sdp.train.data.batch import Batch

    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(count, 4, side, side, generator=generator).half()
    tokens = torch.randint(0, 500, (count, 77), generator=generator).to(torch.int32)
    return Batch(torch.arange(count), torch.ones(count), latents, tokens)


if __name__ == "__main__":
    sys.exit(_cases.main(main, {"loop": loop, "stall": stall}))
