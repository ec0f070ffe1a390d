"""Helpers for tests of the monitoring: the chart's expressions, and a Prometheus over a load on this machine."""
