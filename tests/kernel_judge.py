"""Small networks, good and bad, compiled for a GPU that is not there: a line of JSON with the faults of each."""

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scripts.bench import kernels
from scripts.bench._fake_gpu import PLAIN, Graphs, fakes, report_of
from sdp.train.strategies import LARGER_KERNELS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        images = functional.silu(self.norm(self.convolution(images)))
        rows = images.flatten(2).transpose(1, 2).unsqueeze(1)
        return functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask)


class Broken(Block):
    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        images = super().forward(images, mask)
        torch._dynamo.graph_break()
        return images.relu()


@triton.jit
def hoard(start):  # type: ignore[no-untyped-def]  # Triton reads annotations
    """Hold four times the registers of a warp."""
    at = tl.arange(0, 32768)
    held = tl.load(start + at)
    tl.debug_barrier()
    tl.store(start + at, held / tl.sum(held))


class Norm(nn.Module):
    """A norm with an activation, as before each convolution of a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.GroupNorm(4, 16), nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return functional.silu(self.norm(images * self.weight))


def judge(
    name: str, network: type[nn.Module] = Block, backend: str = "kernels", *, mask: bool = False, **compiler: Any
) -> None:
    """Print the faults of a network's forward and backward pass, and its work."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, graphs = kernels.Kernels(), Graphs(backend)
    layout = torch.channels_last if torch._inductor.config.layout_optimization else torch.contiguous_format
    with fakes(graphs), compiled.watched():
        module = network().to(torch.device("cuda", 0), torch.bfloat16, memory_format=layout)
        images = torch.zeros(2, 16, 10, 10, device="cuda:0", dtype=torch.bfloat16).to(memory_format=layout)
        masks = [torch.zeros(64, 64, device="cuda:0", dtype=torch.bfloat16)] if mask else []
        torch.compile(module, **{"dynamic": False, **compiler})(images, *masks).sum().backward()
        faults = [*compiled.faults(), *kernels.faults_of(graphs.report(), ["flash"])]
        for digest, (kernel, *_) in compiled.seen.items():
            compiled.seen[digest] = (kernel, 40, 1 << 20)
        print(
            json.dumps({"name": name, "faults": faults, "greedy": compiled.faults(), "work": graphs.work()}), flush=True
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["encoders"]:
        for name, case in kernels.CASES.items():
            if "encoder" in case:
                report = kernels._encoder({**PLAIN, **case, "compile": "eager"})
                print(json.dumps({"name": name, "graphs": report["graphs"]["count"]}), flush=True)
        sys.exit(0)
    judge("small kernels", Norm)
    judge("large kernels", Norm, options=LARGER_KERNELS)
    judge("good")
    judge("masked", mask=True)
    torch._inductor.config.layout_optimization = False
    judge("planar")
    judge("broken", Broken, "partitioned")
    judge("dynamic", backend="partitioned", dynamic=True)
    for kind in ("ddp", "fsdp"):
        step = {**PLAIN, "tiny": True, "resolution": 64, "batch": 4, "kind": kind, "compile": "partitioned"}
        graphs = report_of(step)["graphs"]
        faults = kernels.faults_of(graphs, [])
        print(json.dumps({"name": f"a step with {kind}", "faults": faults, "graphs": graphs["count"]}), flush=True)
    source = ASTSource(hoard, {"start": "*fp32"})
    spilled, _ = kernels._resources(triton.compile(source, GPUTarget("cuda", 86, 32), {"num_warps": 1}))
    print(json.dumps({"name": "hoard", "spilled": spilled}))
