"""The GPU exporter: what NVIDIA's driver says of each GPU, and whose processes are on it, as Prometheus metrics.

`python -m sdp.exporter` serves them. A scrape reads the driver there and then, within a deadline: one GPU that fails,
or a driver that hangs, costs its own series, and others tell of it (`sdp_gpu_up`, `sdp_exporter_…`).
"""
