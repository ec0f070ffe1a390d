"""Runs the benchmarks of scripts/bench/, one process each: all of them, or the ones named.

A benchmark is a script that measures us and a peer in one run and prints the ratio; the first line of its docstring
says what it measures. Files that start with an underscore are their helpers.
"""

import ast
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "scripts" / "bench"
TIMEOUT_S = 3600


def benchmarks(folder: Path) -> dict[str, str]:
    """Name of each benchmark in a folder -> what it measures."""
    return {
        path.stem: _first_line(path)
        for path in sorted(folder.glob("*.py"))
        if not path.stem.startswith("_") and path.stem != "run"
    }


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def run(name: str) -> bool:
    """Run one; its output goes straight through."""
    began = time.monotonic()
    command = [sys.executable, "-m", f"scripts.bench.{name}"]
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    verdict = "done" if code == 0 else "did not end in time" if code == -1 else f"failed with exit code {code}"
    print(f"-- {name}: {verdict} after {time.monotonic() - began:.0f} s\n", flush=True)
    return code == 0


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; 1 when one failed, 2 when there is none of that name."""
    known = benchmarks(FOLDER)
    if unknown := [name for name in names if name not in known]:
        print(f"make bench: no benchmark called {', '.join(unknown)}; there are: {', '.join(known) or 'none yet'}")
        return 2
    failed = []
    for name in names or known:
        print(f"== {name}: {known[name]}", flush=True)
        if not run(name):
            failed.append(name)
    if failed:
        print(f"make bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
