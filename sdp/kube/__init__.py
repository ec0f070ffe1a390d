"""Jobs on a Kubernetes cluster from any machine with a kubeconfig: submit, status, logs, stop and doctor.

Plain functions on plain JSON (rayjob, state), with the API server (access, api) and Ray's job API (dashboard) at the
edges. Every request has a timeout.
"""

from collections.abc import Callable
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as JSON."""

Say = Callable[[str], None]
"""Prints a line for the person at the terminal."""
