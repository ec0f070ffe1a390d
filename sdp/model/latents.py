"""Conversions between images, pixels and latents. Each convention is in one place.

The VAE sees pixels in [-1, 1]; the denoiser sees latents: the VAE's output less its shift, times
its scaling factor (0 and 0.18215 in Stable Diffusion; in FLUX.2, squares of it, with both for each channel).
"""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Scale:
    """The shift and the factor that make latents of a VAE's output, for all channels or for each."""

    shift: "torch.Tensor"
    factor: "torch.Tensor"
    patch: int

    def packed(self, output: "torch.Tensor") -> "torch.Tensor":
        """Return latents before they are shifted and scaled."""
        from torch.nn.functional import pixel_unshuffle

        return pixel_unshuffle(output, self.patch)

    def unscaled(self, latents: "torch.Tensor") -> "torch.Tensor":
        """Return the VAE's output that latents were made of."""
        from torch.nn.functional import pixel_shuffle

        return pixel_shuffle(latents / self.factor + self.shift, self.patch)


def scale_of(vae: Vae, device: "torch.device | None" = None) -> Scale:
    """Return a VAE's scale, on its device or another one."""
    import torch

    space = latent_space(vae.config)
    if (norm := getattr(vae, "bn", None)) is None:
        shift, scale = (torch.tensor(value, dtype=torch.float64) for value in (space.shift, space.scale))
        return Scale(shift, scale, space.patch)
    mean, variance = (each.to(device, torch.float32).view(-1, 1, 1) for each in (norm.running_mean, norm.running_var))
    return Scale(mean, (variance + norm.eps).rsqrt(), space.patch)


def decode(vae: Vae, latents: "torch.Tensor") -> "torch.Tensor":
    """Return the pixels of scaled latents."""
    pixels: torch.Tensor = vae.decode(scale_of(vae).unscaled(latents)).sample
    return pixels
