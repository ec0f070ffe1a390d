"""What a running job tells of itself: see catalogue.py for every metric, and docs/metrics.md for the same to read."""

from sdp.telemetry.catalogue import CATALOGUE, Metric
from sdp.telemetry.emit import Backend, Telemetry, begin, run_name

__all__ = ["CATALOGUE", "Backend", "Metric", "Telemetry", "begin", "run_name"]
