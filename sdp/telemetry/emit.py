"""Emission of a job's metrics, by their names in the catalogue.

    telemetry = begin("s3://bucket/run")
    telemetry.count("sdp_train_samples_total", 1024)
    telemetry.reach("sdp_download_rows_total", 70_312, outcome="failed", reason="timeout")

With Ray they go through Ray's metrics, which KubeRay exposes on each pod; without, nobody reads them.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sdp.console import say
from sdp.errors import one_line
from sdp.telemetry.catalogue import CATALOGUE, COUNTER, GAUGE, Metric


class Backend(Protocol):
    """A store of series."""

    def emit(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Add to a counter or set a gauge, by the metric's kind."""


@dataclass
class Telemetry:
    """The metrics of one run in one process."""

    backend: Backend | None
    """None: nobody reads them."""
    run: str
    job: str = ""
    """The submitted job's name in Ray."""
    _reached: dict[tuple[str, tuple[tuple[str, object], ...]], float] = field(default_factory=dict)
    _failed: bool = False

    def count(self, name: str, amount: float, **labels: object) -> None:
        """Add to a counter."""
        if amount > 0:
            self._emit(COUNTER, name, amount, labels)

    def reach(self, name: str, total: float, **labels: object) -> None:
        """Raise a counter to this process's total; a total that falls has restarted, and adds nothing."""
        key = (name, tuple(labels.items()))
        before, self._reached[key] = self._reached.get(key, 0.0), total
        self.count(name, total - before, **labels)

    def show(self, name: str, value: float | None, **labels: object) -> None:
        """Set a gauge, unless the value is None."""
        if value is not None:
            self._emit(GAUGE, name, value, labels)

    def progress(self, job: str, done: int, total: int) -> None:
        """Show how many of its rows a job has done."""
        self.show("sdp_job_rows", total, job=job)
        self.show("sdp_job_rows_done", done, job=job)

    def process(self, role: str, rank: int | str = "") -> None:
        """Announce this process's role."""
        self.show("sdp_process_info", 1, pid=os.getpid(), role=role, rank=rank, job_name=self.job)

    def _emit(self, kind: str, name: str, value: float, labels: Mapping[str, object]) -> None:
        """Hand a value to the backend. Its errors end here: no job fails because its metrics do."""
        metric = CATALOGUE[name]
        if metric.kind != kind:
            raise ValueError(f"{name}: expected a {kind}, got a {metric.kind}")
        if set(labels) != set(metric.labels):
            raise ValueError(f"{name}: expected the labels {metric.labels}, got {tuple(labels)}")
        if self.backend is None:
            return
        series = {"run": self.run, **{label: str(labels[label]) for label in metric.labels}}
        try:
            self.backend.emit(metric, value, series)
        except Exception as error:  # noqa: BLE001 (a backend may raise anything)
            if not self._failed:
                say(f"telemetry: {name} and perhaps other metrics cannot be emitted: {one_line(error, 200)}")
            self._failed = True


def begin(uri: str) -> Telemetry:
    """Return this process's metrics of the run that writes to a URI."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        from sdp.ray import internals
        from sdp.telemetry.ray_metrics import RayBackend

        return Telemetry(RayBackend(), run_name(uri), internals.job_name()[:100])
    return Telemetry(None, run_name(uri))


def run_name(uri: str) -> str:
    """Return the end of a URI: `sd2/phase-1` for `s3://bucket/runs/sd2/phase-1`."""
    parts = [part for part in uri.split("://")[-1].split("/") if part]
    if len(parts) > 1 and parts[-1].startswith("phase-"):
        return "/".join(parts[-2:])[:100]
    return (parts[-1] if parts else uri)[:100]
