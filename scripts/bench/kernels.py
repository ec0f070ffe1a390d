"""The machine code that a GPU would run, compiled here without one and judged; and what a step costs it at least.

    make kernels                                                  all models for an A100
    make kernels ARCH=90 ARGS="sd2-256-fsdp vae"                  these, for an H100 (86: an A10G)
    make kernels ARGS="--predict --write"                         the shortest time of a step, kept for the first GPU hour
    python -m scripts.bench.kernels klein-lora --set activation_checkpointing=true    what one case holds, keeps and sends

The cases train, or encode, on fake tensors over fake_cuda.c. Inductor and Triton compile for the GPU as they would there, and ptxas makes
its machine code; nothing is launched. A case fails on registers that spill in every configuration that Inductor would try, on more
shared memory than the GPU has, on a dynamic graph, a graph break, a convolution that is not channels-last, and on attention by another
kernel than its own list has.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from scripts.bench._cases import take_stdout
from scripts.bench._fake_gpu import PLAIN, Graphs, environment, fakes, line_of, report_of
from scripts.bench._training import known_model
from sdp.console import size
from sdp.errors import one_line
from sdp.hardware import GPUS, usable_cores
from sdp.plan.prices import reference

FLASH, EFFICIENT, CUDNN = "flash", "efficient", "cudnn"
CASES: dict[str, dict[str, Any]] = {
    **{
        f"sd2-{side}-{kind}": {"kind": kind, "resolution": side, "attention": [FLASH]}
        for side in (256, 512)
        for kind in ("ddp", "fsdp")
    },
    **{
        f"{name}-{side}": {"model": name, "resolution": side, "attention": [EFFICIENT]}
        for name in ("prx-424m", "prx-1.2b")
        for side in (256, 512)
    },
    "klein-lora": {"model": "klein-4b", "kind": "ddp", "resolution": 512, "batch": 1, "lora": 16, "attention": [FLASH]},
    "vae": {"encoder": "vae", "resolution": 256, "batch": 32, "attention": [EFFICIENT]},  # one head of 512
    "clip": {"encoder": "clip", "batch": 64, "attention": [FLASH]},
    "qwen3": {"encoder": "qwen3", "batch": 64, "attention": [EFFICIENT]},
}
"""Steps with all that the product compiles, and the attention kernels that each is to use."""
PREDICTED = Path(__file__).with_name("predicted.json")
"""Samples a second that each GPU can reach at most, by case."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the cases, say what is wrong with them; return 1 if anything is."""
    parser = argparse.ArgumentParser(prog="kernels")
    parser.add_argument("names", nargs="*", default=["*"], help=f"of {', '.join(CASES)}; * stands for any letters")
    parser.add_argument("--arch", type=int, choices=(80, 86, 90), default=80)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the cases: batch=8")
    parser.add_argument("--predict", action="store_true", help="print the shortest time of each step")
    parser.add_argument("--write", action="store_true", help=f"keep these times in {PREDICTED.name}")
    parser.add_argument("--json", action="store_true", help="print all that is known of each case, a line each")
    options = parser.parse_args(arguments)
    names = [name for name in CASES if any(fnmatch(name, pattern) for pattern in options.names)]
    if not names:
        parser.error(f"no case {' or '.join(options.names)}; there are {', '.join(CASES)}")
    changes = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in options.set)}
    if unknown := changes.keys() - PLAIN.keys():
        parser.error(f"--set: no key {', '.join(sorted(unknown))}; there are {', '.join(PLAIN)}")
    newer = {"attention": [CUDNN]} if options.arch == 90 else {}  # which torch prefers there, for heads of up to 256
    cases = [
        {"name": name, **PLAIN, "compile": "kernels", **CASES[name], **(newer if name != "vae" else {}), **changes}
        for name in names
    ]
    with tempfile.TemporaryDirectory(prefix="sdp-kernels-") as folder:
        environ = environment(Path(folder), options.arch)
        failed = False
        with ThreadPoolExecutor(max(1, usable_cores())) as pool:
            for done in as_completed([pool.submit(_in_process, case, environ) for case in cases]):
                report = done.result()
                failed = failed or bool(report["faults"])
                lines = [json.dumps(report)] if options.json else _lines(report, options.arch)
                if "work" in report and (options.predict or options.write):
                    lines += _predict(report, write=options.write)
                print(*lines, sep="\n", flush=True)
    return 1 if failed else 0


def _in_process(case: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    """Compile a case in a process of its own."""
    print(f"kernels: compiling {case['name']}; it takes minutes", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "scripts.bench.kernels", "worker", json.dumps(case)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"name": case["name"], "faults": [f"it failed: {done.stderr.strip()[-800:]}"]}
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _lines(report: dict[str, Any], arch: int) -> list[str]:
    graphs = report.get("graphs")
    if graphs is None:
        return [f"{report['name']}: FAILED", *(f"  {fault}" for fault in report["faults"])]
    memory = report.get("memory", {})
    held = f"; holds {size(memory['before'])}, {size(max(memory.values()))} at most" if memory else ""
    return [
        f"{report['name']}: {'FAILED' if report['faults'] else 'ok'}, sm_{arch}, {graphs['cubins']} kernels in {graphs['count']} graphs, "
        f"{report['seconds']:.0f} s{held}",
        *(f"  {fault}" for fault in report["faults"]),
    ]


def _predict(report: dict[str, Any], *, write: bool) -> Iterator[str]:
    """Yield a line for each GPU: a step's shortest time, and the milliseconds of each kind of kernel."""
    most = {}
    for name in ("A100-80G", "A10G", "H100-SXM", "H200"):
        by_kind = ceiling(report["work"], GPUS[name])
        step_s = sum(by_kind.values())
        most[name] = round(report["batch"] / step_s, 1)
        shares = (f"{kind} {1000 * by_kind[kind]:.1f}" for kind in sorted(by_kind, key=by_kind.__getitem__)[::-1])
        yield f"  {name}: at least {1000 * step_s:.1f} ms ({', '.join(shares)}), at most {most[name]:,.1f} samples/s"
    if write:
        known = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {}
        PREDICTED.write_text(json.dumps({**known, report["name"]: most}, indent=1, sort_keys=True) + "\n")


def ceiling(work: Sequence[Sequence[Any]], gpu: Any) -> dict[str, float]:
    """Return seconds by the kind of kernel: each takes its bytes' time or its operations' time, whichever is longer."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for kind, moved, operations, calls in work:
        seconds[kind] += calls * max(moved / gpu.bytes_per_s, operations / gpu.peak_flops)
    return dict(seconds)


# --- one case, in a process that uses fake_cuda.c ---------------------------------------------------------------------


def judged(case: dict[str, Any]) -> dict[str, Any]:
    """Compile a case; return what is known of it, and its faults."""
    began, kernels = time.monotonic(), Kernels()
    with kernels.watched():
        report = _encoder(case) if "encoder" in case else report_of(case)
    report["graphs"]["cubins"] = len(kernels.seen)
    faults = [*kernels.faults(), *faults_of(report["graphs"], case["attention"]), *_memory_faults(case, report)]
    return {
        **report,
        "name": case["name"],
        "batch": case["batch"],
        "faults": faults,
        "seconds": time.monotonic() - began,
    }


def faults_of(graphs: dict[str, Any], attention: Sequence[str]) -> list[str]:
    """Return what is wrong with graphs, which are to use only these attention kernels."""
    faults = [f"graph break: {one_line(reason, 200)}" for reason in graphs["breaks"]]
    if graphs["dynamic"]:
        faults.append(f"{graphs['dynamic']} of {graphs['count']} graphs are dynamic")
    faults += [f"a convolution that is not channels-last: {line}" for line in graphs["planar"]]
    others = sorted(set(graphs["attention"]) - set(attention))
    return faults + [
        f"attention by {kind} ({graphs['attention'][kind]} calls), not {' or '.join(attention)}" for kind in others
    ]


def _memory_faults(case: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """Return what `sdp plan` expects in vain of the bytes that a step keeps for the backward pass."""
    if "encoder" in case or case["tiny"] or case["lora"] or case["activation_checkpointing"]:
        return []  # or what is kept is a part of what the plan counts
    form = case["kind"] + ("+compiled" if case["compile"] in ("partitioned", "kernels") else "")
    memory = reference()[known_model(case["model"]).memory]
    known = memory.get(form, {})
    if str(case["resolution"]) not in known or memory.get("tokens") != case["tokens"]:
        return []
    kept, expected = sum(report["kept"].values()), known["fixed"] + case["batch"] * known[str(case["resolution"])]
    if abs(kept - expected) <= 0.02 * expected:
        return []
    return [f"{case['batch']} samples keep {size(kept)}; {form} in sdp/plan/reference.yaml makes it {size(expected)}"]


class Kernels:
    """The kernels that Triton has compiled: what each spills, and which line led to it."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[str, int, int]] = {}
        """Name, spilled bytes and shared memory, by the digest of the source."""
        self.lines: dict[str, str] = {}

    def faults(self) -> list[str]:
        import torch

        limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        faults = [(name, f"spills {spilled} bytes") for name, spilled, _ in self.seen.values() if spilled]
        faults += [
            (name, f"takes {shared} bytes of shared memory of {limit}")
            for name, _, shared in self.seen.values()
            if shared > limit
        ]
        return [f"{name} {fault}: {self.lines.get(name, 'no line is known')}" for name, fault in faults]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Compile every Triton kernel inside, up to its first configuration that spills nothing, and load none."""
        from torch._inductor.codegen.triton import TritonScheduling
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        define = TritonScheduling.define_kernel

        def defined(scheduling: Any, source: str, nodes: Any, kernel: Any) -> str:
            name: str = define(scheduling, source, nodes, kernel)
            self.lines[name] = line_of(
                origin for node in nodes for origin in getattr(getattr(node, "node", None), "origins", ())
            )
            return name

        def compiled(tuner: Any, *_: Any, **__: Any) -> None:
            name, digest = tuner.fn.__name__, hashlib.sha256(tuner.fn.src.encode()).hexdigest()
            if digest not in self.seen:
                tried = (_resources(tuner._precompile_config(config).kernel) for config in tuner.configs)
                least = min(_until_none_spills(tried))
                self.seen[digest] = (name, *least)

        with (
            mock.patch.object(TritonScheduling, "define_kernel", defined),
            mock.patch.object(CachingAutotuner, "precompile", compiled),
        ):
            yield


def _until_none_spills(tried: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for spilled, shared in tried:
        yield spilled, shared
        if not spilled:
            return


def _resources(kernel: Any) -> tuple[int, int]:
    """Return a kernel's bytes of local memory, which is where registers spill to, and of shared memory."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        text = subprocess.check_output([knobs.nvidia.cuobjdump.path, "-res-usage", file.name], text=True)
    return sum(map(int, re.findall(r"STACK:(\d+)", text))), kernel.metadata.shared


def _encoder(case: dict[str, Any]) -> dict[str, Any]:
    """Compile one of the frozen networks as `sdp process` runs it."""
    import torch

    from sdp.encode.encoder import Encoder
    from sdp.encode.recipe import TEXT, EncoderSettings

    graphs, batch = Graphs(case["compile"]), case["batch"]
    torch._dynamo.utils.counters.clear()
    settings = EncoderSettings(dtype="bf16", batch_sizes={case["resolution"]: batch, TEXT: batch}, compile=True)
    with fakes(graphs), torch.inference_mode():
        vae, text, family, length = _networks(case["encoder"])
        encoder = Encoder(vae, settings, family=family, text_encoder=text, device="cuda:0")
        for _ in range(2):
            graphs.calls.clear()
            if text is None:
                pixels = torch.zeros(
                    batch, case["resolution"], case["resolution"], 3, dtype=torch.uint8, device="cuda:0"
                )
                encoder._encode(pixels, None)
            else:
                family.encode_text(encoder._text, torch.zeros(batch, length, dtype=torch.int64, device="cuda:0"))
    return {"graphs": graphs.report(), "work": graphs.work()}


def _networks(name: str) -> tuple[Any, Any, Any, int]:
    """Return a VAE, a text encoder or None, their family, and the tokens of a text."""
    from diffusers import AutoencoderKL
    from transformers import Qwen3Config, Qwen3Model

    from scripts.bench._training import _text_encoder
    from scripts.published import QWEN3, VAE
    from sdp.families.prx import PRX
    from sdp.families.sd import SD

    vae = AutoencoderKL.from_config(dict(VAE)).eval()
    if name == "vae":
        return vae, None, SD, 0
    if name == "clip":
        return vae, _text_encoder(device="cpu"), SD, 77
    return vae, Qwen3Model(Qwen3Config(**QWEN3)).eval(), PRX, 256


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        output = take_stdout()
        print(json.dumps(judged(json.loads(sys.argv[2]))), file=output)
        sys.exit(0)
    sys.exit(main())
