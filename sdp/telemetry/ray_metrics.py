"""Metrics through Ray: each node's agent exposes them, on the port that KubeRay scrapes."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import ray

from sdp.ray import internals
from sdp.telemetry.catalogue import ACTIONS, GAUGE, Metric

_PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
_REFRESH_S = 2.0
"""Ray exports every 10 s only those gauges that were set since, and the node's agent drops the others 20 s later. So
each gauge is set again at this interval, which takes 10 µs."""


@dataclass
class RayBackend:
    """A backend on Ray's metrics."""

    _families: dict[str, Any] = field(default_factory=dict)
    _gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)
    _refresher: threading.Thread | None = None

    def emit(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Emit a value."""
        if metric.name not in self._families:
            names = ("run", *metric.labels)
            self._families[metric.name] = internals.metric(metric.kind, metric.name, metric.help, names)
        tags = {label: ascii_tag(text) for label, text in labels.items()}
        getattr(self._families[metric.name], ACTIONS[metric.kind])(value, tags=tags)
        if metric.kind == GAUGE:
            self._gauges[metric.name, tuple(tags.items())] = value
            if self._refresher is None or not self._refresher.is_alive():  # it ends with its Ray
                self._refresher = threading.Thread(target=self._keep_fresh, name="sdp-telemetry", daemon=True)
                self._refresher.start()

    def _keep_fresh(self) -> None:
        """Set every gauge to its latest value again, at intervals."""
        pause = threading.Event()
        while not pause.wait(_REFRESH_S) and ray.is_initialized():
            for (name, tags), value in list(self._gauges.items()):
                self._families[name].set(value, tags=dict(tags))


def ascii_tag(text: str) -> str:
    """Return text as a tag of Ray, which must be ASCII: other characters become %XX of their UTF-8."""
    return text if text.isascii() else quote(text, safe=_PRINTABLE)
