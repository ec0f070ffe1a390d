"""A backend for metrics in a registry of prometheus-client, which tests read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from sdp.telemetry.catalogue import ACTIONS, COUNTER, GAUGE, Metric

FAMILIES: dict[str, Any] = {COUNTER: Counter, GAUGE: Gauge}


@dataclass
class RegistryBackend:
    """Keeps metrics in a registry."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _families: dict[str, Any] = field(default_factory=dict)

    def emit(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Emit a value."""
        family = self._families.get(metric.name)
        if family is None:
            labels_of = ("run", *metric.labels)
            family = FAMILIES[metric.kind](metric.name, metric.help, labels_of, registry=self.registry)
            self._families[metric.name] = family
        getattr(family.labels(**labels), ACTIONS[metric.kind])(value)
