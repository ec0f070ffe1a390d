"""Families of models: everything that depends on the kind of a model, chosen by its folder.

A family is one object with the answers that the other rooms ask for; `docs/families.md` lists them. Nothing here
imports torch before a function needs it.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sdp.errors import ModelError, UserError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor, nn

INDEX = "model_index.json"
_SIZES = (
    *("block_out_channels", "layers_per_block", "cross_attention_dim", "hidden_size", "depth"),
    *("num_layers", "num_single_layers", "num_attention_heads"),
)
"""The keys of a denoiser's configuration that decide its size."""
LoraNames = Literal["kohya", "diffusers"]
DENOISER = "denoiser"
"""The part that is trained; each family has a folder name for it."""
TICKS = 1 << 24
"""A flow's times are whole numbers of this many parts: FSDP would round times in fp32 to its own dtype."""


@dataclass(frozen=True, slots=True)
class LatentSpace:
    """The latents of a VAE; by default, Stable Diffusion's."""

    channels: int = 4
    reduction: int = 8
    """Pixels per latent, in width and in height."""
    scale: float = 0.18215
    """Latents are the VAE's output, less the shift, times the scale."""
    shift: float = 0.0
    drawn: bool = True
    """True if the VAE returns a distribution to draw latents from."""
    patch: int = 1
    """The side of the squares of the VAE's output that are one latent each, with the channels of all."""

    def shape(self, width: int, height: int | None = None, *, moments: bool = False) -> tuple[int, int, int]:
        """Return the channels, rows and columns of a picture's latents, or of their mean and log-variance."""
        rows, columns = (height or width) // self.reduction, width // self.reduction
        return self.channels * (2 if moments else 1), rows, columns


@dataclass(frozen=True, slots=True)
class TextSpace:
    """The form of captions in a dataset: token ids or, with a width, embeddings; by default, Stable Diffusion's ids."""

    tokens: int = 77
    """Tokens of a caption, after cutting and padding."""
    dtype: str = "uint16"
    """The dtype of token ids."""
    width: int | None = None
    """The size of a token's embedding."""
    pad: int | None = None
    """The token of padding, if the model does not see it; captions have lengths then."""
    step: int | None = None
    """The multiple of tokens to which a batch's captions may be cut, if the denoiser masks their padding."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.tokens,) if self.width is None else (self.tokens, self.width)

    @property
    def stored(self) -> np.dtype:
        """The dtype of what is stored."""
        return np.dtype(self.dtype if self.width is None else np.float16)

    @property
    def bytes(self) -> int:
        """The size of a caption."""
        return int(np.prod(self.shape)) * self.stored.itemsize

    def lengths(self, tokens: int) -> list[int]:
        """Return the numbers of tokens to which a batch may cut captions of `tokens`."""
        step = self.step or tokens
        return [*range(step, tokens, step), tokens]

    def cut(self, captions: NDArray[Any], counted: NDArray[np.bool_]) -> int:
        """Return to how many tokens a batch cuts captions: ids, or embeddings with zeros for padding.

        It is one of `lengths`, which are few, since each has kernels of its own.
        """
        tokens: int = captions.shape[1]
        if self.step is None:
            return tokens
        if captions.ndim == 2:
            used = np.flatnonzero((captions[counted] != self.pad).any(0)) // self.step
        else:
            used = np.flatnonzero(captions[:, :: self.step][counted].any((0, 2)))
        return min(tokens, self.step * (1 + int(used.max(initial=0))))


ALL_TOKENS: Final = TextSpace()
"""Captions that batches never cut."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose memory is known: the networks that may be trained, and the parameters of each."""

    name: str
    unet: Mapping[str, Any]
    """The denoiser's configuration."""
    text_encoder: Mapping[str, Any]
    """The text encoder's, or nothing where training it was not counted."""
    parameters: Mapping[str, int]
    memory: str = "memory"
    """The section of plan/reference.yaml with the bytes that training keeps."""

    def has_size_of(self, config: Mapping[str, Any]) -> bool:
        """Return whether a denoiser's configuration is one of this size."""
        return all(config.get(key) == self.unet[key] for key in _SIZES if key in self.unet)


def known_model(name: str) -> KnownModel:
    """Return a model of known.json by its name."""
    return KnownModel(name, **json.loads(Path(__file__).with_name("known.json").read_bytes())[name])


class Family(ABC):
    """The answers of a family."""

    name: ClassVar[str]
    pipeline: ClassVar[str]
    """The class of diffusers that loads an export."""
    pipeline_options: ClassVar[tuple[str, ...]] = ()
    """Arguments with which it draws what was trained."""
    denoiser: ClassVar[str]
    """The folder of the network that is trained."""
    denoiser_class: ClassVar[str]
    text_class: ClassVar[str]
    kinds: ClassVar[tuple[tuple[str, str, tuple[str, ...]], ...]]
    """The other networks' folders, the key that names their kind, and its values."""
    text_key: ClassVar[str]
    """The denoiser's key for the size of a token's embedding."""
    tokens: ClassVar[int] = TextSpace().tokens
    """Tokens of a caption, at least, with which operations are counted: MFU is never overstated."""
    text_layers: ClassVar[tuple[int, ...]] = ()
    """The layers of the text encoder whose states are put side by side; by default the last one's alone."""
    trains_text: ClassVar[bool] = True
    """True if the text encoder may be trained, too."""
    predictions: ClassVar[tuple[str, ...]]
    """The values of objective.prediction that the denoiser can be trained for."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Name endings of the denoiser's attention layers."""
    lora_names: ClassVar[LoraNames | None] = None
    """The names by which other programs know these layers in a LoRA's file; None if they read none."""
    builtin: ClassVar[str]
    """The name of its tiny model."""
    known: ClassVar[tuple[KnownModel, ...]]
    """The models whose memory is known."""

    def folder(self, part: str) -> str:
        """Return the folder of a part."""
        return self.denoiser if part == DENOISER else part

    def problem(self, configs: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Return why networks with these configurations, by folder, are not a model of this family, or None."""
        for folder, key, kinds in (*self.kinds, (self.denoiser, "_class_name", (self.denoiser_class,))):
            if folder in configs and (value := configs[folder].get(key)) not in kinds:
                expected = " or ".join(map(repr, kinds))
                return f"{folder}/config.json: {key}: expected {expected}, got {value!r}"
        denoiser = configs.get(self.denoiser, {})
        for folder, key, own, times in (
            ("vae", "latent_channels", "in_channels", _packed(configs.get("vae", {})) ** 2),
            ("text_encoder", "hidden_size", self.text_key, len(self.text_layers) or 1),
        ):
            value, total = configs.get(folder, {}).get(key), denoiser.get(own)
            if denoiser and folder in configs and (not isinstance(value, int) or value * times != total):
                needed = f"{total // times}, as the {self.denoiser} needs" if isinstance(total, int) else f"{total!r}"
                return f"{folder}/config.json: {key}: expected {needed}, got {value!r}"
        return None

    def skips_tokens(self, denoiser: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Return whether a denoiser with this configuration has blocks that image tokens may skip."""
        return False

    @abstractmethod
    def text(self, model: Path, *, embedded: bool) -> TextSpace:
        """Return the form of captions for a model."""

    @abstractmethod
    def load_tokenizer(self, folder: Path) -> "Tokenizer":
        """Load a tokenizer that cuts and pads captions; raise anything if its files do not fit."""

    def prepare_text_encoder(self, text_encoder: Any, model: Path) -> None:  # noqa: B027 (most need nothing)
        """Give a loaded text encoder what `encode_text` needs of the model's folder."""

    @abstractmethod
    def encode_text(self, text_encoder: Any, ids: "Tensor") -> "Tensor":
        """Return the denoiser's text input: the hidden states of all tokens; zeros for padding it must not see."""

    @abstractmethod
    def predict(
        self, denoiser: Any, latents: "Tensor", times: "Tensor", text: "Tensor", kept: "Tensor | None" = None
    ) -> "Tensor":
        """Return the prediction for noisy latents at times of the model's process.

        In training, image tokens other than the `kept` ones of each sample may skip some blocks.
        """

    def set_timesteps(self, scheduler: Any, steps: int, image: "Tensor") -> None:
        """Set the times at which a sampler of diffusers calls the denoiser to draw latents like `image`."""
        scheduler.set_timesteps(steps, device=image.device)

    def authors_layer(self, layer: str) -> str:
        """Return the authors' name of a layer; if it is one of several equal parts of theirs, that of the whole."""
        return layer

    @abstractmethod
    def initialise(self, denoiser: Any) -> None:
        """Give a new denoiser the initial weights that diffusers does not give it."""

    @abstractmethod
    def blocks(self, denoiser: Any) -> "Iterator[nn.Module]":
        """Yield the denoiser's blocks in forward order. Each is sharded and compiled separately."""

    def text_blocks(self, text_encoder: Any) -> "Iterator[nn.Module]":
        """Yield the text encoder's layers in the order of a forward pass."""
        yield from text_encoder.layers

    def flops_inputs(self, denoiser: Any, side: int) -> "Sequence[Tensor]":
        """Return the latents, time and text of one sample, to count operations with."""
        import torch

        config = denoiser.config
        text = torch.empty(1, self.tokens, config[self.text_key])
        return torch.empty(1, config.in_channels, side, side), torch.zeros(1, dtype=torch.int64), text


def flow_times(times: "Tensor") -> "Tensor":
    """Return a flow's times from 0 to 1: training's are ticks, a sampler's are thousandths."""
    return times / 1000 if times.is_floating_point() else times / TICKS


def every() -> tuple[Family, ...]:
    """Return all families."""
    from sdp.families.flux2 import FLUX2
    from sdp.families.prx import PRX
    from sdp.families.sd import SD

    return SD, PRX, FLUX2


def of(model: Path) -> Family:
    """Return the family of a model's folder."""
    index = model / INDEX
    return by_index(index.read_bytes() if index.is_file() else b"{}", str(model))


def by_index(index: bytes, model: str) -> Family:
    """Return the family that a model_index.json names, which may be absent (`{}`) in Stable Diffusion."""
    name = parse_index(index).get("_class_name", every()[0].pipeline)
    if (known := next((family for family in every() if family.pipeline == name), None)) is not None:
        return known
    *able, last = (family.pipeline for family in every())
    expected = f"expected {', '.join(able)} or {last}, got {name!r}"
    raise ModelError(f"model source {model}: {INDEX}: _class_name: {expected} (docs/families.md); choose another model")


def parse_index(index: bytes) -> Mapping[str, Any]:
    """Return the content of a model_index.json; empty if it is damaged, since the parts then show what is wrong."""
    try:
        content = json.loads(index)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_unsupported(name: str, where: str) -> None:
    """Raise ModelError for the name of a model whose kind people train with other programs."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.casefold())
    if kind := next((kind for mark, kind in _UNSUPPORTED.items() if re.search(rf"\b{mark}", plain)), None):
        *able, last = (family.name for family in every())
        raise ModelError(f"{where}: {kind} is not supported; {', '.join(able)} and {last} are (docs/families.md)")


_UNSUPPORTED = {
    "pixart": "PixArt",
    r"(sd)?xl\b": "SDXL",
    r"klein\b.*9b\b": "FLUX.2 klein 9B",
    r"flux(?!-?2-?klein\b)": "FLUX",
    r"(diffusion|sd)-?3\b": "Stable Diffusion 3",
    "qwen-?image": "Qwen-Image",
    "z-?image": "Z-Image",
    "kandinsky": "Kandinsky",
}
"""Kinds of models, by words in their names, with hyphens between."""


def text_width(model: Path) -> int:
    """Return the size of the text encoder's output for each token."""
    return int(_number(model / "text_encoder", "hidden_size", 512))


def latent_space(vae: Mapping[str, Any]) -> LatentSpace:
    """Return the latent space of a VAE by its configuration."""
    default, patch = LatentSpace(), _packed(vae)
    is_drawn = vae.get("_class_name") != "AutoencoderDC"
    blocks = vae.get("block_out_channels") if is_drawn else vae["encoder_block_out_channels"]
    scale = default.scale if patch == 1 else 1.0  # with patches, the weights hold each channel's mean and deviation
    return LatentSpace(
        channels=int(vae.get("latent_channels", default.channels)) * patch**2,
        reduction=(2 ** (len(blocks) - 1) if blocks else default.reduction) * patch,
        scale=float(vae.get("scaling_factor", scale)),
        shift=float(vae.get("shift_factor") or 0.0),
        drawn=is_drawn,
        patch=patch,
    )


def _packed(vae: Mapping[str, Any]) -> int:
    """Return the side of the squares of a VAE's output that are packed into one latent."""
    return 2 if vae.get("_class_name") == "AutoencoderKLFlux2" else 1


def space_of(model: Path) -> LatentSpace:
    """Return the latent space of a model's folder; one without a VAE has Stable Diffusion's."""
    config = model / "vae/config.json"
    with explained(config):
        return latent_space(json.loads(config.read_bytes())) if config.is_file() else LatentSpace()


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn what the libraries raise for a damaged or odd network, which is of any class, into one line."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        remedy = "install what it needs" if isinstance(error, ImportError) else "compare it with the original"
        raise ModelError(f"{folder}: cannot be loaded ({one_line(error, 200)}); {remedy}") from error


def read_latent_space(model: Path, source: str) -> LatentSpace:
    """Return the latent space of a model; refuse one whose latents would be left unscaled."""
    scale = _number(model / "vae", "scaling_factor", LatentSpace().scale)
    space, weights = space_of(model), model / "vae/diffusion_pytorch_model.safetensors"
    if space.patch == 1 and scale == 1.0:
        raise ModelError(
            f"model.source: the VAE of {source} has scaling_factor 1.0: latents would be left unscaled; set it in "
            "vae/config.json (0.18215 in Stable Diffusion 2)"
        )
    if space.patch > 1 and weights.is_file():
        from safetensors import safe_open

        with explained(weights), safe_open(weights, "pt") as file:  # NumPy lacks bf16
            names = {"bn.running_mean", "bn.running_var"} & set(file.keys())
            statistics = [file.get_tensor(name) for name in sorted(names)]
        if len(names) < 2 or not all(each.isfinite().all() for each in statistics) or statistics[1].min() <= 0:
            raise ModelError(
                f"model.source: the VAE of {source} lacks bn, the finite mean and variance of its latents; restore it"
            )
    return space


def patch_of(model: Path) -> int:
    """Return the side of the denoiser's patches in latents."""
    folder = model / of(model).denoiser
    return int(_number(folder, "patch_size", 1)) if (folder / "config.json").is_file() else 1


def kept_tokens(tokens: int, skipped: float) -> int:
    """Return how many image tokens pass all blocks if a share of them skips some."""
    return max(1, round(tokens * (1 - skipped)))


def refuse_sides(key: str, model: Path, sides: Iterable[int], *, buckets: bool = False) -> None:
    """Raise UserError if pictures have no whole number of the denoiser's patches; `buckets` have whole eighths."""
    multiple, crop = space_of(model).reduction * patch_of(model), ""
    if buckets:
        multiple, crop = 8 * multiple, " with transform.crop: buckets"
    if odd := [side for side in sides if side % multiple]:
        raise UserError(f"{key}: expected multiples of {multiple} pixels for this model{crop}, got {odd[0]}")


def _number(folder: Path, key: str, default: float) -> float:
    """Return a number of a configuration, by default the libraries' own, since older files lack the key."""
    with explained(folder):
        value = json.loads((folder / "config.json").read_bytes()).get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"{folder}/config.json: {key}: expected a number above 0, got {value!r}; restore the file")
    return value


def flops(family: Family, architecture: Mapping[str, Any], side: int, skipped: float = 0.0) -> float:
    """Count the floating-point operations of a forward and backward pass for one sample of latents of a side.

    A multiply-add is two. `skipped` is the share of image tokens that skip some blocks.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from sdp.families.classes import network_class

    with torch.device("meta"):
        denoiser = network_class(family.denoiser_class).from_config(dict(architecture))
        latents, times, text = family.flops_inputs(denoiser, side)
        tokens = (side // denoiser.config.get("patch_size", 1)) ** 2
        kept = torch.empty(1, kept_tokens(tokens, skipped), dtype=torch.int64) if skipped else None
        with FlopCounterMode(display=False) as counter:
            torch.autograd.backward(family.predict(denoiser, latents, times, text, kept).sum())
    return float(counter.get_total_flops())
