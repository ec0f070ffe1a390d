"""Run the benchmarks of scripts/bench/, each in a process of its own: all of them, or the named ones.

A benchmark is a script that measures sdp and another tool in one run and prints the ratio. The first line of its
docstring says what it measures. Files that start with an underscore are helpers.
"""

import ast
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "scripts" / "bench"
TIMEOUT_S = 4 * 3600


def benchmarks(folder: Path) -> dict[str, str]:
    """Return the name and the description of each benchmark in a folder."""
    return {
        path.stem: _first_line(path)
        for path in sorted(folder.glob("*.py"))
        if not path.stem.startswith("_") and path.stem != "run"
    }


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def run(name: str) -> bool:
    """Run one benchmark with its output unchanged; return whether it succeeded."""
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
    """Run the named benchmarks, or all; return 1 if one failed, 2 if a name is unknown."""
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
