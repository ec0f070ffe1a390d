"""Metrics of running jobs; docs/metrics.md lists them, made from catalogue.py."""

from sdp.telemetry.catalogue import CATALOGUE, Metric
from sdp.telemetry.emit import Backend, Telemetry, begin, run_name

__all__ = ["CATALOGUE", "Backend", "Metric", "Telemetry", "begin", "run_name"]
