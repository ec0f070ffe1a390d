"""Find and install the external programs that tests use.

`python -m scripts.tools fetch` installs those that are missing: Go programs with `go install` at a pinned version into
.tools/bin, system packages with apt-get (only after asking on a terminal, except with CI=true), Python packages with uv
into an environment of their own, whose Python is the program. A program that cannot be installed is listed and is not a
failure: its tests are skipped, or fail with CI=true.
"""

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".tools" / "bin"
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin")
"""Debian's folders of servers, which are not on an ordinary user's PATH."""
GO_TIMEOUT_S = 1500
APT_TIMEOUT_S = 600
PACKAGES_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program, and the one way to install it."""

    name: str
    programs: tuple[str, ...] = ()
    """The names of its executables, the usual one first; empty means its own name."""
    go_package: str = ""
    go_version: str = ""
    apt_package: str = ""
    python_packages: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        """Return the Python of its environment."""
        return ROOT / ".tools" / self.name / "bin" / "python"

    @property
    def how(self) -> str:
        """Return the command that installs it."""
        if self.go_package:
            return f"go install {self.go_package}@{self.go_version}"
        if self.python_packages:
            return f"uv venv .tools/{self.name}, uv pip install {' '.join(self.python_packages)}"
        return f"apt-get install {self.apt_package}"


TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(name="versitygw", go_package="github.com/versity/versitygw/cmd/versitygw", go_version="v1.8.0"),
        Tool(name="helm", go_package="helm.sh/helm/v4/cmd/helm", go_version="v4.3.1"),
        Tool(name="kubeconform", go_package="github.com/yannh/kubeconform/cmd/kubeconform", go_version="v0.8.0"),
        Tool(name="actionlint", go_package="github.com/rhysd/actionlint/cmd/actionlint", go_version="v1.7.12"),
        Tool(name="cc", programs=("cc", "gcc", "clang"), apt_package="build-essential"),
        Tool(name="nginx", apt_package="nginx"),
        Tool(name="ip", apt_package="iproute2"),
        Tool(name="tc", apt_package="iproute2"),
        Tool(name="prometheus", apt_package="prometheus"),
        Tool(name="promtool", apt_package="prometheus"),
        Tool(name="diffusers-oldest", python_packages=("diffusers==0.30.3", "transformers==4.44.2")),
        Tool(name="readers", python_packages=("datasets==5.2.0", "duckdb==2.0.1", "polars==2.1.0")),
        Tool(name="chat-server", python_packages=("fastapi==0.165.0", "openai==3.57.0", "uvicorn==0.54.0")),
        Tool(name="linters", python_packages=("checkov==3.3.30", "zizmor==1.32.0")),
    )
}


class UnknownTool(Exception):
    """A test needs a program that is not in TOOLS."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no outside program is called {name!r}: add it to TOOLS in scripts/tools.py")


def find(name: str) -> Path | None:
    """Return the program's path: in .tools/bin, on PATH, in the system's folders, or in `go install`'s folder."""
    if name not in TOOLS:
        raise UnknownTool(name)
    tool = TOOLS[name]
    if tool.python_packages:
        made_from = tool.python.parents[1] / "made-from"
        return tool.python if made_from.exists() and made_from.read_text() == tool.how else None
    path = _find_in([str(BIN), os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS], tool)
    return path or (_find_in([_go_bin()], tool) if tool.go_package and _go_bin() else None)


def _find_in(folders: list[str], tool: Tool) -> Path | None:
    for program in tool.programs or (tool.name,):
        if path := shutil.which(program, path=os.pathsep.join(folders)):
            return Path(path)
    return None


def needed_by(tests: Path) -> dict[str, list[str]]:
    """Return the programs that tests in a folder name in `needs("...")` or `tool("...")`, each with its test files."""
    users: dict[str, list[str]] = {}
    for path in sorted(tests.rglob("*.py")):
        names = named_in(path.read_text(encoding="utf-8"))
        for name in sorted(names):
            users.setdefault(name, []).append(path.relative_to(tests).as_posix())
    return users


def named_in(source: str) -> set[str]:
    """Return the programs that a test file names: literal arguments of `needs`, and known ones of `tool`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", None))
        literals = {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
        if called == "needs":
            names |= literals
        elif called == "tool":
            names |= literals & set(TOOLS)
    return names


def fetch(names: Iterable[str]) -> list[Tool]:
    """Install those of the programs that are missing, if permitted; return what is still missing."""
    wanted = [TOOLS[name] for name in sorted(set(names) & set(TOOLS))]
    if shutil.which("go"):
        for tool in wanted:
            if tool.go_package and not _is_pinned(tool):
                _go_install(tool)
    for tool in wanted:
        if tool.python_packages and find(tool.name) is None:
            _make_environment(tool)
    packages = sorted({t.apt_package for t in wanted if t.apt_package and find(t.name) is None})
    if packages and shutil.which("apt-get") and _may_install(packages):
        _apt_install(packages)
    return [tool for tool in wanted if find(tool.name) is None]


@functools.cache
def _go_bin() -> str:
    if not shutil.which("go"):
        return ""
    asked = subprocess.run(["go", "env", "GOPATH"], capture_output=True, text=True, timeout=60, check=False)
    first = asked.stdout.strip().split(os.pathsep)[0]
    return str(Path(first) / "bin") if first else ""


def _is_pinned(tool: Tool) -> bool:
    path = find(tool.name)
    return path is not None and go_version_of(path) == tool.go_version


def go_version_of(program: Path) -> str:
    """Return the module version that a Go program was built from, or "" if unknown."""
    asked = subprocess.run(
        ["go", "version", "-m", str(program)], capture_output=True, text=True, timeout=60, check=False
    )
    for line in asked.stdout.splitlines():
        match line.split():
            case ["mod", _, version, *_]:
                return version
    return ""


def _go_install(tool: Tool) -> None:
    _say(f"building {tool.name} {tool.go_version} into .tools/bin (takes minutes the first time)")
    BIN.mkdir(parents=True, exist_ok=True)
    _run(
        ["go", "install", f"{tool.go_package}@{tool.go_version}"],
        env={**os.environ, "GOBIN": str(BIN), "GOFLAGS": "-trimpath"},
        timeout_s=GO_TIMEOUT_S,
    )


def _make_environment(tool: Tool) -> None:
    _say(f"installing {', '.join(tool.python_packages)} into .tools/{tool.name}")
    uv = subprocess.run(["sh", ROOT / "scripts/uv.sh"], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    home, limit = tool.python.parents[1], PACKAGES_TIMEOUT_S
    if _run([uv, "venv", "--clear", "--python", sys.executable, str(home)], timeout_s=limit) and _run(
        [uv, "pip", "install", "--python", str(tool.python), *tool.python_packages], timeout_s=limit
    ):
        (home / "made-from").write_text(tool.how)


def _may_install(packages: list[str]) -> bool:
    if os.environ.get("CI") == "true":
        return True
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    answer = input(f"Tests use {', '.join(packages)}. Install with apt-get? [y/N] ")
    return answer.strip().lower() in {"y", "yes"}


def _apt_install(packages: list[str]) -> None:
    _say(f"installing {', '.join(packages)}")
    become_root = [] if os.geteuid() == 0 else ["sudo"]
    if become_root and os.environ.get("CI") == "true":
        become_root.append("--non-interactive")
    apt = [*become_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y"]
    quick = ["-o", "DPkg::Lock::Timeout=120"]
    if _run([*apt, *quick, "update"], timeout_s=APT_TIMEOUT_S):
        _run([*apt, *quick, "install", "--no-install-recommends", *packages], timeout_s=APT_TIMEOUT_S)


def _run(command: list[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> bool:
    """Run a command silently, and show the end of its output if it fails. A missing tool is reported later."""
    try:
        done = subprocess.run(
            command,
            env=env,
            timeout=timeout_s,
            stdin=None if sys.stdin.isatty() else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _say(str(error))
        return False
    if done.returncode != 0:
        _say(f"{' '.join(command)} failed:\n" + "\n".join(done.stdout.splitlines()[-15:]))
    return done.returncode == 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Install what tests need (`fetch`), or list the programs and their users (`list`)."""
    if arguments not in (["fetch"], ["list"]):
        _say("usage: python -m scripts.tools fetch | list")
        return 2
    users = needed_by(ROOT / "tests")
    if unknown := sorted(set(users) - set(TOOLS)):
        _say("\n".join(f"{users[name][0]}: {UnknownTool(name)}" for name in unknown))
        return 2
    if arguments == ["fetch"]:
        for tool in fetch(users):
            _say(f"missing: {tool.name} (for {', '.join(users[tool.name])}); to get it: {tool.how}")
        return 0
    for name, tool in TOOLS.items():
        print(f"{name:12} {find(name) or 'missing; to get it: ' + tool.how}")
        for user in users.get(name, []):
            print(f"{'':12}   used by tests/{user}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
