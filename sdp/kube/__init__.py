"""Jobs on a Kubernetes cluster from any machine with a kubeconfig: submit, status, logs, stop and doctor.

Plain functions on plain JSON (rayjob, state), with the API server (access, api) and Ray's job API (head) at the
edges. Every request has a timeout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Object = dict[str, Any]
"""A Kubernetes object as JSON."""

Say = Callable[[str], None]
"""Prints a line for the person at the terminal."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one of the doctor's checks: one line of output."""

    check: str
    state: Literal["ok", "warning", "failed"]
    says: str
    do: str = ""
    """The remedy; empty if none is needed."""

    def __str__(self) -> str:
        remedy = f"; {self.do}" if self.do else ""
        return f"{self.state:8}{self.check}: {self.says}{remedy}"
