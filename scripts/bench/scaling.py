"""Fine-tuning on 1, 2 and 4 workers: the time for the same number of samples, compared with linear scaling.

    python -m scripts.bench.scaling                     on the GPUs of this machine, or with stand-ins on its CPUs
    python -m scripts.bench.scaling --picture docs/pictures/scaling.svg

On GPUs it trains the 866 M U-Net with random weights, at 512 px and one pair per worker, as in DreamBooth. A stand-in
is the tiny model, whose forward pass waits (as a host waits for its GPU) instead of computing, so that workers do not
compete for this machine's cores. The result is then the cost of the training loop, DDP and the exchange of gradients.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench import gpu_train
from sdp.charts import Line, lines
from sdp.console import table
from sdp.errors import OutOfMemory

SAMPLES = 1600
"""800 steps of one pair, on one worker."""
_COLORS = (
    "<style>svg{--a:#0969da;--b:#bc4c00;--line:#d0d7de;background:#fff}text{font:13px sans-serif;fill:#57606a}</style>"
)


def main(arguments: Sequence[str]) -> int:
    """Measure each number of workers, print the results, and draw them."""
    parser = argparse.ArgumentParser(prog="scaling")
    parser.add_argument("--workers", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--wait-ms", type=float, default=500.0, help="time of a stand-in's forward pass")
    parser.add_argument("--picture", type=Path, help="an SVG to write")
    options = parser.parse_args(arguments)
    gpus = gpu_train._gpus()
    counts = [count for count in options.workers if not gpus or count <= len(gpus)]
    hours = {}
    for count in counts:
        per_s = _measure(options, count, stand_in=not gpus)["per_s"]
        hours[count] = SAMPLES / per_s / 3600
    first = hours[counts[0]] * counts[0]
    rows = [
        (str(count), f"{60 * hours[count]:.1f}", f"{first / count * 60:.1f}", f"{first / count / hours[count]:.0%}")
        for count in counts
    ]
    print(f"scaling: {SAMPLES} samples on {gpus[0] if gpus else f'stand-ins of {options.wait_ms:g} ms'}")
    print(table(rows, ("workers", "minutes", "if it were linear", "efficiency")))
    if options.picture:
        measured = Line("measured", counts, [60 * hours[count] for count in counts])
        linear = Line("linear", counts, [60 * first / count for count in counts])
        name = f"minutes for {SAMPLES} samples, by number of workers ({gpus[0] if gpus else 'stand-ins'})"
        head, _, rest = lines([linear, measured], x_name=name, zero=True).partition(">")
        options.picture.write_text(f'{head} xmlns="http://www.w3.org/2000/svg">{_COLORS}{rest}\n')
    return 0


def _measure(options: argparse.Namespace, count: int, *, stand_in: bool) -> dict[str, Any]:
    case = {
        "resolution": 64 if stand_in else 512, "kind": "ddp", "compile": False, "workers": count, "batch": 2, "warm": 3,
        "steps": options.steps, "shard": "shard_grad_op", "tiny": stand_in,
        "activation_checkpointing": False, "wait_s": options.wait_ms / 1000 if stand_in else 0.0,
    }  # fmt: skip
    try:
        return gpu_train.run(case)
    except OutOfMemory as error:
        raise SystemExit(f"scaling: no memory for one pair at 512 px; take a larger GPU ({error})") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
