"""Metrics without Ray: prometheus-client's registry, and a port if one is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from sdp.errors import UserError
from sdp.telemetry.catalogue import COUNTER, GAUGE, Metric

_default: list["RegistryBackend"] = []


@dataclass
class RegistryBackend:
    """See Backend."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _families: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def default() -> "RegistryBackend":
        """This process' own; a registry refuses a second family of the same name."""
        if not _default:
            _default.append(RegistryBackend(REGISTRY))
        return _default[0]

    def add(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._series(metric, labels).inc(value)

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._series(metric, labels).set(value)

    def observe(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._series(metric, labels).observe(value)

    def _series(self, metric: Metric, labels: Mapping[str, str]) -> Any:
        family = self._families.get(metric.name)
        if family is None:
            names = ("run", *metric.labels)
            if metric.kind == COUNTER:
                family = Counter(metric.name, metric.help, names, registry=self.registry)
            elif metric.kind == GAUGE:
                family = Gauge(metric.name, metric.help, names, registry=self.registry)
            else:
                family = Histogram(metric.name, metric.help, names, registry=self.registry, buckets=metric.bounds)
            self._families[metric.name] = family
        return family.labels(**labels)


def forget() -> None:
    """Take away what has been told: what it was told of has ended, though this process has not."""
    for backend in _default:
        for family in backend._families.values():
            family.clear()


def serve(port: int, key: str, address: str = "0.0.0.0") -> Any:
    """Offer this process' metrics at http://ADDRESS:PORT/metrics until it ends; returns the server. `key` is the
    setting that named the port."""
    try:
        server, _ = start_http_server(port, addr=address)
    except OSError as error:
        raise UserError(f"{key}: port {port} cannot be had ({error.strerror}); choose another or null") from error
    return server
