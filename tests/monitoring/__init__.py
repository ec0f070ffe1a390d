"""What the tests of the monitoring share: the chart's expressions, and a Prometheus over a load of this machine."""
