"""Runs what Inductor generates for a GPU on the CPU, in Triton's interpreter, and compares it with eager code.

python -m tests.interpreted builtin:tiny     a line of JSON: how a model with one compiled block differs
python -m tests.interpreted draw             the same of the random numbers of training
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from torch import Tensor

from sdp.config.train import ObjectiveConfig
from sdp.device import DTYPES
from sdp.model.schedule import from_alphas_cumprod
from sdp.model.sources import resolve
from sdp.model.trained import load_networks
from sdp.train.data.batch import Batch
from sdp.train.randomness import RowRandom
from sdp.train.step import Objective, draw
from sdp.train.strategies import cast_norms, compile_blocks


@contextmanager
def interpreted() -> Iterator[set[str]]:
    """Have torch.compile generate Triton for the CPU, and interpret it; yield the names of the kernels that ran."""
    import triton.language as tl
    from torch._inductor import config
    from torch._inductor.runtime import triton_compat, triton_heuristics
    from torch.utils import _triton

    ran: set[str] = set()

    def run(tuner: Any, *arguments: Any, stream: Any) -> None:
        del stream
        ran.add(tuner.fn.__name__)
        how = copy(tuner.configs[0])
        how.kwargs = {key: 1024 if key == "XBLOCK" else value for key, value in how.kwargs.items()}  # fewer turns
        values = {**dict(zip(tuner.fn.arg_names, arguments, strict=False)), **how.kwargs}
        grid = triton_heuristics.GridExpr.from_meta(tuner.inductor_meta, how).eval_slow(values)
        tuner.fn[grid](*arguments, **how.kwargs)

    def of_triton(name: str) -> Callable[..., Any]:
        return lambda *values: getattr(tl.math, name)(*values)  # the interpreter replaces it while a kernel runs

    # A sum with it is rounded to the nearest, of two the even one.
    whole = {tl.float32: 1.5 * 2**23, tl.float64: 1.5 * 2**52}
    # CUDA's own functions, which the interpreter has not.
    functions = {name: of_triton(name) for name in ("erf", "rsqrt", "exp", "sqrt", "log", "sin", "cos")}
    functions["tanh"] = lambda value: 2 * tl.sigmoid(2 * value) - 1
    functions["nearbyint"] = lambda value: (value + whole[value.dtype]) - whole[value.dtype]
    tuner = triton_heuristics.CachingAutotuner
    with ExitStack() as patches:
        patches.enter_context(config.patch(cpu_backend="triton", compile_threads=1, fx_graph_cache=False))
        patches.enter_context(mock.patch.object(_triton, "triton_hash_with_backend", return_value="interpreter"))
        patches.enter_context(mock.patch.object(tuner, "precompile"))
        patches.enter_context(mock.patch.object(tuner, "run", run))
        for name, function in functions.items():
            patches.enter_context(mock.patch.object(triton_compat.libdevice, name, function))
        yield ran


def blocks(source: str) -> dict[str, Any]:
    """Compare a model whose first block is compiled with the eager one: its prediction and its gradients."""
    expected = _computed(source, "fp32", compiled=False)
    errors = {}
    with interpreted() as ran:
        for precision in ("fp32", "bf16"):
            errors[precision] = _difference(_computed(source, precision, compiled=True), expected)
    eager = _difference(_computed(source, "bf16", compiled=False), expected)
    return {"compiled": errors, "eager bf16": eager, "kernels": len(ran)}


def _computed(source: str, precision: str, *, compiled: bool) -> list[Tensor]:
    """Return a prediction, and the gradients of all weights."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    networks = load_networks(resolve(source).path, text_encoder=False, pretrained=True)
    latents, times, text = networks.family.flops_inputs(networks.denoiser, 8)
    latents, text = torch.randn(2, *latents.shape[1:]), torch.randn(2, *text.shape[1:])
    if compiled:
        compile_blocks([next(iter(networks.blocks()))])
    if precision != "fp32":
        cast_norms(networks, DTYPES[precision])
    with torch.autocast("cpu", DTYPES["bf16"], enabled=precision != "fp32"):
        predicted = networks.family.predict(networks.denoiser, latents, times.expand(2) + 300, text)
    predicted.float().square().mean().backward()
    return [
        predicted.detach().float(),
        *(weights.grad.float() for weights in networks.parameters() if weights.grad is not None),
    ]


def _difference(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the relative distance of the prediction, and of all gradients."""
    pairs = [(actual[:1], expected[:1]), (actual[1:], expected[1:])]
    flat = [tuple(torch.cat([each.flatten() for each in part]) for part in pair) for pair in pairs]
    return [((one - other).norm() / other.norm()).item() for one, other in flat]


def drawn() -> dict[str, Any]:
    """Compare all random numbers of a batch."""
    settings = ObjectiveConfig(prediction="epsilon", caption_dropout=0.1, offset_noise=0.1, skipped_tokens=0.5)
    objective = Objective(from_alphas_cumprod(torch.linspace(0.99, 0.01, 1000), "epsilon"), settings)
    batch = Batch(torch.arange(4) + (1 << 40), torch.ones(4), torch.zeros(4, 8, 8, 8), moments=True)
    random = RowRandom((3 << 32) + 7, torch.tensor([0, 0, 1, 1]), batch.rows)
    eager = draw(objective, batch, random)
    with interpreted() as ran:
        compiled = torch.compile(draw, dynamic=False)(objective, batch, random)
    equal = {name: torch.equal(getattr(eager, name), getattr(compiled, name)) for name in ("times", "dropped", "kept")}
    noise = max((getattr(eager, name) - getattr(compiled, name)).abs().max().item() for name in ("noise", "vae"))
    return {"equal": equal, "noise": noise, "kernels": len(ran)}


if __name__ == "__main__":
    print(json.dumps(drawn() if sys.argv[1] == "draw" else blocks(sys.argv[1])))
