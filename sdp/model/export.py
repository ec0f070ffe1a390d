"""`sdp export`: a checkpoint as a folder in diffusers layout, or as a single file."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from sdp.errors import ModelError, UserError
from sdp.model import load, sources
from sdp.model.checkpoints import find_checkpoint, read_config, read_marker, read_weights, trained_scheduler
from sdp.model.layout import INDEX, PARTS
from sdp.model.lora import diffusers_lora
from sdp.model.single_file import single_file
from sdp.model.trained import by_network, load_trained, lora_of
from sdp.storage import Storage, StorageOptions, open_storage

SCHEDULER = "scheduler/scheduler_config.json"
TEXT_ENCODER = "text_encoder/config.json"
Dtype = Literal["fp32", "fp16"]
Form = Literal["folder", "single-file", "lora"]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export."""

    uri: str
    checkpoint: str
    step: int
    ema: bool
    files: int

    @property
    def draw_command(self) -> str:
        """Return a command that draws a picture with the exported folder; empty if it is remote or a single file."""
        if "://" in self.uri or self.uri.endswith(".safetensors"):
            return ""
        folder = json.dumps(self.uri, ensure_ascii=False)
        code = f'SD.from_pretrained({folder})("a red circle").images[0].save("picture.png")'
        return shlex.join(["python", "-c", f"from diffusers import StableDiffusionPipeline as SD; {code}"])


def export(
    checkpoint: str,
    out: str,
    *,
    ema: bool = True,
    dtype: Dtype = "fp32",
    form: Form = "folder",
    options: StorageOptions | None = None,
) -> Exported:
    """Export a checkpoint, or the newest of a run, with the averaged weights or the raw ones.

    `out` is an empty folder, or a new file's name: for the whole model (single-file), or only the LoRA (lora), as
    diffusers' load_lora_weights reads it. All networks are stored in `dtype`, including those that were not trained.
    """
    one_file = form != "folder"
    folder = find_checkpoint(checkpoint, options)
    config = read_config(folder)
    objective = config["objective"]
    scheduler = trained_scheduler(objective["prediction"], objective["zero_terminal_snr"])
    step = int(read_marker(folder)["state"]["step"])
    if not step:
        raise UserError(f"export: CHECKPOINT: {folder.uri}: step 0, which has learned nothing; train first")
    parent, _, file = out.rpartition("/") if one_file else (out, "", "")
    target = open_storage(parent or ".", options)
    if one_file and not file.endswith(".safetensors"):
        raise UserError(f"export: OUT: expected a file name that ends with .safetensors, got {out}")
    if one_file and target.exists(file):
        raise UserError(f"export: OUT: {target.uri_of(file)}: already exists; choose another name")
    if not one_file and target.names():
        raise UserError(f"export: OUT: {target.uri}: the folder is not empty; choose an empty one")
    source = _source(folder, config, options)
    if one_file:
        tensors = _lora(folder, ema=ema) if form == "lora" else _whole(folder, source, ema=ema)
        target.publish(file, _serialised(tensors, dtype))
        return Exported(target.uri_of(file), folder.uri, step, ema, 1)
    networks: Any = load_trained(folder, source, ema=ema, name=config["model"]["source"])
    with TemporaryDirectory(prefix="sdp-export-") as scratch:
        for part, network in networks.named_children():
            network.save_pretrained(Path(scratch) / part, safe_serialization=True)
        saved = {path.relative_to(scratch).as_posix(): path for path in Path(scratch).rglob("*") if path.is_file()}
        parts = {name.partition("/")[0] for name in saved}
        copied = {name: source / name for name in sources.present(source) if name.partition("/")[0] not in parts}
        # The index comes last: without it the folder is visibly unfinished.
        names = sorted({**copied, **saved}, key=lambda name: (name == INDEX, name))
        for name in names:
            data = {**copied, **saved}[name].read_bytes()
            if name.endswith(".safetensors"):
                data = _in_dtype(data, dtype)
            elif name == SCHEDULER:
                data = _json({**json.loads(data), **scheduler})
            elif name == INDEX:
                data = _index(data)
            elif name == TEXT_ENCODER:
                data = _text_encoder(data)
            target.publish(name, data)
    return Exported(target.uri, folder.uri, step, ema, len(names))


def _source(folder: Storage, config: dict[str, Any], options: StorageOptions | None) -> Path:
    """Return the folder of the model that the run started from; its content must be unchanged."""
    source = config["model"]["source"]
    sources.check(source, storage=options)
    model = sources.resolve(source, storage=options)
    digest = read_marker(folder).get("model", {}).get("digest")
    if digest is not None and digest != model.digest:
        raise ModelError(
            f"model source {source}: its content has changed since {folder.uri} was trained with it: "
            f"then {digest[:12]}…, now {model.digest[:12]}…; restore it"
        )
    return model.path


def _lora(folder: Storage, *, ema: bool) -> dict[str, Any]:
    lora = lora_of(folder)
    if lora.rank is None:
        raise UserError(f"export: --lora: {folder.uri} was trained without lora.rank; leave --lora out")
    return diffusers_lora(by_network(read_weights(folder, ema=ema)), lora.scale)


def _whole(folder: Storage, source: Path, *, ema: bool) -> dict[str, Any]:
    networks = load_trained(folder, source, ema=ema, name=str(source))
    return single_file(networks.unet, load.load_vae(source), networks.text_encoder or load.load_text_encoder(source))


def _in_dtype(data: bytes, dtype: Dtype) -> bytes:
    """Return a weights file with its floating-point tensors converted to a dtype."""
    from safetensors.torch import load as load_tensors

    return _serialised(load_tensors(data), dtype)


def _serialised(tensors: dict[str, Any], dtype: Dtype) -> bytes:
    import torch
    from safetensors.torch import save as save_tensors

    target = {"fp32": torch.float32, "fp16": torch.float16}[dtype]
    cast = {name: tensor.to(target) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return save_tensors({name: tensor.contiguous() for name, tensor in cast.items()}, {"format": "pt"})


def _index(data: bytes) -> bytes:
    """Return the source's index without the networks that are not exported, such as a safety checker."""
    index = json.loads(data)
    for name, entry in index.items():
        if isinstance(entry, list) and name not in PARTS:
            index[name] = [None, None]
    return _json({**index, "requires_safety_checker": False})


def _text_encoder(data: bytes) -> bytes:
    """Return the text encoder's configuration with fp32 as its default dtype, like diffusers' networks.

    Otherwise transformers would load it in the weights' dtype, which may differ from the U-Net's, and drawing fails.
    """
    config = {name: value for name, value in json.loads(data).items() if name != "torch_dtype"}
    return _json({**config, "dtype": "float32"})


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
