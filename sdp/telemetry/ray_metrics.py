"""Metrics through Ray: the agent of each node exposes them, on the port that KubeRay knows of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from sdp.telemetry.catalogue import COUNTER, GAUGE, Metric


@dataclass
class RayBackend:
    """See Backend."""

    _families: dict[str, Any] = field(default_factory=dict)

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._family(metric).inc(value, tags=dict(labels))

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._family(metric).set(value, tags=dict(labels))

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._family(metric).observe(value, tags=dict(labels))

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
