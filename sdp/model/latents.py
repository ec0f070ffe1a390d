"""Pixels, latents, and the way between them: each convention in one place, each applied exactly once.

The VAE sees pixels in [-1, 1]; the U-Net sees latents times the VAE's scaling factor (0.18215).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Vae = Any
"""diffusers' AutoencoderKL; its decorators hide from mypy what it has."""


def to_pixels(images: "torch.Tensor") -> "torch.Tensor":
    """Bytes, N × height × width × 3, to what the VAE sees: float32, N × 3 × height × width, in [-1, 1]."""
    import torch

    if images.dtype != torch.uint8:
        raise TypeError(f"images are bytes (uint8), got {images.dtype}: floats may be scaled already")
    return images.permute(0, 3, 1, 2).float().div(127.5).sub(1)


def to_images(pixels: "torch.Tensor") -> "torch.Tensor":
    """The inverse of `to_pixels`; what lies outside [-1, 1] is clipped."""
    import torch

    return pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def encode(vae: Vae, pixels: "torch.Tensor", noise: "torch.Tensor | None" = None) -> "torch.Tensor":
    """Scaled latents of pixels: a draw from the VAE's posterior by the noise given, or its mode without."""
    posterior = vae.encode(pixels).latent_dist
    latents = posterior.mean if noise is None else posterior.mean + posterior.std * noise
    scaled: torch.Tensor = latents * vae.config.scaling_factor
    return scaled


def decode(vae: Vae, latents: "torch.Tensor") -> "torch.Tensor":
    """Pixels of scaled latents."""
    pixels: torch.Tensor = vae.decode(latents / vae.config.scaling_factor).sample
    return pixels
