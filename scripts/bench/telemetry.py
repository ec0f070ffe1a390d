"""Cost of emitting a trainer's metrics, as a share of a step.

    python -m scripts.bench.telemetry          (STEPS=200)

One run of the tiny model under a local Ray, which collects metrics as on a cluster. Every other step runs with the
callback that emits metrics; a line of the metrics is emitted every ten steps. The share is of the process's CPU time.
On a GPU it is smaller, because steps are longer and the cost is the same.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.bench._cases import exit_status, sized

STEPS = int(os.environ.get("STEPS", sized("200", "60")))
WARM, LINE_EVERY = 20, 10
GOAL = 0.01
LINE = {
    "loss": 1.0, "loss_smoothed": 1.0, "gradient_norm": 1.0, "learning_rate": 1e-4, "samples_per_s": 100.0,
    "workers": 8, "skipped": 0, "mfu": 0.3, "encoders": 8, "encoders_busy": 0.9, "encoded": 1000,
    "validation": {"all": 1.0, "0-99": 1.0},
}  # fmt: skip


def main() -> int:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = Path(tempfile.mkdtemp(prefix="sdp-bench-telemetry-"))
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        return _measured(folder)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _measured(folder: Path) -> int:
    import torch

    from scripts.bench.train_loop import BATCH, _batch, _config, _trainer
    from sdp import telemetry
    from sdp.model.sources import resolve
    from sdp.train.callbacks.telemetry import EmitMetrics
    from sdp.train.trainer import Callback

    torch.set_num_threads(1)
    config = _config(folder / "run", max_steps=STEPS)
    emit = EmitMetrics(telemetry.begin(config.output.uri))
    steps: dict[bool, list[float]] = {True: [], False: []}
    emitting_s: list[float] = []

    class Turns(Callback):
        since = 0.0

        def on_start(self, trainer: Any) -> None:
            emit.on_start(trainer)
            self.since = time.process_time()

        def on_step(self, trainer: Any, report: Any) -> None:
            emitting = report.step % 2 == 0
            if emitting:
                began = time.thread_time()
                emit.on_step(trainer, report)
                if report.step % LINE_EVERY == 0:
                    emit.on_metrics(trainer, {**LINE, "encoded": 1000 * report.step})
                emitting_s.append(time.thread_time() - began)
            if report.step > WARM:
                steps[emitting].append(time.process_time() - self.since)
            self.since = time.process_time()

    _trainer(config, resolve(config.model.source), _batch(BATCH, 8), [Turns()]).train()
    with_it, without = (statistics.median(steps[emitting]) for emitting in (True, False))
    share = statistics.fmean(emitting_s[WARM:]) / without  # includes what is emitted once a second
    kept_s = _keeping(emit)
    print(
        f"a step of the tiny model at batch {BATCH}, medians of {len(steps[True])} (load {os.getloadavg()[0]:.1f}): "
        f"{1e3 * without:.2f} ms of CPU without, {1e3 * with_it:.2f} with: {with_it / without - 1:+.2%}"
    )
    print(f"  emitting     {1e6 * statistics.fmean(emitting_s[WARM:]):.0f} µs a step on average, {share:.3%} of it")
    print(f"  keep-alive   {1e6 * kept_s:.0f} µs every 2 s in another thread, {kept_s / 2:.3%} of a core")
    met = share + kept_s / 2 <= GOAL
    print(f"at most {GOAL:.0%} of a step: {'yes' if met else 'NO'}")
    return exit_status(met)


def _keeping(emit: Any, times: int = 50) -> float:
    """Return the CPU seconds of emitting all gauges again, as a thread does every two seconds."""
    backend = emit.telemetry.backend
    began = time.thread_time()
    for _ in range(times):
        backend.refresh()
    return (time.thread_time() - began) / times


if __name__ == "__main__":
    sys.exit(main())
