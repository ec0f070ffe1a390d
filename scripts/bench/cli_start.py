"""Start-up time of sdp for its help, a usage error and a configuration error, compared with an empty Python.

Each round starts every command once, so that a busy moment of the machine affects all alike. Bytecode is cached in a
temporary folder, as it is beside the code in an installation, whatever the environment sets.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.bench._cases import exit_status, sized

ROOT = Path(__file__).resolve().parent.parent.parent
ROUNDS = sized(20, 1)
GOAL_S = 0.3

EMPTY = "python -c pass"
COMMANDS = {
    EMPTY: (["-c", "pass"], 0),
    "sdp --help": (["-m", "sdp", "--help"], 0),
    "sdp conifg": (["-m", "sdp", "conifg"], 2),
    "sdp config show train --bogus": (["-m", "sdp", "config", "show", "train", "--bogus"], 2),
    "sdp config show train --set limit=0 (pydantic)": (["-m", "sdp", "config", "show", "train", "--set=limit=0"], 2),
    "sdp config show train (pydantic)": (["-m", "sdp", "config", "show", "train"], 0),
}
GOAL_FOR = [name for name in COMMANDS if name.startswith("sdp") and "(" not in name]


def run(name: str, environment: dict[str, str]) -> tuple[float, float]:
    """Run a command; return its wall-clock and CPU seconds."""
    arguments, code = COMMANDS[name]
    command = [sys.executable, *arguments]
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode != code:
        raise SystemExit(f"{name}: expected exit code {code}, got {done.returncode}:\n{done.stderr.decode()}")
    return wall, cpu


def main() -> int:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        for name in sized(tuple(COMMANDS), ()):
            run(name, environment)  # fills the cache
        for _ in range(ROUNDS):
            for name in COMMANDS:
                taken[name].append(run(name, environment))
    wall = {name: statistics.median(seconds for seconds, _ in times) for name, times in taken.items()}
    cpu = {name: statistics.median(seconds for _, seconds in times) for name, times in taken.items()}
    load = os.getloadavg()[0]
    print(f"median seconds of {ROUNDS} alternating runs, and the excess over an empty Python (load {load:.1f})")
    print("   wall    above      CPU    above")
    for name in COMMANDS:
        above = wall[name] - wall[EMPTY], cpu[name] - cpu[EMPTY]
        print(f"{wall[name]:7.3f} {above[0]:+8.3f}  {cpu[name]:7.3f} {above[1]:+8.3f}  {name}")
    slowest = max(wall[name] for name in GOAL_FOR) - wall[EMPTY]
    verdict = "within" if slowest <= GOAL_S else "OVER"
    print(f"help and usage errors: {slowest:.3f} s above an empty Python (wall clock), {verdict} {GOAL_S} s")
    return exit_status(slowest <= GOAL_S)


if __name__ == "__main__":
    sys.exit(main())
