"""`sdp export`: a checkpoint as a folder in diffusers layout, or as a single file."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from sdp.errors import ModelError, UserError
from sdp.families import INDEX, Family, LatentSpace, space_of
from sdp.families.sd import SD
from sdp.model import checkpoints, layout, load, sources
from sdp.model.layout import PARTS
from sdp.model.lora import published
from sdp.model.single_file import architecture, single_file
from sdp.model.trained import by_network, load_trained, lora_of
from sdp.storage import Storage, open_storage

SCHEDULER = "scheduler/scheduler_config.json"
TEXT_ENCODER = "text_encoder/config.json"
Dtype = Literal["fp32", "fp16"]
Form = Literal["folder", "single-file", "lora"]
_PROMPT = "a photograph"


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export."""

    uri: str
    checkpoint: str
    step: int
    newer: str
    """The run's newest checkpoint, if it is another."""
    ema: bool
    form: Form
    family: Family = SD
    prompt: str = _PROMPT

    @property
    def hint(self) -> str:
        """Return a line on how to use the export."""
        first, uri = "", self.uri
        if "://" in uri:
            first, uri = "copy it here, then ", uri.rpartition("/")[2]
        place = json.dumps(uri, ensure_ascii=False)
        if self.form == "single-file":
            command = shlex.join(["sdp", "export", self.checkpoint])
            code = f"StableDiffusionPipeline.from_single_file({place}, config=FOLDER)"
            return f"{first}load it in diffusers: {code}, where FOLDER is written by: {command} FOLDER"
        if self.form != "folder":
            return f"{first}put it into ComfyUI's models/loras, or in diffusers: pipeline.load_lora_weights({place})"
        pipeline, words = self.family.pipeline, ", ".join([json.dumps(self.prompt), *self.family.pipeline_options])
        code = f'{pipeline}.from_pretrained({place})({words}).images[0].save("picture.png")'
        line = shlex.join(["python", "-c", f"from diffusers import {pipeline}; {code}"])
        return f"{first}draw with it: {line}"


def export(checkpoint: str, out: str, *, ema: bool = True, dtype: Dtype = "fp32", form: Form = "folder") -> Exported:
    """Export a checkpoint, or the newest of a run, with the averaged weights if it has them, or the raw ones.

    `out` is an empty folder, or a new file's name: for the whole model (single-file), or only the LoRA, as diffusers'
    load_lora_weights reads it (lora). All networks are stored in `dtype`, including those that were not trained.
    """
    one_file = form != "folder"
    folder = checkpoints.find_checkpoint(checkpoint)
    stem, dot, suffix = out.rpartition(".") if one_file else (out.rstrip("/"), "", "")
    own = f"name it by the step ({stem}-{{step}}{dot}{suffix})"
    out = checkpoints.with_step(out, folder.uri)
    config, marker = checkpoints.training_config(folder).model_dump(mode="json"), checkpoints.read_marker(folder)
    ema = ema and config["ema"]["decay"] is not None
    step = int(marker["state"]["step"])
    if not step:
        raise UserError(f"export: CHECKPOINT: {folder.uri}: step 0, which has learned nothing; train first")
    parent, _, file = out.rpartition("/") if one_file else (out, "", "")
    target = open_storage(parent or ".")
    if one_file and not file.endswith(".safetensors"):
        raise UserError(f"export: OUT: expected a file name that ends with .safetensors, got {out}")
    if one_file and target.exists(file):
        raise UserError(f"export: OUT: {target.uri_of(file)}: already exists; choose another name, or {own}")
    if not one_file and target.names():
        raise UserError(f"export: OUT: {target.uri}: the folder is not empty; choose an empty one, or {own}")
    model = _source(folder, config)
    source, family = model.path, model.family
    space, usual = space_of(source), LatentSpace()
    foreign = (space.channels, space.scale, space.shift) != (usual.channels, usual.scale, usual.shift)
    if (form == "lora" and not family.lora_names) or (form == "single-file" and (family is not SD or foreign)):
        what = family.name if family is not SD else "a Stable Diffusion with another VAE"
        raise UserError(f"export: no other program reads such a file of {what}; export a folder")
    if form == "lora":
        target.publish(file, _serialised(_lora(folder, family, ema=ema), dtype))
        return Exported(target.uri_of(file), folder.uri, step, checkpoints.newer_than(folder.uri), ema, form)
    networks: Any = load_trained(folder, source, ema=ema, name=config["model"]["source"])
    if form == "folder":
        _write_folder(target, networks, config["objective"], model, dtype)
        prompt = next(iter((config.get("samples") or {}).get("prompts") or ()), _PROMPT)
        return Exported(target.uri, folder.uri, step, checkpoints.newer_than(folder.uri), ema, form, family, prompt)
    text_encoder = networks.text_encoder or load.load_text_encoder(source)
    spec = _modelspec(file.removesuffix(".safetensors"), config, marker, text_encoder)
    target.publish(file, _serialised(single_file(networks.denoiser, load.load_vae(source), text_encoder), dtype, spec))
    return Exported(target.uri_of(file), folder.uri, step, checkpoints.newer_than(folder.uri), ema, form)


def _write_folder(
    target: Storage, networks: Any, objective: Mapping[str, Any], model: sources.LocalModel, dtype: Dtype
) -> None:
    """Write the trained networks and the source's other parts in diffusers layout."""
    from safetensors.torch import load as load_tensors

    scheduler = checkpoints.trained_scheduler(objective["prediction"], objective["zero_terminal_snr"])
    with TemporaryDirectory(prefix="sdp-export-") as scratch:
        for part, network in networks.named_children():
            network.save_pretrained(Path(scratch) / part, safe_serialization=True)
        saved = {path.relative_to(scratch).as_posix(): path for path in Path(scratch).rglob("*") if path.is_file()}
        parts = {name.partition("/")[0] for name in saved}
        others = (name for name in layout.present(model.path) if name.partition("/")[0] not in parts)
        files = {name: model.path / name for name in others} | saved
        # The index comes last: without it the folder is visibly unfinished.
        for name in sorted(files, key=lambda name: (name == INDEX, name)):
            data = files[name].read_bytes()
            if name.endswith(".safetensors"):
                data = _serialised(load_tensors(data), dtype)
            elif name == SCHEDULER:
                data = _json({**json.loads(data), **scheduler})
            elif name == INDEX:
                data = _index(data, networks.family, None if "text_encoder" in parts else model.encoder_digest)
            elif name == TEXT_ENCODER:
                data = _text_encoder(data)
            target.publish(name, data)


def _source(folder: Storage, config: dict[str, Any]) -> sources.LocalModel:
    """Return the model that the run started from; its content must be unchanged."""
    source = config["model"]["source"]
    sources.check(source)
    model = sources.resolve(source)
    digest = checkpoints.base_digest(folder)
    if digest is not None and digest != model.digest:
        raise ModelError(
            f"model source {source}: its content has changed since {folder.uri} was trained with it: "
            f"then {digest[:12]}…, now {model.digest[:12]}…; restore it"
        )
    return model


def _lora(folder: Storage, family: Family, *, ema: bool) -> dict[str, Any]:
    lora = lora_of(folder)
    if lora.rank is None:
        raise UserError(f"export: --lora: {folder.uri} was trained without lora.rank; leave --lora out")
    assert family.lora_names is not None
    return published(by_network(checkpoints.read_weights(folder, ema=ema), family), lora.scale, family.lora_names)


def _modelspec(title: str, config: Mapping[str, Any], marker: Mapping[str, Any], text_encoder: Any) -> dict[str, str]:
    """Return what the ModelSpec standard and sdp say of a single file."""
    prediction, side = config["objective"]["prediction"], config["data"]["resolution"]
    spec = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": architecture(text_encoder, prediction),
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        "modelspec.title": title,
        "modelspec.date": marker.get("created"),
        "modelspec.resolution": f"{side}x{side}",
        "modelspec.prediction_type": prediction,
        "sdp.step": marker["state"]["step"],
        "sdp.zero_terminal_snr": json.dumps(config["objective"]["zero_terminal_snr"]),
        "sdp.model": marker.get("model", {}).get("digest"),
        "sdp.dataset": marker.get("dataset", {}).get("manifest_digest"),
    }
    return {name: str(value) for name, value in spec.items() if value is not None}


def _serialised(tensors: dict[str, Any], dtype: Dtype, spec: Mapping[str, str] | None = None) -> bytes:
    """Return a weights file, with floating-point tensors in a dtype; one with a specification also holds the digest."""
    import torch
    from safetensors.torch import save as save_tensors

    target = {"fp32": torch.float32, "fp16": torch.float16}[dtype]
    cast = {name: tensor.to(target) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    cast = {name: tensor.contiguous() for name, tensor in cast.items()}
    data = save_tensors(cast, {"format": "pt"})
    if not spec:
        return data
    begin = 8 + int.from_bytes(data[:8], "little")
    digest = hashlib.sha256(memoryview(data)[begin:]).hexdigest()
    del data  # gigabytes
    return save_tensors(cast, {"format": "pt", **spec, "modelspec.hash_sha256": f"0x{digest}"})


def _index(data: bytes, family: Family, encoder: str | None) -> bytes:
    """Return the source's index without the networks that are not exported, such as a safety checker.

    It names the model that `encoder` is the digest of, whose VAE and text encoder these are.
    """
    index, parts = json.loads(data) | {sources.ENCODER: encoder}, set(map(family.folder, PARTS))
    for name, entry in index.items():
        if isinstance(entry, list) and name not in parts:
            index[name] = [None, None]
    return _json({**index, "requires_safety_checker": False} if family is SD else index)


def _text_encoder(data: bytes) -> bytes:
    """Return the text encoder's configuration with fp32 as its default dtype, like diffusers' networks.

    Otherwise transformers would load it in the weights' dtype, which may differ from the U-Net's, and drawing fails.
    """
    config = {name: value for name, value in json.loads(data).items() if name != "torch_dtype"}
    return _json({**config, "dtype": "float32"})


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
