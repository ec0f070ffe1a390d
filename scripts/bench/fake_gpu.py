"""Without a GPU: training steps of the full U-Net on one of 32 simulated A100s, on fake tensors: devices, dtypes, traffic, memory.

    python -m scripts.bench.fake_gpu                                         all cases
    python -m scripts.bench.fake_gpu --cases "fsdp,fsdp both" --batch 32   some of them
    python -m scripts.bench.fake_gpu --tiny                                  the tiny model at 64 px, in seconds

Each case takes two steps; the second is reported. CUDA's runtime is fake_cuda.c, the process group is torch's fake one, and no kernel runs.
So torch's decisions on the host are real (device, dtype, attention kernel, collective, graph), and no figure is a time.
DistributedDataParallel's reducer needs real memory, so for ddp each gradient is all-reduced separately when it is ready; the real reducer
sends the same bytes in buckets. Memory is that of live tensors, without the allocator's fragmentation and cuDNN's workspaces.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from scripts.bench._cases import take_stdout
from scripts.bench._fake_cuda import environment
from scripts.bench._training import MODELS
from sdp.console import size, table

WORKERS = 32
KERNELS = "kernels"
"""The compiler that generates machine code for an A100 with Inductor and Triton, and then runs the graph unchanged."""
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "ddp checkpointing": {"kind": "ddp", "activation_checkpointing": True},
    "ddp compiled": {"kind": "ddp", "compile": "aot_eager"},
    "fsdp": {"kind": "fsdp"},
    "fsdp both": {"kind": "fsdp", "train_text_encoder": True},
    "fsdp full shard": {"kind": "fsdp", "shard": "full_shard"},
    "fsdp checkpointing": {"kind": "fsdp", "activation_checkpointing": True},
    "fsdp accumulating": {"kind": "fsdp", "micro_batches": 2},
    "fsdp traced": {"kind": "fsdp", "compile": "eager"},
    "fsdp compiled": {"kind": "fsdp", "compile": "aot_eager"},
    "fsdp kernels": {"kind": "fsdp", "compile": KERNELS},
}
PLAIN = {
    "model": "sd2",
    "steps": 2,
    "shard": "shard_grad_op",
    "compile": None,
    "activation_checkpointing": False,
    "train_text_encoder": False,
}
HEAVY = ("convolution", "mm", "addmm", "bmm", "baddbmm", "attention")
"""Words in the names of operations that use tensor cores."""


def main(arguments: Sequence[str]) -> int:
    """Run the cases one after the other and print their reports."""
    parser = argparse.ArgumentParser(prog="fake_gpu")
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), default=list(CASES), help="comma-separated names (default: all)"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--resolution", type=int)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model", choices=MODELS, default="sd2")
    parser.add_argument("--lora", type=int, help="train matrices of this rank instead of the network")
    parser.add_argument("--json", action="store_true", help="print each case as one line of JSON, with all figures")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"--cases: no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    sizes = {
        "batch": options.batch,
        "resolution": options.resolution or (64 if options.tiny else 256),
        "tiny": options.tiny,
        "model": options.model,
        "lora": options.lora,
    }
    reports = {}
    with tempfile.TemporaryDirectory(prefix="sdp-bench-fake-") as folder:
        cases = [{"name": name, **PLAIN, **sizes, **CASES[name]} for name in options.cases]
        command = [sys.executable, "-m", "scripts.bench.fake_gpu", "worker", json.dumps(cases)]
        with subprocess.Popen(command, env=environment(Path(folder)), stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                report = json.loads(line)
                reports[report["name"]] = report
                print(line.rstrip() if options.json else f"  {report['name']}: {report['seconds']:.0f} s", flush=True)
        if process.returncode:
            print(f"fake_gpu: failed with exit code {process.returncode}", file=sys.stderr)
            return 1
    if not options.json:
        print(*as_text(reports, **sizes), sep="\n")
    return 0


def as_text(reports: dict[str, dict[str, Any]], batch: int, resolution: int, **_: Any) -> list[str]:
    """Return the reports as tables."""
    rows, traffic = [], []
    for name, report in reports.items():
        memory = report["memory"]
        graphs = report["graphs"]
        rows.append(
            (
                name,
                *(size(memory[activity]) for activity in ("before", "forward", "backward", "optimizer")),
                ", ".join(f"{size(count)} {dtype}" for dtype, count in report["kept"].items()),
                ", ".join(f"{count} {dtype}" for dtype, count in report["heavy"].items()),
                f"{graphs['count']}, {graphs['dynamic']} dynamic, {sum(graphs['breaks'].values())} breaks"
                if graphs["count"]
                else "-",
                f"{graphs['kernels']}, {graphs['convolutions']}" if graphs["kernels"] else "-",
                str(len(report["strays"])),
            )
        )
        traffic += [
            (name, activity, f"{kind} of {workers}", str(count), size(moved))
            for activity, kind, workers, count, moved in report["collectives"]
        ]
    header = (
        "case",
        "held before",
        "peak forward",
        "peak backward",
        "peak optimizer",
        "kept for backward",
        "tensor-core calls",
        "graphs",
        "Triton kernels",
        "strays",
    )
    return [
        f"{WORKERS} simulated A100s, {batch} samples each at {resolution} px; memory and traffic of one GPU in one step",
        table(rows, header),
        "",
        table(traffic, ("case", "activity", "collective", "calls", "bytes")),
    ]


# --- one case, in a process that uses fake_cuda.c ---------------------------------------------------------------------


def worker(cases: Sequence[dict[str, Any]]) -> int:
    """Print a report of each case."""
    output = take_stdout()
    for case in cases:
        print(json.dumps(report_of(case)), file=output, flush=True)
    return 0


def report_of(case: dict[str, Any]) -> dict[str, Any]:
    """Take the steps of a case; return the report of the last one."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORKERS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    began, seen, graphs = time.monotonic(), Seen(), Graphs(case["compile"])
    with tempfile.TemporaryDirectory(prefix="sdp-bench-fake-") as folder, fakes(graphs), seen.watch():
        trainer = _trainer({**case, "folder": folder, "compile": case["compile"] is not None})
        trainer.stopwatch = seen
        batches = trainer.reader.batches()
        for _ in range(case["steps"]):
            seen.forget()
            trainer._step(next(batches))
    return {"name": case["name"], **seen.report(), "graphs": graphs.report(), "seconds": time.monotonic() - began}


def _trainer(case: dict[str, Any]) -> Any:
    """Return the trainer of rank 0, with figures of a step that let it continue."""
    import torch

    from scripts.bench._training import make_model, make_trainer
    from sdp.train.world import World

    class Figures:
        """A step's figures on the host, which fake tensors lack."""

        def copy_(self, figures: Any, *, non_blocking: bool) -> None:
            assert non_blocking
            assert figures.shape == (6,)

        def tolist(self) -> list[float]:
            return [1.0, 1.0, 0.0, 0.0, float(case["batch"] * WORKERS), 0.0]

    world = World(0, WORKERS, torch.device("cuda", 0))
    trainer = make_trainer(
        case, make_model(Path(case["folder"]) / "model", tiny=case["tiny"], name=case["model"]), world
    )
    trainer._figures = Figures()
    return trainer


@contextmanager
def fakes(graphs: "Graphs") -> Iterator[None]:
    """Use fake tensors, with stand-ins for the few functions that do not support them."""
    import torch
    from diffusers import (  # noqa: F401  # importing these creates real tensors
        Flux2Transformer2DModel,
        PRXTransformer2DModel,
        UNet2DConditionModel,
    )
    from torch import Tensor, nn
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from transformers import CLIPTextModel  # noqa: F401

    from sdp.train import strategies
    from sdp.train.data.batch import Batch
    from sdp.train.world import World

    make_mesh, compiled = strategies.init_device_mesh, torch.compile

    def real_mesh(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():  # it reads values of tensors, the ranks
            return make_mesh(*arguments, **options)

    def moved(module: nn.Module, *where: Any, memory_format: Any = torch.preserve_format, **_: Any) -> nn.Module:
        """Replace Module.to, which cannot swap fake tensors."""
        device = next((argument for argument in where if isinstance(argument, torch.device)), None)
        dtype = next((argument for argument in where if isinstance(argument, torch.dtype)), None)
        for submodule in module.modules():
            for name, weights in submodule._parameters.items():
                if weights is not None:
                    layout = memory_format if weights.dim() == 4 else torch.preserve_format
                    values = weights.detach().to(device, dtype, memory_format=layout)
                    submodule._parameters[name] = nn.Parameter(values, weights.requires_grad)
            for name, values in submodule._buffers.items():
                if values is not None:
                    submodule._buffers[name] = values.to(device, dtype if values.is_floating_point() else None)
        return module

    with (
        mock.patch.object(strategies, "init_device_mesh", real_mesh),
        mock.patch.object(strategies, "DistributedDataParallel", _replicated()),
        mock.patch.object(torch, "compile", lambda code, **options: compiled(code, **{**options, "backend": graphs})),
        mock.patch.object(nn.Module, "to", moved),
        mock.patch.object(Tensor, "pin_memory", Tensor.contiguous),  # not implemented for fake tensors
        mock.patch.object(Batch, "counted_by_epoch", return_value=()),  # it reads values of tensors on the host
        mock.patch.object(World, "together", lambda _, work: work()),  # so does this one
        FakeTensorMode(allow_non_fake_inputs=True),  # a loaded model has real tensors
    ):
        yield


def _replicated() -> Any:
    import torch.distributed as dist
    from torch import Tensor, nn

    class Replica(nn.Module):
        """A stand-in for DistributedDataParallel with the same traffic: each gradient, summed over all workers."""

        def __init__(self, module: nn.Module, **_: Any) -> None:
            super().__init__()
            self.module = module
            for weights in module.parameters():
                if weights.requires_grad:
                    weights.register_post_accumulate_grad_hook(self._send)

        def forward(self, *inputs: Any, **options: Any) -> Any:
            return self.module(*inputs, **options)

        @staticmethod
        def _send(weights: Tensor) -> None:
            assert weights.grad is not None
            dist.all_reduce(weights.grad)

    return Replica


class Graphs:
    """A compiler that passes graphs to another one, and counts them."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend
        self.dynamic: list[bool] = []
        self.kernels = 0
        self.convolutions: Counter[str] = Counter()
        """Convolutions, by the layout of the images (in backward, of their gradients) that Inductor hands to cuDNN."""

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        import torch
        from torch._dynamo.backends.registry import lookup_backend

        values = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
        sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else [value])]
        self.dynamic.append(any(isinstance(size, torch.SymInt) for size in sizes))
        compiler = self._make_kernels() if self._backend == KERNELS else lookup_backend(self._backend or "eager")
        return compiler(graph, inputs)

    def _make_kernels(self) -> Any:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor import config, metrics
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.graph import GraphLowering
        from torch.fx import GraphModule

        codegen = GraphLowering.codegen

        def generated(graph: Any) -> Any:
            code = codegen(graph)
            for operation in graph.operations:
                if "convolution" in (getattr(operation, "python_kernel_name", None) or ""):
                    last = operation.inputs[0].get_stride()[1] == 1
                    self.convolutions["NHWC" if last else "NCHW"] += 1
            return code

        def compiled(graph: Any, inputs: Any) -> Any:
            before = metrics.generated_kernel_count
            changes = {"fx_graph_cache": False, "compile_threads": 1}
            with config.patch(changes), mock.patch.object(GraphLowering, "codegen", generated):
                compile_fx_inner(GraphModule(graph, copy.deepcopy(graph.graph)), inputs)
            self.kernels += metrics.generated_kernel_count - before
            return make_boxed_func(graph.forward)

        return aot_autograd(
            fw_compiler=compiled,
            bw_compiler=compiled,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )

    def report(self) -> dict[str, Any]:
        from torch._dynamo.utils import counters

        return {
            "count": len(self.dynamic),
            "dynamic": sum(self.dynamic),
            "breaks": dict(counters["graph_break"]),
            "kernels": self.kernels,
            "convolutions": dict(self.convolutions),
        }


@dataclass
class Seen:
    """Counts of a step's operations, by activity; it replaces the trainer's stopwatch."""

    activity: str = "before"
    live: int = 0
    """Bytes of tensors on the GPU."""
    storages: dict[int, Any] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    """The peak of each activity."""
    kept: Counter[str] = field(default_factory=Counter)
    heavy: Counter[str] = field(default_factory=Counter)
    """Calls that use tensor cores, by dtype."""
    fp32: Counter[str] = field(default_factory=Counter)
    """Those of these calls with an fp32 input, by operation."""
    strays: Counter[str] = field(default_factory=Counter)
    """Operations on another device than this worker's, by name."""
    collectives: defaultdict[tuple[str, str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    annotate: ClassVar[bool] = False

    @contextmanager
    def measure(self, activity: str, **_: bool) -> Iterator[None]:
        before, self.activity = self.activity, activity
        self._look()
        yield
        self._look()
        self.activity = before

    def lap(self) -> dict[str, float]:
        return {}

    def forget(self) -> None:
        """Start counting a new step."""
        self._look()
        self.memory = {"before": self.live}
        for counts in (self.kept, self.heavy, self.fp32, self.strays, self.collectives):
            counts.clear()

    def _look(self) -> None:
        """Update the sizes of storages, because FSDP resizes those of the weights that it gathers."""
        self.sizes = {key: storage.nbytes() for key, reference in self.storages.items() if (storage := reference())}
        self.live = sum(self.sizes.values())
        self._peak()

    def _peak(self) -> None:
        if self.activity != "before":
            self.memory[self.activity] = max(self.memory.get(self.activity, 0), self.live)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count every operation inside, and the bytes saved for the backward pass."""
        import torch
        from torch import Tensor
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        from sdp.train.optimizer import shard

        saved: dict[int, Any] = {}

        def forget(storage: int) -> None:
            self.storages.pop(storage)
            self.live -= self.sizes.pop(storage, 0)

        def hold(tensor: Tensor) -> None:
            storage = shard(tensor).untyped_storage()
            if tensor.device.type == "cuda" and storage._cdata not in self.storages:
                self.storages[storage._cdata] = weakref.ref(storage)
                weakref.finalize(storage, forget, storage._cdata)
                self.sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                self._peak()

        class Watch(TorchDispatchMode):
            @classmethod
            def ignore_compile_internals(cls) -> bool:
                return True  # otherwise nothing would be compiled inside

            def __torch_dispatch__(_, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: N805
                results = func(*args, **(kwargs or {}))
                inputs, outputs = (
                    [x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), results)
                )
                for tensor in outputs:
                    hold(tensor)
                self.take_in(func, args, inputs, outputs)
                return results

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if (
                storage._cdata not in saved
                and not isinstance(tensor, torch.nn.Parameter)
                and self.activity == "forward"
            ):
                saved[storage._cdata] = weakref.finalize(storage, saved.pop, storage._cdata, None)
                self.kept[_name(tensor.dtype)] += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Watch():
            yield

    def take_in(self, func: Any, args: Any, inputs: list[Any], outputs: list[Any]) -> None:
        """Count an operation."""
        name = func._schema.name
        space, _, operation = name.partition("::")
        if space == "c10d":
            self._count_collective(operation, args, inputs, outputs)
        if self.activity == "before":
            return
        if (
            any(tensor.device.type != "cuda" or tensor.device.index for tensor in outputs if tensor.dim())
            and self.activity != "copy"
        ):
            self.strays[f"{self.activity}: {operation}"] += 1
        words = operation.strip("_").split("_")
        if inputs and any(word in HEAVY for word in words):
            rank = max(tensor.dim() for tensor in inputs)  # excludes biases and attention's per-row values
            dtypes = {_name(tensor.dtype) for tensor in inputs if tensor.is_floating_point() and tensor.dim() == rank}
            self.heavy["+".join(sorted(dtypes))] += 1
            if "float32" in dtypes:
                self.fp32[f"{self.activity}: {operation}"] += 1

    def _count_collective(self, operation: str, args: Any, inputs: list[Any], outputs: list[Any]) -> None:
        from torch.distributed import ProcessGroup

        group = next((argument for argument in args if "ProcessGroup" in str(argument)), None)
        workers = ProcessGroup.unbox(group).size() if group is not None else 0
        moved = max((tensor.numel() * tensor.element_size() for tensor in [*inputs, *outputs]), default=0)
        self.collectives[self.activity, operation.strip("_"), workers].append(moved)

    def report(self) -> dict[str, Any]:
        return {
            "memory": self.memory,
            "kept": dict(self.kept),
            "heavy": dict(self.heavy),
            "fp32": dict(self.fp32),
            "strays": dict(self.strays),
            "collectives": [[*key, len(sizes), sum(sizes)] for key, sizes in self.collectives.items()],
        }


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        sys.exit(worker(json.loads(sys.argv[2])))
    sys.exit(main(sys.argv[1:]))
