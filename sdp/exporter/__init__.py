"""The GPU exporter: Prometheus metrics of each NVIDIA GPU and of the processes on it.

`python -m sdp.exporter` serves them. A scrape reads the driver within a deadline. A GPU that fails, or a driver that
hangs, loses only its own series, and other series report it (`sdp_gpu_up`, `sdp_exporter_…`).
"""
