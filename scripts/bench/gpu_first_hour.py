"""The most important figures of a machine with GPUs, in order of value; each is written down as soon as it is known.

    scripts/bench/gpu_first_hour.sh                       what is missing here, then all rows
    scripts/bench/gpu_first_hour.sh check                 only what is missing, and which rows can run
    scripts/bench/gpu_first_hour.sh 'train-*' latents     these rows; no row takes longer than ten minutes

OUT=FOLDER (default build/gpu) receives gpu-results.md, rows.jsonl and log.txt; rows of earlier commands stay in it. Packages that a
machine lacks may lie as wheels in .wheels (docs/gpu-results.md). This module itself needs the standard library alone.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from scripts.bench._cases import FIGURES, sized
from scripts.bench._training import MODELS, SWITCHES, known_model
from sdp.hardware import DRIVERS, GIB, gpu_by_product

STEP = ("torch", "numpy", "safetensors", "transformers", "diffusers", "pydantic", "pyarrow", "pyroaring")
"""The packages of a training step, of the encoders and of the sampler."""
RAY = (*STEP, "ray", "obstore", "PIL", "simplejpeg", "cv2")
EXPORTER = ("prometheus_client", "pynvml")
HOUR_S = 3600.0
WORK = Path("build/first-hour")
"""The folder in which rows leave data for later ones."""


@dataclass(frozen=True)
class Row:
    """Figures that one command measures, and what it needs."""

    name: str
    goal: str
    command: str
    limit_s: int = 540
    packages: tuple[str, ...] = STEP
    gpus: int = 1
    compiler: bool = False
    """True if Triton compiles."""
    kernels: str = ""
    """The case of scripts.bench.kernels whose prediction is an upper limit."""
    memory_gb: int = 16
    disk_gb: int = 2


TRAIN = "scripts.bench.gpu_train --strategies"
SWITCH_ROW = f"{TRAIN} fsdp --compile on --resolutions 256 --largest 64 --steps 20"
CHECK = "scripts.bench._gpu_checks"
ROWS = (
    Row("train-256", "MFU 42 %", f"{TRAIN} fsdp --compile on --resolutions 256", compiler=True, kernels="sd2-256-fsdp"),
    Row(
        "train-512", "MFU 42 %", f"{TRAIN} fsdp --compile on --resolutions 512 --steps 20", compiler=True, kernels="sd2-512-fsdp",
    ),
    Row("encode-256", "A10G 102 img/s", "scripts.bench.gpu_encode --sides 256 --seconds 4", compiler=True, kernels="vae"),
    Row("encode-512", "", "scripts.bench.gpu_encode --sides 512 --seconds 4", compiler=True),
    *(
        Row(f"prx-{side}", "", f"{TRAIN} fsdp --compile on --model prx-1.2b --resolutions {side} --steps 20", compiler=True, kernels=f"prx-1.2b-{side}")
        for side in (256, 512)
    ),
    Row("train-ddp", "", f"{TRAIN} ddp --compile on --resolutions 256", compiler=True, kernels="sd2-256-ddp"),
    Row("train-eager", "", f"{TRAIN} fsdp --compile off --resolutions 256"),
    Row(
        "checkpoint", "a stall below 1 s, the same losses",
        f"{TRAIN} fsdp --compile off --resolutions 256 --largest 32 --checkpoint", memory_gb=48, disk_gb=30,
    ),
    Row("latents", "below 5 %", "scripts.bench.gpu_encode --latents"),
    Row("generate", "", f"{CHECK} generate"),
    Row(
        "klein-lora", "14 GB at most", f"{TRAIN} ddp --compile on --model klein-4b --resolutions 512 --batch 1 --lora 16 --steps 20",
        compiler=True, memory_gb=32, kernels="klein-lora",
    ),
    Row("train-lora", "", f"{TRAIN} ddp --compile on --resolutions 512 --lora 8", compiler=True),
    Row("exporter", "memory as nvidia-smi has it", f"{CHECK} exporter", 60, EXPORTER, memory_gb=1),
    Row("switch-none", "", SWITCH_ROW, compiler=True, kernels="sd2-256-fsdp"),
    *(Row(f"switch-{name}", "slower than switch-none", f"{SWITCH_ROW} --without {name}", compiler=True) for name in SWITCHES),
    Row(
        "accumulate", "as without",
        f"{TRAIN} fsdp --compile on --resolutions 256 --largest 128 --micro-batches 4 --steps 10", compiler=True,
    ),
    Row("pipeline", "ends well", f"scripts.demo --folder {WORK} --images 400", packages=RAY),
    Row("collocated", "latents as on the CPU", f"{CHECK} latents --images {WORK}/images", packages=RAY, gpus=2),
    Row("processes", "one on each GPU", f"{CHECK} checkpoint --latents {WORK}/latents --work {WORK}/run", packages=RAY, gpus=2),
    Row(
        "online", "as fast as offline",
        f"scripts.bench.tables --tiny --workers 1 --images {WORK}/images --latents {WORK}/latents", packages=RAY, gpus=2,
    ),
)  # fmt: skip


@dataclass
class Machine:
    """The parts of this machine that rows need; a line about each in `lines`."""

    lines: list[str] = field(default_factory=list)
    gpus: int = 0
    gpu: str = "no GPU"
    driver: str = "-"
    torch: str = "-"
    missing: set[str] = field(default_factory=set)
    compiles: bool = False
    memory_gb: float = 0.0
    disk_gb: float = 0.0

    def lacks(self, row: Row) -> list[str]:
        """Return what a row needs and this machine has not."""
        lacking = [name for name in row.packages if name in self.missing]
        if self.gpus < row.gpus and (not SMALL or row.gpus > 1):
            lacking.append(f"{row.gpus} GPUs that torch sees" if row.gpus > 1 else "a GPU that torch sees")
        if row.compiler and not self.compiles and not SMALL:
            lacking.append("a compiler")
        for kind, needed, present in (("memory", row.memory_gb, self.memory_gb), ("disk", row.disk_gb, self.disk_gb)):
            if present < needed and not SMALL:
                lacking.append(f"{needed} GB of {kind}")
        return lacking


SMALL = sized(False, True)
"""True if the tests run this: CPUs stand in for GPUs, at the smallest sizes."""


def main(arguments: Sequence[str]) -> int:
    """Say what is missing, and measure the rows whose names match; return 1 if a name matches none."""
    rows = [row for row in ROWS if arguments in ([], ["check"]) or any(fnmatch(row.name, name) for name in arguments)]
    if not rows:
        print(f"gpu_first_hour: no row {' or '.join(arguments)}; there are {', '.join(row.name for row in ROWS)}")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="sdp-wheels-") as site:
        _unpack(Path(site))
        machine = _look()
        print(*machine.lines, sep="\n")
        for row in rows:
            can = f"can run, in at most {row.limit_s // 60} minutes"
            print(
                f"{row.name}: {'cannot run, needs ' + ', '.join(lacking) if (lacking := machine.lacks(row)) else can}"
            )
        if not arguments:
            print("no row begins after an hour; name those that are left")
        if arguments == ["check"]:
            return 0
        results, begun = Results(Path(os.environ.get("OUT", "build/gpu")), machine), time.monotonic()
        for row in rows:
            if lacking := machine.lacks(row):
                results.add(row, reason=f"not run: needs {', '.join(lacking)}")
            elif not arguments and time.monotonic() - begun > HOUR_S:
                results.add(row, reason=f"not run: the hour is over; gpu_first_hour.sh {row.name}")
            else:
                _measure(row, results)
    print(f"see {results.folder / 'gpu-results.md'}")
    return 0


# --- this machine ----------------------------------------------------------------------------------------------------


def _unpack(site: Path) -> None:
    """Make the packages in .wheels importable, here and in rows; wheels are zip files, so this needs no pip."""
    for wheel in sorted(Path(".wheels").glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(site)
    if any(site.iterdir()):
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])


def _look() -> Machine:
    machine = Machine()
    python = ".".join(map(str, sys.version_info[:3]))
    machine.lines.append(f"python: {python} at {sys.executable}")
    names = dict.fromkeys([*RAY, *EXPORTER, "triton"])
    versions = importlib.metadata.packages_distributions()
    machine.missing = {name for name in names if importlib.util.find_spec(name) is None}
    present = [
        f"{n} {importlib.metadata.version(versions[n][0])}" for n in names if n not in machine.missing and n in versions
    ]
    machine.lines.append(f"packages: {', '.join(present) or 'none'}")
    machine.lines.append(f"missing packages: {', '.join(n for n in names if n in machine.missing) or 'none'}")
    _look_at_gpus(machine)
    compiler, header = shutil.which("cc") or shutil.which("gcc"), Path(sysconfig.get_path("include"), "Python.h")
    machine.compiles = compiler is not None and header.exists() and "triton" not in machine.missing
    state = f"{compiler or 'no cc or gcc'}, {header} {'is there' if header.exists() else 'is missing'}"
    machine.lines.append(f"compiler: {state}" + (", no triton" if "triton" in machine.missing else ""))
    machine.memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    machine.disk_gb = shutil.disk_usage(tempfile.gettempdir()).free / GIB
    machine.lines.append(f"memory: {machine.memory_gb:.0f} GB, {os.cpu_count()} CPUs")
    machine.lines.append(f"disk: {machine.disk_gb:.0f} GB free in {tempfile.gettempdir()}")
    return machine


def _look_at_gpus(machine: Machine) -> None:
    smi = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader")
    devices = [[cell.strip() for cell in line.split(",")] for line in smi.splitlines() if line.count(",") == 3]
    if devices:
        machine.gpu, machine.driver = devices[0][0], devices[0][1]
        machine.lines.append(
            f"GPUs: {len(devices)} × {machine.gpu}, {devices[0][2]}, of which {devices[0][3]} are in use"
        )
    else:
        machine.lines.append("GPUs: nvidia-smi lists none")
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available() and torch.cuda.device_count())"
    version, cuda, seen = (_output(sys.executable, "-c", code).splitlines() or ["- - 0"])[-1].split()
    machine.torch, machine.gpus = version, int(seen) if seen.isdigit() else 0
    needed = DRIVERS.get(int(cuda.partition(".")[0])) if cuda[:1].isdigit() else None
    verdict = f"torch {version}, built for CUDA {cuda}, sees {machine.gpus} GPUs"
    if needed is not None:
        old = machine.driver[:1].isdigit() and int(machine.driver.partition(".")[0]) < needed
        verdict += f", needs driver {needed} or later{', so this one is too old' if old else ''}"
    machine.lines.append(f"driver: {machine.driver}; {verdict}")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


# --- the rows --------------------------------------------------------------------------------------------------------


def _measure(row: Row, results: "Results") -> None:
    """Run a row's command, and add each of its cases as it ends."""
    results.add(row, reason="was still running when the command ended")
    print(f"{row.name}: python -m {row.command}", flush=True)
    began, count, lines = time.monotonic(), 0, [""]
    words = row.command.replace("--compile on", "--compile off" if SMALL else "--compile on").split()
    command = [sys.executable, "-u", "-m", *words]
    with (
        results.log(row) as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True) as process,
    ):
        late = threading.Event()

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started

        def give_up() -> None:
            late.set()
            end()

        timer = threading.Timer(row.limit_s, give_up)
        timer.start()
        try:
            for line in process.stdout or ():
                log.write(line)
                log.flush()
                if line.startswith(FIGURES):
                    figures = json.loads(line.removeprefix(FIGURES))
                    results.add(row, replace=not count, seconds=time.monotonic() - began, **figures)
                    count += 1
                elif line.strip():
                    lines.append(line.strip())
            code = process.wait()
        finally:
            timer.cancel()
            end()  # or it would go on, and hold the GPU's memory, when this command is ended
    if late.is_set():
        results.add(row, replace=not count, reason=f"ended after {row.limit_s} s")
    elif not count:
        reason = f"failed with exit code {code}: {results.last_line() or lines[-1]}"
        outcome = {"reason": reason} if code else {"note": lines[-1]}
        results.add(row, seconds=time.monotonic() - began, **outcome)


class Results:
    """The table of all figures, in a folder."""

    def __init__(self, folder: Path, machine: Machine) -> None:
        self.folder, self._machine = folder, machine
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = folder / "rows.jsonl"
        text = self._lines.read_text(encoding="utf-8") if self._lines.exists() else ""
        self._figures: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def log(self, row: Row) -> Any:
        """Return the open log, to which the row's command writes."""
        log = (self.folder / "log.txt").open("a", encoding="utf-8")
        log.write(f"\n== {row.name}: python -m {row.command}\n")
        log.flush()
        return log

    def last_line(self) -> str:
        lines = (
            (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace").split("\n== ")[-1].splitlines()[1:]
        )
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def add(self, row: Row, *, replace: bool = True, **figures: Any) -> None:
        """Add a case of a row, or replace all of the row's, and write everything."""
        machine = self._machine
        own = {"gpu": f"{machine.gpus} × {machine.gpu}", "driver": machine.driver, "torch": machine.torch}
        if replace:
            self._figures = [old for old in self._figures if old["row"] != row.name or old["gpu"] != own["gpu"]]
        self._figures.append({"row": row.name, "goal": row.goal, **own, **figures})
        self._write(self._lines, "".join(json.dumps(one) + "\n" for one in self._figures))
        self._write(self.folder / "gpu-results.md", "\n".join(self._page()) + "\n")
        if "case" in figures or not replace:
            print("  " + " | ".join(_cells(self._figures[-1])[:9]), flush=True)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.with_name(path.name + "~").write_text(text, encoding="utf-8")
        path.with_name(path.name + "~").replace(path)

    def _page(self) -> Iterator[str]:
        commit = _output("git", "rev-parse", "--short", "HEAD").strip() or "unknown"
        yield f"`scripts/bench/gpu_first_hour.sh` wrote this at commit {commit}, on {datetime.now(UTC):%Y-%m-%d}.\n"
        yield "| " + " | ".join(COLUMNS) + " |"
        yield "|" + "---|" * len(COLUMNS)
        order = {row.name: number for number, row in enumerate(ROWS)}
        for figures in sorted(self._figures, key=lambda one: order.get(one["row"], len(order))):
            yield "| " + " | ".join(cell.replace("|", "/") for cell in _cells(figures)) + " |"


COLUMNS = (
    "Row", "Case", "img/s", "at most", "MFU", "Peak GB (held, plan)", "ms a step", "Kernels a step", "Result", "Expected", "s",
    "GPU", "driver", "torch",
)  # fmt: skip


PREDICTED = json.loads(Path(__file__).with_name("predicted.json").read_text(encoding="utf-8"))
UPDATE_BYTES = 40
"""Bytes that AdamW and the average read and write for each weight, all in fp32."""
SLOW = 1.3
"""Times longer than the shortest time at which a figure is marked."""


def _limit(figures: dict[str, Any]) -> str:
    """Return the img/s that the kernels of a row allow on its GPU."""
    gpu = gpu_by_product(figures["gpu"].partition(" × ")[2])
    row = next((row for row in ROWS if row.name == figures["row"]), None)
    if not (gpu and row and figures.get("per_s") and gpu.name in PREDICTED.get(row.kernels, {})):
        return "-"
    workers = figures.get("workers", 1)
    most = workers * PREDICTED[row.kernels][gpu.name]
    if " fsdp " in row.command:  # predicted for workers that update a share of the weights each
        from scripts.bench._fake_gpu import WORKERS

        model = next(name for name in MODELS if row.kernels.startswith(f"{name}-"))
        updated = known_model(model).parameters["unet"] * (1 / workers - 1 / WORKERS)
        most /= 1 + updated * UPDATE_BYTES / gpu.bytes_per_s * most / (workers * figures["batch"])
    times = most / figures["per_s"]
    return f"{most:,.1f}, {times:.1f} times slower" if times > SLOW else f"{most:,.1f}"


def _cells(figures: dict[str, Any]) -> list[str]:
    def amount(key: str) -> float:
        return float(figures.get(key) or 0)

    memory = f"{amount('peak') / 1e9:.1f} ({amount('held') / 1e9:.1f}, {amount('plan') / 1e9:.1f})"
    phases = ", ".join(f"{name} {ms:.1f}" for name, ms in figures.get("phases", {}).items() if ms >= 0.05)
    step = f"{1000 * amount('step_s'):.1f}: {phases}" if amount("step_s") else "-"
    notes = [f"batch {figures['batch']}"] if "batch" in figures else []
    notes += [f"first step after {amount('first_s'):.0f} s"] if "first_s" in figures else []
    notes += [str(figures[key]) for key in ("reason", "note", "checkpoint") if figures.get(key)]
    return [
        figures["row"],
        figures.get("case", "-"),
        f"{amount('per_s'):,.1f}" if amount("per_s") else "-",
        _limit(figures),
        f"{amount('mfu'):.1%}" if amount("mfu") else "-",
        memory if amount("peak") else "-",
        step,
        str(figures.get("kernels") or "-"),
        "; ".join(notes) or "-",
        figures["goal"] or "-",
        f"{amount('seconds'):.0f}",
        figures["gpu"],
        figures["driver"],
        figures["torch"],
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
