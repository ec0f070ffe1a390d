"""Pre-train Stable Diffusion: download, process, train, generate, on Ray and Kubernetes."""

__version__ = "0.1.0"
