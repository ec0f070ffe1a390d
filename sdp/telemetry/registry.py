"""Metrics without Ray: prometheus-client's registry, served at a port on request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from sdp.errors import UserError
from sdp.telemetry.catalogue import ACTIONS, COUNTER, GAUGE, HISTOGRAM, Metric

FAMILIES: dict[str, Any] = {COUNTER: Counter, GAUGE: Gauge, HISTOGRAM: Histogram}


@dataclass
class RegistryBackend:
    """A backend on a registry of prometheus-client."""

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


@cache
def default() -> RegistryBackend:
    """Return this process's only backend: a registry refuses a second family of the same name."""
    return RegistryBackend(REGISTRY)


def forget() -> None:
    """Clear all series: their run has ended, though this process has not."""
    for family in default()._families.values():
        family.clear()


def serve(port: int, key: str, address: str = "0.0.0.0") -> Any:
    """Serve this process's metrics at http://ADDRESS:PORT/metrics until it ends; return the server.

    `key` is the setting that names the port.
    """
    try:
        server, _ = start_http_server(port, addr=address)
    except OSError as error:
        raise UserError(f"{key}: cannot listen on port {port} ({error.strerror}); choose another, or null") from error
    return server
