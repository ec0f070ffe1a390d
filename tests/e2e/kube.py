"""kubectl in one namespace, with waits that end and report the last state."""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Object = dict[str, Any]


class Failed(Exception):
    """A command failed, or the cluster is not as expected."""


@dataclass(frozen=True, slots=True)
class Kube:
    """One namespace of the cluster that KUBECONFIG leads to."""

    namespace: str

    def run(self, *words: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        """Run kubectl and return its output; raise Failed if it fails."""
        kubectl = shutil.which("kubectl")
        assert kubectl, "tests/e2e needs kubectl on PATH"
        command = [kubectl, "-n", self.namespace, f"--request-timeout={timeout_s:.0f}s", *words]
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, timeout=timeout_s + 5, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"kubectl {' '.join(words)}: no answer within {timeout_s:.0f} s") from error
        if done.returncode:
            raise Failed(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *words: str) -> Any:
        return json.loads(self.run("get", *words, "-o", "json"))

    def find(self, kind: str, selector: str = "") -> list[Object]:
        """All objects of a kind, or those with some labels."""
        objects: list[Object] = self.get(kind, *(["-l", selector] if selector else []))["items"]
        return objects

    def lookup(self, kind: str, name: str) -> Object | None:
        result: Object | None = json.loads(self.run("get", kind, name, "--ignore-not-found", "-o", "json") or "null")
        return result

    def apply(self, objects: Iterable[Object]) -> None:
        self.run("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def python(self, pod: str, program: str, *arguments: str, container: str = "", timeout_s: float = 120) -> str:
        """Run a Python program in a pod and return its output."""
        where = ["-c", container] if container else []
        return self.run("exec", "-i", pod, *where, "--", "python", "-", *arguments, stdin=program, timeout_s=timeout_s)

    def until(self, condition: Callable[[], T | None], seconds: float, what: str) -> T:
        """Wait for a condition's result; at the deadline fail with the namespace's state."""
        deadline = time.monotonic() + seconds
        last = ""
        while (began := time.monotonic()) < deadline:
            try:
                if result := condition():
                    return result
            except Failed as error:
                last = f"\nlast: {error}"  # an API server may be away for a moment
            # The nodes may share this machine's cores, and a look starts a process or two.
            threading.Event().wait(max(1.0, 2 * (time.monotonic() - began)))
        raise AssertionError(f"not within {seconds:.0f} s: {what}{last}\n{self.report()}")

    def report(self) -> str:
        """Return pods, jobs, events and the end of the head's log, for debugging."""
        lines = []
        for words in (
            ("get", "pods", "-o", "wide"),
            ("get", "rayclusters,rayjobs", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", "-l", "ray.io/node-type=head", "--all-containers", "--tail=15"),
        ):
            try:
                lines.append("\n".join(self.run(*words, timeout_s=30).splitlines()[-40:]))
            except Failed as error:
                lines.append(str(error))
        return "\n\n".join(lines)


def environment() -> dict[str, str]:
    """Return the environment for commands other than kubectl, so that they use the same cluster."""
    return {**os.environ, "COLUMNS": "200"}
