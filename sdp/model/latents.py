"""Conversions between images, pixels and latents. Each convention is in one place.

The VAE sees pixels in [-1, 1]; the denoiser sees latents: the VAE's output less its shift, times
its scaling factor (0 and 0.18215 in Stable Diffusion).
"""

from typing import TYPE_CHECKING, Any

from sdp.families import latent_space

if TYPE_CHECKING:
    import torch

Vae = Any
"""diffusers' AutoencoderKL; its decorators hide its attributes from mypy."""


def to_pixels(images: "torch.Tensor") -> "torch.Tensor":
    """Convert images (N × height × width × 3, uint8) to pixels (N × 3 × height × width, float32, in [-1, 1])."""
    import torch

    if images.dtype != torch.uint8:
        raise TypeError(f"expected images in uint8, got {images.dtype}: floats may already be scaled")
    return images.permute(0, 3, 1, 2).float().div(127.5).sub(1)


def to_images(pixels: "torch.Tensor") -> "torch.Tensor":
    """Convert pixels back to images, clipping values outside [-1, 1]."""
    import torch

    return pixels.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def decode(vae: Vae, latents: "torch.Tensor") -> "torch.Tensor":
    """Return the pixels of scaled latents."""
    space = latent_space(vae.config)
    pixels: torch.Tensor = vae.decode(latents / space.scale + space.shift).sample
    return pixels
