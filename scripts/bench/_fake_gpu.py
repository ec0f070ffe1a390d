"""Training steps of a full network on one of 32 simulated GPUs, on fake tensors: devices, dtypes, traffic, memory, graphs.

CUDA's runtime is fake_cuda.c, the process group is torch's fake one, and no kernel runs. So torch's decisions on the host are real
(device, dtype, attention kernel, collective, graph), and no figure is a time. scripts.bench.kernels is its command.

DistributedDataParallel's reducer needs real memory, so for ddp each gradient is all-reduced separately when it is ready; the real reducer
sends the same bytes in buckets. Memory is that of live tensors, without the allocator's fragmentation and cuDNN's workspaces.
"""

import copy
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

WORKERS = 32
PLAIN = {
    "model": "sd2",
    "tiny": False,
    "kind": "fsdp",
    "shard": "shard_grad_op",
    "resolution": 256,
    "batch": 64,
    "micro_batches": 1,
    "steps": 2,
    "compile": None,
    "activation_checkpointing": False,
    "train_text_encoder": False,
    "lora": None,
    "tokens": None,
}
"""A case. `compile`: None, "eager" (graphs are found), "partitioned" (and split as Inductor does) or "kernels" (and compiled)."""
HEAVY = ("convolution", "mm", "addmm", "bmm", "baddbmm", "attention")
"""Words in the names of operations that use tensor cores."""
UNMOVED = ("empty", "empty_like", "empty_strided", "_unsafe_view", "all_gather_copy_in")
"""Operations that move nothing, or little of what they are given."""


def environment(folder: Path, arch: int = 80) -> dict[str, str]:
    """Compile fake_cuda.c into a folder; return an environment in which a process sees eight GPUs of an architecture."""
    library = folder / "libcuda.so.1"
    triton = find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    options = ["-shared", "-fPIC", "-O1", "-w", "-I", str(headers), "-Wl,-soname,libcuda.so.1"]
    source = Path(__file__).with_name("fake_cuda.c")
    command = [shutil.which("cc") or "gcc", *options, "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=120)
    caches = {name: str(folder / name.lower()) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    own = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "SDP_FAKE_ARCH": str(arch),
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **own, **caches}


def report_of(case: dict[str, Any]) -> dict[str, Any]:
    """Take the steps of a case; return the report of the last one."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORKERS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = Graphs(case["compile"])
    seen = Seen(graphs)
    with tempfile.TemporaryDirectory(prefix="sdp-bench-fake-") as folder, fakes(graphs), seen.watch():
        trainer = _trainer({**case, "folder": folder, "compile": case["compile"] is not None})
        trainer.stopwatch = seen
        batches = trainer.reader.batches()
        for _ in range(case["steps"]):
            seen.forget()
            graphs.calls.clear()
            trainer._step(next(batches))
    return {**seen.report(), "graphs": graphs.report(), "work": [*graphs.work(), *seen.work()]}


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
    """A compiler that runs each graph unchanged, counts its calls, and has Inductor compile it as well if asked to."""

    def __init__(self, backend: str | None) -> None:
        self._backend = backend
        self.dynamic: list[bool] = []
        self.calls: Counter[int] = Counter()
        self.inside = False
        """True while a compiled graph runs."""
        self.attention: Counter[str] = Counter()
        self.planar: list[str] = []
        """Lines of convolutions whose images (in backward, their gradients) are not channels-last."""
        self._costs: list[list[tuple[str, int, float]]] = []
        """The kind, bytes and operations of each kernel of a graph."""

    def __call__(self, graph: Any, inputs: list[Any], options: Mapping[str, Any] = {}) -> Any:
        import torch
        from torch._inductor.compile_fx import compile_fx

        values = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
        sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else [value])]
        self.dynamic.append(any(isinstance(size, torch.SymInt) for size in sizes))
        if self._backend in (None, "eager"):
            return graph.forward
        changes = {
            "fx_graph_cache": False,
            "compile_threads": 1,
            "shape_padding": False,
            "use_static_triton_launcher": False,
            **options,
        }
        return compile_fx(graph, inputs, inner_compile=self._inner, config_patches=changes)

    def _inner(self, graph: Any, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.graph import GraphLowering
        from torch.fx import GraphModule

        number, codegen = len(self._costs), GraphLowering.codegen
        self._costs.append([])

        def generated(lowered: Any) -> Any:
            code = codegen(lowered)
            for node in lowered.scheduler.nodes:
                self._take_in(node, number)
            return code

        if self._backend == "kernels":
            with mock.patch.object(GraphLowering, "codegen", generated):
                compile_fx_inner(GraphModule(graph, copy.deepcopy(graph.graph)), inputs, **options)

        def run(arguments: list[Any]) -> Any:
            self.calls[number] += 1
            self.inside, before = True, self.inside
            results = graph.forward(*arguments)
            arguments.clear()
            self.inside = before
            return results

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd then hands over a list, to be emptied
        return run

    def _take_in(self, node: Any, number: int) -> None:
        """Count a kernel of a graph that Inductor has lowered."""
        from torch._inductor.fx_utils import count_flops_fx

        operation: Any = getattr(node, "node", None)
        name = getattr(operation, "python_kernel_name", None) or ""
        kind, operations = kind_of(name), 0
        if kind != "pointwise":
            # The first is its own; more are those that made an input that no kernel has stored.
            own = next((each for each in operation.origins if kind_of(str(each.target)) == kind), None)
            operations = (own and count_flops_fx(own)) or 0
        if kind == "convolution" and operation.inputs[0].get_stride()[1] != 1:
            self.planar.append(line_of(operation.origins))
        if kind == "attention":
            self.attention[next(word for word in ("flash", "efficient", "cudnn", "flex", name) if word in name)] += 1
        self._costs[number].append((kind, node.get_read_write_buffers_sizes(), operations))

    def work(self) -> list[tuple[str, int, float, int]]:
        """Return the kind, bytes, operations and calls of the kernels of a step's compiled graphs."""
        return [(*cost, self.calls[number]) for number, costs in enumerate(self._costs) for cost in costs]

    def report(self) -> dict[str, Any]:
        from torch._dynamo.utils import counters

        breaks = dict(counters["graph_break"])
        return {
            "count": len(self.dynamic),
            "dynamic": sum(self.dynamic),
            "breaks": breaks,
            "attention": self.attention,
            "planar": self.planar,
        }


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    words = {
        "convolution": "convolution",
        "attention": "attention",
        "mm": "matmul",
        "bmm": "matmul",
        "addmm": "matmul",
        "adamw": "optimizer",
    }
    return next((kind for word, kind in words.items() if word in re.split(r"[_.]", name)), "pointwise")


def line_of(nodes: Any) -> str:
    """Return the last line of a model's or our own code that led to nodes of a graph."""
    for node in nodes:
        for file, line, code in reversed(
            re.findall(r'File "(.+?)", line (\d+), in \w+\n\s*(.+)', node.stack_trace or "")
        ):
            if "/torch/" not in file:
                return f"{'/'.join(Path(file).parts[-3:])}:{line}: {code.strip()[:80]}"
    return "no line is known"


@dataclass
class Seen:
    """Counts of a step's operations, by activity; it replaces the trainer's stopwatch."""

    graphs: Graphs
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
    eager: Counter[tuple[str, int, float]] = field(default_factory=Counter)
    """Operations outside of compiled graphs, by kind, bytes and operations."""
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
        for counts in (self.kept, self.heavy, self.fp32, self.strays, self.collectives, self.eager):
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
                if self.activity != "before" and not (self.graphs.inside or func.is_view):
                    self._cost(func, args, kwargs or {}, results, inputs, outputs)
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

    def _cost(
        self, func: Any, args: Any, kwargs: Any, results: Any, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        """Count what an operation outside of compiled graphs moves and computes."""
        from torch.utils._pytree import tree_leaves
        from torch.utils.flop_counter import flop_registry

        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "prim") or name in UNMOVED:
            return
        written = [
            arg
            for arg, known in zip(args, func._schema.arguments, strict=False)
            if known.alias_info and known.alias_info.is_write
        ]
        formula = flop_registry.get(func.overloadpacket)
        each_once = ({id(tensor): tensor for tensor in some} for some in (inputs, [*outputs, *tree_leaves(written)]))
        moved = sum(tensor.nbytes for some in each_once for tensor in some.values())
        self.eager[kind_of(name), moved, formula(*args, **kwargs, out_val=results) if formula else 0] += 1

    def work(self) -> list[tuple[str, int, float, int]]:
        """Return the kind, bytes, operations and calls of what a step does outside of compiled graphs."""
        return [(*cost, calls) for cost, calls in self.eager.items()]

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
