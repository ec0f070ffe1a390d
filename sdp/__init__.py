"""Pre-train Stable Diffusion: download, process, train, generate, on Ray and Kubernetes."""

__version__ = "0.2.0"
