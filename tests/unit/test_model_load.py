"""The loaders, on the tiny model and on networks of Stable Diffusion v2's own shapes (built without memory)."""

import json
import logging
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.published import VAE
from sdp.errors import ModelError
from sdp.families import KnownModel
from sdp.families.classes import network_class
from sdp.families.sd import SD, SD1, SD2
from sdp.families.tokenizer import load_tokenizer, tokens_of
from sdp.model import latents, load
from sdp.model.single_file import _unet
from sdp.model.sources import resolve
from tests.unit.test_model_single_file import SMALL_UNET, SMALL_VAE


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve("builtin:tiny").path


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))


def rewrite(path: Path, change: Any) -> None:
    weights = change(load_file(path))
    save_file(weights, path, metadata={"format": "pt"})


def set_key(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def test_frozen_parts_are_frozen_and_in_evaluation_mode(tiny: Path) -> None:
    for network in (load.load_vae(tiny), load.load_text_encoder(tiny)):
        assert not network.training
        assert not any(weight.requires_grad for weight in network.parameters())
        assert {weight.dtype for weight in network.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("prediction_type", "sample"), ("beta_schedule", "unheard-of"), ("trained_betas", "x")),
        *(("num_train_timesteps", value) for value in (-1, 0, 300_000_000, "1000")),
    ],
)
def test_a_schedule_that_is_not_ours_is_refused(copy: Path, key: str, value: str) -> None:
    set_key(copy / "scheduler/scheduler_config.json", key, value)
    with pytest.raises(ModelError, match="/scheduler"):
        load.load_noise_schedule(copy)


def test_a_text_encoder_saved_under_newer_names_loads_the_same(tiny: Path, copy: Path) -> None:
    weights = copy / "text_encoder/model.safetensors"
    rewrite(weights, lambda w: {name.removeprefix("text_model."): value for name, value in w.items()})
    old, new = load.load_text_encoder(tiny).state_dict(), load.load_text_encoder(copy).state_dict()
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_a_text_encoder_saved_with_its_positions_loads(copy: Path) -> None:
    # As Stable Diffusion v2's own file is.
    positions = {"text_model.embeddings.position_ids": torch.arange(77)[None]}
    rewrite(copy / "text_encoder/model.safetensors", lambda w: w | positions)
    load.load_text_encoder(copy)


class Pickled:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["pickled.bin", "../outside.safetensors", "/outside.safetensors"])
@pytest.mark.parametrize("part", ["text_encoder", "unet"])
def test_an_index_that_names_other_files_than_safetensors_beside_it_is_refused(
    copy: Path, part: str, name: str, tmp_path: Path
) -> None:
    (weights,) = (copy / part).glob("*.safetensors")
    files = dict.fromkeys(load_file(weights), name)
    weights.unlink()
    (copy / part / "pickled.bin").write_bytes(pickle.dumps(Pickled(tmp_path / "made")))
    weights.with_name(f"{weights.name}.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ModelError, match=r"\.index\.json: weight_map: expected safetensors in the same folder"):
        load.load_text_encoder(copy) if part == "text_encoder" else load.load_denoiser(copy, pretrained=True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("adapter_config.json", {"peft_type": "LORA"}, "expected a network without"),
        ("config.json", {"attn_implementation": "owner/name"}, "attn_implementation: .* of the model hub"),
        ("generation_config.json", {"_attn_implementation_internal": {"": "owner/name"}}, "internal: .* the model hub"),
    ],
)
def test_a_network_that_brings_weights_or_code_of_others_is_refused(
    copy: Path, file: str, content: dict[str, str], says: str
) -> None:
    target = copy / "text_encoder" / file
    known = json.loads(target.read_text()) if target.exists() else {}
    text = json.dumps(known | {"text_config": content} if known else content)
    target.write_text(text.replace("attn_", "\\u0061ttn_").replace("owner/", "owner\\u002f"))
    with pytest.raises(ModelError, match=rf"text_encoder\W+{file}: .*{says}"):
        load.load_text_encoder(copy)


def test_the_u_net_comes_with_the_sources_weights_or_with_new_ones(tiny: Path) -> None:
    kept = load.load_denoiser(tiny, pretrained=True)
    file = load_file(tiny / "unet/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(weight, file[name].float()) for name, weight in kept.state_dict().items())
    torch.manual_seed(5)
    new = load.load_denoiser(tiny, pretrained=False)
    assert not torch.equal(new.conv_in.weight, kept.conv_in.weight)
    torch.manual_seed(5)
    other = load.load_denoiser(tiny, pretrained=False)
    assert torch.equal(new.conv_in.weight, other.conv_in.weight)
    for unet in (kept, new):
        assert unet.training
        assert all(weight.requires_grad for weight in unet.parameters())
        assert {weight.dtype for weight in unet.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", [SD1, SD2], ids=["1", "2"])
def test_new_weights_begin_at_zero_where_those_of_stable_diffusion_do(family: KnownModel, copy: Path) -> None:
    # The layers in CompVis' openaimodel.py and attention.py that pass through zero_module, for Stable Diffusion's
    # blocks: three levels with attention, then one without, two residual blocks each and three on the way up.
    (copy / "unet/config.json").write_text(json.dumps({**family.unet, **SMALL_UNET}))
    unet = load.load_denoiser(copy, pretrained=False)
    residual = {f"input_blocks.{n}.0" for n in (1, 2, 4, 5, 7, 8, 10, 11)} | {f"output_blocks.{n}.0" for n in range(12)}
    attention = {f"input_blocks.{n}.1" for n in (1, 2, 4, 5, 7, 8)} | {f"output_blocks.{n}.1" for n in range(3, 12)}
    expected = {f"{block}.out_layers.3" for block in residual | {"middle_block.0", "middle_block.2"}}
    expected |= {f"{block}.proj_out" for block in attention | {"middle_block.1"}} | {"out.2"}
    compvis = _unet(unet.state_dict(), unet.config)
    weights = {name.removesuffix(".weight") for name, w in compvis.items() if name.endswith(".weight") and not w.any()}
    assert weights == expected
    assert not any(compvis[f"{layer}.bias"].any() for layer in expected)
    noise, text = torch.randn(1, 4, 8, 8), torch.randn(1, 77, 8)
    assert not SD.predict(unet, noise, torch.tensor([10]), text).any()


LOADERS: dict[str, Callable[[Path], Any]] = {
    "vae": load.load_vae,
    "text_encoder": load.load_text_encoder,
    "unet": lambda path: load.load_denoiser(path, pretrained=True),
    "tokenizer": load_tokenizer,
}


def lose_a_weight(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(list(weights.items())[1:])


def grow_a_weight(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = min(weights)
    return weights | {name: torch.zeros(weights[name].shape[0] + 1, *weights[name].shape[1:])}


@pytest.mark.parametrize("change", [lose_a_weight, grow_a_weight])
@pytest.mark.parametrize("file", ["vae/diffusion_pytorch_model", "text_encoder/model", "unet/diffusion_pytorch_model"])
def test_weights_that_do_not_fit_are_an_error_and_never_random(
    copy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, file: str, change: Any
) -> None:
    for library in ("diffusers", "transformers"):
        monkeypatch.setattr(logging.getLogger(library), "propagate", True)
    rewrite(copy / f"{file}.safetensors", change)
    part = file.partition("/")[0]
    with pytest.raises(ModelError, match=rf"/{part}: 1 weights are (missing|of other shapes), such as [a-z]"):
        LOADERS[part](copy)
    assert not caplog.messages, "the libraries do not add lines of their own"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("vae/config.json", {"norm_num_groups": {}}),
        ("text_encoder/config.json", {"vocab_size": "many"}),
        ("unet/config.json", {"block_out_channels": [2**70]}),
        ("tokenizer/vocab.json", b"{"),
    ],
)
def test_a_damaged_file_is_an_error_in_one_line(copy: Path, file: str, content: Any) -> None:
    old = (copy / file).read_bytes()
    (copy / file).write_bytes(content if isinstance(content, bytes) else json.dumps(json.loads(old) | content).encode())
    with pytest.raises(ModelError, match=r"\(.*\); compare it with the original$") as caught:
        LOADERS[file.partition("/")[0]](copy)
    assert "\n" not in str(caught.value)


TENSOR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def with_header(header: bytes, claimed: int | None = None) -> bytes:
    """Return a file of safetensors with this header, which may claim another length."""
    return struct.pack("<Q", len(header) if claimed is None else claimed) + header + bytes(24)


@pytest.mark.parametrize("part", ["unet/diffusion_pytorch_model", "text_encoder/model"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps({"conv_in.weight": [1.0] * 100}), "header too large"),
        (with_header(b"{}", 2**63), "header too large"),
        (with_header(json.dumps({"a": TENSOR, "b": {**TENSOR, "data_offsets": [8, 24]}}).encode()), "invalid offset"),
        (b"", "header too small"),
    ],
    ids=["a pickle", "a header of 8 EiB", "tensors that overlap", "nothing"],
)
def test_weights_that_are_not_safetensors_are_named_with_the_reason(
    copy: Path, part: str, content: bytes, reason: str
) -> None:
    file = copy / f"{part}.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=rf"^{file}: cannot be loaded \(.*{reason}.*\); compare it with the original$"):
        LOADERS[part.partition("/")[0]](copy)


@pytest.mark.parametrize(("name", "tokens"), [("tiny", 77), ("tiny-prx", 32), ("tiny-klein", 512)])
def test_the_tokenizer_of_each_family_fits_its_text_encoder(name: str, tokens: int) -> None:
    assert tokens_of(load_tokenizer(resolve(f"builtin:{name}").path)) == tokens


def test_a_tokenizer_with_ids_that_the_text_encoder_lacks_is_refused(copy: Path) -> None:
    set_key(copy / "tokenizer/tokenizer_config.json", "additional_special_tokens", ["<cat-toy>"])
    says = r"tokenizer: has the id \d+, but the text encoder has \d+ embeddings; restore"
    with pytest.raises(ModelError, match=says):
        load_tokenizer(copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt"])
def test_a_tokenizer_s_file_that_is_too_large_is_not_read(copy: Path, name: str) -> None:
    file = copy / "tokenizer" / name
    with file.open("a") as large:
        large.truncate((64 << 20) + 1)
    with pytest.raises(ModelError, match=f"^{file}: has 67,108,865 bytes, too many for a tokenizer's; restore it$"):
        load_tokenizer(copy)


def test_pixels_go_from_minus_one_to_one() -> None:
    images = torch.tensor([0, 128, 255], dtype=torch.uint8).view(1, 1, 3, 1).repeat(1, 1, 1, 3)
    pixels = latents.to_pixels(images)
    assert pixels.shape == (1, 3, 1, 3)
    assert pixels[0, 0, 0].tolist() == pytest.approx([-1, 0.0039216, 1], abs=1e-6)
    assert torch.equal(latents.to_images(pixels), images)
    assert latents.to_images(torch.tensor([-3.0, 3.0]).view(1, 1, 1, 2)).flatten().tolist() == [0, 255]


def test_pixels_that_are_scaled_already_are_refused() -> None:
    with pytest.raises(TypeError, match="uint8"):
        latents.to_pixels(torch.zeros(1, 8, 8, 3))


def test_latents_are_unscaled_before_they_are_decoded(tiny: Path) -> None:
    vae: Any = load.load_vae(tiny)
    drawn = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(latents.decode(vae, drawn), vae.decode(drawn / 0.18215).sample)


@pytest.mark.parametrize(
    ("family", "unet", "vae", "text_encoder"),
    # What the published checkpoints hold.
    [(SD2, 865_910_724, 83_653_863, 340_387_840), (SD1, 859_520_964, 83_653_863, 123_060_480)],
)
def test_the_networks_of_stable_diffusion_have_their_published_sizes(
    family: KnownModel, unet: int, vae: int, text_encoder: int
) -> None:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    kind: Any = AutoencoderKL
    with torch.device("meta"):
        networks = {
            "unet": network_class("UNet2DConditionModel").from_config(family.unet),
            "vae": kind.from_config(VAE),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**family.text_encoder)),
        }
    sizes = {name: sum(weight.numel() for weight in network.parameters()) for name, network in networks.items()}
    assert sizes == family.parameters == {"unet": unet, "vae": vae, "text_encoder": text_encoder}


def test_a_vae_saved_under_older_names_loads_the_same(tmp_path: Path) -> None:
    # Stable Diffusion v2's VAE names its attention query, key, value and proj_attn.
    from diffusers import AutoencoderKL

    small: dict[str, Any] = {**VAE, **SMALL_VAE}
    torch.manual_seed(0)
    kind: Any = AutoencoderKL
    vae = kind.from_config(small)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text(json.dumps(small))
    new_to_old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    weights = {}
    for name, weight in vae.state_dict().items():
        for new, old in new_to_old.items():
            name = name.replace(new, old)
        weights[name] = weight
    assert any(".query." in name for name in weights)
    save_file(weights, tmp_path / "vae/diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    loaded = load.load_vae(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in vae.state_dict().items())
