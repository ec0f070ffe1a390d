"""Metrics through Ray: the agent of each node exposes them, on the port that KubeRay knows of."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from sdp.telemetry.catalogue import COUNTER, GAUGE, Metric

_LONGEST_NAME = 100
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
_AGAIN_S = 2.0
"""A gauge that was not set since Ray's last export (they are 10 s apart) is left out of the next, and the node's agent
forgets it 20 s later, though it still holds: so each is set again and again. It takes 10 µs."""


def job_name() -> str:
    """Of the job that this process belongs to, if it was submitted: KubeRay's begin with the RayJob's name.

    Ray hands it to every process of the job, and tells it by no public call.
    """
    worker: Any = ray._private.worker.global_worker
    try:
        told = worker.core_worker.get_job_config().metadata
    except Exception:  # noqa: BLE001 (no public call: with another Ray the label stays empty)
        return ""
    return str(told.get("job_name") or told.get("job_submission_id") or "")[:_LONGEST_NAME]


@dataclass
class RayBackend:
    """See Backend."""

    _families: dict[str, Any] = field(default_factory=dict)
    _gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)
    _keeper: threading.Thread | None = None

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._family(metric).inc(value, tags=_tags(labels))

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._family(metric).set(value, tags=_tags(labels))
        self._gauges[metric.name, tuple(labels.items())] = value
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="sdp-telemetry", daemon=True)
            self._keeper.start()

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._family(metric).observe(value, tags=_tags(labels))

    def _keep(self) -> None:
        """Until this process leaves Ray, which ends the series."""
        pause = threading.Event()
        while not pause.wait(_AGAIN_S) and ray.is_initialized():
            self.tell_again()

    def tell_again(self) -> None:
        """All gauges, as they were last."""
        for (name, labels), value in list(self._gauges.items()):
            self._families[name].set(value, tags=_tags(dict(labels)))

    def _family(self, metric: Metric) -> Any:
        family = self._families.get(metric.name)
        if family is None:
            names = ("run", *metric.labels)
            if metric.kind == COUNTER:
                family = Counter(metric.name, metric.help, names)
            elif metric.kind == GAUGE:
                family = Gauge(metric.name, metric.help, names)
            else:
                family = Histogram(metric.name, metric.help, list(metric.bounds), names)
            self._families[metric.name] = family
        return family


def ascii_tag(text: str) -> str:
    """Return text as Ray takes it in a tag: it takes ASCII alone, so any other character becomes %XX of its UTF-8."""
    return text if text.isascii() else quote(text, safe=_PRINTABLE)


def _tags(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: ascii_tag(value) for name, value in labels.items()}
