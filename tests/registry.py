"""A backend for metrics in a registry of prometheus-client, which tests read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sdp.telemetry.catalogue import ACTIONS, COUNTER, GAUGE, HISTOGRAM, Metric

FAMILIES: dict[str, Any] = {COUNTER: Counter, GAUGE: Gauge, HISTOGRAM: Histogram}


@dataclass
class RegistryBackend:
    """Keeps metrics in a registry."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _families: dict[str, Any] = field(default_factory=dict)

    def emit(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Emit a value."""
        family = self._families.get(metric.name)
        if family is None:
            options = {"buckets": metric.bounds} if metric.kind == HISTOGRAM else {}
            family = FAMILIES[metric.kind](
                metric.name, metric.help, ("run", *metric.labels), registry=self.registry, **options
            )
            self._families[metric.name] = family
        getattr(family.labels(**labels), ACTIONS[metric.kind])(value)
